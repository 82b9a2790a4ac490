"""What becomes of a gradient from its completion to its release."""

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, distributed

from optimi_func import _torch
from optimi_func._checks import check_grad, warn_user
from optimi_func._distributed import redistribute_like, to_local
from optimi_func._rule import WHOLE_BATCH, Microbatch, Scalar
from optimi_func._torch import clip_factor
from optimi_func.execution.executors import SMALL
from optimi_func.execution.tensors import is_dense, is_plain
from optimi_func.gradient_release import streams
from optimi_func.gradient_release.accumulation import Accumulation
from optimi_func.gradient_release.backward import Backward, SinceStep
from optimi_func.gradient_release.norms import Norm, are_finite, at, measured, total, whole
from optimi_func.gradient_release.options import ReleaseOptions
from optimi_func.gradient_release.owners import Owner

# Waiting gradients begin at multiples of so many bytes: aligned for every dtype.
ALIGNMENT = 16

NO_DDP = (
    "DistributedDataParallel copies its buckets back into p.grad after the hooks: use "
    "FSDP2 (torch.distributed.fsdp.fully_shard) with gradient release"
)


class Runner:
    """Updates parameters from their hooks, and frees the gradients. Internal.

    Attributes:
        params: What is released, by name.
        owner: What updates it.
        options: As they are now; changed between two backwards.
        cycle: Where the accumulation stands.
        grad_norm: The last backward's, where it was asked for.
        last_norm: The last step's, for how="lagged".
        skipped: By parameter, how many updates were left out.
        grad_scale: Of the backward to come, from the pass that measured it.
        since_step: The backwards since the last step(); None before the first.
    """

    def __init__(
        self, params: dict[str, Tensor], owner: Owner, options: ReleaseOptions
    ) -> None:
        self.params = params
        self.names = {p: name for name, p in params.items()}
        self.owner = owner
        self.options = options
        self.cycle = Accumulation()
        self.grad_norm: Tensor | None = None
        self.last_norm: Tensor | None = None
        self.skipped: dict[Tensor, Tensor] = {}
        self.grad_scale: Tensor | None = None
        self.since_step: SinceStep | None = None
        self.lock = threading.RLock()  # devices run their hooks on threads of their own
        self._running: weakref.ref[Backward] | None = None
        self._updated: list[str] | None = None  # None: the last backward has finished
        self._found_alone = False  # nobody else writes the gradients
        small = [p for p in params.values() if p.numel() < SMALL]
        self._small_bytes = sum(p.nbytes for p in small)
        self._staging_buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._measuring: Backward | None = None
        # The options and groups that `check` last accepted.
        self._checked: tuple[ReleaseOptions, object] | None = None
        # Also in a compiled training step the hooks run as they are.
        self.hook = cast(Any, torch.compiler.disable(_weakly(self)))
        self._at_end = cast(Any, torch.compiler.disable(self._end))

    def check(self, options: ReleaseOptions) -> None:
        """Refuse options that these parameters and their optimizer cannot honour."""
        self._checked = None
        if options.accumulation == "states":
            self.owner.check_accumulates()
        if options.accumulation == "states" and options.skip_nonfinite:
            far = [n for n, p in self.params.items() if not self.owner.on_host(p)]
            if far:
                raise ValueError(
                    f"skip_nonfinite=True with accumulation='states': for {far[0]} it "
                    "would have to wait for the device. Use accumulation='buffer'"
                )
        if options.clipping or options.skip_nonfinite or options.grad_norm:
            parts = to_local([p.detach() for p in self.params.values()])
            for name, part in zip(self.params, parts):
                if not is_plain(part):
                    raise ValueError(
                        "clipping, skip_nonfinite and grad_norm take plain tensors and "
                        f"DTensors, and {name} is a {type(part).__name__}"
                    )
        self._checked = (options, self.owner.groups())

    @contextmanager
    def measuring(self) -> Generator[Backward]:
        """Backwards inside find the norms of their gradients and move nothing."""
        self._measuring = Backward(last=True)
        try:
            yield self._measuring
        finally:
            self._measuring = None
            self.forget()

    def forget(self) -> None:
        """No backward is running, and none has failed."""
        self._running = self._updated = None

    def close_cycle(self) -> None:
        """End the open accumulation cycle outside of any backward."""
        with self.lock:
            if not self.cycle.is_open:
                return
            ending = Backward(last=True)
            o = self.options
            if o.two_pass:
                sums = self.cycle.buffer
                ending.grad_scale = self.grad_scale_of(
                    self.norms_to_clip([*sums], [*sums.values()])
                )
            elif o.clipping == "lagged":
                ending.grad_scale = self._lagged_grad_scale()
            self._finish(ending)

    # A backward

    def on_gradient(self, p: Tensor) -> None:
        """The hook: p.grad is complete."""
        g = p.grad
        if g is None:
            return
        # Taken off the parameter: if this backward fails, the next one must not add to it.
        p.grad = None
        with self.lock:
            try:
                if g.requires_grad:
                    raise RuntimeError(
                        f"{self.names[p]}: backward(create_graph=True) needs the "
                        "gradients that gradient release frees: remove() the hooks for it"
                    )
                if g.layout != torch.strided:
                    check_grad(f"[{self.names[p]!r}]", p, g)
                g = redistribute_like(f"[{self.names[p]!r}]", p, g)
                self._take(self._enter(p), p, g)
            except BaseException:
                self._running = None  # the traceback keeps it alive
                raise

    def _enter(self, p: Tensor) -> Backward:
        """The backward that p's gradient belongs to."""
        number = _torch.backward_id()
        backward = None if self._running is None else self._running()
        if backward is None or number not in backward.ids:
            backward = self._begin(number, p, backward)
        if p in backward.fired:
            raise RuntimeError(
                f"{self.names[p]} got a second gradient in one backward, after the first "
                "had updated it: reentrant checkpointing of a shared parameter. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        backward.fired.add(p)
        return backward

    def _begin(self, number: int, p: Tensor, running: Backward | None) -> Backward:
        if running is not None:
            # The engine keeps it alive, so it has not ended: this one was started inside
            # of it, by a hook or by reentrant checkpointing, and ends with it.
            running.ids.add(number)
            return running
        if self._updated is not None:
            # The last backward did not reach its end.
            names = ", ".join(self._updated) or "none"
            done = "updated, or their sums," if self.options.accumulation else "updated"
            self._running = self._updated = None
            warn_user(
                "the backward before this one did not finish: gradients still waiting "
                f"were dropped; parameters already {done}: {names}",
            )
        if self._measuring is not None:
            backward = self._measuring
        else:
            self._check_backward()
            backward = Backward(self.moves_next())
            o = self.options
            backward.grad_scale = (
                self._lagged_grad_scale() if o.clipping == "lagged" else self.grad_scale
            )
            if o.two_pass and backward.last and backward.grad_scale is None:
                raise RuntimeError(
                    f"clip_global_norm={o.clip_global_norm} with how='two_pass' has to "
                    "run the backward: call handle.backward(loss_fn), or choose "
                    "how='lagged'"
                )
        backward.ids.add(number)
        self._running, self._updated = weakref.ref(backward), []
        _torch.after_backward(partial(self._at_end, backward))
        return backward

    def _check_backward(self) -> None:
        """Refuse a backward that could not be honoured, before its first update."""
        o = self.options
        self.owner.check_train_mode("a backward")
        if _torch.in_compiled_autograd():
            raise RuntimeError(
                "compiled autograd runs hooks inside a graph of its own: set "
                "torch.compile's config option compiled_autograd to False"
            )
        if o.accumulation and self.owner.accumulates():
            raise RuntimeError(
                f"optimizer_accumulation=True with accumulation={o.accumulation!r}: "
                "choose one"
            )
        if o.accumulation == "states":
            # Numbers in groups change at every step, and with them perhaps the rule.
            self.owner.check_accumulates()
            found = (o, self.owner.groups())
            if found != self._checked:
                self.check(o)

    def moves_next(self) -> bool:
        """Whether the next backward moves parameters."""
        o = self.options
        if o.accumulation is None:
            return True
        steps = o.accumulation_steps
        return steps is not None and self.cycle.position + 1 >= steps

    def _take(self, backward: Backward, p: Tensor, g: Tensor) -> None:
        """Accumulate a gradient, let it wait with other small ones, or apply it."""
        o = self.options
        if o.accumulation == "buffer":
            if backward.last:
                g = self.cycle.whole(p, g)
            else:
                held = self.cycle.keep(p, g, o.buffer_dtype)
                if o.grad_norm:
                    backward.norms += measured([held])
                self._note([p])
                return
        self._release(backward, p, g)

    def _release(self, backward: Backward, p: Tensor, g: Tensor) -> None:
        if p.numel() >= SMALL:
            self._apply(backward, [p], [g])
            return
        waiting = backward.waiting.get(p.device, 0)
        if p.device.type == "cpu" and is_plain(g):
            g = self._stage(backward, g, waiting)
        waiting += -(-g.nbytes // ALIGNMENT) * ALIGNMENT
        pending = backward.pending.setdefault(p.device, [])
        pending.append((p, g, streams.current_stream(p.device)))
        backward.waiting[p.device] = waiting
        if waiting > self.options.pending_bytes:
            self._flush(backward, p.device)

    def _stage(self, backward: Backward, g: Tensor, offset: int) -> Tensor:
        """A copy of g in memory set aside for what waits, `offset` bytes into it.

        Small blocks kept between large ones that come and go fragment malloc's heap: a
        tenth of a ViT-L's resident memory was lost to them.
        """
        if not backward.staging_buffer.numel():
            # Taken, and not shared: a backward may start another one.
            backward.staging_buffer, self._staging_buffer = (
                self._staging_buffer,
                backward.staging_buffer,
            )
        room = backward.staging_buffer.numel()
        if offset + g.nbytes > room:
            # What waits already stays in the old one.
            least = min(self.options.pending_bytes, self._small_bytes)
            size = max(least, 2 * room, offset + g.nbytes)
            backward.staging_buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        place = backward.staging_buffer[offset : offset + g.nbytes].view(g.dtype)
        if is_dense(g):
            # In g's own order: in another, means would be summed in another order too.
            return place.as_strided(g.shape, g.stride()).copy_(g)
        return place.view(g.shape).copy_(g)

    def _flush(self, backward: Backward, device: torch.device) -> None:
        pending = backward.pending.pop(device, [])
        backward.waiting.pop(device, None)
        if pending:
            params, grads, made_on = (list(x) for x in zip(*pending))
            streams.wait_for(made_on, device)
            self._apply(backward, params, grads)

    def _end(self, backward: Backward) -> None:
        with self.lock:
            try:
                self._finish(backward)
                self._check_alone(backward)
            except BaseException:
                self._running = None  # the traceback keeps it alive
                raise

    def _check_alone(self, backward: Backward) -> None:
        """Refuse DistributedDataParallel, by what it does, in the first backward.

        A module that was wrapped after the hooks were added does not show it before: a
        wrapper puts averaged gradients into p.grad at the end of the backward.
        """
        if self._found_alone:
            return
        if distributed.is_available() and distributed.is_initialized():
            for p in backward.fired:
                if p.grad is not None:
                    raise RuntimeError(f"{self.names[p]} got its gradient back: {NO_DDP}")
        self._found_alone = True

    def _finish(self, backward: Backward) -> None:
        """Apply the gradients that wait; the last backward of a cycle ends the cycle."""
        o, cycle = self.options, self.cycle
        for device in list(backward.pending):
            self._flush(backward, device)
        if self._measuring is None:
            if backward.last:
                self._close(backward)
            elif o.grad_norm:
                rest = [x for p, x in cycle.buffer.items() if p not in backward.fired]
                backward.norms += measured(rest)
            self._report(backward)
            if o.accumulation:
                cycle.position = 0 if backward.last else cycle.position + 1
            moved = o.accumulation is None and not self.owner.accumulates()
            self.since_step = self.since_step or SinceStep()
            if backward.ids:  # none where step() ends a cycle
                self.since_step.add(backward.fired, moved)
            self.owner.end(backward.last)
        if backward.staging_buffer.numel():
            self._staging_buffer = backward.staging_buffer
        self._running = self._updated = None

    def _close(self, backward: Backward) -> None:
        """Update parameters with gradients in the cycle, but not in its last backward."""
        cycle = self.cycle
        for p, held in list(cycle.buffer.items()):
            wide = torch.promote_types(held.dtype, p.dtype)
            self._release(backward, p, held.to(wide))
        for p in list(cycle.partially_updated):
            self._release(backward, p, torch.zeros_like(p, requires_grad=False))
        for device in list(backward.pending):
            self._flush(backward, device)

    def _report(self, backward: Backward) -> None:
        """Publish the norm of a backward, and keep that of a step for the next."""
        o = self.options
        if o.clipping != "lagged" and backward.last:
            self.last_norm = None  # no longer that of the step before
        if not (o.grad_norm or o.clipping == "lagged"):
            return
        if o.accumulation == "states" and not backward.fired:
            return  # ended by step(), without a gradient
        streams.record([norm.value for norm in backward.norms])
        norm = total(backward.norms)
        if o.grad_norm:
            self.grad_norm = norm
        if o.clipping == "lagged" and backward.last:
            # A gradient that overflowed says nothing about the next.
            before = torch.zeros_like(norm) if self.last_norm is None else self.last_norm
            self.last_norm = torch.where(norm.isfinite(), norm, before.to(norm.device))

    def norms_to_clip(self, params: list[Tensor], grads: list[Tensor]) -> list[Norm]:
        """The norm of each gradient; 0 where it is skipped and must not scale others."""
        norms = measured(grads)
        if not self.options.skip_nonfinite:
            return norms
        finites = are_finite(grads, norms, list(map(self.owner.on_host, params)))
        return [
            norm._replace(value=torch.where(finite, norm.value, 0.0))
            for finite, norm in zip(finites, norms)
        ]

    def grad_scale_of(self, norms: list[Norm]) -> Tensor:
        """The factor on all gradients, from the norm of each."""
        return clip_factor(self.options.clip_global_norm, total(norms))

    def _lagged_grad_scale(self) -> Tensor | None:
        if self.last_norm is None:
            return None
        return clip_factor(self.options.clip_global_norm, self.last_norm)

    # An update

    def _apply(self, backward: Backward, params: list[Tensor], grads: list[Tensor]) -> None:
        """Measure gradients, decide on each, and update."""
        o, partially_updated = self.options, self.cycle.partially_updated
        streams.record(grads)
        if self._measuring is not None:
            backward.norms += self.norms_to_clip(params, grads)
            return
        norms: list[Norm] = []
        if o.grad_norm or o.skip_nonfinite or o.clipping not in (None, "clip_value"):
            norms = measured(grads)
            backward.norms += norms
        arrived = params
        try:
            if o.skip_nonfinite:
                params, grads, norms, finites = self._finite(params, grads, norms)
            else:
                finites = [None] * len(params)
            if o.clip_value is not None:
                for g in to_local(grads):
                    limit = min(o.clip_value, torch.finfo(g.dtype).max)
                    g.clamp_(-limit, limit)
            grad_scales = self._grad_scales(backward, params, norms)
            accumulate = [p in partially_updated for p in params]
            microbatches = [
                Microbatch(*microbatch)
                for microbatch in zip(grad_scales, accumulate, finites)
            ]
            write = backward.last and not self.owner.accumulates()
            if params:
                self.owner.update(params, grads, microbatches, write, backward.last)
        except Exception as error:
            names = ", ".join(self.names[p] for p in arrived)
            raise RuntimeError(f"updating {names}: {error}") from error
        if backward.last:
            partially_updated.difference_update(params)  # what was skipped still closes
            for p in arrived:
                self.cycle.buffer.pop(p, None)
        else:
            partially_updated.update(params)
        self._note(params)

    def _note(self, params: list[Tensor]) -> None:
        if self._updated is not None:
            self._updated += [self.names[p] for p in params]

    def _finite(
        self, params: list[Tensor], grads: list[Tensor], norms: list[Norm]
    ) -> tuple[list[Tensor], list[Tensor], list[Norm], list[Tensor | None]]:
        """Drop gradients that are not finite; on a device pass a flag to the update."""
        kept: list[int] = []
        finites: list[Tensor | None] = []
        hosts = list(map(self.owner.on_host, params))
        for i, (p, finite, host) in enumerate(
            zip(params, are_finite(grads, norms, hosts), hosts)
        ):
            if host and finite:
                kept.append(i)
                finites.append(None)
                continue
            if p not in self.skipped:
                self.skipped[p] = torch.zeros((), dtype=torch.int64, device=p.device)
            self.skipped[p].add_(~finite)
            if not host:
                kept.append(i)
                finites.append(finite)
        return (
            [params[i] for i in kept],
            [grads[i] for i in kept],
            [norms[i] for i in kept],
            finites,
        )

    def _grad_scales(
        self, backward: Backward, params: list[Tensor], norms: list[Norm]
    ) -> list[Scalar]:
        limit = self.options.clip_param_norm
        if limit is None and backward.grad_scale is None:
            return [WHOLE_BATCH.grad_scale] * len(params)
        hosts = [self.owner.on_host(p) for p in params]
        if limit is None:
            return [backward.grad_scale_for(p, host) for p, host in zip(params, hosts)]
        return [
            at(clip_factor(limit, norm.value), p, host)
            for p, norm, host in zip(params, whole(norms), hosts)
        ]


def _weakly(runner: Runner) -> Callable[[Tensor], None]:
    """The runner's hook, which keeps nothing alive.

    Python's garbage collector does not see a parameter's hooks: one that led back to the
    parameter would keep both for good.
    """
    runner_of = weakref.ref(runner)

    def hook(p: Tensor) -> None:
        runner = runner_of()
        if runner is None:
            raise RuntimeError(
                "the handle of this gradient release is gone, and with it its optimizer: "
                "keep a reference, or remove() the hooks"
            )
        runner.on_gradient(p)

    return hook
