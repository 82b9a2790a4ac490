"""The memory events of a forward and backward that run on fake tensors.

A dispatch mode sees the results of every operation. A block of memory is taken when its
storage is seen for the first time, and freed with the last reference to it. This counts
what autograd saves, what a checkpoint drops and recomputes, and temporaries of backward.
"""

import copy
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimi_func.core import torch_private
from optimi_func.core.checks import check_loss
from optimi_func.core.rule import PyTree

LossFn = Callable[[nn.Module, PyTree], PyTree]


class Event(NamedTuple):
    """A change of the blocks that are alive."""

    # "done": the gradient of parameter `param` is complete, in this block.
    kind: Literal["taken", "freed", "backward", "done"]
    block: int = -1
    bytes: int = 0
    param: int = -1  # index among the parameters that require a gradient


class Trace(NamedTuple):
    """The events of a forward and backward, without parameters and buffers."""

    events: list[Event]
    attention: bool  # True if F.scaled_dot_product_attention ran as on CUDA


def most_alive(events: Iterable[Event]) -> int:
    """Return the most bytes that are taken and not yet freed at one time."""
    signs = {"taken": 1, "freed": -1}
    changes = (signs.get(e.kind, 0) * e.bytes for e in events)
    return max(itertools.accumulate(changes, initial=0))


class Counter(TorchDispatchMode):
    """A dispatch mode that records when operations take blocks, and when they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.in_backward = False
        # By id of a storage that is alive: its block, and a weak reference to it.
        self._blocks: dict[int, tuple[int, object]] = {}
        self._next = itertools.count()
        self._sum: tuple[Event, int, int] | None = None

    def see(self, x: Tensor) -> None:
        """Count the memory of x as taken, unless it was counted before."""
        block = self.number(x)
        if block is not None:
            self.events.append(Event("taken", block, x.untyped_storage().nbytes()))

    def done(self, param: int, p: Tensor) -> None:
        """Record that the gradient of a parameter is complete, and drop it."""
        assert p.grad is not None
        self._settle()
        block, _ = self._blocks[id(p.grad.untyped_storage())]
        self.events.append(Event("done", block, p.grad.nbytes, param))
        p.grad = None

    def finish(self) -> list[Event]:
        """Return the events until now."""
        self._settle()
        return list(self.events)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation unchanged and see its results."""
        if func is torch.ops.prim.device.default:
            # Called very often. A fake tensor answers without another dispatch.
            return args[0].device
        self._settle()
        out = func(*args, **(kwargs or {}))
        adds = self.in_backward and func is torch.ops.aten.add.Tensor
        # Autograd never adds into a view in place.
        if adds and not torch.is_grad_enabled() and not args[0]._is_view():
            self._see_sum(out, args)
        else:
            pytree.tree_map_only_(Tensor, self.see, out)
        return out

    def _see_sum(self, out: Tensor, args: tuple[Tensor, ...]) -> None:
        """Remember a sum of two gradients until the next operation.

        Autograd adds into the first gradient in place if nothing else refers to it, but not
        under a dispatch mode. The first one is then freed before the next operation.
        """
        first, size = args[0].untyped_storage(), out.untyped_storage().nbytes()
        block = self.number(out)
        if block is not None:
            term = self._blocks[id(first)][0] if first.nbytes() == size else -1
            self._sum = Event("taken", block, size), len(self.events), term

    def _settle(self) -> None:
        """Insert the last sum, after its first term was freed if that has happened."""
        if self._sum is None:
            return
        (event, at, term), self._sum = self._sum, None
        freed = any(e.kind == "freed" and e.block == term for e in self.events[at:])
        self.events.insert(len(self.events) if freed else at, event)

    def number(self, x: Tensor) -> int | None:
        """Give the storage of x a number and return it, or None if it has one already."""
        if x.layout != torch.strided:
            raise NotImplementedError(
                f"a tensor has layout {x.layout}: only strided tensors can be planned"
            )
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._blocks:
            return None
        block = next(self._next)

        def freed(_: object) -> None:
            del self._blocks[key]
            if self._sum is not None and self._sum[0].block == block:
                self._settle()
            self.events.append(Event("freed", block, size))

        self._blocks[key] = block, weakref.ref(storage, freed)
        return block


