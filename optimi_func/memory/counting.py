"""The bytes of parameters, of an optimizer's state, and of its steps' temporaries.

No rule, storage or executor is known here. The optimizer is made on meta parameters, its
tensors are counted, and its own step is rehearsed.
"""

import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.distributed import is_distributed, to_local
from optimi_func.core.program import TOGETHER
from optimi_func.core.rehearsal import rehearse
from optimi_func.core.rule import WHOLE_BATCH
from optimi_func.execution.wholes import BATCHED, ELEMENTS

# A class of this package, or a function that makes one of its optimizers in the same way.
Factory = Callable[..., Any]
Options = Mapping[str, Any]
Params = dict[str, nn.Parameter]

# Operations that read operands of several dtypes as they are.
_MIXED = {"copy_", "_to_copy", "clone", "fill_", "masked_fill", "where"}
# Elements of the workspace of LAPACK's functions for a side of n, in torch's CPU build.
_WORKSPACES: dict[str, Callable[[int], int]] = {
    "_linalg_eigh": lambda n: 2 * n * n + 11 * n + 4,  # syevd's, as LAPACK documents them
    "linalg_qr": lambda n: 96 * n,  # orgqr's with blocks of 96 columns
}
# No launch holds temporaries of more elements of one kind of parameters at once.
_ENOUGH = max(TOGETHER, ELEMENTS, BATCHED)


class Event(NamedTuple):
    """A change of the memory that is alive, in bytes, or the arrival of a gradient."""

    bytes: int
    block: int
    param: int = -1  # of an arrival: the index of the parameter


class Counter(TorchDispatchMode):
    """A dispatch mode that records when operations take memory, and when it is freed.

    A block is taken when its storage is seen for the first time, and freed with the last
    reference to it.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.in_backward = False
        self._on_cpu = device == "cpu"
        self._size = lambda size: rounded(size, device)
        # By id of a storage that is alive: its block, and a weak reference to it.
        self._blocks: dict[int, tuple[int, object]] = {}
        self._next = itertools.count()
        self._late: list[Event] = []

    def block(self, x: Tensor, bytes: int | None = None, late: bool = False) -> int:
        """Return the number of a tensor's memory, which is new if it was not seen before.

        If `late`, it is taken when the next operation begins.
        """
        if x.layout != torch.strided:
            raise NotImplementedError(
                f"a tensor has layout {x.layout}: only strided tensors can be planned"
            )
        storage = x.untyped_storage()
        key, size = id(storage), self._size(storage.nbytes()) if bytes is None else bytes
        if key not in self._blocks:
            block = next(self._next)

            def freed(_: object) -> None:
                del self._blocks[key]
                self.events.append(Event(-size, block))

            self._blocks[key] = block, weakref.ref(storage, freed)
            (self._late if late else self.events).append(Event(size, block))
        return self._blocks[key][0]

    def known(self, tensors: object) -> None:
        """Leave tensors uncounted that are there before."""
        pytree.tree_map_only_(Tensor, lambda x: self.block(x, 0), tensors)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation unchanged and see its results."""
        if func is torch.ops.prim.device.default:
            # Called very often. A fake tensor answers without another dispatch.
            return args[0].device
        self.events += self._late
        self._late.clear()
        out = func(*args, **(kwargs or {}))
        # Autograd adds gradients into the first of them, but not under a dispatch mode.
        # Unless it has to be kept, that one is freed before the next operation.
        adds = self.in_backward and func is torch.ops.aten.add.Tensor
        late = adds and not torch.is_grad_enabled() and not args[0]._is_view()
        pytree.tree_map_only_(Tensor, lambda x: self.block(x, late=late), out)
        if self._on_cpu and (size := _extra_bytes(func, args, kwargs or {})):
            block = next(self._next)
            self.events += [Event(size, block), Event(-size, block)]
        return out


