"""The handle of a gradient release, and the handles that models and parameters have."""

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict
from torch.utils.hooks import RemovableHandle

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core import torch_private
from optimi_func.core.checks import warn_user
from optimi_func.core.distributed import any_distributed, distribute_like
from optimi_func.gradient_release.backward import (
    PAUSE,
    WRAPPERS,
    Accumulation,
    Norm,
    SinceStep,
)
from optimi_func.gradient_release.options import AccumulationMode, ReleaseOptions
from optimi_func.gradient_release.runner import Runner
from optimi_func.gradient_release.tree import TreeOptimizer
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import TreeState

NO_REENTRANCE = (
    "reentrant checkpointing hides where a backward ends, which accumulation_steps, "
    "clip_global_norm and grad_norm must know: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Attached(NamedTuple):
    """The release that a hook belongs to, and the way to remove the hook without it."""

    release: "ref[GradientRelease]"
    removers: list[RemovableHandle]


# Weak dictionaries instead of attributes, which copies of a model would share.
by_model: "WeakKeyDictionary[nn.Module, list[GradientRelease]]" = WeakKeyDictionary()
by_hook: "WeakKeyDictionary[Callable[..., object], Attached]" = WeakKeyDictionary()


class GradientRelease:
    """The hooks of one model and optimizer: `remove()` them, or use it as a context.

    Made by `prepare_for_gradient_release`. A copy (deepcopy, pickle) of a handle has a copy
    of the optimizer and of all that the handle carries, but no hooks: no model is prepared.

    Attributes:
        optimizer: The optimizer that updates the parameters in backward.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: BaseOptimizer | FunctionalOptimizer,
        params: dict[str, Tensor],
        options: ReleaseOptions,
        runner_of: Callable[..., Runner] = Runner,
    ) -> None:
        self.optimizer = optimizer
        is_class = isinstance(optimizer, BaseOptimizer)
        updater = optimizer if is_class else TreeOptimizer(optimizer, params)
        self._runner = runner = runner_of(params, updater, options)
        self._warned: set[str] = set()
        self._idle = 0  # steps before the first backward
        self._hooks: list[RemovableHandle] = []
        self._model = None if model is None else ref(model)
        if model is None:
            return  # a copy
        self._hooks += runner.attach(model)
        by_model.setdefault(model, []).append(self)
        by_hook[runner.hook] = Attached(ref(self), list(self._hooks))
        if isinstance(optimizer, BaseOptimizer):
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
            optimizer.releases.append(self)

    def __reduce__(self) -> tuple[object, ...]:
        """Return a copy's parts; hooks and locks belong to one model and process."""
        arguments = None, self.optimizer, self.params, self.options
        return GradientRelease, arguments, (self.state_dict(), getattr(self, "state", None))

    def __setstate__(self, carried: tuple[dict[str, object], TreeState | None]) -> None:
        """Load what the copied handle carried."""
        state_dict, state = carried
        self.load_state_dict(state_dict)
        if state is not None:
            self.state = state

    @property
    def params(self) -> dict[str, Tensor]:
        """The released parameters, by name."""
        return self._runner.params

    @property
    def options(self) -> ReleaseOptions:
        """All options; assign a changed copy between two backwards.

        Raises:
            ValueError: Options that exclude each other, or another accumulation while
                a cycle is open; nothing has changed then.
        """
        return self._runner.options

    @options.setter
    def options(self, options: ReleaseOptions) -> None:
        if options.accumulation != self.accumulation and self.accumulating:
            raise ValueError(
                f"accumulation={options.accumulation!r} inside an open cycle of "
                f"{self.accumulation!r}: call step() first"
            )
        self._runner.check(options)
        self._runner.options = options

    @property
    def accumulation(self) -> AccumulationMode | None:
        """The way in which several backwards make a step; assign between two cycles."""
        return self._runner.options.accumulation

    @accumulation.setter
    def accumulation(self, accumulation: AccumulationMode | None) -> None:
        o = self.options
        self.options = replace(
            o,
            accumulation=accumulation,
            accumulation_steps=o.accumulation_steps if accumulation else None,
            buffer_dtype=o.buffer_dtype if accumulation == "buffer" else None,
        )

    @property
    def accumulation_steps(self) -> int | None:
        """The number of backwards in a step, or None if `step()` ends it; assignable."""
        return self._runner.options.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int | None) -> None:
        self.options = replace(self.options, accumulation_steps=steps)

    @property
    def state(self) -> TreeState:
        """The state of a FunctionalOptimizer, over {name: parameter}; assignable.

        The tensors are updated in place.

        Raises:
            AttributeError: For a class, which keeps its state itself.
        """
        return self._tree.state

    @state.setter
    def state(self, state: TreeState) -> None:
        self._tree.state = state

    @property
    def _tree(self) -> TreeOptimizer:
        optimizer = self._runner.optimizer
        if isinstance(optimizer, BaseOptimizer):
            raise AttributeError(
                "handle.state is for a FunctionalOptimizer: "
                f"{type(optimizer).__name__} keeps its own in optimizer.state"
            )
        return optimizer

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm of the last backward's gradients, if `grad_norm=True`.

        It is the 0-d tensor on the parameters' device that clip_grad_norm_ would have
        returned, taken before any clipping. With accumulation="buffer" it is the norm of
        the sums so far. None before the first backward.
        """
        return self._runner.grad_norm

    @property
    def skipped(self) -> dict[str, int]:
        """The number of skipped updates by name of the parameter, without zeros."""
        names, skipped = self._runner.names, self._runner.skipped
        counts = {names[p]: int(count) for p, count in skipped.items()}
        return {name: count for name, count in counts.items() if count}

    def state_dict(self) -> StateDict:
        """Return what the hooks carry from one backward to the next, in live tensors.

        The optimizer's own state is not in it, but in `optimizer.state_dict()` of a class
        and in `handle.state` of a FunctionalOptimizer. Before the first backward there are
        zeros in the place of sums, for torch.distributed.checkpoint to load into.
        """
        runner, o, cycle = self._runner, self.options, self._runner.cycle
        names, sums = runner.names, cycle.buffer
        if runner.since_step is None and o.accumulation == "buffer" and not cycle.is_open:
            sums = cycle.zeros(names, o.buffer_dtype)
        return {
            "accumulation": o.accumulation,
            "position": cycle.position,
            "begun": sorted(names[p] for p in cycle.partially_updated.union(cycle.buffer)),
            "buffer": {names[p]: total for p, total in sums.items()},
            "skipped": dict.fromkeys(names.values(), 0) | self.skipped,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Copy what another run's handle carried, to go on from there.

        Counts of skipped updates of parameters that have been frozen since are dropped.

        Raises:
            TypeError, ValueError: What does not fit this model or these options; nothing
                is loaded then.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict={state_dict!r:.80}: allowed is a dict, as saved")
        saved, runner = dict(state_dict), self._runner
        saved.pop("last_norm", None)  # of version 0.2
        expected, params = {*self.state_dict()}, runner.params
        if {*saved} != expected:
            raise ValueError(
                f"state_dict holds {sorted(saved)}: allowed are {sorted(expected)}"
            )
        for field in ("begun", "buffer"):
            if unknown := [name for name in saved[field] if name not in params]:
                raise ValueError(
                    f"state_dict[{field!r}] names {unknown[0]!r}: allowed are {[*params]}"
                )
        cycle = Accumulation()
        cycle.position = int(saved["position"])
        begun, sums = saved["begun"], saved["buffer"]
        if saved["accumulation"] == "states":
            cycle.partially_updated = {params[name] for name in begun}
        elif (cycle.position and not sums) or not {*begun} <= {*sums}:
            raise ValueError(
                "state_dict is from an open cycle and lacks its sums. Let "
                "torch.distributed.checkpoint load them into the state_dict() of a handle "
                "with accumulation='buffer' before its first backward"
            )
        elif begun or not cycle.position:  # others are zeros, of no gradient
            sums = {name: sums[name] for name in begun}
        for name, total in sums.items():
            p = params[name]
            if not isinstance(total, Tensor) or total.shape != p.shape:
                raise ValueError(
                    f"state_dict['buffer'][{name!r}] is not a tensor of shape "
                    f"{tuple(p.shape)}"
                )
            cycle.buffer[p] = torch.empty_like(p, dtype=total.dtype, requires_grad=False)
            cycle.buffer[p].copy_(distribute_like(p, total))
        if cycle.is_open and saved["accumulation"] != self.accumulation:
            raise ValueError(
                f"state_dict is from an open cycle of accumulation="
                f"{saved['accumulation']!r}: allowed is {self.accumulation!r}"
            )
        counts = {n: int(k) for n, k in saved["skipped"].items() if n in params and int(k)}
        runner.skipped = {
            params[n]: torch.tensor(k, dtype=torch.int64, device=params[n].device)
            for n, k in counts.items()
        }
        runner.cycle = cycle

    def remove(self) -> None:
        """Remove the hooks, so that the optimizer's own step updates everything again.

        Inside a cycle of accumulation="buffer" the sums become the parameters' `.grad`.
        """
        with self._runner.lock:
            while self._hooks:
                self._hooks.pop().remove()
            attached = list(by_model.values())
            if isinstance(self.optimizer, BaseOptimizer):
                attached.append(self.optimizer.releases)
            for handles in attached:
                if self in handles:
                    handles.remove(self)
            cycle, self._runner.cycle = self._runner.cycle, Accumulation()
            for p, total in cycle.buffer.items():
                total = total.to(p.dtype)
                p.grad = total if p.grad is None else p.grad + total
            if cycle.buffer and self._runner.group is not None:
                warn_user("p.grad holds the sums of this process, which nothing averages")
            if cycle.partially_updated:
                warn_user(
                    "gradient release removed inside a cycle of accumulation='states': "
                    f"the state of {len(cycle.partially_updated)} parameters has taken "
                    "gradients that will not move them in this step"
                )
            self._runner.forget()

    def __repr__(self) -> str:
        """Return the optimizer's name, the number of parameters, and if hooks are there."""
        name, count = type(self.optimizer).__name__, len(self.params)
        return f"GradientRelease({name}, {count} parameters, attached={bool(self._hooks)})"

    def __enter__(self) -> "GradientRelease":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def step(self) -> None:
        """End the open accumulation cycle now, if there is one.

        `step()` of a class does the same; a FunctionalOptimizer has no other.
        """
        self._runner.close_cycle()

    def discard(self) -> None:
        """Drop the gradients of the open cycle, as zero_grad() drops those in p.grad.

        Raises:
            RuntimeError: With accumulation="states", which adds gradients into the state.
        """
        if self._runner.cycle.partially_updated:
            raise RuntimeError(
                "accumulation='states' cannot take gradients back out of the state: "
                "use accumulation='buffer'"
            )
        self._runner.cycle = Accumulation()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which backwards update nothing, as without release.

        Their gradients stay in `p.grad`, to be read, or dropped by `zero_grad()`. A GAN
        needs this for the discriminator in the generator's backward. Gradients that are not
        dropped join the next step. A later backward outside adds to them, or
        `optimizer.step()` applies them without this handle's clipping. An open accumulation
        cycle waits meanwhile. Contexts may be nested, and are for all threads.

        Raises:
            RuntimeError: On entering it inside a running backward.

        >>> from optimi_func import prepare_for_gradient_release, sgd
        >>> model = nn.Linear(2, 1)
        >>> handle = prepare_for_gradient_release(model, sgd(lr=0.1))
        >>> with handle.paused():
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad
        tensor([[1., 1.]])
        """
        return self._runner.paused()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which replicas add up their gradients and send nothing.

        The next backward outside, or `step()`, averages and applies the sums.

        Raises:
            RuntimeError: Without `process_group`, or with accumulation="states".

        >>> from optimi_func import prepare_for_gradient_release, sgd
        >>> prepare_for_gradient_release(nn.Linear(2, 1), sgd(lr=0.1)).no_sync()
        Traceback (most recent call last):
        RuntimeError: no_sync() is for replicas, prepared with process_group=...
        """
        return self._runner.no_sync()

    @property
    def accumulating(self) -> bool:
        """True if an accumulation cycle is open."""
        return self._runner.cycle.is_open

    def before_zero_grad(self) -> None:
        """Warn if zero_grad() would be expected to drop the gradients of an open cycle."""
        if self.accumulating:
            self._warn_once(
                "zero_grad() does not drop the gradients of the open accumulation cycle: "
                f"handle.discard() does. {PAUSE}"
            )
        elif (since := self._runner.since_step) is not None and since.moves:
            self._warn_once(
                "zero_grad() between a backward and step() drops nothing: the backward has "
                f"moved the parameters already. {PAUSE}. If nothing was to be thrown away, "
                "call step() before zero_grad()"
            )

    def _warn_once(self, text: str, key: str = "") -> None:
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            warn_user(text)

    def _before_step(self, optimizer: object, args: object, kwargs: object) -> None:
        if self._runner.group is None and not self.accumulating:
            return
        why = "and then the open accumulation cycle, in two steps: drop one of them first, "
        why = f"{why}by zero_grad() or handle.discard()"
        for name, p in self._runner.held().items():
            if p.grad is not None:
                why = why if self.accumulating else f"of {name}, which is not averaged"
                raise RuntimeError(f"step() would apply p.grad {why}")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if "param" in kwargs or len(args) > 2:
            # By its name: a class's own step may have another argument in this place.
            call = signature(type(optimizer).step).bind(*args, **kwargs)
            if call.arguments.get("param") is not None:
                return  # a step of one parameter, which is a part of the cycle
        self.step()
        for key in WRAPPERS.keys() & set[str]().union(*optimizer.param_groups):
            self._warn_once(
                f"{WRAPPERS[key]} (param_groups have its {key!r}) passes over parameters "
                "without p.grad, so all under gradient release: use the ordinary step"
            )
        since, params = self._runner.since_step, self._runner.params.values()
        if since is None:
            self._idle += any(p.requires_grad for p in params)
            # A scheduler may have called step() once.
            if self._idle > 1 and all(p.grad is None for p in params):
                self._warn_once(
                    "step() again before any hook has run, and without gradients. If there "
                    "was a backward, the model's parameters have been replaced since it "
                    "was prepared: prepare it after fully_shard and the like"
                )
            return
        for name, text in since.late(optimizer.numbers()).items():
            self._warn_once(text, name)
        if since.moves > 1:
            self._warn_once(
                f"{since.moves} backwards since the last step(), and each moved the same "
                "parameters: to accumulate, pass accumulation='buffer' or 'states' to "
                f"prepare_for_gradient_release. {PAUSE}"
            )
        parts = since.backwards > 1 and not since.repeats
        if parts and (self.options.accumulation_steps or self.options.grad_norm):
            self._warn_once(
                f"{since.backwards} backwards since the last step(), each with gradients "
                "of other parameters. If these are the blocks of one: " + NO_REENTRANCE
            )
        self._runner.since_step = SinceStep()

    def backward(
        self, loss_fn: Callable[[], Tensor], *, clip_global_norm: float | None = None
    ) -> Tensor:
        """Compute the loss and run its backward, which updates the parameters.

        With `clip_global_norm` both run twice, once to measure the norm of all gradients
        and once to apply them, scaled. In between, the random number generators of torch,
        Python and numpy and the model's buffers (BatchNorm's statistics) are restored.
        `loss_fn` must draw or change everything else in the same way again, and so numbers
        of a `numpy.random.Generator` of your own. Within an accumulation cycle only the
        last backward runs twice.

        Args:
            loss_fn: Runs the model and returns the loss, a tensor of one element.
            clip_global_norm: Replaces the handle's for this call.

        Returns:
            The loss, detached.

        Raises:
            TypeError: The loss instead of the function that computes it.
            RuntimeError: The second pass gave another loss than the first; nothing has
                been updated then.
        """
        if not callable(loss_fn):
            raise TypeError(
                f"handle.backward(loss_fn) got a {type(loss_fn).__name__}: allowed is a "
                "function that computes the loss, `lambda: model(x).mean()`, which may "
                "have to run twice"
            )
        if clip_global_norm is not None:
            usual = self.options
            self.options = replace(usual, clip_global_norm=clip_global_norm)
            try:
                return self.backward(loss_fn)
            finally:
                self._runner.options = usual
        if not self._hooks:
            raise RuntimeError(
                "the hooks were removed, or this is a copy: call loss.backward() and step()"
            )
        runner, model = self._runner, self._model and self._model()
        if not (self.options.two_pass and runner.moves_next()):
            loss = loss_fn()
            loss.backward()
            return loss.detach()
        if model is None:
            raise RuntimeError(
                "the module that was prepared is gone, so that its buffers cannot be put "
                "back between two passes: keep a reference to it"
            )
        measured, norms = measure(runner, model, loss_fn)
        if runner.skips(norms):
            return measured
        loss = loss_fn()
        if not torch.isclose(loss.detach(), measured, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"loss_fn gave {measured.item()} and then {loss.item()}: clip_global_norm "
                "needs it to do the same thing twice"
            )
        runner.grad_scale = runner.grad_scale_of(norms)
        try:
            loss.backward()
        finally:
            runner.grad_scale = None
        return loss.detach()


