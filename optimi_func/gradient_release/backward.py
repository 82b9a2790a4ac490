"""The state of a backward and of an accumulation cycle, small gradients that wait, norms.

Hooks run on the CUDA streams of autograd's nodes, the end of a backward on the caller's.
The allocator reuses a tensor's memory once the host has dropped it, for work on the stream
that the tensor was made on, so it has to be told if another stream uses the tensor.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func.core.codes import is_dense
from optimi_func.core.distributed import (
    ShardSpec,
    all_reduce_all,
    all_reduce_sum,
    is_distributed,
    shards_of,
    to_local,
)
from optimi_func.core.rule import WHOLE_BATCH, Scalar
from optimi_func.core.torch_private import is_plain, norms_of
from optimi_func.execution.sums import Part
from optimi_func.execution.tensors import current_stream

# Small gradients wait up to this many bytes, or the end of backward, for each other.
PENDING_BYTES = 1 << 20
# Pending gradients start at multiples of this many bytes, which is aligned for every dtype.
ALIGNMENT = 16


def aligned(size: int) -> int:
    """Round bytes up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def staging_size(size: int, needed: int, least: int) -> int:
    """Return the size of the staging memory, grown if it has less than `needed` bytes."""
    return size if needed <= size else max(least, 2 * size, needed)


class Norm(NamedTuple):
    """The norm of a tensor's local shard."""

    value: Tensor  # 0-d, of at least float32
    shard: ShardSpec | None  # the processes that hold the other shards


def local_norms(tensors: list[Tensor]) -> list[Norm]:
    """Return the norms of the local shards."""
    return list(map(Norm, norms_of(to_local(tensors)), map(shards_of, tensors)))


def whole_norms(norms: list[Norm]) -> list[Norm]:
    """Combine the norms of local shards into those of whole tensors by one all-reduce."""
    if all(norm.shard is None for norm in norms):
        return norms
    squares = [norm.value.double().square() for norm in norms]
    sums = all_reduce_sum(squares, [norm.shard for norm in norms])
    return [
        norm if norm.shard is None else Norm(total.sqrt().to(norm.value.dtype), None)
        for norm, total in zip(norms, sums)
    ]


def as_scalar(x: Tensor, p: Tensor, on_host: bool) -> Scalar:
    """Convert x to a Python number, or move it to p's device if reading it would wait."""
    return x.item() if on_host else x.to(p.device)


def are_finite(grads: list[Tensor], norms: list[Norm], hosts: list[bool]) -> list[Tensor]:
    """Return a 0-d bool for each gradient, True if all its shards are finite.

    hosts[i] is True if norms[i] may be read without waiting for a device.
    """
    flags = list(map(is_finite, to_local(grads), norms, hosts))
    return all_reduce_all(flags, grads)


def is_finite(g: Tensor, norm: Norm, host: bool) -> Tensor:
    """Return a 0-d bool, True if a local shard is finite."""
    if host:
        # The norm of large finite elements can overflow, so an infinite one proves nothing.
        finite = norm.value.isfinite()
        return finite if finite else g.isfinite().all()
    if g.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=g.device)
    # g.isfinite() would allocate a tensor of g's shape.
    low, high = g.aminmax()
    return low.isfinite() & high.isfinite()


class Accumulation:
    """An accumulation cycle: the backwards that make one step."""

    def __init__(self) -> None:
        self.position = 0  # the number of backwards in the open cycle
        # "states": the parameters whose state has taken a part of the gradient.
        self.partially_updated: set[Tensor] = set()
        self.buffer: dict[Tensor, Tensor] = {}  # "buffer": the sums of gradients

    @property
    def is_open(self) -> bool:
        """True if gradients have come that have not moved their parameter yet."""
        return bool(self.position or self.partially_updated or self.buffer)

    def keep(self, p: Tensor, g: Tensor, dtype: torch.dtype | None, copy: bool) -> Tensor:
        """Add g to p's sum, and return the sum; the first gradient becomes the sum."""
        total = self.buffer.get(p)
        if total is not None:
            return total.add_(g)
        self.buffer[p] = g.to(_sum_dtype(g, dtype), copy=copy)
        return self.buffer[p]

    def zeros(
        self, params: Iterable[Tensor], dtype: torch.dtype | None
    ) -> dict[Tensor, Tensor]:
        """Return zeros in the place of sums."""
        wide = {p: _sum_dtype(p, dtype) for p in params}
        return {p: torch.zeros_like(p.detach(), dtype=d) for p, d in wide.items()}

    def whole(self, p: Tensor, g: Tensor) -> Tensor:
        """Return p's sum plus g; the buffer keeps its value, and g may be overwritten."""
        total = self.buffer.get(p)
        if total is None:
            return g
        record([total])
        wide = torch.promote_types(total.dtype, g.dtype)
        return g.add_(total) if g.dtype == wide else total + g


