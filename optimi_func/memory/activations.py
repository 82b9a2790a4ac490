"""The activations of a model: what one forward on fake tensors saves for its backward."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optimi_func.core import torch_private
from optimi_func.core.checks import check_loss
from optimi_func.core.rule import PyTree
from optimi_func.memory.counting import cast_to, copied, rounded

LossFn = Callable[[nn.Module, PyTree], PyTree]
_NEAR = 4  # saved tensors that one operation and the next may have


class Moment(NamedTuple):
    """A moment of a forward. Backward passes all of them in reverse order."""

    saved: int | None = None  # bytes of a tensor that is saved, 0 if it was before
    again: int = 0  # bytes that a checkpointed module takes when it runs again
    params: Sequence[int] = ()  # parameters that are used


class Activations(NamedTuple):
    """Moments of a forward, without parameters and buffers, and the bytes of the batch."""

    moments: Sequence[Moment]
    batch: int


def gradients_of(sizes: Sequence[int], i: int) -> int:
    """Return the bytes of gradients of activations where backward reaches a saved tensor.

    An operation has the gradients of its result and of its operand alive. They are about as
    large as what it and the next operations save.
    """
    return 2 * max(sizes[i : i + _NEAR], default=0)


class _Forward:
    """Hooks that see what a model's forward saves, each storage once."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.moments: list[Moment] = []
        self.running: list[nn.Module] = []
        self.autocast = False
        self._device, self._packs = device, 0
        self._probe = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        self._checkpointed: nn.Module | None = None
        self._again = Moment()
        trained = [p for p in model.parameters() if p.requires_grad]
        self._index = {id(p.untyped_storage()): i for i, p in enumerate(trained)}
        # They stay alive here, so that no two storages have the same id.
        known = [*model.parameters(), *model.buffers(), self._probe]
        self._storages = {id(s): s for s in [x.untyped_storage() for x in known]}
        for module in model.modules():
            module.register_forward_pre_hook(self._start, with_kwargs=True)
            module.register_forward_hook(self._end)

    def bytes(self, x: Tensor) -> int:
        """Return the bytes of a tensor's storage, or 0 if it was seen before."""
        storage = x.untyped_storage()
        if id(storage) in self._storages:
            return 0
        self._storages[id(storage)] = storage
        return rounded(storage.nbytes(), self._device)

    def pack(self, x: Tensor) -> Tensor:
        """Record a tensor that is saved, and leave it as it is."""
        self._packs += 1
        self.autocast |= torch.is_autocast_enabled("cuda")
        self.moments.append(Moment(saved=self.bytes(x)))
        self._use([x])
        return x

    def _use(self, tensors: Iterable[Tensor]) -> None:
        found = [self._index.get(id(x.untyped_storage())) for x in tensors]
        if params := [i for i in found if i is not None]:
            self.moments.append(Moment(params=params))

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.append(module)
        if self._checkpointed is None and self._saves_nothing((args, kwargs)):
            self._checkpointed = module
            outside, self.moments = self.moments, []
            storages, self._storages = self._storages, self._storages.copy()
            with torch.enable_grad(), saved_tensors_hooks(self.pack, lambda x: x):
                module.forward(*args, **kwargs)
            sizes = [m.saved for m in self.moments if m.saved]
            self.moments, self._storages = outside, storages
            alive = enumerate(itertools.accumulate(sizes))
            most = max((x + gradients_of(sizes, i) for i, x in alive), default=0)
            self._again = Moment(again=most)

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        self._use(module.parameters(recurse=False))
        if self.running.pop() is self._checkpointed:
            self.moments.append(self._again)
            self._checkpointed = None

    def _saves_nothing(self, inputs: object) -> bool:
        """Return True in a checkpoint, which has hooks of its own or no gradients."""
        if not torch.is_grad_enabled():
            leaves = pytree.tree_leaves(inputs)
            return any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        packs = self._packs
        self._probe.square()  # saves its operand
        return self._packs == packs


class _AttentionOnCUDA(TorchFunctionMode):
    """A function mode without dropout in attention, which CUDA's kernels draw again.

    The CPU saves the weights of all pairs of positions with dropout.
    """

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], *[0.0] * (len(args) > 4), *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def activations_of(
    model: nn.Module, loss_fn: LossFn, batch: PyTree, dtype: torch.dtype, device: str
) -> Activations:
    """Run the forward of a fake copy of the model, and record what it saves.

    Floating parameters and buffers are cast to `dtype`, and so are the batch's tensors that
    have the dtype of the model.
    """
    params = dict(model.named_parameters())
    model_dtype = next(p.dtype for p in params.values() if p.requires_grad)

    def fake_like(x: Tensor) -> Tensor:
        cast = dtype if x.dtype == model_dtype else x.dtype
        fake = torch.empty_strided(x.shape, x.stride(), dtype=cast, device="cpu")
        return fake.requires_grad_(x.requires_grad)

    calls = _AttentionOnCUDA() if device == "cuda" else nullcontext()
    with torch_private.fake_mode(), torch.enable_grad():
        fake = copied(model, cast_to(params, dtype, "cpu"), dtype)
        batch = pytree.tree_map_only(Tensor, fake_like, batch)
        forward = _Forward(fake, device)
        leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]
        of_batch = sum(map(forward.bytes, leaves))
        try:
            with calls, saved_tensors_hooks(forward.pack, lambda x: x):
                loss = loss_fn(fake, batch)
        except Exception as error:
            raise RuntimeError(_explained(error, fake, forward.running)) from error
    check_loss(loss)
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that depends on no parameter of the model it is given"
        )
    if forward.autocast:
        raise ValueError(
            'loss_fn enters torch.autocast("cuda"), which has no effect on the CPU '
            "tensors of a plan: use torch.autocast(device.type) with the device of the "
            "batch"
        )
    return Activations(forward.moments, of_batch)


def _explained(error: Exception, model: nn.Module, running: Sequence[nn.Module]) -> str:
    """Return a message that names the module that could not run on fake tensors."""
    place = "outside of all modules"
    if running:
        names = {module: name for name, module in model.named_modules()}
        name = names[running[-1]] or "the model itself"
        place = f"in module {name} ({type(running[-1]).__name__})"
    return (
        f"loss_fn cannot run on fake tensors, it failed {place}: "
        f"{type(error).__name__}: {error}\n"
        "Values of tensors are not available (item(), tolist(), numpy(), shapes that "
        "depend on values), and all tensors have to come from the model and the batch "
        "that loss_fn is given. Without loss_fn and batch, everything except the "
        "activations is planned."
    )