class _Calls(TorchFunctionMode):
    """A function mode that notices attention, and autocast for CUDA.

    For CUDA, attention runs without dropout. Its kernels recompute the dropout mask, while
    the CPU's fallback would save the weights of all pairs of positions.
    """

    def __init__(self, for_cuda: bool) -> None:
        super().__init__()
        self.attention = self.autocast = False
        self._for_cuda = for_cuda

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        self.autocast |= torch.is_autocast_enabled("cuda")
        if func is F.scaled_dot_product_attention and self._for_cuda:
            self.attention = True
            args = (*args[:4], *[0.0] * (len(args) > 4), *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def cast_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of x in a recipe. Integers, complex numbers and float8 stay."""
    return dtype if x.is_floating_point() and x.element_size() > 1 else x.dtype


def trace(
    model: nn.Module, loss_fn: LossFn, batch: PyTree, dtype: torch.dtype, for_cuda: bool
) -> Trace:
    """Run forward and backward of a fake copy of the model, and record their events.

    Floating parameters and buffers are cast to `dtype`, and so are the batch's tensors that
    have the dtype of the model.
    """
    mode, counter = torch_private.fake_mode(), Counter()
    calls = _Calls(for_cuda)
    model_dtype = next((p.dtype for p in model.parameters() if p.requires_grad), dtype)

    def given(x: Tensor) -> Tensor:
        fake = _empty_like(x, dtype if x.dtype == model_dtype else x.dtype)
        return fake.requires_grad_(x.requires_grad)

    with mode:
        fake = _fake_copy(model, dtype)
        names = {module: name for name, module in fake.named_modules()}
        batch = pytree.tree_map_only(Tensor, given, batch)
        for x in [*fake.parameters(), *fake.buffers()]:
            counter.number(x)
        pytree.tree_map_only_(Tensor, counter.see, batch)
        for i, p in enumerate([p for p in fake.parameters() if p.requires_grad]):
            p.register_post_accumulate_grad_hook(lambda p, i=i: counter.done(i, p))
        with torch.enable_grad(), calls, counter:
            loss = _called(names, loss_fn, fake, batch)
            check_loss(loss)
            if not loss.requires_grad:
                raise ValueError(
                    "loss_fn returned a loss that depends on no parameter of the model it "
                    "is given"
                )
            if calls.autocast:
                raise ValueError(
                    'loss_fn enters torch.autocast("cuda"), which has no effect on the CPU '
                    "tensors of a plan: use torch.autocast(device.type) with the device of "
                    "the batch"
                )
            counter.events.append(Event("backward"))
            counter.in_backward = True
            _called(names, loss.backward)
        return Trace(counter.finish(), calls.attention)


def _fake_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model with fake tensors in place of its own, within a FakeTensorMode."""
    buffers = {id(x) for x in model.buffers()}
    memo: dict[int, object] = {}
    for module in model.modules():
        # Plain attributes are replaced too, because real and fake tensors do not mix.
        plain = [x for x in vars(module).values() if isinstance(x, Tensor)]
        for x in [*module.parameters(False), *module.buffers(False), *plain]:
            is_param = isinstance(x, nn.Parameter)
            cast = is_param or id(x) in buffers
            fake = _empty_like(x, cast_dtype(x, dtype) if cast else x.dtype)
            memo[id(x)] = nn.Parameter(fake, x.requires_grad) if is_param else fake
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(
            f"the model, a {type(model).__name__}, cannot be copied to be run on fake "
            f"tensors ({type(error).__name__}: {error}): plan it before it is wrapped, or "
            "without loss_fn and batch"
        ) from error


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cpu")


def _called(
    names: Mapping[nn.Module, str], function: Callable[..., object], *args: object
) -> PyTree:
    """Call a function, and name the module that ran if it raises."""
    try:
        return function(*args)
    except Exception as error:
        place = "outside of all modules"
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in names:
                name = names[module] or "the model itself"
                place = f"in module {name} ({type(module).__name__})"
        raise RuntimeError(
            f"loss_fn cannot run on fake tensors, it failed {place}: "
            f"{type(error).__name__}: {error}\n"
            "Values of tensors are not available (item(), tolist(), numpy(), shapes that "
            "depend on values), and all tensors have to come from the model and the batch "
            "that loss_fn is given. Without loss_fn and batch, everything except the "
            "activations is planned."
        ) from error