def _sum_dtype(g: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of sums of a gradient, for a `buffer_dtype`."""
    if dtype is None:
        return torch.promote_types(g.dtype, torch.float32)
    return dtype.to_complex() if g.is_complex() else dtype


class Backward:
    """One running backward.

    The autograd engine holds the only reference, so a backward that fails frees it and the
    gradients that still wait.
    """

    def __init__(self, last: bool, grad_scale: Tensor | None, staging: Tensor) -> None:
        self.last = last  # True if it moves the parameters
        self.ids: set[int] = set()  # its own, and those of backwards started inside it
        self.fired: set[Tensor] = set()
        self.norms: list[Norm] = []
        self.parts: dict[Tensor, Part] = {}  # of sums, joined by `finish_step`
        self.lacking = 0  # how many more whole tensors those that wait are mapped with
        # Parameters, gradients, and the CUDA streams that compute the gradients.
        self.pending: dict[torch.device, list[tuple[Tensor, Tensor, object]]] = {}
        self.staging = staging
        self._pending_bytes: dict[torch.device, int] = {}
        self.messages: Any = None  # on replicas: all, to send, under way; gradients' order
        self.grad_scale = grad_scale  # a factor on every gradient
        self._grad_scales: dict[torch.device | None, Scalar] = {}

    def grad_scale_for(self, p: Tensor, on_host: bool) -> Scalar:
        """Return the common factor, the same object for all parameters on a device."""
        if self.grad_scale is None:
            return WHOLE_BATCH.grad_scale
        place = None if on_host else p.device
        if place not in self._grad_scales:
            self._grad_scales[place] = as_scalar(self.grad_scale, p, on_host)
        return self._grad_scales[place]

    def add_pending(self, p: Tensor, g: Tensor, room: int) -> int:
        """Let g wait in staging memory of at least `room` bytes; return all that wait."""
        pending_bytes = self._pending_bytes.get(p.device, 0)
        if p.device.type == "cpu" and is_plain(g):
            g = self._stage(g, pending_bytes, room)
        elif is_distributed(g):
            # fully_shard's gradients are views of one buffer, which they would keep alive.
            g = g.clone()
        pending_bytes += aligned(g.nbytes)
        self._pending_bytes[p.device] = pending_bytes
        self.pending.setdefault(p.device, []).append((p, g, current_stream(p.device)))
        return pending_bytes

    def take_pending(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Remove and return the parameters and gradients that wait on a device."""
        self._pending_bytes.pop(device, None)
        pending = self.pending.pop(device, [])
        wait_for([stream for _, _, stream in pending], device)
        return [p for p, _, _ in pending], [g for _, g, _ in pending]

    def _stage(self, g: Tensor, offset: int, room: int) -> Tensor:
        """Copy g into the staging memory, `offset` bytes into it.

        Small blocks that are kept between large, short-lived ones fragment malloc's heap:
        they cost a tenth of a ViT-L's resident memory.
        """
        size = staging_size(self.staging.numel(), offset + g.nbytes, room)
        if size > self.staging.numel():
            # Gradients that wait already keep the old memory alive.
            self.staging = torch.empty(size, dtype=torch.uint8, device="cpu")
        place = self.staging[offset : offset + g.nbytes].view(g.dtype)
        if is_dense(g):
            # With other strides, means would be summed in another order.
            return place.as_strided(g.shape, g.stride()).copy_(g)
        return place.view(g.shape).copy_(g)


# A key that a wrapper of optimizers writes into param groups, and the wrapper.
WRAPPERS = {"lookahead_k": "timm's Lookahead", "weight_sum": "schedulefree's wrapper"}
PAUSE = "If a gradient is to be thrown away, run its backward in `with handle.paused():`"


class SinceStep:
    """The backwards since the last step(), for its warnings."""

    def __init__(self) -> None:
        self.backwards = 0
        self.moves = 0  # backwards that move different parameters count as one
        self.repeats = False  # True if a parameter got several gradients
        self.used: dict[str, object] = {}  # hyperparameters of the last one that moved any
        self._fired: set[Tensor] = set()

    def add(self, fired: set[Tensor], moved: bool) -> None:
        """Count a backward that gave these parameters gradients."""
        again = not self._fired.isdisjoint(fired)
        self.backwards += 1
        self.repeats |= again
        self.moves += moved and (again or not self.moves)
        self._fired |= fired

    def late(self, now: Mapping[str, object]) -> dict[str, str]:
        """Return warnings of hyperparameters that have changed since they were used."""
        changed = [k for k, used in self.used.items() if now.get(k, used) != used]
        late = "it comes a step late under gradient release. Set it before backward"
        where = "in the backward that moved the parameters, and is"
        return {k: f"{k} was {self.used[k]} {where} {now[k]} now: {late}" for k in changed}


def wait_for(streams: Iterable[object], device: torch.device) -> None:
    """Make this thread's stream wait for other streams."""
    here = current_stream(device)
    for stream in set(streams):
        if stream is not None and stream != here:
            here.wait_stream(stream)


def record(tensors: list[Tensor]) -> None:
    """Tell the allocator that this thread's stream uses these tensors."""
    for x in to_local([x for x in tensors if x.is_cuda]):
        stream = current_stream(x.device)
        if stream is not None:
            x.record_stream(stream)
