"""The hooks: what becomes of a gradient from its completion to its release."""

import random
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimi_func import _torch
from optimi_func import functional as _f
from optimi_func._types import WHOLE, Scalar, Share
from optimi_func.compiled.batching import SMALL
from optimi_func.compiled.jobs import is_plain
from optimi_func.functional import FunctionalOptimizer, TreeState
from optimi_func.gradient_release.cycle import Cycle
from optimi_func.gradient_release.options import Accumulation, How, ReleaseOptions
from optimi_func.gradient_release.owners import ClassOwner, TreeOwner
from optimi_func.optimizers import BaseOptimizer


class _Backward:
    """One running backward.

    The autograd engine alone keeps it alive: a backward that fails drops it, and with it
    the gradients that still waited.
    """

    def __init__(self, last: bool, inside: bool) -> None:
        self.last = last  # whether parameters move in it
        self.inside = inside  # of another that has not shown itself
        self.ids: set[int] = set()  # its own, and those of backwards started inside it
        self.fired: set[Tensor] = set()
        self.pending: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self.norms: list[Tensor] = []
        self.gain: Tensor | None = None  # of every gradient; None leaves them be
        self._gains: dict[torch.device | None, Scalar] = {}

    def gain_for(self, p: Tensor, on_host: bool) -> Scalar:
        """The common gain where p's numbers are; one object for all that share it."""
        if self.gain is None:
            return WHOLE.gain
        place = None if on_host else p.device
        if place not in self._gains:
            self._gains[place] = _number(self.gain, p, on_host)
        return self._gains[place]


