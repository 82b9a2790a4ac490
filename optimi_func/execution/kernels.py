"""Kernels: the update of one flat tensor, compiled once for each rule and dtypes.

A kernel takes 1-D tensors of any length, and all scalars as one small tensor, so
neither a shape nor a scalar is part of its graph. Grad mode, inference mode and autocast
are fixed on entry. torch.compile's other guards are left out by calling the generated
code directly.
"""

import logging
import os
import re
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Timer
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func.core.checks import is_first, warn_user
from optimi_func.core.codes import GROUP
from optimi_func.core.hooks import OWN
from optimi_func.core.leaf import (
    answering,
    compute_dtype,
    leaf_round,
    leaf_step,
    requests,
    whole_means,
    with_given,
)
from optimi_func.core.packed import fill, is_capturing
from optimi_func.core.rehearsal import device_type
from optimi_func.core.rule import Rule, Scalars
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import (
    COMP,
    GRAD,
    PARAM,
    leaf_in,
    scales_in,
)
from optimi_func.core.torch_private import has_stance, is_switched_off
from optimi_func.execution import store
from optimi_func.execution.cpp import MOST, failure, native
from optimi_func.execution.inductor import (
    Kernel,
    compile_flat,
    compile_list_kernel,
    in_rows,
)
from optimi_func.execution.list_kernel import TRIAL, ListKernel, kernels_agree
from optimi_func.execution.shaped import ShapedKernel, trials
from optimi_func.execution.tensors import write_back
from optimi_func.execution.triton_list import TritonListKernel

T = TypeVar("T")

# Compiled for this length: on a short one Inductor's CPU loop would stay serial for good.
_COMPILE_LENGTH = 1 << 20


class KernelKey(NamedTuple):
    """The choices that a kernel is compiled for."""

    rule: Rule
    statics: tuple[bool | str | None, ...]  # the scalars that choose a graph
    write: bool  # False moves the state alone
    in_place: bool  # False: results go to more arguments, the targets
    # Names and dtypes of the tensors that the kernel takes after the scalars: parameter,
    # gradient, state and compensation. If it is not in place, the targets follow, which are
    # all of them but the gradient, and at last what the step is given besides. A field in
    # codes is two tensors, which the kernel itself decodes.
    tensors: tuple[tuple[str, torch.dtype], ...]
    device: torch.device
    # A step with means over the tensor takes a kernel for each round of them, by its name,
    # which writes them behind the scalars and the answers before it, and one that reads
    # them all. One graph would keep everything that it computes before the means in tensors
    # as long as the parameter.
    round: str | None = None
    shape: tuple[int, ...] = ()  # of the example of a kernel that maps whole tensors
    given: tuple[tuple[str, torch.dtype], ...] = ()  # see `Rule.given`

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of parameter, gradient, state and compensation."""
        return tuple([dtype for _, dtype in self.tensors])

    @property
    def names(self) -> list[str]:
        """Return the names of parameter, gradient, state and compensation."""
        return [name for name, _ in self.tensors]

    @property
    def targets(self) -> list[str]:
        """Return the names of what a step writes."""
        return [name for name in self.names if name != GRAD]

    @property
    def row(self) -> int:
        """Return the elements of a row: those that share a scale, else 1."""
        return GROUP if scales_in(self.names) else 1

    @property
    def name(self) -> str:
        """Return a name for profiles and logs."""
        kinds = (str(d).removeprefix("torch.") for d in dict.fromkeys(self.dtypes))
        flags = [f for f in ("write", "in_place") if getattr(self, f)]
        flags += ["compensated"] * (COMP in self.names)
        statics = [str(s) for s in self.statics if isinstance(s, bool)]
        part = [] if self.round is None else ["mean_" + re.sub(r"\W", "_", self.round)]
        codes = ["codes"] * bool(scales_in(self.names))
        sizes = list(map(str, self.shape))
        return "_".join([self.rule.name, *kinds, *flags, *statics, *part, *codes, *sizes])

    @property
    def digest(self) -> str:
        """Return the hash of all that the kernel computes, empty if there is none."""
        if any([isinstance(s, str) and s.startswith(OWN) for s in self.statics]):
            return ""
        mapped = self.rule.whole if self.shape else None
        return self.rule.digest if mapped is None else mapped.digest


# Types of devices whose kernels update a list of tensors in one call.
LISTED = {"cpu"}


def updates_lists(device: torch.device) -> bool:
    """Return True if a device's kernels update a list of tensors in one call."""
    return device_type(device) in LISTED


