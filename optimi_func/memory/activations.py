"""The memory that a forward and backward take and free, counted on fake tensors."""

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optimi_func.core import torch_private
from optimi_func.core.checks import check_loss
from optimi_func.core.rule import PyTree
from optimi_func.memory.counting import Counter, Event, cast_dtype

LossFn = Callable[[nn.Module, PyTree], PyTree]


class Trace(NamedTuple):
    """The events of a forward and backward, without parameters and buffers.

    The gradient of each parameter is dropped when it arrives.
    """

    events: Sequence[Event]
    backward: int  # index of the first event of the backward
    attention: bool  # True if F.scaled_dot_product_attention ran as on CUDA


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


def trace(
    model: nn.Module, loss_fn: LossFn, batch: PyTree, dtype: torch.dtype, device: str
) -> Trace:
    """Run forward and backward of a fake copy of the model, and record their events.

    Floating parameters and buffers are cast to `dtype`, and so are the batch's tensors that
    have the dtype of the model.
    """
    counter, calls = Counter(device), _Calls(device == "cuda")
    model_dtype = next((p.dtype for p in model.parameters() if p.requires_grad), dtype)

    def fake_like(x: Tensor) -> Tensor:
        fake = _empty_like(x, dtype if x.dtype == model_dtype else x.dtype)
        return fake.requires_grad_(x.requires_grad)

    with torch_private.fake_mode():
        fake = _fake_copy(model, dtype)
        names = {module: name for name, module in fake.named_modules()}
        batch = pytree.tree_map_only(Tensor, fake_like, batch)
        counter.known([*fake.parameters(), *fake.buffers()])
        pytree.tree_map_only_(Tensor, counter.block, batch)
        for i, p in enumerate([p for p in fake.parameters() if p.requires_grad]):
            p.register_post_accumulate_grad_hook(lambda p, i=i: _arrived(counter, i, p))
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
            begin, counter.in_backward = len(counter.events), True
            _called(names, loss.backward)
        return Trace(tuple(counter.events), begin, calls.attention)


def _arrived(counter: Counter, param: int, p: Tensor) -> None:
    """Record that the gradient of a parameter is complete, and drop it."""
    assert p.grad is not None
    counter.events.append(Event(0, counter.block(p.grad), param))
    p.grad = None


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
