"""The handle: settings, what is carried from step to step, and backwards run twice."""

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimi_func._checks import warn_user
from optimi_func._distributed import any_distributed, distribute_like
from optimi_func._functional import FunctionalOptimizer
from optimi_func._tree import TreeState
from optimi_func.gradient_release.accumulation import Accumulation
from optimi_func.gradient_release.backward import SinceStep
from optimi_func.gradient_release.hooks import attach, detach
from optimi_func.gradient_release.norms import Norm
from optimi_func.gradient_release.options import AccumulationMode, How, ReleaseOptions
from optimi_func.gradient_release.owners import ClassOwner, TreeOwner
from optimi_func.gradient_release.runner import Runner
from optimi_func.gradient_release.two_pass import (
    NO_REENTRANCE,
    Buffers,
    is_reentrant,
    leaves_of,
)
from optimi_func.optimizers import BaseOptimizer


class GradientRelease:
    """The hooks of one model and optimizer: `remove()` them, or use as a context.

    Made by `prepare_for_gradient_release`.

    Attributes:
        optimizer: What updates the parameters in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: BaseOptimizer | FunctionalOptimizer,
        params: dict[str, Tensor],
        options: ReleaseOptions,
    ) -> None:
        self.optimizer = optimizer
        self._model = weakref.ref(model)
        owner = (
            ClassOwner(optimizer)
            if isinstance(optimizer, BaseOptimizer)
            else TreeOwner(optimizer, params)
        )
        self._runner = Runner(params, owner, options)
        self._runner.check(options)
        self._said: set[str] = set()
        self._idle = 0  # steps without a backward before them
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._runner.hook) for p in params.values()
        ]
        attach(self, model, self._runner.hook, self._hooks)
        if isinstance(optimizer, BaseOptimizer):
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
            self._hooks.append(
                optimizer.register_state_dict_pre_hook(self._before_state_dict)
            )
            self._hooks.append(
                optimizer.register_load_state_dict_post_hook(self._after_load)
            )
            optimizer.attach(self)

    @property
    def params(self) -> dict[str, Tensor]:
        """What it updates in backward, by name."""
        return self._runner.params

    # Settings

    @property
    def options(self) -> ReleaseOptions:
        """All settings; assign a changed copy between two backwards.

        Raises:
            ValueError: Settings that exclude each other, or another accumulation while
                a cycle is open; nothing has changed then.
        """
        return self._runner.options

    @options.setter
    def options(self, options: ReleaseOptions) -> None:
        now = self._runner.options.accumulation
        if options.accumulation != now and self._runner.cycle.is_open:
            raise ValueError(
                f"accumulation={options.accumulation!r} inside an open cycle of {now!r}: "
                "call step() first"
            )
        self._runner.check(options)
        self._runner.options = options

    @property
    def accumulation(self) -> AccumulationMode | None:
        """How backwards make a step together; assign between two cycles."""
        return self._runner.options.accumulation

    @accumulation.setter
    def accumulation(self, accumulation: AccumulationMode | None) -> None:
        steps = self._runner.options.accumulation_steps if accumulation else None
        dtype = self._runner.options.buffer_dtype if accumulation == "buffer" else None
        self.options = replace(
            self._runner.options,
            accumulation=accumulation,
            accumulation_steps=steps,
            buffer_dtype=dtype,
        )

    @property
    def accumulation_steps(self) -> int | None:
        """Backwards in a step; None: `step()` ends it. Assignable."""
        return self._runner.options.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int | None) -> None:
        self.options = replace(self._runner.options, accumulation_steps=steps)

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
        if not isinstance(self._runner.owner, TreeOwner):
            name = type(self.optimizer).__name__
            raise AttributeError(
                f"handle.state is for a FunctionalOptimizer: {name} keeps its own in "
                "optimizer.state"
            )
        return self._runner.owner

    @property
    def grad_norm(self) -> Tensor | None:
        """With `grad_norm=True`, the global norm of the last backward's gradients.

        A 0-d tensor on the parameters' device, from before any clipping: what
        clip_grad_norm_ would have returned. With accumulation="buffer" that of the sums
        so far. None before the first.
        """
        return self._runner.grad_norm

    @property
    def skipped(self) -> dict[str, int]:
        """With `skip_nonfinite=True`: how many of a parameter's updates were skipped."""
        names = self._runner.names
        counts = {names[p]: int(count) for p, count in self._runner.skipped.items()}
        return {name: count for name, count in counts.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """What the runner itself carries from one backward to the next.

        The optimizer's own state is not in it: a class has `optimizer.state_dict()`, a
        FunctionalOptimizer `handle.state`. Tensors are the live ones.
        """
        cycle = self._runner.cycle
        return {
            "accumulation": self._runner.options.accumulation,
            "position": cycle.position,
            "begun": sorted(self._runner.names[p] for p in cycle.partially_updated),
            "buffer": {self._runner.names[p]: held for p, held in cycle.buffer.items()},
            "last_norm": self._runner.last_norm,
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
        for field in ("begun", "buffer", "skipped"):
            for name in saved[field]:
                if name not in self._runner.params:
                    raise ValueError(
                        f"state_dict[{field!r}] names {name!r}, which is none of the "
                        "released parameters"
                    )
        for name, held in saved["buffer"].items():
            p = self._runner.params[name]
            if not isinstance(held, Tensor) or held.shape != p.shape:
                raise ValueError(
                    f"state_dict['buffer'][{name!r}] is not a tensor of shape "
                    f"{tuple(p.shape)}"
                )
        cycle = Accumulation()
        cycle.position = int(saved["position"])
        if cycle.position < 0:
            raise ValueError(f"state_dict['position'] is {cycle.position}: at least 0")
        cycle.partially_updated = {self._runner.params[name] for name in saved["begun"]}
        for name, held in saved["buffer"].items():
            p = self._runner.params[name]
            cycle.buffer[p] = torch.empty_like(p, dtype=held.dtype, requires_grad=False)
            cycle.buffer[p].copy_(distribute_like(p, held))
        if cycle.is_open and saved["accumulation"] != self._runner.options.accumulation:
            raise ValueError(
                f"state_dict is from an open cycle of accumulation="
                f"{saved['accumulation']!r}, here it is {self.accumulation!r}"
            )
        last = saved["last_norm"]
        if last is not None and not isinstance(last, Tensor):
            raise ValueError(f"state_dict['last_norm'] is {last!r}: allowed is a tensor")
        last = None if last is None else last.detach().clone()
        counts = {self._runner.params[n]: int(k) for n, k in saved["skipped"].items()}
        skipped = {p: torch.tensor(k, device=p.device) for p, k in counts.items()}
        self._runner.cycle = cycle
        self._runner.last_norm, self._runner.skipped = last, skipped

    # Attaching

    def remove(self) -> None:
        """Detach the hooks; the optimizer's own step updates everything again.

        Inside a cycle of accumulation="buffer" the sums become the parameters' `.grad`.
        """
        with self._runner.lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            if isinstance(self.optimizer, BaseOptimizer):
                _take_out(self.optimizer.releases, self)
            model = self._model()
            if model is not None:
                detach(self, model)
            cycle, self._runner.cycle = self._runner.cycle, Accumulation()
            for p, held in cycle.buffer.items():
                held = held.to(p.dtype)
                p.grad = held if p.grad is None else p.grad + held
            if cycle.partially_updated:
                warn_user(
                    "gradient release removed inside a cycle of accumulation='states': "
                    f"the state of {len(cycle.partially_updated)} parameters has taken "
                    "gradients that will not move them in this step",
                )
            self._runner.forget()

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
        self._runner.close_cycle()

    def discard(self) -> None:
        """Forget the gradients of the open cycle, as zero_grad() does those in p.grad.

        Raises:
            RuntimeError: With accumulation="states", whose gradients cannot be told
                from the state any more.
        """
        if self._runner.cycle.partially_updated:
            raise RuntimeError(
                "accumulation='states' cannot take gradients back out of the state: "
                "use accumulation='buffer'"
            )
        self._runner.cycle = Accumulation()

    @property
    def accumulating(self) -> bool:
        """Whether an accumulation cycle is open."""
        return self._runner.cycle.is_open

    def before_zero_grad(self) -> None:
        """Say that zero_grad() finds no gradients, where that may surprise."""
        if self._runner.cycle.is_open:
            self._warn_once(
                "zero_grad() inside an open accumulation cycle has no effect: "
                "handle.discard() forgets the gradients so far"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warn_user(text)

    def _after_load(self, optimizer: Any) -> None:
        del optimizer
        if self._runner.cycle.is_open:
            warn_user(
                "load_state_dict() inside an open accumulation cycle, which goes on: "
                "handle.load_state_dict() loads where the saved run stood in its own",
            )

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(args) > 2 or kwargs.get("param") is not None:
            return  # the optimizer, closure, param: a step of one parameter
        self.step()
        since = self._runner.since_step
        if since is None:
            self._idle += any(p.requires_grad for p in self._runner.params.values())
            # Once may be a scheduler's dummy.
            if self._idle > 1 and all(p.grad is None for p in self._runner.params.values()):
                self._warn_once(
                    "step() again before any hook has run, and without gradients: if there "
                    "was a backward, the model's parameters are not those that it was "
                    "prepared with. Prepare after fully_shard, and after all else that "
                    "replaces them"
                )
            return
        if since.moves > 1:
            self._warn_once(
                f"{since.moves} backwards since the last step(), and each moved the same "
                "parameters: to accumulate, pass accumulation='buffer' or 'states' to "
                "prepare_for_gradient_release"
            )
        if since.backwards > 1 and not since.repeats and self.options.whole_backward:
            self._warn_once(
                f"{since.backwards} backwards since the last step(), each with gradients "
                "of other parameters. If these are the blocks of one: " + NO_REENTRANCE
            )
        self._runner.since_step = SinceStep()

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
            TypeError: A loss, in place of the function that computes it.
            RuntimeError: The second pass gave another loss than the first: nothing has
                been updated then.
        """
        if not callable(loss_fn):
            raise TypeError(
                f"handle.backward(loss_fn) got a {type(loss_fn).__name__}: allowed is a "
                "function that computes the loss, `lambda: model(x).mean()`, which may "
                "have to run twice"
            )
        if clip_global_norm is not None or how is not None:
            usual = self._runner.options
            limit = usual.clip_global_norm if clip_global_norm is None else clip_global_norm
            self.options = replace(usual, clip_global_norm=limit, how=how or usual.how)
            try:
                return self.backward(loss_fn)
            finally:
                self._runner.options = usual
        if not self._hooks:
            raise RuntimeError("the hooks were removed: call loss.backward() and step()")
        if not (self._runner.options.two_pass and self._runner.moves_next()):
            loss = loss_fn()
            loss.backward()
            return loss.detach()
        measured, norms = self._measure(loss_fn)
        loss = loss_fn()
        if not torch.isclose(loss.detach(), measured, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"loss_fn gave {measured.item()} and then {loss.item()}: how='two_pass' "
                "needs it to do the same thing twice"
            )
        self._runner.grad_scale = self._runner.grad_scale_of(norms)
        try:
            loss.backward()
        finally:
            self._runner.grad_scale = None
        return loss.detach()

    def _measure(self, loss_fn: Callable[[], Tensor]) -> tuple[Tensor, list[Norm]]:
        """The loss and its gradients' norms; .grad, buffers, random state are restored."""
        model = self._model()
        if model is None:
            raise RuntimeError(
                "the module that was prepared is gone, and with it the list of buffers to "
                "put back between two passes: keep a reference to it"
            )
        buffers = Buffers(model)
        runner = self._runner
        params = list(runner.params.values())
        before = {p: p.grad.clone() for p in params if p.grad is not None}
        apart: dict[Tensor, Tensor | None] = {}
        drawn = random.getstate()
        devices = {p.device.index for p in params if p.is_cuda}
        try:
            with runner.measuring() as measured, torch.random.fork_rng(sorted(devices)):
                loss = loss_fn()
                if is_reentrant(loss):
                    raise RuntimeError(NO_REENTRANCE)
                # Other parameters' gradients must not be added twice.
                if any_distributed(params):
                    # What fully_shard made is no leaf: its gradients come from others.
                    apart = {x: x.grad for x in leaves_of(loss).difference(params)}
                    for x in apart:
                        x.grad = None
                    loss.backward()
                else:
                    loss.backward(inputs=[p for p in params if p.requires_grad])
        finally:
            random.setstate(drawn)
            buffers.restore()
            for p, g in [*before.items(), *apart.items()]:
                p.grad = g
        sums = runner.cycle.buffer.items()
        rest = {p: x for p, x in sums if p not in measured.fired}
        norms = runner.norms_to_clip([*rest], [*rest.values()])
        return loss.detach(), measured.norms + norms

    def _before_state_dict(self, optimizer: Any) -> None:
        del optimizer
        if self._runner.cycle.is_open:
            carried = {
                "states": "which states have taken gradients",
                "buffer": "the sums of gradients",
            }[str(self._runner.options.accumulation)]
            warn_user(
                "state_dict() inside an open accumulation cycle (backward "
                f"{self._runner.cycle.position} of it): {carried} and the position are "
                "not in it. Save handle.state_dict() beside it, or call step() first",
            )


def _take_out(handles: list[Any], handle: GradientRelease) -> None:
    handles[:] = [other for other in handles if other is not handle]