def has_list_kernels() -> bool:
    """Return True if this process can compile kernels for CPU, which update lists."""
    return not runtime.other_code and failure() is None


lock = threading.RLock()


def _unlock() -> None:
    global lock
    lock = threading.RLock()


# Another thread of the parent may have compiled, and does not go on in a child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class DispatchModeError(RuntimeError):
    """A TorchDispatchMode is active, under which no kernel can run."""


class CaptureError(RuntimeError):
    """A kernel cannot be compiled while a CUDA graph is captured."""


class SwitchedOffError(RuntimeError):
    """torch.compile is switched off."""

    def __init__(self) -> None:
        super().__init__(
            "torch.compile is switched off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE "
            "or torch.compiler.set_stance)"
        )


class NoListKernelError(RuntimeError):
    """A step for CPU cannot be compiled into a kernel that updates a list of tensors."""


def forget() -> dict[str, Kernel]:
    """Drop the kernels of this process, which looks for them again; return them by name."""
    with lock:
        kernels = dict(runtime.kernels.values())
        runtime.kernels.clear()
    return kernels


# Modules whose warnings while a kernel compiles are not about the user's program.
_COMPILERS = r"(torch|torchgen|functorch|triton|sympy|mpmath|networkx|optimi_func)(\.|$)"


def _is_large(key: KernelKey) -> bool:
    """Return True if the code may have more arguments than a list kernel takes."""
    # Each read and written, what is given besides, the scalars and the length.
    return 2 * len(key.dtypes) + len(key.given) + 2 >= MOST


def kernel(key: KernelKey, scalars: Scalars) -> Kernel:
    """Return the kernel of a key, compiled now on tensors of its own if it is new.

    So no parameter has been written if the compiler fails. Only the structure of the
    scalars matters. Raises the four errors above, and any of the compiler.
    """
    if any_torch_dispatch_mode_on_stack():
        raise DispatchModeError(
            "a TorchDispatchMode is active, which compiled steps cannot run under: "
            "leave it for the step, or pass compile=False"
        )
    # Rules of one digest compute the same.
    place = key._replace(rule=key.digest or key.rule), updates_lists(key.device)
    if (entry := runtime.kernels.get(place)) is None:
        if is_capturing(key.device):
            raise CaptureError(
                f"a CUDA graph is being captured, and the kernel {key.name} is not "
                "compiled yet: take a step of the same kind before the capture"
            )
        with lock:
            entry = runtime.kernels.get(place) or (key.name, _compile(key, scalars))
            runtime.kernels[place] = entry
    return entry[1]


_OTHER_CODE = (
    f"torch {torch.__version__} generates other code than expected, or it gives other "
    "results. Choose a version of torch that the documentation names"
)


def warn_once(text: str) -> None:
    """Warn the user, unless this process has said the same before."""
    if is_first(text):
        warn_user(text)


def log_once(text: str) -> None:
    """Log why something is slower than it could be, unless it has been logged before."""
    if is_first(text):
        logging.getLogger("optimi_func").warning(text)


def _without_lists(key: KernelKey) -> NoListKernelError:
    """Return the error that says why a kernel for CPU cannot be compiled."""
    if _is_large(key):
        return NoListKernelError(
            f"{key.rule.name} has {len(key.dtypes)} tensors for each parameter, and a "
            f"compiled step for CPU takes at most {(MOST - 3) // 2}: choose compile=False"
        )
    if (error := failure()) is not None:
        return NoListKernelError(
            "the C++ functions that update many tensors in one call could not be compiled "
            f"({type(error).__name__}: {str(error)[:300]}). Free disk space, or install a "
            "C++ compiler (g++ or clang++, on PATH or named by CXX); the next optimizer "
            "tries again"
        )
    return NoListKernelError(runtime.other_code[0])


