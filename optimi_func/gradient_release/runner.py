"""The hooks' work: accumulate, clip and apply each gradient, then free it."""

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core import torch_private
from optimi_func.core.checks import check_grad, warn_user
from optimi_func.core.distributed import (
    everywhere,
    is_distributed,
    redistribute_like,
    to_local,
)
from optimi_func.core.math import norm_of_shards
from optimi_func.core.rule import WHOLE_BATCH, Microbatch, Scalar
from optimi_func.core.torch_private import clip_factor, is_plain
from optimi_func.execution.executors import SMALL
from optimi_func.gradient_release.backward import (
    PENDING_BYTES,
    Accumulation,
    Backward,
    Norm,
    SinceStep,
    are_finite,
    as_scalar,
    is_finite,
    local_norms,
    record,
    whole_norms,
)
from optimi_func.gradient_release.options import ReleaseOptions
from optimi_func.gradient_release.tree import TreeOptimizer

NO_DDP = (
    "DistributedDataParallel copies its buckets back into p.grad after the hooks: pass the "
    "module that it wraps, with process_group=torch.distributed.group.WORLD, or use FSDP2 "
    "(torch.distributed.fsdp.fully_shard) with gradient release"
)


class Runner:
    """The hooks of one model and optimizer, and what they carry between backwards."""

    group: "distributed.ProcessGroup | None" = None  # gradients are averaged over it

    def __init__(
        self,
        params: dict[str, Tensor],
        optimizer: BaseOptimizer | TreeOptimizer,
        options: ReleaseOptions,
    ) -> None:
        self.params = params
        self.names = {p: name for name, p in params.items()}
        self.optimizer = optimizer
        self.update = optimizer.update
        self.check(options)
        self.options = options  # changes between two backwards only
        self.cycle = Accumulation()
        self.grad_norm: Tensor | None = None  # of the last backward
        self.finites: list[Tensor] = []  # of gradients that were measured
        self.skipped: dict[Tensor, Tensor] = {}  # the number of skipped updates
        self.grad_scale: Tensor | None = None  # from the pass that measured the gradients
        self.since_step: SinceStep | None = None  # None before the first backward
        self.pauses = 0  # the number of open paused() blocks
        self.lock = threading.RLock()  # autograd has one thread per device
        self._running: weakref.ref[Backward] | None = None
        self._unfinished = False  # True from a backward's first gradient to its end
        self._checked_ddp = False
        self._distributed = {p for p in params.values() if is_distributed(p)}
        self._mates = {p: n for p in params.values() if (n := self._together(p)) > 1}
        self._small_bytes = sum(p.nbytes for p in params.values() if p.numel() < SMALL)
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._measuring: Backward | None = None
        # Disabled, because a compiled training step would trace into them.
        self.hook = torch.compiler.disable(_weak_hook(self))
        self._at_end = cast(Any, torch.compiler.disable(self._end))

    def check(self, options: ReleaseOptions) -> None:
        """Raise if these parameters and their optimizer cannot honour the options."""
        if options.accumulation == "states":
            self.optimizer.check_accumulates()
        if options.accumulation == "states" and options.skip_nonfinite:
            far = [name for name, p in self.held().items() if not self._on_host(p)]
            if far:
                raise ValueError(
                    f"skip_nonfinite=True with accumulation='states' would have to wait "
                    f"for the device of {far[0]}: use accumulation='buffer'"
                )
        options.check_complex(self.params)
        if getattr(self.optimizer, "skips_steps", False) and not options.skips_steps:
            raise ValueError(
                "skip_nonfinite='step' of the optimizer: pass it to this handle too"
            )
        if options.clips or options.skip_nonfinite or options.grad_norm:
            parts = to_local([p.detach() for p in self.params.values()])
            for name, part in zip(self.params, parts):
                if not is_plain(part):
                    raise ValueError(
                        "clipping, skip_nonfinite and grad_norm take plain tensors and "
                        f"DTensors, and {name} is a {type(part).__name__}"
                    )

    def held(self) -> dict[str, Tensor]:
        """Return the released parameters that are in the optimizer's groups, by name."""
        find = self.optimizer.find_group
        return {name: p for name, p in self.params.items() if find(p) is not None}

    def check_lists(self) -> None:
        """Raise if a parameter is in two groups; drop sums of those that are in none."""
        self.optimizer.check_lists()
        cycle, find = self.cycle, self.optimizer.find_group
        for p in [p for p in {*cycle.buffer, *cycle.partially_updated} if find(p) is None]:
            cycle.buffer.pop(p, None)
            cycle.partially_updated.discard(p)

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Add the hooks, and return the handles that remove them."""
        params = self.params.values()
        return [p.register_post_accumulate_grad_hook(self.hook) for p in params]

    def no_sync(self) -> AbstractContextManager[None]:
        """Raise, because nothing is sent."""
        raise RuntimeError("no_sync() is for replicas, prepared with process_group=...")

    @contextmanager
    def measuring(self) -> Generator[Backward]:
        """Make backwards inside measure their gradients and update nothing."""
        self.check_lists()
        try:
            self._measuring = self._new_backward(last=True, grad_scale=None)
            self.finites = []
            yield self._measuring
        finally:
            self._measuring = None
            self.forget()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Make backwards inside leave their gradients in p.grad."""
        with self.lock:
            if self._running is not None and self._running() is not None:
                raise RuntimeError("paused() inside a backward: enter it before")
            self.pauses += 1
        try:
            yield
        finally:
            with self.lock:
                self.pauses -= 1

    def forget(self) -> None:
        """Forget a backward that runs or has failed."""
        self._running, self._unfinished = None, False

    def close_cycle(self) -> None:
        """End the open accumulation cycle outside of any backward."""
        with self.lock:
            if not self.cycle.is_open:
                return
            self.check_lists()
            grad_scale, o = None, self.options
            if o.two_pass or o.skips_steps:
                if self.skips(norms := self._norms_of_sums()):
                    return
                grad_scale = self.grad_scale_of(norms) if o.two_pass else None
            self._finish(self._new_backward(last=True, grad_scale=grad_scale))

    def _norms_of_sums(self) -> list[Norm]:
        sums = self.cycle.buffer
        return self.norms_to_clip([*sums], [*sums.values()])

    def _new_backward(self, last: bool, grad_scale: Tensor | None) -> Backward:
        # A hook may call step() during a backward, which must not overwrite the gradients
        # that wait in its staging memory.
        staging, self._staging = self._staging, self._staging.new_empty(0)
        return Backward(last, grad_scale, staging)

    def on_gradient(self, p: Tensor) -> None:
        """Take p.grad, which is complete, off the parameter and process it."""
        g = p.grad
        if g is None:
            return
        if self.pauses:
            self.since_step = self.since_step or SinceStep()
            return  # the gradient stays in p.grad
        if self.optimizer.find_group(p) is None:
            return  # taken out of the groups: it stays there too, as without release
        # If this backward fails, the next one must not add to this gradient.
        p.grad = None
        with self.lock:
            try:
                if g.requires_grad:
                    raise RuntimeError(
                        f"{self.names[p]}: backward(create_graph=True) needs the "
                        "gradients that release frees: run it in handle.paused()"
                    )
                if g.layout != torch.strided:
                    check_grad(f"[{self.names[p]!r}]", p, g)
                if p in self._distributed:
                    g = redistribute_like(f"[{self.names[p]!r}]", p, g)
                self._take(self._enter(p), p, g.resolve_conj())
            except BaseException:
                self._running = None  # the traceback keeps the backward alive
                raise

    def _enter(self, p: Tensor) -> Backward:
        """Return the backward that p's gradient belongs to."""
        number = torch_private.backward_id()
        backward = None if self._running is None else self._running()
        if backward is None or number not in backward.ids:
            backward = self._begin(number, backward)
        if p in backward.fired:
            raise RuntimeError(
                f"{self.names[p]} got a second gradient in one backward, after the first "
                "had updated it, by reentrant checkpointing of a shared parameter. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False). Backwards "
                "in several threads mix in this way too: run one at a time"
            )
        backward.fired.add(p)
        return backward

    def _begin(self, number: int, running: Backward | None) -> Backward:
        if running is not None:
            # It has not ended, because the engine keeps it alive. This backward was started
            # inside of it, by a hook or by reentrant checkpointing, and ends with it.
            running.ids.add(number)
            return running
        if self._unfinished:
            self.forget()
            warn_user(
                "the backward before this one did not finish: gradients that came before "
                "it failed are applied or summed up, and those that waited are dropped"
            )
        backward = self._measuring
        if backward is None:
            self._check_backward()
            backward = self._new_backward(self.moves_next(), self.grad_scale)
        backward.ids.add(number)
        self._running, self._unfinished = weakref.ref(backward), True
        torch_private.after_backward(partial(self._at_end, backward))
        return backward

    def _check_backward(self) -> None:
        """Raise before the first update of a backward that could not be honoured."""
        o = self.options
        self.optimizer.check_train_mode("a backward")
        self.check_lists()
        if torch_private.in_compiled_autograd():
            raise RuntimeError(
                "compiled autograd runs hooks inside a graph of its own: set "
                "torch.compile's config option compiled_autograd to False"
            )
        if o.accumulation and self.optimizer.optimizer_accumulation:
            raise RuntimeError(
                f"optimizer_accumulation=True with accumulation={o.accumulation!r}: "
                "choose one"
            )
        if o.accumulation == "states":
            self.check(o)  # param groups may have changed since
        if o.two_pass and self.moves_next() and self.grad_scale is None:
            raise RuntimeError(
                f"clip_global_norm={o.clip_global_norm} has to run the backward twice: "
                "call handle.backward(loss_fn), or let step() end the step, by "
                "accumulation='buffer' without accumulation_steps"
            )

    def moves_next(self) -> bool:
        """Return True if the next backward moves parameters."""
        o = self.options
        if self.pauses:
            return False
        if o.accumulation is None:
            return True
        steps = o.accumulation_steps
        return steps is not None and self.cycle.position + 1 >= steps

    def _take(self, backward: Backward, p: Tensor, g: Tensor) -> None:
        """Add a gradient to its sum, or release it."""
        o = self.options
        if o.accumulation != "states" and not backward.last:
            # fully_shard's gradients are views of one buffer, which they would keep alive.
            total = self.cycle.keep(p, g, o.buffer_dtype, copy=p in self._distributed)
            if o.grad_norm:
                backward.norms += local_norms([total])
            return
        if o.accumulation != "states":
            g = self.cycle.whole(p, g)
        self._release(backward, p, g)

    def _release(self, backward: Backward, p: Tensor, g: Tensor) -> None:
        """Apply a gradient, or let it wait if it is small."""
        together = self._mates.get(p, 1)
        if p.numel() >= SMALL and together == 1:
            self._apply(backward, [p], [g])
            return
        if together > 1:
            backward.lacking = (backward.lacking or together) - 1
        waits = backward.add_pending(p, g, min(PENDING_BYTES, self._small_bytes))
        if waits > PENDING_BYTES and not backward.lacking:
            self._apply(backward, *backward.take_pending(p.device))

    def _together(self, p: Tensor) -> int:
        """Return how many tensors like p wait for each other: one for each process to map.

        No more than four copies do, because each process holds all of a copy.
        """
        if isinstance(self.optimizer, TreeOptimizer):
            return 1
        holders = self.optimizer.holders_of(self.optimizer.group_of(p), p)
        if holders is None:
            return 1
        return -(-min(holders.group.size(), 4 * holders.parts) // max(1, holders.matrices))

    def _flush(self, backward: Backward) -> None:
        for device in list(backward.pending):
            self._apply(backward, *backward.take_pending(device))

    def _end(self, backward: Backward) -> None:
        with self.lock:
            try:
                self._finish(backward)
                self._check_ddp(backward)
            except BaseException:
                self._running = None  # the traceback keeps the backward alive
                raise

    def _check_ddp(self, backward: Backward) -> None:
        """Raise after the first backward if DistributedDataParallel has filled p.grad.

        A module that is wrapped after it was prepared cannot be recognized before.
        """
        if self._checked_ddp:
            return
        if distributed.is_available() and distributed.is_initialized():
            for p in backward.fired:
                if p.grad is not None:
                    raise RuntimeError(f"{self.names[p]} got its gradient back: {NO_DDP}")
        self._checked_ddp = True

    def _finish(self, backward: Backward) -> None:
        """Apply the gradients that wait; the last backward of a cycle ends the cycle."""
        o, cycle = self.options, self.cycle
        self._flush(backward)
        if self._measuring is None:
            if backward.last:
                self._close(backward)
            elif o.grad_norm:
                sums = [x for p, x in cycle.buffer.items() if p not in backward.fired]
                backward.norms += local_norms(sums)
            self._report(backward)
            cycle.position = 0 if backward.last else cycle.position + 1
            accumulates = o.accumulation or self.optimizer.optimizer_accumulation
            self.since_step = self.since_step or SinceStep()
            if backward.ids:  # none if step() ends a cycle
                self.since_step.add(backward.fired, backward.last and not accumulates)
            self.optimizer.finish_step(backward.parts, backward.last)
            if backward.ids and backward.last:
                self.since_step.used = self.optimizer.numbers()
        if backward.staging.numel():
            self._staging = backward.staging
        self.forget()

    def _close(self, backward: Backward) -> None:
        """Update the parameters that got no gradient in the last backward of the cycle."""
        cycle = self.cycle
        for p, total in list(cycle.buffer.items()):
            wide = torch.promote_types(total.dtype, p.dtype)
            self._release(backward, p, total.to(wide))
        # In the order of all processes, which exchange messages.
        for p in [p for p in self.params.values() if p in cycle.partially_updated]:
            self._release(backward, p, torch.zeros_like(p, requires_grad=False))
        self._flush(backward)

    def _report(self, backward: Backward) -> None:
        o = self.options
        if not o.grad_norm or (o.accumulation == "states" and not backward.fired):
            return  # step() ended the cycle without a gradient
        record([norm.value for norm in backward.norms])
        self.grad_norm = norm_of_shards(backward.norms, 2, o.groups)

    def skips(self, norms: list[Norm]) -> bool:
        """Return True, and drop the cycle, if a measured gradient is not finite."""
        finites, self.finites = self.finites, list[Tensor]()
        o = self.options
        if not o.skips_steps:
            return False
        start = torch.ones((), dtype=torch.bool, device=next(iter(self.names)).device)
        finite = torch.stack([start, *[x.to(start.device) for x in finites]]).all()
        if everywhere(finite, list(self.params.values()), o.groups):
            return False
        self.cycle, self.since_step = Accumulation(), self.since_step or SinceStep()
        self.grad_norm = norm_of_shards(norms, 2, o.groups) if o.grad_norm else None
        for p in self.params.values():
            self._skip(p, torch.ones((), dtype=torch.bool, device=p.device))
        return True

    def _apply(self, backward: Backward, params: list[Tensor], grads: list[Tensor]) -> None:
        """Measure, skip or clip gradients, and update their parameters."""
        o, partially_updated = self.options, self.cycle.partially_updated
        record(grads)
        if self._measuring is not None:
            backward.norms += self.norms_to_clip(params, grads)
            return
        norms = local_norms(grads) if o.needs_norms else []
        backward.norms += norms
        arrived = params
        try:
            finites: list[Tensor | None] = [None] * len(params)
            if o.skip_nonfinite is True:
                indices, finites = self._finite(params, grads, norms)
                params = [params[i] for i in indices]
                grads, norms = [grads[i] for i in indices], [norms[i] for i in indices]
            if o.clip_value is not None:
                for g in to_local(grads):
                    limit = min(o.clip_value, torch.finfo(g.dtype).max)
                    g.clamp_(-limit, limit)
            grad_scales = self._grad_scales(backward, params, norms)
            accumulate = [p in partially_updated for p in params]
            microbatches = list(map(Microbatch, grad_scales, accumulate, finites))
            write = backward.last and not self.optimizer.optimizer_accumulation
            if params:
                arguments = params, grads, microbatches, write, backward.last
                backward.parts.update(self.update(*arguments) or ())
        except Exception as error:
            names = ", ".join(self.names[p] for p in arrived)
            raise RuntimeError(f"updating {names}: {error}") from error
        if backward.last:
            # A skipped parameter stays in the set, so that `_close` ends its step.
            partially_updated.difference_update(params)
            for p in arrived:
                self.cycle.buffer.pop(p, None)
        else:
            partially_updated.update(params)

    def _on_host(self, p: Tensor) -> bool:
        """Return True if reading the scalars of p's update does not wait for a device."""
        capturable = self.optimizer.group_of(p)["capturable"]
        return p.device.type == "cpu" and not capturable

    def norms_to_clip(self, params: list[Tensor], grads: list[Tensor]) -> list[Norm]:
        """Return the gradients' norms, with 0 for those that will be skipped."""
        norms = local_norms(grads)
        if self.options.skips_steps:
            self.finites += map(
                is_finite, to_local(grads), norms, map(self._on_host, params)
            )
            return norms
        if not self.options.skip_nonfinite:
            return norms
        finites = are_finite(grads, norms, list(map(self._on_host, params)))
        return [
            norm._replace(value=torch.where(finite, norm.value, 0.0))
            for finite, norm in zip(finites, norms)
        ]

    def _skip(self, p: Tensor, skipped: Tensor) -> None:
        if p not in self.skipped:
            self.skipped[p] = torch.zeros((), dtype=torch.int64, device=p.device)
        self.skipped[p].add_(skipped)

    def grad_scale_of(self, norms: list[Norm]) -> Tensor:
        """Return the factor that clips all gradients, from their norms."""
        o = self.options
        return clip_factor(o.clip_global_norm, norm_of_shards(norms, 2, o.groups))

    def _finite(
        self, params: list[Tensor], grads: list[Tensor], norms: list[Norm]
    ) -> tuple[list[int], list[Tensor | None]]:
        """Return the indices of gradients to apply, with a flag if a device decides."""
        flags: dict[int, Tensor | None] = {}
        hosts = list(map(self._on_host, params))
        finites = are_finite(grads, norms, hosts)
        for i, (p, finite, host) in enumerate(zip(params, finites, hosts)):
            if host and finite:
                flags[i] = None
                continue
            self._skip(p, ~finite)
            if not host:
                flags[i] = finite
        return list(flags), list(flags.values())

    def _grad_scales(
        self, backward: Backward, params: list[Tensor], norms: list[Norm]
    ) -> list[Scalar]:
        limit = self.options.clip_param_norm
        if limit is None and backward.grad_scale is None:
            return [WHOLE_BATCH.grad_scale] * len(params)
        hosts = list(map(self._on_host, params))
        if limit is None:
            return list(map(backward.grad_scale_for, params, hosts))
        return [
            as_scalar(clip_factor(limit, norm.value), p, host)
            for p, norm, host in zip(params, whole_norms(norms), hosts)
        ]


def _weak_hook(runner: Runner) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the runner alive.

    Python's garbage collector does not see the hooks of a parameter, so a hook that refers
    back to the parameter would keep both for good.
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