def _extra_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that an operation on CPU takes besides its results.

    LAPACK has a workspace. An elementwise operation computes in one dtype, and copies each
    operand and target that has another one. The target of a comparison is none.
    """
    if workspace := _WORKSPACES.get(func.overloadpacket.__name__):
        return workspace(max(args[0].shape[-2:])) * args[0].element_size()
    if torch.Tag.pointwise not in func.tags or func.overloadpacket.__name__ in _MIXED:
        return 0
    read, written = (
        [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
        for tree in (args, kwargs)
    )
    if len({x.dtype for x in read + written}) < 2:
        return 0
    common = reduce(
        torch.promote_types, [x.dtype for x in read if x.dim()] or [read[0].dtype]
    )
    written = [x for x in written if x.dtype != torch.bool]
    return sum([x.numel() * common.itemsize for x in read + written if x.dtype != common])


def most_alive(events: Iterable[Event]) -> int:
    """Return the most bytes that are taken and not yet freed at one time."""
    return max(itertools.accumulate([e.bytes for e in events], initial=0))


def held(x: Tensor, ranks: int = 1) -> int:
    """Return the bytes of a tensor in one process, for a DTensor those of its local part.

    If `ranks` > 1, fully_shard will divide its rows. The first process has the most.
    """
    (part,) = to_local([x])
    if ranks == 1 or is_distributed(x) or not part.dim() or not part.numel():
        return part.nbytes
    rows = part.shape[0]
    return part.nbytes // rows * -(-rows // ranks)


def rounded(size: int, device: str) -> int:
    """Round bytes up to the block that the device's allocator takes, 512 on CUDA."""
    return -(-size // 512) * 512 if device == "cuda" else size


def cast_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of x in a recipe. Integer and complex tensors and float8 stay."""
    return dtype if x.is_floating_point() and x.element_size() > 1 else x.dtype


def on_meta(params: Mapping[str, Tensor], dtype: torch.dtype) -> Params:
    """Return meta parameters of the same shapes, cast to a dtype."""
    found: Params = {}
    for name, p in params.items():
        x = torch.empty_like(p.detach(), device="meta", dtype=cast_dtype(p, dtype))
        if x.dtype == p.dtype and not is_distributed(p):  # a slice is left as it is
            x = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
        found[name] = nn.Parameter(x, p.requires_grad)
    return found


def takes_model(optimizer: Factory) -> bool:
    """Return True if an optimizer is made of a model, as by MuonAdamW."""
    return next(iter(inspect.signature(optimizer).parameters), "") == "model"


def made_of(
    optimizer: Factory, model: nn.Module, params: Params, options: Options
) -> BaseOptimizer:
    """Make an optimizer of this package, or raise TypeError if it is of another one.

    `params` are in the place of the model's. If the constructor requires lr it gets one,
    because bytes do not depend on it. Warnings are left to `apply`.
    """
    if not callable(optimizer):
        name = type(optimizer).__name__
        raise TypeError(f"optimizer={name}(...): pass the class, as each recipe makes one")
    lr = inspect.signature(optimizer).parameters.get("lr")
    if lr is not None and lr.default is inspect.Parameter.empty:
        options = {"lr": 1e-3, **options}
    first: Any = list(params.items())
    if takes_model(optimizer):
        memo: dict[int, object] = {
            id(p): params[name] for name, p in model.named_parameters()
        }
        first = deepcopy(model, memo | {id(x): x.to("meta") for x in model.buffers()})
    kind = optimizer
    if not isinstance(optimizer, type) or issubclass(optimizer, BaseOptimizer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            instance = optimizer(first, **options)
        if isinstance(instance, BaseOptimizer):
            return instance
        kind = type(instance)
    raise TypeError(
        f"optimizer={optimizer!r} makes a {kind.__name__}: allowed are the classes of "
        "optimi_func, partials of them, and functions that make one of them"
    )


def state_bytes(optimizer: BaseOptimizer, device: str, ranks: int) -> int:
    """Return the bytes of state on the device."""
    optimizer.init_state()
    entries = optimizer.state.values()
    tensors = [x for entry in entries for x in entry.values() if isinstance(x, Tensor)]
    # Step counts stay on the host.
    there = [x for x in tensors if x.is_meta or device == "cpu"]
    return sum(rounded(held(x, ranks), device) for x in there)


def temporaries(optimizer: BaseOptimizer, params: list[nn.Parameter], device: str) -> int:
    """Return the most bytes of temporaries while these parameters are updated together.

    Some rules do more at every k-th step, and have k among their hyperparameters. So the
    steps that whole numbers name are counted too.
    """
    kinds: dict[object, int] = {}
    some: list[Tensor] = []
    for p in params:
        kind = p.shape, p.stride(), p.dtype, id(optimizer.group_of(p))
        if kinds.get(kind, 0) < _ENOUGH:
            some.append(p)
        kinds[kind] = kinds.get(kind, 0) + p.numel()
    grads = [torch.empty_like(p, requires_grad=False) for p in some]
    counter, wholes = Counter(device), [WHOLE_BATCH] * len(some)
    counter.known([some, grads, [[*optimizer.state[p].values()] for p in some]])
    with rehearse(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The first one is planned, which computes shapes on meta.
        optimizer.update(some, grads, wholes, write=True, count=True)
        for step in sorted(_steps(optimizer)):
            for p in some:
                optimizer.state[p]["step"].fill_(step - 1)
            with counter:
                optimizer.update(some, grads, wholes, write=True, count=True)
    return most_alive(counter.events)


def _steps(optimizer: BaseOptimizer) -> set[int]:
    """Return the numbers of the steps to count."""
    numbers = {
        x for group in optimizer.param_groups for x in group.values() if type(x) is int
    }
    return {1, 2, *numbers, *[n + 1 for n in numbers]} - {0, -1}