def releases_of(model: nn.Module) -> list[GradientRelease]:
    """Find a model's releases, even if made for another module with its parameters."""
    params = set(model.parameters())
    releases = [x for x in releases_on(params) if params.issuperset(x.params.values())]
    return list(dict.fromkeys([*by_model.get(model, []), *releases]))


def releases_on(params: Iterable[Tensor]) -> list[GradientRelease]:
    """Find the releases that have hooks on any of these parameters."""
    hooks = [hook for p in params for hook in torch_private.accumulate_hooks(p)]
    releases = [by_hook[hook].release() for hook in hooks if hook in by_hook]
    return list(dict.fromkeys([release for release in releases if release is not None]))


def has_foreign_hooks(p: Tensor) -> bool:
    """Return True if other code has hooks on p; remove hooks whose release is gone."""
    foreign = False
    for hook in torch_private.accumulate_hooks(p):
        attached = by_hook.get(hook)
        if attached is None:
            foreign = True
        elif attached.release() is None:
            for remover in attached.removers:
                remover.remove()
    return foreign


# The first of two passes, which measures the gradients and changes nothing.


def measure(
    runner: Runner, model: nn.Module, loss_fn: Callable[[], Tensor]
) -> tuple[Tensor, list[Norm]]:
    """Return the loss and its gradients' norms; restore .grad, buffers and random state."""
    params = list(runner.held().values())
    if any_distributed(params) and torch_private.has_unreduced_grads(params):
        raise RuntimeError(
            f"clip_global_norm={runner.options.clip_global_norm} after or in a backward "
            "that fully_shard does not reduce (set_requires_gradient_sync or "
            "set_requires_all_reduce) would measure a part of the gradient: reduce every "
            "backward, with accumulation='buffer'"
        )
    buffers = Buffers(model)
    grads: dict[Tensor, Tensor | None] = {
        p: p.grad.clone() for p in params if p.grad is not None
    }
    random_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    devices = {p.device.index for p in params if p.is_cuda}
    try:
        with runner.measuring() as backward, torch.random.fork_rng(sorted(devices)):
            loss = loss_fn()
            kinds, leaves = graph_of(loss)
            if "CheckpointFunctionBackward" in kinds:
                raise RuntimeError(NO_REENTRANCE)
            if any_distributed(params):
                # fully_shard's parameters are not leaves of the graph, so `inputs` cannot
                # keep the second pass from adding to the .grad of others again.
                for x in leaves.difference(params):
                    grads[x], x.grad = x.grad, None
                loss.backward()
            else:
                loss.backward(inputs=[p for p in params if p.requires_grad])
    finally:
        random.setstate(random_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        buffers.restore()
        for p, g in grads.items():
            p.grad = g
    sums = runner.cycle.buffer.items()
    rest = {p: x for p, x in sums if p not in backward.fired}
    norms = runner.norms_to_clip([*rest], [*rest.values()])
    return loss.detach(), backward.norms + norms


class Buffers:
    """A copy of a model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(m, dict(m._buffers)) for m in model.modules()]
        tensors = {x for _, table in self._tables for x in table.values() if x is not None}
        self._contents = [(x, x.clone()) for x in tensors]

    def restore(self) -> None:
        """Put back the buffers that have changed, and write to no others."""
        for module, table in self._tables:
            module._buffers.clear()
            module._buffers.update(table)
        for x, before in self._contents:
            # BatchNorm changes its buffers without counting up x._version.
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                if not torch.equal(x, before):
                    x.copy_(before)


def graph_of(loss: Tensor) -> tuple[set[str], set[Tensor]]:
    """Return the type names of the nodes in the loss's graph, and the leaf tensors."""
    nodes: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        waiting += [after for after, _ in node.next_functions]
    leaves = {x.variable for x in nodes if hasattr(x, "variable")}
    return {type(x).__name__ for x in nodes}, leaves
