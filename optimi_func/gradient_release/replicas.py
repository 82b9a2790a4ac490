"""Gradient release on replicas, which average gradients in buckets during backward.

A gradient is copied into its bucket's message and freed. A full message is all-reduced
while backward goes on, applied as one update, and freed. All processes send the same
buckets in the same order, whichever gradients they have.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.checks import check_flag, check_number
from optimi_func.core.codes import is_dense
from optimi_func.core.distributed import check_same, comparable, is_distributed, lost
from optimi_func.core.lists import chunks, grouped
from optimi_func.core.packed import is_capturing
from optimi_func.core.pairs import as_real
from optimi_func.core.torch_private import assert_later, uncompiled
from optimi_func.gradient_release import backward as streams
from optimi_func.gradient_release.backward import Backward, Norm, aligned
from optimi_func.gradient_release.runner import Runner

BYTES = 1 << 22  # of a message of parameters and buffers
IN_FLIGHT = 2  # messages under way while backward goes on: more would keep more memory
REDUCE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, None)


@dataclass(frozen=True)
class Replicas:
    """The options of replicas, under their names in `prepare_for_gradient_release`."""

    process_group: "distributed.ProcessGroup"
    bucket_cap_mb: float
    reduce_dtype: torch.dtype | None
    broadcast_buffers: bool

    def __post_init__(self) -> None:
        """Raise if no model could be prepared with these."""
        if not isinstance(self.process_group, getattr(distributed, "ProcessGroup", ())):
            raise TypeError(
                f"process_group={self.process_group!r}: allowed is a ProcessGroup, such as "
                "torch.distributed.group.WORLD, which is None before init_process_group()"
            )
        check_number("bucket", "bucket_cap_mb", self.bucket_cap_mb, above=0.0)
        check_flag("broadcast_buffers", self.broadcast_buffers)
        if (dtype := self.reduce_dtype) not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype={dtype!r}: allowed are {REDUCE_DTYPES}")


class Message:
    """The gradients of one bucket in one backward, summed in all processes."""

    def __init__(self, params: list[Tensor], dtype: torch.dtype, runner: Any) -> None:
        self.params, self._dtype, self._group = params, dtype, runner.group
        self._marks: list[int] = runner.marks
        self._flat: Tensor | None = None
        self._grads: list[Tensor] = []  # views of `_flat`
        self.missing = {*range(len(params))}
        self._streams: list[object] = []
        self._work: Any = None

    def put(self, i: int, g: Tensor) -> None:
        """Copy this process's share of the i-th gradient into the message."""
        self._open()
        share = 1.0 / distributed.get_world_size(self._group)
        torch.mul(g.to(self._dtype), share, out=self._grads[i])
        self.missing.remove(i)

    def _open(self) -> Tensor:
        """Return the message's memory, which this thread's stream may use."""
        device = self.params[0].device
        if self._flat is None:
            size = self._dtype.itemsize
            sizes = [aligned(p.numel() * size) // size for p in self.params]
            sizes.append(len(sizes) + len(self._marks))
            self._flat = torch.empty(sum(sizes), dtype=self._dtype, device=device)
            for p, part in zip(self.params, self._flat.split(sizes)):
                g = part[: p.numel()].view(p.shape)
                self._grads.append(g.as_strided(p.shape, p.stride()) if is_dense(p) else g)
        streams.wait_for(self._streams, device)
        streams.record([self._flat])
        self._streams.append(streams.current_stream(device))
        return self._flat

    def send(self) -> None:
        """Begin to average the message over all processes."""
        flat, count = self._open(), len(self.params)
        for i in self.missing:
            self._grads[i].zero_()
        # The last elements count the processes that have a parameter's gradient.
        counts = [float(i not in self.missing) for i in range(count)]
        tail = torch.tensor(counts + self._marks, dtype=self._dtype, device="cpu")
        flat[-len(tail) :].copy_(tail, non_blocking=True)
        self._work = distributed.all_reduce(flat, group=self._group, async_op=True)

    def land(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Wait, and return if marks are equal, and the used parameters and averages."""
        self._work.wait()
        flat, grads, count = self._open(), self._grads, len(self.params)
        counts, *halves = flat[-count - len(self._marks) :].split([count, 32, 32])
        same = (halves[0] * halves[1] == 0).all()
        self._flat, self._grads, self._work = None, [], None  # which hold the memory
        # The host reads the device only for gradients that this process lacks.
        used = [i for i in range(count) if i not in self.missing or counts[i] != 0]
        params = [self.params[i] for i in used]
        wide = [torch.promote_types(self._dtype, p.dtype) for p in params]
        return same, params, [grads[i].to(dtype) for i, dtype in zip(used, wide)]


class ReplicaRunner(Runner):
    """The hooks of a model that is the same in several processes."""

    def __init__(self, *given: Any, replicas: Replicas) -> None:
        super().__init__(*given)
        self.replicas, self.group = replicas, replicas.process_group
        self.syncs, self._ordered = True, False  # syncs is False inside no_sync()
        self._assign(reversed(self.params.values()))
        self._sent = False  # True if a backward has sent messages and has not finished
        self._trained = set(self._trainable())

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Make the processes' models equal, add the hooks, and return their handles."""
        self._check_equal(model)
        hooks = super().attach(model)
        _prepared[model] = ref(self)
        pairs = [(p, name) for name, p in model.named_parameters() if p not in self.names]
        self._frozen = dict[Tensor, str](pairs)
        if self.replicas.broadcast_buffers and [*model.buffers()]:
            hooks.append(model.register_forward_pre_hook(_share_buffers))
        _share([*model.parameters(), *model.buffers()], self.group)
        return hooks

    def _check_equal(self, model: nn.Module) -> None:
        """Raise, in all processes, if their models, options or states differ."""
        facts: dict[str, object] = {}
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if is_distributed(x):
                raise ValueError(f"process_group= is not for {name}, a DTensor: omit it")
            if x in self.names and x.is_complex() and self.replicas.reduce_dtype:
                option = f"reduce_dtype={self.replicas.reduce_dtype} with {name}"
                raise ValueError(f"{option}, which is complex: allowed is None")
            if isinstance(x, nn.Parameter) and x.requires_grad and x not in self.names:
                text = f"process_group= would not average {name}, of another optimizer"
                raise ValueError(f"{text}: freeze it, or make one Mixed optimizer for all")
            facts[name] = x.dtype, tuple(x.shape), x.requires_grad
        if isinstance(self.optimizer, BaseOptimizer):
            facts["the optimizer's class"] = type(self.optimizer).__name__
            keys = (*self.optimizer.defaults, "rule", "param_names")
            for i, group in enumerate(self.optimizer.param_groups):
                facts |= {
                    f"{key} of param group {i}": comparable(group.get(key), type)
                    for key in keys
                }
            # It belongs to weights that the first process's might replace.
            for name, p in self.params.items():
                state = self.optimizer.state.get(p, {})
                facts[f"optimizer state of {name}"] = sorted(state)
                if self.optimizer.state:
                    tensors = [p.detach(), *state.values()]
                    tensors = [x for x in tensors if isinstance(x, Tensor) and x.numel()]
                    hashes = [str(torch.hash_tensor(x)) for x in map(as_real, tensors)]
                    facts[f"hashes of {name} and its state"] = hashes
        check_same(facts | self._shared(Tensor.tolist), self.group)

    def _shared(self, of_device: Callable[[Tensor], object]) -> dict[str, object]:
        """Return the options and hyperparameters, which all processes share, by name."""
        facts = self.optimizer.numbers(of_device)
        for options in (self.options, self.replicas):
            for name in [x.name for x in fields(options) if x.name != "process_group"]:
                facts[name] = comparable(getattr(options, name), of_device)
        return facts

    def _assign(self, params: Iterable[Tensor]) -> None:
        """Put parameters into buckets, in this order."""
        arrival = {p: i for i, p in enumerate(params)}
        o, size = self.replicas, int(self.replicas.bucket_cap_mb * 2**20)
        kinds = grouped(arrival, lambda p: (o.reduce_dtype or p.dtype, p.device))
        self._buckets = [
            (bucket, dtype)
            for (dtype, _), some in kinds.items()
            for bucket in chunks(some, size // dtype.itemsize, Tensor.numel)
        ]
        # A bucket of another dtype must not hold back those that are full before it.
        self._buckets.sort(key=lambda bucket: arrival[bucket[0][-1]])
        places = enumerate(self._buckets)
        self._places = {p: (at, i) for at, (b, _) in places for i, p in enumerate(b)}

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Make backwards inside add up their gradients in this process."""
        if self.options.accumulation == "states":
            raise RuntimeError("no_sync() keeps sums: accumulation='states' has none")
        before = self.syncs
        try:
            self.syncs = False
            yield
        finally:
            self.syncs = before

    def moves_next(self) -> bool:
        """Return True if the next backward moves parameters."""
        return self.syncs and super().moves_next()

    def _trainable(self) -> list[Tensor]:
        """Return the optimizer's trainable parameters, if it is a class."""
        groups = getattr(self.optimizer, "param_groups", ())
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _new_backward(self, last: bool, grad_scale: Tensor | None) -> Backward:
        if self._sent:
            raise RuntimeError(
                "the backward before this one failed after it had sent messages, and other "
                "processes may wait for the rest: prepare again in all of them, or restart"
            )
        for p in self._trainable():
            if p not in self._trained:
                name = self._frozen.get(p, f"a parameter of shape {tuple(p.shape)}")
                raise RuntimeError(
                    f"{name} is trained since the model was prepared, and process_group= "
                    "would not average its gradients: remove() the handle and prepare again"
                )
        backward = super()._new_backward(last, grad_scale)
        digest = crc32(repr(self._shared(type)).encode())
        bits = [digest >> i & 1 for i in range(32)]
        # Of each bit that all processes share, it or its complement sums to 0.
        self.marks = [*bits, *[1 - bit for bit in bits]]
        all_ = [Message(*bucket, self) for bucket in self._buckets]
        backward.messages = all_, deque(enumerate(all_)), deque[Message](), list[Tensor]()
        return backward

    def _check_backward(self) -> None:
        super()._check_backward()
        if any(is_capturing(p.device) for p in self.params.values()):
            raise RuntimeError("process_group= in a CUDA graph: capture no backward")
        for other in [reference() for reference in _prepared.values()]:
            if other and other is not self and other.group is self.group:
                if other._running and other._running():
                    raise RuntimeError(
                        "two handles in one backward, whose messages would mix: give each "
                        "a process_group of its own (torch.distributed.new_group())"
                    )

    def _release(self, backward: Backward, p: Tensor, g: Tensor) -> None:
        """Put a gradient into its bucket, and send the buckets that are full."""
        if backward.messages is None:  # zeros, which end a step of "states"
            super()._release(backward, p, g)
            return
        (messages, _, _, arrived), (at, i) = backward.messages, self._places[p]
        arrived.append(p)
        messages[at].put(i, g)
        self._advance(backward, rest=False)

    def _advance(self, backward: Backward, rest: bool) -> None:
        """Send full messages, or the rest of them, and apply those that have arrived."""
        _, waiting, flying, _ = backward.messages
        while waiting and (rest or not waiting[0][1].missing):
            self._sent = True
            waiting[0][1].send()
            flying.append(waiting.popleft())
            # Not what happens to have arrived, which may differ by process: updates send
            # messages too.
            if len(flying) > IN_FLIGHT:
                self._land(backward, *flying.popleft())
        while rest and flying:
            self._land(backward, *flying.popleft())

    def _land(self, backward: Backward, number: int, message: Message) -> None:
        try:
            same, *arrived = message.land()
        except RuntimeError as error:
            names = [self.names[p] for p in message.params]
            raise RuntimeError(
                f"{lost(error)}averaging bucket {number + 1} of {len(self._buckets)} "
                f"({names[0]} to {names[-1]}): {error}. All processes need the same number "
                "of backwards"
            ) from error
        if same.device.type != "cpu":
            assert_later(same, "hyperparameters or options differ by process")
        elif not same:
            check_same(self._shared(type), self.group)
        self._apply(backward, *arrived)

    def _finish(self, backward: Backward) -> None:
        """Send what waits, also for gradients that only other processes have."""
        states = self.options.accumulation == "states"
        if bool(backward.ids) if states else backward.last:
            for p, total in list(self.cycle.buffer.items()):
                if p not in backward.fired:
                    backward.fired.add(p)
                    self._release(backward, p, total)
            self._advance(backward, rest=True)
            if not self._ordered:
                self._order(backward.messages[-1])
        backward.messages, self._sent = None, False
        super()._finish(backward)

    def _order(self, arrived: list[Tensor]) -> None:
        """Put parameters into the order of the first process's first backward."""
        self._ordered, params = True, list(self.params.values())
        places = {p: i for i, p in enumerate(params)}
        order = [places[p] for p in dict.fromkeys([*arrived, *reversed(params)])]
        message = torch.tensor(order, dtype=torch.int64, device=params[0].device)
        distributed.broadcast(message, group=self.group, group_src=0)
        self._assign([params[i] for i in message.tolist()])

    def _norms_of_sums(self) -> list[Norm]:
        with self.measuring() as backward:
            self._finish(backward)
            return backward.norms


# A weak dictionary instead of attributes, which copies of a model would share.
_prepared: "WeakKeyDictionary[nn.Module, ref[ReplicaRunner]]" = WeakKeyDictionary()


@uncompiled
def _share_buffers(module: nn.Module, args: object) -> None:
    """Broadcast buffers before the first forward of a step, as DistributedDataParallel."""
    runner = _prepared[module]() if module in _prepared else None
    if runner is not None and module.training and torch.is_grad_enabled():
        if not runner.cycle.position:
            _share(module.buffers(), runner.group)


@torch.no_grad()
def _share(tensors: Iterable[Tensor], group: Any) -> None:
    """Copy the values of the group's first process into these tensors."""
    # Not .detach(): a model may run twice before a backward that saved a buffer.
    data = [x.data for x in tensors if x.numel()]
    for some in grouped(data, lambda x: (x.device, x.dtype)).values():
        for part in chunks(some, BYTES, lambda x: x.nbytes):
            # As bytes, because gloo does not know every dtype.
            message = torch.cat([x.reshape(-1).view(torch.uint8) for x in part])
            distributed.broadcast(message, group=group, group_src=0)
            if distributed.get_rank(group) != 0:
                for x, new in zip(part, message.split([x.nbytes for x in part])):
                    x.copy_(new.view(x.dtype).view(x.shape))
