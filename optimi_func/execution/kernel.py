"""One compiled kernel a (rule, static choices, dtypes): the leaf pipeline on flat tensors.

A kernel takes 1-D tensors of any length from 2 up, and all scalars as one small tensor:
neither a shape nor a number is part of its graph. Where threads share a list of tensors
(`sweeps`) their number is neither; elsewhere another one makes another graph. Grad mode,
inference mode and autocast are fixed on entry, and what torch.compile guards on beside
them is left out by calling its result directly.
"""

import threading
import types
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func._leaf import compute_dtype, leaf_step, whole_mean
from optimi_func._rule import Leaf, Rule, Scalar, Scalars
from optimi_func.execution.direct import Flat, compile_flat, compile_sweep
from optimi_func.execution.loop import Sweep

T = TypeVar("T")

# Compiled for this length: on a short one Inductor's CPU loop would stay serial for good.
_COMPILE_LENGTH = 1 << 20


class Numbers:
    """The scalars of one step, packed once a dtype and device for every kernel call."""

    def __init__(self, scalars: Scalars) -> None:
        self.scalars = scalars
        leaves = _flatten(scalars)
        # A bool is a static choice, part of the kernel; the rest is data.
        self.statics = tuple(x if isinstance(x, bool) else None for x in leaves)
        self._values = [x for x in leaves if not isinstance(x, bool)]
        self._packed: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def values(self, dtype: torch.dtype, device: torch.device) -> list[Scalar]:
        """The values: host numbers where all of them are, else 0-d tensors."""
        if self._on_host():
            return list(self._values)
        return list(self.packed(dtype, device).unbind())

    def packed(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """All values as one 1-D tensor, each rounded once."""
        key = (dtype, device)
        if key not in self._packed:
            self._packed[key] = self._pack(dtype, device)
        return self._packed[key]

    def _pack(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._on_host():
            if not self._values:
                return torch.empty(0, dtype=dtype, device=device)
            # torch.tensor takes ten times as long to look at a list.
            code = "d" if dtype == torch.float64 else "f"
            values = torch.frombuffer(array(code, self._values), dtype=dtype)
            return values.to(device, non_blocking=True)
        values = [
            x.detach().to(device, dtype)
            if isinstance(x, Tensor)
            else torch.full((), x, dtype=dtype, device=device)
            for x in self._values
        ]
        return torch.stack(values)

    def _on_host(self) -> bool:
        return not any(isinstance(x, Tensor) for x in self._values)


def _flatten(x: Any) -> list[Any]:
    """As pytree's, of tuples within tuples alone: a step has no time for more."""
    return [leaf for y in x for leaf in _flatten(y)] if isinstance(x, tuple) else [x]


class Key(NamedTuple):
    """What a kernel is compiled for."""

    rule: Rule[Any, Any]
    statics: tuple[bool | None, ...]
    write: bool  # False: the state alone moves
    in_place: bool  # results onto the inputs, or onto tensors passed beside them
    dtypes: tuple[torch.dtype, ...]  # of p, g, the state's fields, the compensation
    device: torch.device
    threads: int  # Inductor writes their number into a CPU loop; 0 makes a sweep
    guarded: bool  # one number more, the last: where it is 0 nothing changes

    @property
    def compensated(self) -> bool:
        """Whether the last of the tensors is a Kahan compensation."""
        return len(self.dtypes) > 2 + len(self.rule.state._fields)

    @property
    def two_passes(self) -> bool:
        """Whether a mean over the tensor comes first; its place is after all numbers."""
        return self.rule.per_tensor and self.write

    @property
    def name(self) -> str:
        """For profiles and logs."""
        kinds = (str(d).removeprefix("torch.") for d in dict.fromkeys(self.dtypes))
        flags = ("write", "in_place", "compensated", "guarded")
        flags = [f for f in flags if getattr(self, f)]
        chosen = [str(s) for s in self.statics if s is not None]
        return "_".join([self.rule.name, *kinds, *flags, *chosen])


def job_key(
    rule: Rule[Any, Any],
    leaf: Leaf,
    g: Tensor,
    numbers: Numbers,
    write: bool,
    in_place: bool,
    guarded: bool,
) -> Key:
    """The kernel that one leaf needs."""
    p, *rest = flat_leaf(leaf)
    dtypes = tuple(x.dtype for x in (p, g, *rest))
    statics, device = numbers.statics, p.device
    threads = 0 if sweeps(device) else torch.get_num_threads()
    return Key(rule, statics, write, in_place, dtypes, device, threads, guarded)


def kernel(key: Key, scalars: Scalars) -> "Kernel":
    """The compiled kernel of a key.

    Compiled here and now, on tensors of its own, so that a compiler that fails has not
    touched anybody's parameters; of the scalars only their structure counts.

    Raises:
        RuntimeError: torch.compile is switched off, or a TorchDispatchMode is active,
            which sees operations and not kernels.
        Exception: Whatever the compiler raised.
    """
    if any_torch_dispatch_mode_on_stack():
        raise DispatchModeError(
            "a TorchDispatchMode is active, which compiled steps cannot run under: "
            "leave it for the step, or pass compile=False"
        )
    found = _kernels.get(key)
    if found is None:
        with _lock:
            spec = pytree.tree_structure(scalars)
            found = _kernels.get(key) or _compile(key, spec)
            if found is None:
                _sweepless.add(key.device.type)
                key = key._replace(threads=torch.get_num_threads())
                found = _compile(key, spec)
            assert found is not None
            _kernels[key] = found
    return found


def sweeps(device: torch.device) -> bool:
    """Whether a device's kernels update a whole list of tensors in one call."""
    return device.type == "cpu" and device.type not in _sweepless


# Made once a process.
_kernels: dict[Key, "Kernel"] = {}
# Devices where that was tried, and torch was not as expected.
_sweepless: set[str] = set()
# Compiled by one thread, found by the others.
_lock = threading.RLock()


class DispatchModeError(RuntimeError):
    """Not now, rather than not at all."""


def _compile(key: Key, spec: pytree.TreeSpec) -> "Kernel | None":
    if not key.two_passes:
        return _compile_body(key, _body(key, spec, lambda numbers: whole_mean), key.name)
    # One graph would keep everything that it computed before the mean in scratch tensors.
    first = _compile_body(key, _measurement(key, spec), f"{key.name}_mean")
    given = _body(key, spec, lambda numbers: lambda x: numbers[-1])
    second = first and _compile_body(key, given, key.name)
    return TwoPasses(first, second) if first and second else None


# `run(values, p, g, *state, *comp, *targets)`.
Kernel: TypeAlias = "Flat | Sweep | TwoPasses"


class TwoPasses:
    """A kernel that takes a mean over its tensor before anything else."""

    def __init__(self, measure: Flat, move: Flat) -> None:
        self.measure = measure  # writes the mean after the numbers
        self.move = move  # reads it there

    def __call__(self, values: Tensor, *tensors: Tensor) -> None:
        """Both."""
        self.measure(values, *tensors)
        self.move(values, *tensors)


def _compile_body(key: Key, run: Flat, name: str) -> Flat | None:
    """The kernel; None where it should be a sweep and cannot."""
    ran_eagerly: list[bool] = []

    def noticed(*tensors: Tensor) -> None:
        if not torch.compiler.is_compiling():
            ran_eagerly.append(True)
        run(*tensors)

    body = with_own_code_object(noticed, name)
    tensors = [torch.ones(_COMPILE_LENGTH, dtype=d, device=key.device) for d in key.dtypes]
    targets = [] if key.in_place else [x.clone() for x in [tensors[0], *tensors[2:]]]
    numbers = sum(s is None for s in key.statics) + key.guarded + key.two_passes
    dtype = compute_dtype(*key.dtypes)
    values = torch.ones(numbers, dtype=dtype, device=key.device)
    with kernel_context(key.device):
        make = compile_flat if key.threads else compile_sweep
        compiled = make(body, [values, *tensors, *targets])
    if ran_eagerly:
        raise RuntimeError(
            "torch.compile is switched off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE "
            "or torch.compiler.set_stance)"
        )
    return compiled


Mean: TypeAlias = Callable[[Tensor], Tensor]


def _body(
    key: Key, spec: pytree.TreeSpec, mean_of: Callable[[Sequence[Tensor]], Mean]
) -> Flat:
    rule, statics, write, in_place = key.rule, key.statics, key.write, key.in_place
    inputs, compensated, guarded = len(key.dtypes), key.compensated, key.guarded

    def run(values: Tensor, *tensors: Tensor) -> None:
        numbers = values.unbind()
        scalars = fill(statics, spec, numbers)
        leaf, g = unpack(rule, compensated, tensors[:inputs])
        new = leaf_step(rule, leaf, g, scalars, write, mean_of(numbers))
        if guarded:
            ok = numbers[-2 if key.two_passes else -1]
            new = keep_unless(ok != 0, leaf, new)
        write_back(flat_leaf(leaf) if in_place else tensors[inputs:], new)

    return run


def _measurement(key: Key, spec: pytree.TreeSpec) -> Flat:
    """The pipeline up to its mean, which is written after the numbers."""

    def run(values: Tensor, *tensors: Tensor) -> None:
        scalars = fill(key.statics, spec, values.unbind())
        leaf, g = unpack(key.rule, key.compensated, tensors[: len(key.dtypes)])
        values[-1:].copy_(measure(key.rule, leaf, g, scalars).reshape(1))

    return run


def measure(rule: Rule[Any, Any], leaf: Leaf, g: Tensor, scalars: Scalars) -> Tensor:
    """The mean that a step of this leaf takes; a trace drops what comes after it."""
    means: list[Tensor] = []

    def mean(x: Tensor) -> Tensor:
        means.append(whole_mean(x))
        return means[-1]

    leaf_step(rule, leaf, g, scalars, True, mean)
    return means[0]


def fill(
    statics: tuple[bool | None, ...], spec: pytree.TreeSpec, values: Sequence[Tensor]
) -> Scalars:
    """The scalars of a step from its static choices and the rest of its numbers."""
    rest = iter(values)
    return pytree.tree_unflatten([next(rest) if s is None else s for s in statics], spec)


def unpack(
    rule: Rule[Any, Any], compensated: bool, tensors: Sequence[Tensor]
) -> tuple[Leaf, Tensor]:
    """The leaf and its gradient from p, g, the state's fields and the compensation."""
    p, g, *rest = tensors
    comp = rest.pop() if compensated else None
    return Leaf(p, rule.state(*rest), comp), g


def write_back(targets: Sequence[Tensor], new: Leaf) -> None:
    """Copy a step's results onto their targets; what did not change is the target."""
    for target, result in zip(targets, flat_leaf(new)):
        if result is not target:
            target.copy_(result)


def keep_unless(ok: Tensor, old: Leaf, new: Leaf) -> Leaf:
    """The new leaf where ok, a 0-d bool, is true; without asking the device."""
    kept = [
        n if n is o else torch.where(ok, n, o)
        for o, n in zip(flat_leaf(old), flat_leaf(new))
    ]
    fields = kept[1 : 1 + len(old.state)]
    comp = None if old.comp is None else kept[-1]
    return Leaf(kept[0], type(old.state)(*fields), comp)


def flat_leaf(leaf: Leaf) -> list[Tensor]:
    """P, state, comp: the tensors that a step writes."""
    tensors = [leaf.p, *leaf.state]
    if leaf.comp is not None:
        tensors.append(leaf.comp)
    return tensors


def with_own_code_object(fn: Callable[..., T], name: str) -> Callable[..., T]:
    """A function with a code object of its own, by which Dynamo counts recompilations.

    Closures of one body would share it.
    """
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=name)
    return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


@contextmanager
def kernel_context(device: torch.device) -> Generator[None]:
    """Fix the ambient state that kernels guard on, and that no update should feel."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {device.type, "cpu"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
