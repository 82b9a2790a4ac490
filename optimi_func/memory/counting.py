"""The bytes of parameters, of an optimizer's state, and of its steps' temporaries.

No rule, storage or executor is known here. The optimizer is made on meta parameters, its
tensors are counted, and its own step is rehearsed.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimi_func.classes.base import BaseOptimizer
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


class Counter(TorchDispatchMode):
    """A dispatch mode that counts the bytes that operations take and have not freed.

    Memory is taken when a storage is seen for the first time, and freed with the last
    reference to it.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.most = self._alive = 0
        self._device = device
        # Weak references to storages that are alive, by id.
        self._storages: dict[int, object] = {}

    def seen(self, x: Tensor, counts: bool = True) -> None:
        """Count the storage of a tensor if it is new, or never if not `counts`."""
        storage = x.untyped_storage()
        key = id(storage)
        size = rounded(storage.nbytes(), self._device) if counts else 0
        if key in self._storages:
            return

        def freed(_: object) -> None:
            del self._storages[key]
            self._alive -= size

        self._storages[key] = weakref.ref(storage, freed)
        self._take(size)

    def _take(self, size: int) -> None:
        self._alive += size
        self.most = max(self.most, self._alive)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation unchanged and see its results."""
        out = func(*args, **(kwargs or {}))
        pytree.tree_map_only_(Tensor, self.seen, out)
        if self._device == "cpu" and (size := _extra_bytes(func, args, kwargs or {})):
            self._take(size)
            self._alive -= size
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


def held(x: Tensor, ranks: int = 1) -> int:
    """Return the bytes of a tensor in one process.

    If `ranks` > 1, fully_shard will divide its rows. The first process has the most.
    """
    if ranks == 1 or not x.dim() or not x.numel():
        return x.nbytes
    rows = x.shape[0]
    return x.nbytes // rows * -(-rows // ranks)


def rounded(size: int, device: str) -> int:
    """Round bytes up to the block that the device's allocator takes, 512 on CUDA."""
    return -(-size // 512) * 512 if device == "cuda" else size


def cast_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of x in a recipe. Integer and complex tensors and float8 stay."""
    return dtype if x.is_floating_point() and x.element_size() > 1 else x.dtype


def cast_to(params: Mapping[str, Tensor], dtype: torch.dtype, device: str) -> Params:
    """Return empty parameters of the same shapes and strides, cast to a dtype."""
    found: Params = {}
    for name, p in params.items():
        cast = cast_dtype(p, dtype)
        x = torch.empty_like(p.detach(), device=device, dtype=cast)
        if cast == p.dtype:  # a slice is left as it is
            x = torch.empty_strided(p.shape, p.stride(), dtype=cast, device=device)
        found[name] = nn.Parameter(x, p.requires_grad)
    return found


def copied(model: nn.Module, params: Params, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model with these parameters, and empty tensors in place of others.

    Plain attributes are replaced too, because tensors of two devices do not mix.
    """
    memo: dict[int, object] = {id(p): params[n] for n, p in model.named_parameters()}
    device = next(iter(params.values())).device
    plain = [x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor)]
    dtypes = {id(x): cast_dtype(x, dtype) for x in model.buffers()}
    for x in (*model.buffers(), *plain):
        cast = dtypes.get(id(x), x.dtype)
        empty = torch.empty_strided(x.shape, x.stride(), dtype=cast, device=device)
        memo.setdefault(id(x), empty)
    try:
        return deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(
            f"the model, a {type(model).__name__}, cannot be copied to be run on fake "
            f"tensors ({type(error).__name__}: {error}): plan it before it is wrapped, or "
            "without loss_fn and batch"
        ) from error


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
        first = copied(model, params, next(iter(params.values())).dtype)
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
    before = [some, grads, [[*optimizer.state[p].values()] for p in some]]
    pytree.tree_map_only_(Tensor, lambda x: counter.seen(x, counts=False), before)
    with rehearse(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The first one is planned, which computes shapes on meta.
        optimizer.update(some, grads, wholes, write=True, count=True)
        for step in sorted(_steps(optimizer)):
            for p in some:
                optimizer.state[p]["step"].fill_(step - 1)
            with counter:
                optimizer.update(some, grads, wholes, write=True, count=True)
    return counter.most


def _steps(optimizer: BaseOptimizer) -> set[int]:
    """Return the numbers of the steps to count."""
    numbers = {
        x for group in optimizer.param_groups for x in group.values() if type(x) is int
    }
    return {1, 2, *numbers, *[n + 1 for n in numbers]} - {0, -1}
