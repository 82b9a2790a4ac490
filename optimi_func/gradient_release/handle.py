"""The handle of a gradient release, and which models and parameters have handles."""

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
from optimi_func.core.tree import TreeState
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

NO_REENTRANCE = (
    "reentrant checkpointing hides where a backward ends, which accumulation_steps, "
    "clip_global_norm and grad_norm must know: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Attached(NamedTuple):
    """The release to which a hook belongs, and how to remove the hook without it."""

    release: "ref[GradientRelease]"
    removers: list[RemovableHandle]


# Weak dictionaries instead of attributes, which copies of a model would share.
by_model: "WeakKeyDictionary[nn.Module, list[GradientRelease]]" = WeakKeyDictionary()
by_hook: "WeakKeyDictionary[Callable[..., object], Attached]" = WeakKeyDictionary()


class GradientRelease:
    """The handle of the hooks that update the parameters of a model with an optimizer.

    `prepare_for_gradient_release` creates handles. To detach the hooks, call `remove()`, or
    use the handle as a context manager. A copy of a handle (deepcopy, pickle) contains a
    copy of the optimizer and of everything that the handle stores, but has no hooks on any
    model.

    Attributes:
        optimizer: The optimizer that updates the parameters during the backward pass.
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
        """Return the parts of a copy; hooks and locks belong to one model and process."""
        arguments = None, self.optimizer, self.params, self.options
        return GradientRelease, arguments, (self.state_dict(), getattr(self, "state", None))

    def __setstate__(self, carried: tuple[dict[str, object], TreeState | None]) -> None:
        """Load the state that the copied handle stored."""
        state_dict, state = carried
        self.load_state_dict(state_dict)
        if state is not None:
            self.state = state

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters that the hooks update, by name."""
        return self._runner.params

    @property
    def options(self) -> ReleaseOptions:
        """All options of the handle.

        You can assign changed options between two backward passes.

        Raises:
            ValueError: Options exclude each other, or the accumulation changes while an
                accumulation cycle is open. Nothing has changed in this case.
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
        """The way in which several backward passes form one step.

        You can assign another value between two accumulation cycles.
        """
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
        """The number of backward passes per step, or None if only `step()` ends a step.

        You can assign another number.
        """
        return self._runner.options.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int | None) -> None:
        self.options = replace(self.options, accumulation_steps=steps)

    @property
    def state(self) -> TreeState:
        """The state of a FunctionalOptimizer, for the tree {name: parameter}.

        The hooks update the tensors of the state in place. You can assign another state.

        Raises:
            AttributeError: The optimizer is an instance of a class, which stores its state
                itself.
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
        """The global norm of the gradients in the last backward pass, if `grad_norm=True`.

        The norm is the 0-d tensor, on the device of the parameters, that clip_grad_norm_
        would have returned. It is measured before any clipping. With accumulation="buffer",
        it is the norm of the gradients that have been summed so far. It is None before the
        first backward pass.
        """
        return self._runner.grad_norm

    @property
    def skipped(self) -> dict[str, int]:
        """The number of skipped updates for each parameter name.

        Parameters without a skipped update are left out.
        """
        names, skipped = self._runner.names, self._runner.skipped
        counts = {names[p]: int(count) for p, count in skipped.items()}
        return {name: count for name, count in counts.items() if count}

    def state_dict(self) -> StateDict:
        """Return the data that the handle stores between backward passes.

        The dict contains the handle's own tensors, not copies. It does not contain the
        state of the optimizer, which is in `optimizer.state_dict()` if the optimizer is an
        instance of a class, and in `handle.state` if it is a FunctionalOptimizer. Before
        the first backward pass, the dict contains zeros in place of sums, so that
        torch.distributed.checkpoint can load into them.
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
        """Load the `state_dict` of another run's handle, to continue this run.

        If a parameter has been frozen since the state was saved, its count of skipped
        updates is dropped.

        Raises:
            TypeError, ValueError: The state does not fit this model or these options.
                Nothing is loaded in this case.
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
        """Detach the hooks, so that `optimizer.step()` updates all parameters again.

        If a cycle of accumulation="buffer" is open, its sums are added to the parameters'
        `.grad`.
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
        """Return the optimizer, the number of parameters, and whether hooks are there."""
        name, count = type(self.optimizer).__name__, len(self.params)
        return f"GradientRelease({name}, {count} parameters, attached={bool(self._hooks)})"

    def __enter__(self) -> "GradientRelease":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def step(self) -> None:
        """End the open accumulation cycle now, if there is one.

        `optimizer.step()` does the same if the optimizer is an instance of a class. With a
        FunctionalOptimizer, only this method ends a cycle early.
        """
        self._runner.close_cycle()

    def discard(self) -> None:
        """Drop the gradients of the open accumulation cycle, as zero_grad() drops p.grad.

        Raises:
            RuntimeError: accumulation is "states", which has already added the gradients to
                the state.
        """
        if self._runner.cycle.partially_updated:
            raise RuntimeError(
                "accumulation='states' cannot take gradients back out of the state: "
                "use accumulation='buffer'"
            )
        self._runner.cycle = Accumulation()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not update the parameters.

        Gradients stay in `p.grad`, where you can read them, or drop them with
        `zero_grad()`. A GAN needs this context for the generator's backward pass, which
        must not update the discriminator. Gradients that you do not drop become part of the
        next step: a later backward pass outside the context adds its gradients to them, or
        `optimizer.step()` applies them without the clipping of this handle. An open
        accumulation cycle continues after the context. Contexts may be nested, and apply to
        all threads.

        Raises:
            RuntimeError: The context is entered inside a running backward pass.

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
        """Return a context in which replicas sum their gradients and do not communicate.

        The next backward pass outside the context, or `step()`, averages and applies the
        sums.

        Raises:
            RuntimeError: The model was prepared without `process_group`, or with
                accumulation="states".

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
        """Warn if zero_grad() cannot drop gradients that the caller expects it to drop."""
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
        """Compute the loss and run the backward pass, which updates the parameters.

        With `clip_global_norm`, the forward and the backward pass run twice: the first run
        measures the norm of all gradients, and the second run applies the scaled gradients.
        Before the second run, the random number generators of torch, Python and numpy are
        restored, and so are the model's buffers, such as BatchNorm's statistics. `loss_fn`
        must draw or change everything else in the same way in both runs, for example the
        numbers from a `numpy.random.Generator` of your own. Within an accumulation cycle,
        only the last backward pass runs twice.

        Args:
            loss_fn: A function without arguments that runs the model and returns the loss,
                a tensor with one element.
            clip_global_norm: Replaces the `clip_global_norm` of the handle for this call.

        Returns:
            The loss, detached.

        Raises:
            TypeError: loss_fn is the loss instead of a function that computes it.
            RuntimeError: The second run gave a different loss than the first run. Nothing
                has been updated in this case.
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
        if self.options.two_pass and self._runner.moves_next():
            return self._backward_twice(loss_fn)
        loss = loss_fn()
        loss.backward()
        return loss.detach()

    def _backward_twice(self, loss_fn: Callable[[], Tensor]) -> Tensor:
        """Measure the norm of all gradients, then run again and apply the scaled gradients.

        Returns:
            The loss, detached.

        Raises:
            RuntimeError: The model is gone, or the second run gave a different loss.
        """
        runner, model = self._runner, self._model and self._model()
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