def _compile(key: KernelKey, scalars: Scalars) -> Kernel:
    """Load the kernel from the store, or compile it and keep it there."""
    if is_switched_off():
        raise SwitchedOffError
    listed = updates_lists(key.device) and not scales_in(key.names)
    if listed and (_is_large(key) or not has_list_kernels()):
        raise _without_lists(key)
    spec = pytree.tree_structure(scalars)
    before = answers_before(key, scalars)
    count = sum(before.values())
    run = _body(key, spec, before)
    if key.round is not None:  # it writes its own means behind those
        count += requests(key.rule, scalars, key.write)[key.round].number
    entry = ""
    # Only torch.compile knows what a stance asks for.
    if asks := key.device.type == "cpu" and not has_stance():
        identity = (key._replace(rule=None), str(spec), count) if listed else None
        made_of = {"name": key.name, "kernel": identity, "rule": key.digest or None}
        entry = store.key_of(store.machine(), **made_of)
    with kernel_context(key.device), warnings.catch_warnings():
        # As errors, torch's warnings about itself would read as a failed compilation.
        warnings.filterwarnings("ignore", module=_COMPILERS)
        timer = Timer(store.PATIENCE, store.tell, [bool(entry)])
        timer.start()
        try:
            with store.alone(entry):
                if (stored := store.find(entry)) and native() is not None:
                    kind = ShapedKernel if key.shape else ListKernel
                    if _agrees(made := kind(stored[0], *stored[1]), key, run, count):
                        return made
                if asks and not store.may_compile(key.name, entry):
                    return run
                made = _compile_now(key, run, _example(key, count, _COMPILE_LENGTH), listed)
                if isinstance(made, ListKernel | ShapedKernel):
                    path, *facts = made.made_of
                    store.keep(entry, path, facts)
        finally:
            timer.cancel()
    return made


def _agrees(made: Kernel, key: KernelKey, run: Kernel, count: int) -> bool:
    """Return True if a kernel does about what its function does, on a trial."""
    shapes = trials(len(key.shape)) if key.shape else [()]
    tried = [_example(key._replace(shape=shape), count, TRIAL) for shape in shapes]
    return all([kernels_agree(made, run, example, 0.5, 1.0) for example in tried])


def _compile_now(
    key: KernelKey, run: Kernel, example: list[Tensor], listed: bool
) -> Kernel:
    ran_eagerly: list[bool] = []

    def noticed(*tensors: Tensor) -> None:
        if not torch.compiler.is_compiling():
            ran_eagerly.append(True)
        run(*tensors)

    compiled: Kernel | None = None
    if listed:
        body = with_own_code_object(noticed, key.name)
        kinds = bool(key.shape), key.round is None, bool(key.digest)
        compiled = compile_list_kernel(body, example, *kinds)
        if ran_eagerly:
            raise SwitchedOffError
        if key.shape and (compiled is None or not _agrees(compiled, key, run, 0)):
            if failure() is not None:
                raise _without_lists(key)
            warn_once(
                f"{key.rule.name} maps tensors one by one, several times slower where a "
                f"model has many small ones: {_OTHER_CODE}"
            )
            return run  # which is no kernel
        if compiled is None:
            if failure() is None:
                runtime.other_code.append(_OTHER_CODE)
            raise _without_lists(key)
    else:
        function = with_own_code_object(noticed, key.name)
        compiled = compile_flat(function, example, key.row)
        joins = key.device.type == "cuda" and key.round is None and key.row == 1
        if joins and not isinstance(compiled, TritonListKernel):
            log_once(
                f"{key.rule.name} launches a kernel for each tensor, which is slow where a "
                f"model has many small ones: {_OTHER_CODE}"
            )
    if ran_eagerly:
        raise SwitchedOffError
    return compiled


