"""A forward and backward on tensors without memory: which blocks are alive, and when.

The model's operations run on fake CPU tensors, and each one's results are looked at where
torch dispatches it: memory is taken when a storage is seen for the first time, and freed
when nothing holds it any more. So whatever the program does counts: what autograd saves,
what a checkpoint drops and computes again, the temporaries of backward.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimi_func import _torch
from optimi_func._bound import check_loss

LossFn = Callable[[Any, Any], Any]


class Event(NamedTuple):
    """Something that changes what is alive."""

    # "done": the gradient of a parameter is complete, and lies in this block.
    kind: Literal["taken", "freed", "backward", "done"]
    block: int = -1
    bytes: int = 0
    param: int = -1  # of those that are trained


class Trace(NamedTuple):
    """What a forward and backward take and free, beside parameters and buffers."""

    events: list[Event]
    attention: bool  # whether a fused attention is among the operations


class Counter(TorchDispatchMode):
    """Notes which blocks of memory operations take, and when these are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.in_backward = False
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._count = 0
        self._sum: tuple[Event, int, int] | None = None

    def know(self, x: Tensor) -> None:
        """What is there from the beginning, and not counted."""
        self._number(x)

    def see(self, x: Tensor) -> None:
        """Count a tensor's memory as taken, unless it is known."""
        block = self._number(x)
        if block is not None:
            self.events.append(Event("taken", block, x.untyped_storage().nbytes()))

    def done(self, param: int, p: Tensor) -> None:
        """A parameter's gradient is complete; it is let go."""
        assert p.grad is not None
        self._settle()
        block = self._numbers[id(p.grad.untyped_storage())]
        self.events.append(Event("done", block, p.grad.nbytes, param))
        p.grad = None

    def begin_backward(self) -> None:
        """What follows is the backward."""
        self.in_backward = True
        self.events.append(Event("backward"))

    def finish(self) -> list[Event]:
        """What happened so far; what is freed from here on is not of it."""
        self._settle()
        return list(self.events)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation as it stands."""
        if func is torch.ops.prim.device.default:
            # Asked at every turn: a fake tensor knows it without another dispatch.
            return args[0].device
        self._settle()
        out = func(*args, **(kwargs or {}))
        adds = self.in_backward and func is torch.ops.aten.add.Tensor
        # Into what is a view it never writes, as there is a base to share the memory with.
        if adds and not torch.is_grad_enabled() and not args[0]._is_view():
            self._see_sum(out, args)
        else:
            for x in pytree.tree_leaves(out):
                if isinstance(x, Tensor):
                    self.see(x)
        return out

    def _see_sum(self, out: Tensor, args: Any) -> None:
        """A sum of two gradients, which autograd writes into the first if it has it alone.

        It never does while a mode looks on: a new one is made then, and the first is freed
        at once. That is found out when the next operation comes.
        """
        first, size = args[0].untyped_storage(), out.untyped_storage().nbytes()
        block = self._number(out)
        if block is not None:
            term = self._numbers[id(first)] if first.nbytes() == size else -1
            self._sum = Event("taken", block, size), len(self.events), term

    def _settle(self) -> None:
        """Put the last sum where its memory would have been taken."""
        if self._sum is None:
            return
        (taken, at, term), self._sum = self._sum, None
        after = self.events[at:]
        freed = any(e.kind == "freed" and e.block == term for e in after)
        self.events.insert(len(self.events) if freed else at, taken)

    def _number(self, x: Tensor) -> int | None:
        """The number of a block that is new."""
        if x.layout != torch.strided:
            raise NotImplementedError(
                f"a tensor of layout {x.layout}, whose memory has parts"
            )
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._numbers:
            return None
        block = self._count
        self._count += 1

        def freed(_: Any) -> None:
            del self._numbers[key], self._alive[block]
            if self._sum is not None and self._sum[0].block == block:
                self._settle()
            self.events.append(Event("freed", block, size))

        self._numbers[key], self._alive[block] = block, weakref.ref(storage, freed)
        return block


class _Calls(TorchFunctionMode):
    """Looks at what the program calls, for what no operation shows.

    Attention is counted as CUDA's kernels keep it, which draw their dropout again: on CPU
    dropout would keep the weights of every pair of positions.

    Attributes:
        attention: Whether there is any.
        autocast: Whether autocast was on for CUDA, where all tensors are the CPU's.
    """

    def __init__(self, for_cuda: bool) -> None:
        super().__init__()
        self.attention = self.autocast = False
        self._for_cuda = for_cuda

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.autocast |= torch.is_autocast_enabled("cuda")
        if func is F.scaled_dot_product_attention:
            self.attention = True
            if self._for_cuda:
                args = (*args[:4], *[0.0] * (len(args) > 4), *args[5:])
                kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def trace(
    model: nn.Module, loss_fn: LossFn, batch: Any, dtype: torch.dtype, for_cuda: bool
) -> Trace:
    """Run a forward and backward of the model in a dtype, and see what they take.

    Args:
        model: A copy without memory is run; nothing is computed, nothing of it changes.
        loss_fn: `(model, batch) -> loss`.
        batch: Any tree of tensors. Its floating tensors of the model's dtype take the
            other one too, as they would have to.
        dtype: What floating parameters and buffers are cast to.
        for_cuda: Whether attention is to be counted as on CUDA.

    Raises:
        TypeError, ValueError: A loss that no backward starts from.
        RuntimeError: A model that cannot be copied, or not run without memory.
    """
    mode, counter = _torch.fake_mode(), Counter()
    calls = _Calls(for_cuda)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), dtype)
    inside: list[str] = []
    with mode:
        fake = _without_memory(model, dtype)
        for name, module in fake.named_modules():
            _note_when_inside(module, name, inside)
        batch = pytree.tree_map_only(
            Tensor, lambda x: _given(x, dtype if x.dtype == own else x.dtype), batch
        )
        for x in [*fake.parameters(), *fake.buffers()]:
            counter.know(x)
        for x in pytree.tree_leaves(batch):
            if isinstance(x, Tensor):
                counter.see(x)
        for i, p in enumerate([p for p in fake.parameters() if p.requires_grad]):
            p.register_post_accumulate_grad_hook(lambda p, i=i: counter.done(i, p))
        with torch.enable_grad(), calls, counter:
            loss = _called(inside, loss_fn, fake, batch)
            _check(loss, calls)
            counter.begin_backward()
            _called(inside, loss.backward)
        return Trace(counter.finish(), calls.attention)


def _without_memory(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model's structure around tensors without memory, in a dtype."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        # Beside parameters and buffers also what is a mere attribute.
        tensors = [*module.parameters(False), *module.buffers(False)]
        tensors += [x for x in vars(module).values() if isinstance(x, Tensor)]
        for x in tensors:
            if nn.parameter.is_lazy(x):
                raise ValueError(
                    f"{type(module).__name__} has parameters without a shape: run a "
                    "forward first"
                )
            if id(x) not in memo:
                cast = isinstance(x, nn.Parameter) or any(x is b for b in module.buffers())
                kept = dtype if cast and x.is_floating_point() else x.dtype
                empty = _empty_like(x, kept)
                is_param = isinstance(x, nn.Parameter)
                memo[id(x)] = nn.Parameter(empty, x.requires_grad) if is_param else empty
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(
            f"the model, a {type(model).__name__}, cannot be copied to be run without "
            f"memory ({type(error).__name__}: {error}): plan it before it is wrapped, or "
            "without loss_fn and batch"
        ) from error


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    size, strides = tuple(x.shape), tuple(x.stride())
    return torch.empty_strided(size, strides, dtype=dtype, device="cpu")


def _given(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty_like(x, dtype).requires_grad_(x.requires_grad)


def _note_when_inside(module: nn.Module, name: str, inside: list[str]) -> None:
    """Keep a list of the modules whose forward runs; after an error it is where it was."""
    title = f"{name or 'the model itself'} ({type(module).__name__})"
    module.register_forward_pre_hook(lambda *_: inside.append(title))
    module.register_forward_hook(
        lambda *_: inside.remove(title) if title in inside else None
    )


def _called(inside: list[str], function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns; its error with the module it came from."""
    try:
        return function(*args)
    except Exception as error:
        place = inside[-1] if inside else "none, outside of all of them"
        raise RuntimeError(
            "loss_fn cannot be run on tensors without memory; it failed in module "
            f"{place}: {type(error).__name__}: {error}\n"
            "Nothing there may ask for a tensor's values (item(), tolist(), numpy(), a "
            "shape that depends on them), and all tensors have to come from the model and "
            "the batch that loss_fn is given. Without loss_fn and batch all but the "
            "activations is planned."
        ) from error


def _check(loss: Any, calls: _Calls) -> None:
    """Refuse what no backward starts from, and what was computed otherwise than meant."""
    check_loss(loss)
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that depends on no parameter of the model it is given"
        )
    if calls.autocast:
        raise ValueError(
            'loss_fn enters torch.autocast("cuda"), which does nothing for the CPU tensors '
            "that are planned with: use torch.autocast(device.type) of its batch's device"
        )
