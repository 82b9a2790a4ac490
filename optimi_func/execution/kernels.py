"""Compiled kernels: the pipeline of one leaf on flat tensors, one a (rule, dtypes).

A kernel takes 1-D tensors of any length from 2 up, and all scalars as one small tensor:
neither a shape nor a number is part of its graph. Grad mode, inference mode and autocast
are fixed on entry, and what torch.compile guards on beside them is left out by calling its
result directly.
"""

import threading
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func._codes import GROUP
from optimi_func._leaf import compute_dtype, count_means, leaf_means, leaf_step, whole_means
from optimi_func._rule import Leaf, Rule, Scalars
from optimi_func._storage import state_of
from optimi_func.execution.inductor import (
    Flat,
    compile_flat,
    compile_list_kernel,
    in_rows,
)
from optimi_func.execution.launches import Update
from optimi_func.execution.list_kernel import ListKernel
from optimi_func.execution.slots import scale_places
from optimi_func.execution.tensors import (
    flat_leaf,
    is_capturing,
    select,
    write_back,
)

T = TypeVar("T")

# Compiled for this length: on a short one Inductor's CPU loop would stay serial for good.
_COMPILE_LENGTH = 1 << 20

# `run(numbers, p, g, *state, *comp, *targets)`, or of a ListKernel a list of such.
Kernel: TypeAlias = Flat | ListKernel
# A step that needs means over the tensor takes two kernels: "mean" writes them behind the
# numbers, where "move" finds them. One graph would keep all that it computes before the
# means in tensors as long as the parameter.
Pass: TypeAlias = Literal["whole", "mean", "move"]


class KernelKey(NamedTuple):
    """What a kernel is compiled for."""

    rule: Rule[Any, Any]
    statics: tuple[bool | None, ...]  # the scalars that choose a graph
    write: bool  # False: the state alone moves
    in_place: bool  # results onto the inputs, or onto tensors passed beside them
    guarded: bool  # one number more, behind the others: where it is 0 nothing changes
    dtypes: tuple[torch.dtype, ...]  # of p, g, the state's fields, the compensation
    device: torch.device
    part: Pass
    # Of the state's fields those that the kernel is given in codes: two tensors each.
    codes: tuple[bool, ...] = ()

    @property
    def compensated(self) -> bool:
        """Whether the last of the tensors is kept beside the parameter."""
        return len(self.dtypes) > 2 + len(self.rule.state._fields) + sum(self.codes)

    @property
    def row(self) -> int:
        """The elements of a row: where there are codes, those that share a scale."""
        return GROUP if any(self.codes) else 1

    @property
    def name(self) -> str:
        """For profiles and logs."""
        kinds = (str(d).removeprefix("torch.") for d in dict.fromkeys(self.dtypes))
        flags = ("write", "in_place", "compensated", "guarded")
        flags = [f for f in flags if getattr(self, f)]
        chosen = [str(s) for s in self.statics if s is not None]
        part = ["mean"] if self.part == "mean" else []
        codes = ["codes"] if any(self.codes) else []
        return "_".join([self.rule.name, *kinds, *flags, *chosen, *part, *codes])


def kernel_key(rule: Rule[Any, Any], u: Update, write: bool, part: Pass) -> KernelKey:
    """The kernel that an update needs."""
    p, *rest = u.slot.decoded
    in_place = u.target is u.slot
    dtypes = (p, u.g.dtype, *rest)
    statics, device = u.scalars.statics, u.g.device
    return KernelKey(rule, statics, write, in_place, u.guarded, dtypes, device, part)


def coded_key(rule: Rule[Any, Any], u: Update, write: bool, part: Pass) -> KernelKey:
    """Likewise of a kernel that decodes and encodes by itself."""
    p, *rest = u.slot.dtypes
    key = kernel_key(rule, u, write, part)
    return key._replace(dtypes=(p, u.g.dtype, *rest), codes=u.slot.codes)


def has_list_kernels(device: torch.device) -> bool:
    """Whether a device's kernels update a whole list of tensors in one call."""
    return device.type == "cpu" and device.type not in _without_lists


# Made once a process, and on a CPU without list kernels once a number of threads, which
# Inductor writes into its loops.
_kernels: dict[tuple[KernelKey, int], Kernel] = {}
# Types of devices where list kernels were tried, and torch was not as expected.
_without_lists: set[str] = set()
# Compiled, or traced, by one thread, found by the others.
lock = threading.RLock()


class DispatchModeError(RuntimeError):
    """No kernel can run now, though it could at another time."""


class CaptureError(RuntimeError):
    """A kernel cannot be compiled while a CUDA graph is captured."""


class SwitchedOffError(RuntimeError):
    """torch.compile does nothing, because somebody said so."""

    def __init__(self) -> None:
        super().__init__(
            "torch.compile is switched off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE "
            "or torch.compiler.set_stance)"
        )


# Modules whose warnings are not about the user's program while a kernel is compiled.
_COMPILERS = r"(torch|torchgen|functorch|triton|sympy|mpmath|networkx|optimi_func)(\.|$)"


def kernel(key: KernelKey, scalars: Scalars) -> Kernel:
    """The compiled kernel of a key.

    Compiled here and now, on tensors of its own, so that a compiler that fails has not
    touched anybody's parameters; of the scalars only their structure counts.

    Raises:
        RuntimeError: torch.compile is switched off, or a TorchDispatchMode is active,
            which sees operations and not kernels; or a CUDA graph is being captured, and
            the kernel is a new one.
        Exception: Whatever the compiler raised.
    """
    if any_torch_dispatch_mode_on_stack():
        raise DispatchModeError(
            "a TorchDispatchMode is active, which compiled steps cannot run under: "
            "leave it for the step, or pass compile=False"
        )
    found = _kernels.get((key, _threads(key.device)))
    if found is None:
        if is_capturing(key.device):
            raise CaptureError(
                f"a CUDA graph is being captured, and the kernel {key.name} is not "
                "compiled yet: take a step of the same kind before the capture"
            )
        with lock:
            found = _kernels.get((key, _threads(key.device))) or _compile(key, scalars)
            _kernels[key, _threads(key.device)] = found
    return found