class GradientRelease:
    """The hooks of one model and optimizer: `remove()` them, or use as a context.

    Made by `prepare_for_gradient_release`.

    Attributes:
        optimizer: What updates the parameters in backward.
        grad_norm: With `grad_norm=True`, the global norm of the last backward's
            gradients, a 0-d tensor on the parameters' device, before any clipping: what
            clip_grad_norm_ would have returned. With accumulation="buffer" that of the
            sums so far. None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: BaseOptimizer | FunctionalOptimizer,
        params: dict[str, Tensor],
        options: ReleaseOptions,
    ) -> None:
        self.optimizer = optimizer
        self.grad_norm: Tensor | None = None
        self._model = weakref.ref(model)
        self._params = params
        self._names = {p: name for name, p in params.items()}
        self._owner = (
            ClassOwner(optimizer)
            if isinstance(optimizer, BaseOptimizer)
            else TreeOwner(optimizer, params)
        )
        self._options = options
        self._check(options)
        self._cycle = Cycle()
        self._last_norm: Tensor | None = None
        self._skipped: dict[Tensor, Tensor] = {}
        self._lock = threading.RLock()  # devices run their hooks on threads of their own
        self._running: weakref.ref[_Backward] | None = None
        self._updated: list[str] | None = None  # None: the last backward has finished
        self._inner: tuple[weakref.ref[Any], set[Tensor]] | None = None
        self._looked_around = False
        self._since_step: int | None = None  # backwards that moved; None before the first
        self._warned = False
        self._measuring: _Backward | None = None
        self._gain: Tensor | None = None
        # Also in a compiled training step the hooks run as they are.
        on_gradient = torch.compiler.disable(self._on_gradient)
        self._at_end = cast(Any, torch.compiler.disable(self._end))
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(on_gradient) for p in params.values()
        ]
        if isinstance(optimizer, BaseOptimizer):
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
            self._hooks.append(
                optimizer.register_state_dict_pre_hook(self._before_state_dict)
            )
            optimizer.releases.append(self)

    # Settings

    @property
    def options(self) -> ReleaseOptions:
        """All settings; assign a changed copy between two backwards.

        Raises:
            ValueError: Settings that exclude each other, or another accumulation while
                a cycle is open; nothing has changed then.
        """
        return self._options

    @options.setter
    def options(self, options: ReleaseOptions) -> None:
        if options.accumulation != self._options.accumulation and self._cycle.is_open:
            raise ValueError(
                f"accumulation={options.accumulation!r} inside an open cycle of "
                f"{self._options.accumulation!r}: call step() first"
            )
        self._check(options)
        self._options = options

    @property
    def accumulation(self) -> Accumulation | None:
        """How backwards make a step together; assign between two cycles."""
        return self._options.accumulation

    @accumulation.setter
    def accumulation(self, accumulation: Accumulation | None) -> None:
        steps = self._options.accumulation_steps if accumulation else None
        dtype = self._options.buffer_dtype if accumulation == "buffer" else None
        self.options = replace(
            self._options,
            accumulation=accumulation,
            accumulation_steps=steps,
            buffer_dtype=dtype,
        )

    @property
    def accumulation_steps(self) -> int | None:
        """Backwards in a step; None: `step()` ends it. Assignable."""
        return self._options.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int | None) -> None:
        self.options = replace(self._options, accumulation_steps=steps)

    def _check(self, options: ReleaseOptions) -> None:
        if options.accumulation == "states":
            self._owner.check_joins()
        if options.accumulation == "states" and options.skip_nonfinite:
            far = [n for n, p in self._params.items() if not self._owner.on_host(p)]
            if far:
                raise ValueError(
                    f"skip_nonfinite=True with accumulation='states': for {far[0]} it "
                    "would have to wait for the device. Use accumulation='buffer'"
                )
        if options.clipping or options.skip_nonfinite or options.grad_norm:
            odd = [n for n, p in self._params.items() if not is_plain(p.detach())]
            if odd:
                raise ValueError(
                    f"clipping, skip_nonfinite and grad_norm take plain tensors, and "
                    f"{odd[0]} is a {type(self._params[odd[0]].data).__name__}"
                )

    # What it carries

    @property
    def state(self) -> TreeState:
        """A FunctionalOptimizer's state, over {name: parameter}; assign one to load it.

        The tensors are updated in place.

        Raises:
            AttributeError: For a class, which keeps its state itself.
        """
        return self._tree().state

    @state.setter
    def state(self, state: TreeState) -> None:
        self._tree().state = state

    def _tree(self) -> TreeOwner:
        if not isinstance(self._owner, TreeOwner):
            name = type(self.optimizer).__name__
            raise AttributeError(
                f"handle.state is for a FunctionalOptimizer: {name} keeps its own in "
                "optimizer.state"
            )
        return self._owner

    @property
    def skipped(self) -> dict[str, int]:
        """With `skip_nonfinite=True`: how many of a parameter's updates were skipped."""
        counts = {self._names[p]: int(count) for p, count in self._skipped.items()}
        return {name: count for name, count in counts.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """What the runner itself carries from one backward to the next.

        The optimizer's own state is not in it: a class has `optimizer.state_dict()`, a
        FunctionalOptimizer `handle.state`. Tensors are the live ones.
        """
        cycle = self._cycle
        return {
            "accumulation": self._options.accumulation,
            "position": cycle.position,
            "parts": {self._names[p]: n for p, n in cycle.parts.items()},
            "buffer": {self._names[p]: held for p, held in cycle.buffer.items()},
            "last_norm": self._last_norm,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where another run's handle stood; tensors are copied.

        Raises:
            ValueError: What does not fit this model or these settings; nothing is
                loaded then.
        """
        saved = dict(state_dict)
        expected = {*self.state_dict()}
        if {*saved} != expected:
            raise ValueError(
                f"state_dict holds {sorted(saved)}: allowed are {sorted(expected)}"
            )
        for field in ("parts", "buffer", "skipped"):
            for name in saved[field]:
                if name not in self._params:
                    raise ValueError(
                        f"state_dict[{field!r}] names {name!r}, which is none of the "
                        "released parameters"
                    )
        for name, held in saved["buffer"].items():
            p = self._params[name]
            if not isinstance(held, Tensor) or held.shape != p.shape:
                raise ValueError(
                    f"state_dict['buffer'][{name!r}] is not a tensor of shape "
                    f"{tuple(p.shape)}"
                )
        cycle = Cycle()
        cycle.position = int(saved["position"])
        cycle.parts = {self._params[n]: int(k) for n, k in saved["parts"].items()}
        for name, held in saved["buffer"].items():
            p = self._params[name]
            cycle.buffer[p] = torch.empty_like(p, dtype=held.dtype, requires_grad=False)
            cycle.buffer[p].copy_(held)
        if cycle.is_open and saved["accumulation"] != self._options.accumulation:
            raise ValueError(
                f"state_dict is from an open cycle of accumulation="
                f"{saved['accumulation']!r}, here it is {self._options.accumulation!r}"
            )
        last = saved["last_norm"]
        self._cycle = cycle
        self._last_norm = None if last is None else last.detach().clone()
        self._skipped = {
            self._params[n]: torch.tensor(k, device=self._params[n].device)
            for n, k in saved["skipped"].items()
        }

    # Attaching

    def remove(self) -> None:
        """Detach the hooks; the optimizer's own step updates everything again.

        Inside a cycle of accumulation="buffer" the sums become the parameters' `.grad`.
        """
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            if (
                isinstance(self.optimizer, BaseOptimizer)
                and self in self.optimizer.releases
            ):
                self.optimizer.releases.remove(self)
            cycle, self._cycle = self._cycle, Cycle()
            for p, held in cycle.buffer.items():
                held = held.to(p.dtype)
                p.grad = held if p.grad is None else p.grad + held
            if cycle.parts:
                warnings.warn(
                    "gradient release removed inside a cycle of accumulation='states': "
                    f"the state of {len(cycle.parts)} parameters has taken gradients "
                    "that will not move them in this step",
                    UserWarning,
                    stacklevel=2,
                )
            self._running = self._updated = None

    @property
    def attached(self) -> bool:
        """Whether the hooks are there."""
        return bool(self._hooks)

    def __enter__(self) -> "GradientRelease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    # A step that is more than the hooks

    def step(self) -> None:
        """End the open accumulation cycle now, if there is one.

        A class's own `step()` does the same; a FunctionalOptimizer has no other.
        """
        with self._lock:
            if not self._cycle.is_open:
                return
            ending = _Backward(last=True, inside=False)
            o = self._options
            if o.two_pass:
                held = list(self._cycle.buffer.values())
                ending.gain = _coefficient(o.clip_global_norm, _total(_sizes(held)))
            elif o.clipping == "lagged":
                ending.gain = self._lagged_gain()
            self._finish(ending)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(args) > 2 or kwargs.get("param") is not None:
            return  # the optimizer, closure, param: a step of one parameter
        self.step()
        text = None
        if self._since_step is None:
            if all(p.grad is None for p in self._params.values()):
                text = (
                    "step() before any hook has run, and without gradients: if there was a "
                    "backward, the model's parameters are not those that it was prepared "
                    "with. Prepare after fully_shard, and after all else that replaces them"
                )
        elif self._since_step > 1:
            text = (
                f"{self._since_step} backwards since the last step(), and each moved the "
                "parameters: to accumulate, pass accumulation='buffer' or 'states' to "
                "prepare_for_gradient_release"
            )
        if text and not self._warned:
            self._warned = True
            warnings.warn(text, UserWarning, stacklevel=4)
        self._since_step = None if self._since_step is None else 0

    def backward(
        self,
        loss_fn: Callable[[], Tensor],
        *,
        clip_global_norm: float | None = None,
        how: How | None = None,
    ) -> Tensor:
        """Compute the loss and run its backward, which updates the parameters.

        With `clip_global_norm` and how="two_pass" both run twice: once to measure the
        norm of all gradients and once to apply them, scaled. In between the random
        number generators of torch (and its devices) and of Python, and the model's
        buffers (BatchNorm's statistics), are put back; whatever else `loss_fn` draws or
        changes it must draw or change the same way again. Within an accumulation cycle
        only the last backward runs twice.

        Args:
            loss_fn: Runs the model and returns the loss, a tensor of one element.
            clip_global_norm: For this call, in place of the handle's.
            how: For this call, in place of the handle's.

        Returns:
            The loss, detached.

        Raises:
            RuntimeError: The second pass gave another loss than the first: nothing has
                been updated then.
        """
        if clip_global_norm is not None or how is not None:
            usual = self._options
            limit = usual.clip_global_norm if clip_global_norm is None else clip_global_norm
            self.options = replace(usual, clip_global_norm=limit, how=how or usual.how)
            try:
                return self.backward(loss_fn)
            finally:
                self._options = usual
        if not (self._options.two_pass and self._moves_next()):
            loss = loss_fn()
            loss.backward()
            return loss.detach()
        measured, norm = self._measure(loss_fn)
        loss = loss_fn()
        if not torch.isclose(loss.detach(), measured, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"loss_fn gave {measured.item()} and then {loss.item()}: how='two_pass' "
                "needs it to do the same thing twice"
            )
        self._gain = _coefficient(self._options.clip_global_norm, norm)
        try:
            loss.backward()
        finally:
            self._gain = None
        return loss.detach()

    def _measure(self, loss_fn: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and the norm of its gradients; the world is as it was before."""
        model = self._model()
        assert model is not None
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        drawn = random.getstate()
        devices = {p.device.index for p in self._params.values() if p.is_cuda}
        measuring = self._measuring = _Backward(last=True, inside=False)
        try:
            with torch.random.fork_rng(devices=sorted(devices)):
                loss = loss_fn()
                # Other parameters' gradients must not be added twice.
                loss.backward(inputs=list(self._params.values()))
        finally:
            self._measuring = None
            self._running = self._updated = None
            random.setstate(drawn)
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    setattr(module, name, buffer)
                    buffer.copy_(before)
        fired = measuring.fired
        rest = [held for p, held in self._cycle.buffer.items() if p not in fired]
        return loss.detach(), _total(measuring.norms + _sizes(rest))

    # A backward

    def _on_gradient(self, p: Tensor) -> None:
        g = p.grad
        if g is None:
            return
        # Taken off the parameter: if this backward fails, the next one must not add to it.
        p.grad = None
        with self._lock:
            try:
                if g.requires_grad:
                    raise RuntimeError(
                        f"{self._names[p]}: backward(create_graph=True) needs the "
                        "gradients that gradient release frees: remove() the hooks for it"
                    )
                if g.layout != torch.strided:
                    _f.check_grad(f"[{self._names[p]!r}]", p, g)
                self._take(self._enter(p), p, g)
            except BaseException:
                self._running = None  # the traceback keeps it alive
                raise

    def _enter(self, p: Tensor) -> _Backward:
        """The backward that p's gradient belongs to."""
        number = _torch.backward_id()
        backward = None if self._running is None else self._running()
        if backward is None or number not in backward.ids:
            backward = self._begin(number, p, backward)
        if p in backward.fired:
            raise RuntimeError(
                f"{self._names[p]} got a second gradient in one backward, after the first "
                "had updated it: reentrant checkpointing of a shared parameter. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        backward.fired.add(p)
        return backward

    def _begin(self, number: int, p: Tensor, running: _Backward | None) -> _Backward:
        outer = _torch.outer_loss()
        if outer is not None and running is not None:
            running.ids.add(number)
            return running
        if self._updated is not None:
            # Its end never came.
            names = ", ".join(self._updated) or "none"
            self._running = self._updated = None
            warnings.warn(
                "the backward before this one did not finish: gradients still waiting "
                f"were dropped; parameters already updated: {names}",
                UserWarning,
                stacklevel=4,
            )
        if self._measuring is not None:
            backward = self._measuring
        else:
            self._check_backward(p, inside=outer is not None)
            backward = _Backward(self._moves_next(), inside=outer is not None)
            o = self._options
            backward.gain = self._lagged_gain() if o.clipping == "lagged" else self._gain
            if o.two_pass and backward.last and backward.gain is None:
                raise RuntimeError(
                    f"clip_global_norm={o.clip_global_norm} with how='two_pass' has to "
                    "run the backward: call handle.backward(loss_fn), or choose "
                    "how='lagged'"
                )
        if outer is not None:
            backward.fired = self._fired_inside(outer)
        backward.ids.add(number)
        self._running, self._updated = weakref.ref(backward), []
        _torch.after_backward(partial(self._at_end, backward))
        return backward

    def _fired_inside(self, outer: object) -> set[Tensor]:
        """What fired in the other backwards that `outer` started."""
        if self._inner is None or self._inner[0]() is not outer:
            self._inner = (weakref.ref(outer), set())
        return self._inner[1]

    def _check_backward(self, p: Tensor, inside: bool) -> None:
        """Refuse a backward that could not be honoured, before its first update."""
        o = self._options
        if inside and o.whole_backward:
            raise RuntimeError(
                "reentrant checkpointing hides where a backward ends, which "
                "accumulation, clip_global_norm and grad_norm must know: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if _torch.in_compiled_autograd():
            raise RuntimeError(
                "compiled autograd (compiled_autograd=True) runs hooks "
                "inside a graph of its own: switch it off under gradient release"
            )
        if not self._looked_around:
            if _torch.in_ddp(p):
                raise RuntimeError(NO_DDP)
            if _torch.has_fresh_scaler():
                raise RuntimeError(NO_SCALER)
            self._looked_around = True
        if o.accumulation and self._owner.accumulates():
            raise RuntimeError(
                f"optimizer_accumulation=True with accumulation={o.accumulation!r}: "
                "choose one"
            )
        if o.accumulation == "states":
            self._check(o)

    def _moves_next(self) -> bool:
        """Whether the next backward moves parameters."""
        o = self._options
        if o.accumulation is None:
            return True
        steps = o.accumulation_steps
        return steps is not None and self._cycle.position + 1 >= steps

    def _take(self, backward: _Backward, p: Tensor, g: Tensor) -> None:
        """Accumulate a gradient, let it wait with other small ones, or apply it."""
        o = self._options
        if o.accumulation == "buffer":
            if self._measuring is not None:
                g = self._cycle.would_be(p, g)
            elif backward.last:
                g = self._cycle.whole(p, g)
            else:
                held = self._cycle.keep(p, g, o.buffer_dtype)
                if o.grad_norm:
                    backward.norms += _sizes([held])
                self._note([p])
                return
        self._release(backward, p, g)

    def _release(self, backward: _Backward, p: Tensor, g: Tensor) -> None:
        if p.numel() >= SMALL:
            self._apply(backward, [p], [g])
            return
        pending = backward.pending.setdefault(p.device, [])
        pending.append((p, g))
        if sum(g.nbytes for _, g in pending) > self._options.pending_bytes:
            self._flush(backward, p.device)

    def _flush(self, backward: _Backward, device: torch.device) -> None:
        pending = backward.pending.pop(device, [])
        if pending:
            self._apply(backward, [p for p, _ in pending], [g for _, g in pending])

    def _end(self, backward: _Backward) -> None:
        with self._lock:
            self._finish(backward)

    def _finish(self, backward: _Backward) -> None:
        """Apply what waits, and with the last backward of a cycle close it."""
        o, cycle = self._options, self._cycle
        for device in list(backward.pending):
            self._flush(backward, device)
        if self._measuring is None:
            if backward.last:
                self._close(backward)
            elif o.grad_norm:
                rest = [x for p, x in cycle.buffer.items() if p not in backward.fired]
                backward.norms += _sizes(rest)
            self._report(backward)
            if o.accumulation:
                cycle.position = 0 if backward.last else cycle.position + 1
            whole = o.accumulation is None and not backward.inside
            moved = whole and not self._owner.accumulates()
            self._since_step = (self._since_step or 0) + moved
            self._owner.end(backward.last)
        self._running = self._updated = None

    def _close(self, backward: _Backward) -> None:
        """Move what the last backward gave no gradient, but one before it did."""
        cycle = self._cycle
        for p, held in list(cycle.buffer.items()):
            self._release(backward, p, held)
        for p in list(cycle.parts):
            self._release(backward, p, torch.zeros_like(p, requires_grad=False))
        for device in list(backward.pending):
            self._flush(backward, device)

    def _report(self, backward: _Backward) -> None:
        """Publish the norm of a backward, and keep that of a step for the next."""
        o = self._options
        if not (o.grad_norm or o.clipping == "lagged"):
            return
        norm = _total(backward.norms)
        if o.grad_norm:
            self.grad_norm = norm
        if o.clipping == "lagged" and backward.last:
            # A gradient that overflowed says nothing about the next.
            before = torch.zeros_like(norm) if self._last_norm is None else self._last_norm
            self._last_norm = torch.where(norm.isfinite(), norm, before.to(norm.device))

    def _lagged_gain(self) -> Tensor | None:
        if self._last_norm is None:
            return None
        return _coefficient(self._options.clip_global_norm, self._last_norm)

    # An update

    def _apply(
        self, backward: _Backward, params: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Measure gradients, decide on each, and update."""
        o, parts = self._options, self._cycle.parts
        sizes: list[Tensor] = []
        if o.grad_norm or o.skip_nonfinite or o.clipping not in (None, "clip_value"):
            sizes = _sizes(grads)
            backward.norms += sizes
        if self._measuring is not None:
            return
        arrived = params
        names = ", ".join(self._names[p] for p in params)
        try:
            if o.skip_nonfinite:
                params, grads, sizes, oks = self._finite(params, grads, sizes)
            else:
                oks = [None] * len(params)
            if o.clip_value is not None:
                for g in grads:
                    g.clamp_(-o.clip_value, o.clip_value)
            gains = self._gains(backward, params, sizes)
            nths = [parts.get(p, 0) + 1 for p in params]
            shares = [Share(*share) for share in zip(gains, nths, oks)]
            write = backward.last and not self._owner.accumulates()
            if params:
                self._owner.update(params, grads, shares, write, backward.last)
        except Exception as error:
            raise RuntimeError(f"updating {names} in backward: {error}") from error
        for p in arrived if backward.last else ():
            parts.pop(p, None)
            self._cycle.buffer.pop(p, None)
        for p in () if backward.last else params:
            parts[p] = parts.get(p, 0) + 1
        self._note(params)

    def _note(self, params: list[Tensor]) -> None:
        if self._updated is not None:
            self._updated += [self._names[p] for p in params]

    def _finite(
        self, params: list[Tensor], grads: list[Tensor], sizes: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor | None]]:
        """Leave out what is not finite, where the host can know; else say so by a flag."""
        kept: list[int] = []
        oks: list[Tensor | None] = []
        for i, (p, g, size) in enumerate(zip(params, grads, sizes)):
            if self._owner.on_host(p):
                # A finite norm needs no second look; large numbers can overflow it.
                ok, flag = bool(size.isfinite() or g.isfinite().all()), None
            else:
                ok, flag = True, _all_finite(g)
            if not ok or flag is not None:
                zero = torch.zeros((), dtype=torch.int64, device=p.device)
                self._skipped.setdefault(p, zero).add_(1 if flag is None else ~flag)
            if ok:
                kept.append(i)
                oks.append(flag)
        chosen = [[xs[i] for i in kept] for xs in (params, grads, sizes)]
        return chosen[0], chosen[1], chosen[2], oks

    def _gains(
        self, backward: _Backward, params: list[Tensor], sizes: list[Tensor]
    ) -> list[Scalar]:
        limit = self._options.clip_param_norm
        if limit is None and backward.gain is None:
            return [WHOLE.gain] * len(params)
        hosts = [self._owner.on_host(p) for p in params]
        if limit is None:
            return [backward.gain_for(p, host) for p, host in zip(params, hosts)]
        return [
            _number(_coefficient(limit, size), p, host)
            for p, size, host in zip(params, sizes, hosts)
        ]

    def _before_state_dict(self, optimizer: Any) -> None:
        del optimizer
        if self._cycle.is_open:
            carried = {
                "states": "how many gradients each state has taken",
                "buffer": "the sums of gradients",
            }[str(self._options.accumulation)]
            warnings.warn(
                f"state_dict() inside an open accumulation cycle (backward "
                f"{self._cycle.position} of it): {carried} and the position are not in "
                "it. Save handle.state_dict() beside it, or call step() first",
                UserWarning,
                stacklevel=4,
            )


NO_DDP = (
    "DistributedDataParallel copies its buckets back into p.grad after the hooks: use "
    "FSDP2 (torch.distributed.fsdp.fully_shard) with gradient release"
)

NO_SCALER = (
    "a GradScaler has scaled the loss, and gradient release would apply the scaled "
    "gradients: train in bfloat16, which needs no scaler, or remove() the hooks"
)


def _sizes(tensors: list[Tensor]) -> list[Tensor]:
    return _torch.norms(tensors, 2.0) if tensors else []


def _total(sizes: list[Tensor]) -> Tensor:
    """The norm of all from the norms of each, as torch.nn.utils takes it."""
    if not sizes:
        return torch.zeros(())
    first = sizes[0].device
    wide = max((x.dtype for x in sizes), key=lambda d: torch.finfo(d).bits)
    return torch.linalg.vector_norm(torch.stack([x.to(first, wide) for x in sizes]))


def _coefficient(limit: float | None, norm: Tensor) -> Tensor:
    """The factor that clips, as torch.nn.utils has it."""
    assert limit is not None
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _number(x: Tensor, p: Tensor, on_host: bool) -> Scalar:
    return x.item() if on_host else x.to(p.device)


def _all_finite(g: Tensor) -> Tensor:
    """A 0-d bool on g's device, found without a tensor of g's size."""
    if g.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=g.device)
    low, high = g.aminmax()
    return low.isfinite() & high.isfinite()