def _example(key: KernelKey, count: int, length: int) -> list[Tensor]:
    """Return arguments of a kernel with `count` means, in rows if the key has rows."""
    if key.shape:
        p = torch.ones(key.shape, dtype=key.dtypes[0], device=key.device)
        like = p, p, *key.rule.init(p, p.dtype, None), p
        size = key.statics.count(None)
        numbers = torch.ones(size, dtype=torch.float64, device=key.device)
        return [numbers, *[torch.ones_like(x, dtype=d) for x, d in zip(like, key.dtypes)]]
    scales, every = scales_in(key.names), [*key.tensors, *key.given]
    # Scales have one element for each row.
    lengths = [length // key.row if name in scales else length for name, _ in every]
    flat = [torch.ones(n, dtype=x[1], device=key.device) for n, x in zip(lengths, every)]
    tensors = dict(zip([name for name, _ in every], in_rows(flat, key.row)))
    own = [tensors[name] for name in key.names]
    targets = [] if key.in_place else [tensors[name].clone() for name in key.targets]
    size = count + key.statics.count(None)
    numbers = torch.ones(size, dtype=compute_dtype(*key.dtypes), device=key.device)
    return [numbers, *own, *targets, *[tensors[name] for name, _ in key.given]]


def answers_before(key: KernelKey, scalars: Scalars) -> dict[str, int]:
    """Return the requests whose answers a kernel is given, with their counts of numbers."""
    asked = requests(key.rule, scalars, key.write) if not key.shape else {}
    names = [*asked]
    if key.round is not None:
        names = names[: names.index(key.round)]
    return {name: asked[name].number for name in names}


def _body(key: KernelKey, spec: pytree.TreeSpec, before: dict[str, int]) -> Kernel:
    """Return the function that a kernel is compiled from.

    Its numbers are the scalars, the answers of the requests `before`, and the kernel's own.
    """
    rule, names = key.rule, [name for name, _ in key.tensors]
    targets = [] if key.in_place else key.targets
    given = [name for name, _ in key.given]
    # Dynamo orders a graph's inputs by their first use, and Inductor its loads by that
    # order. With the state first, Adan's kernel on CUDA has 96 registers in place of 106.
    first_used = sorted(range(len(names)), key=lambda i: names[i] in (PARAM, GRAD, COMP))

    def run(numbers: Tensor, *tensors: Tensor) -> None:
        for i in first_used:
            tensors[i].numel()
        left, values = iter(tensors), iter(numbers.unbind())
        own = {name: next(left) for name in names}
        into = {name: next(left) for name in targets} if targets else own
        scalars = fill(key.statics, spec, values)
        stored = leaf_in(rule, own)
        more = {name: next(left) for name in given}
        leaf, scalars = with_given(stored, scalars, more)
        known = {name: [next(values) for _ in range(n)] for name, n in before.items()}
        if key.round is not None:
            asked = leaf_round(rule, leaf, own[GRAD], scalars, known, key.write)
            means = whole_means(asked.tensors, asked.tops)
            for place, mean in zip(numbers.split(1)[-len(means) :], means):
                place.copy_(mean.reshape(1))
            return
        answer = answering(known)
        write_back(into, leaf_step(rule, leaf, own[GRAD], scalars, key.write, answer))

    return run


def with_own_code_object(fn: Callable[..., T], name: str) -> Callable[..., T]:
    """Return a function with its own code object.

    Dynamo counts recompilations by code object, and closures of one body share it.
    """
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=name)
    return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


class kernel_context:
    """Switch off grad mode, inference mode and autocast, which no update depends on."""

    __slots__ = ("_device", "_grad", "_modes")

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._modes: list[AbstractContextManager[object]] = []
        if torch.is_inference_mode_enabled():
            self._modes.append(torch.inference_mode(False))
        own = self._device.type
        for kind in ("cpu",) if own in ("cpu", "meta") else ("cpu", own):
            if torch.is_autocast_enabled(kind):
                self._modes.append(torch.autocast(kind, enabled=False))
        for mode in self._modes:
            mode.__enter__()
        # torch.no_grad() takes five times as long, which every step would notice.
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        for mode in reversed(self._modes):
            mode.__exit__(*error)