def _threads(device: torch.device) -> int:
    own = device.type == "cpu" and not has_list_kernels(device)
    return torch.get_num_threads() if own else 0


def _compile(key: KernelKey, scalars: Scalars) -> Kernel:
    from torch._dynamo import config

    if config.disable:
        raise SwitchedOffError
    ran_eagerly: list[bool] = []
    count = count_means(key.rule, scalars.rates)
    run = _body(key, pytree.tree_structure(scalars), count)

    def noticed(*tensors: Tensor) -> None:
        if not torch.compiler.is_compiling():
            ran_eagerly.append(True)
        run(*tensors)

    tensors = _example(key)
    targets = [] if key.in_place else [x.clone() for x in [tensors[0], *tensors[2:]]]
    own = 0 if key.part == "whole" else count
    own += sum(s is None for s in key.statics) + key.guarded
    numbers = torch.ones(own, dtype=compute_dtype(*key.dtypes), device=key.device)
    example = [numbers, *tensors, *targets]
    compiled: Kernel | None = None
    with kernel_context(key.device), warnings.catch_warnings():
        # Torch's own, of its settings and parts: as errors they would be no compiler.
        warnings.filterwarnings("ignore", module=_COMPILERS)
        if has_list_kernels(key.device) and not key.codes:
            body = with_own_code_object(noticed, key.name)
            compiled = compile_list_kernel(body, example)
            if compiled is None and not ran_eagerly:
                _without_lists.add(key.device.type)
        if compiled is None:
            own = with_own_code_object(noticed, key.name)
            compiled = compile_flat(own, example, key.row)
    if ran_eagerly:
        raise SwitchedOffError
    return compiled


def _example(key: KernelKey) -> list[Tensor]:
    """Tensors to compile a kernel on, in rows where it is for rows."""
    # Scales have one element a row; the state comes behind p and g.
    scales = scale_places(key.codes, 2)
    lengths = [
        _COMPILE_LENGTH // key.row if i in scales else _COMPILE_LENGTH
        for i in range(len(key.dtypes))
    ]
    made = [torch.ones(n, dtype=d, device=key.device) for n, d in zip(lengths, key.dtypes)]
    return in_rows(made, key.row)


def _body(key: KernelKey, spec: pytree.TreeSpec, count: int) -> Flat:
    """What a kernel does, to be compiled; `count` is how many means the step takes."""
    rule, inputs = key.rule, len(key.dtypes)

    def run(numbers: Tensor, *tensors: Tensor) -> None:
        values = numbers.unbind()
        scalars = fill(key.statics, spec, values)
        leaf, g = unpack(rule, key.compensated, tensors[:inputs], key.codes)
        if key.part == "mean":
            found = leaf_means(rule, leaf, g, scalars)
            for place, mean in zip(numbers.split(1)[-len(found) :], found):
                place.copy_(mean.reshape(1))
            return
        known = () if key.part == "whole" else values[-count:]
        take = whole_means if key.part == "whole" else lambda _: list(known)
        new = leaf_step(rule, leaf, g, scalars, key.write, take)
        if key.guarded:
            new = select(values[-1 - len(known)] != 0, leaf, new)
        write_back(flat_leaf(leaf) if key.in_place else tensors[inputs:], new)

    return run


def fill(
    statics: tuple[bool | None, ...], spec: pytree.TreeSpec, values: Sequence[Tensor]
) -> Scalars:
    """The scalars of a step from its static choices and the rest of its numbers."""
    rest = iter(values)
    return pytree.tree_unflatten([next(rest) if s is None else s for s in statics], spec)


def unpack(
    rule: Rule[Any, Any],
    compensated: bool,
    tensors: Sequence[Tensor],
    codes: tuple[bool, ...],
) -> tuple[Leaf, Tensor]:
    """The leaf and its gradient from p, g, the state's fields and the compensation.

    Args:
        rule: The mathematics.
        compensated: Whether something is kept beside p.
        tensors: All of these, a field in codes as two.
        codes: Which fields are; empty for none.
    """
    p, g, *rest = tensors
    comp = rest.pop() if compensated else None
    plain = (False,) * len(rule.state._fields)
    return Leaf(p, state_of(rule.state, iter(rest), codes or plain), comp), g


def with_own_code_object(fn: Callable[..., T], name: str) -> Callable[..., T]:
    """A function with a code object of its own, by which Dynamo counts recompilations.

    Closures of one body would share it.
    """
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=name)
    return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


class kernel_context:
    """Fix the modes that kernels guard on, and that no update should depend on."""

    __slots__ = ("_device", "_stack")

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        kinds = ("cpu",) if self._device.type == "meta" else (self._device.type, "cpu")
        modes: list[AbstractContextManager[Any]] = [torch.no_grad()]
        if torch.is_inference_mode_enabled():
            modes.insert(0, torch.inference_mode(False))
        for kind in dict.fromkeys(k for k in kinds if torch.is_autocast_enabled(k)):
            modes.append(torch.autocast(kind, enabled=False))
        self._stack = modes
        for mode in modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._stack):
            mode.__exit__(*error)
