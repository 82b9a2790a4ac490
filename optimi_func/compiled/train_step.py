"""A training step compiled as one graph: forward, backward, clipping and update."""

import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple, Unpack, cast, overload

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from optimi_func.compiled.update_op import running
from optimi_func.compiled.whole import Outcome, Program, StepGraph
from optimi_func.core import torch_private
from optimi_func.core.checks import check_apart, check_runs_kernels, is_expanded
from optimi_func.core.rule import InitOptions, Microbatch, PyTree
from optimi_func.core.torch_private import is_plain
from optimi_func.core.tree import FlatTree, TreeState, paths_in, without_none
from optimi_func.execution.sums import Part
from optimi_func.execution.trees import TreeUpdate
from optimi_func.pure.functional import FunctionalOptimizer

LossFn = Callable[[PyTree, PyTree], PyTree]


class TrainState(NamedTuple):
    """The parameters, buffers and optimizer state of a training run, as one pytree."""

    params: PyTree
    buffers: PyTree
    optimizer: PyTree  # the state of the optimizer


@overload
def train_step(
    model_or_fn: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    clip_global_norm: float | None = None,
) -> "ClassStep": ...


@overload
def train_step(
    model_or_fn: Callable[..., PyTree],
    loss_fn: LossFn,
    optimizer: FunctionalOptimizer,
    *,
    clip_global_norm: float | None = None,
) -> "PureStep": ...


def train_step(
    model_or_fn: Callable[..., PyTree],
    loss_fn: LossFn,
    optimizer: object,
    *,
    clip_global_norm: float | None = None,
) -> "ClassStep | PureStep":
    """Compile a whole training step into one graph: forward, backward, clipping and update.

    This function is experimental. For a batch x, with L = loss_fn:

        g <- grad L(model(x)),   norm <- |g| over all parameters
        g <- g * min(1, clip_global_norm / (norm + 1e-6))
        params, state <- optimizer(params, g, state)

    In the graph, each parameter is updated as soon as its gradient is complete and the
    parameter has been read for the last time. The gradient is then freed, as with gradient
    release, but without hooks. With clipping, all gradients are stored until their norm is
    known. A call of the step compiles a new graph if the batch has a new shape or the model
    is in a new mode, but not if a hyperparameter has changed.

    If the optimizer is an instance of a class (`optimi_func.AdamW(model.parameters(),
    ...)`), call `outcome = step(batch)`. This call replaces zero_grad, backward,
    clip_grad_norm_ and optimizer.step(), and writes to the same tensors as they do.
    Schedulers, state_dict and add_param_group work as usual, and you can alternate between
    compiled steps and ordinary steps.

    If the optimizer is pure (`optimi_func.adamw(lr=...)`), create the first state with
    `step.init()`, and call `state, outcome = step(state, batch)`. The state is a pytree of
    tensors, which you can save and load. Each step overwrites the state that you pass. The
    state from `step.init()` shares memory with the module. A loaded state does not, so
    steps with a loaded state do not change the module.

    Dropout draws a new mask at every step from the default generator. The masks are the
    same as in an eager run with the same seed.

    Args:
        model_or_fn: A module, or, with a pure optimizer, a function `(params, buffers,
            batch) -> output`, which may write to buffers. A module is called with one
            input: the batch, or the first element of a batch that is a tuple or list. If
            this input is a dict, its items become keyword arguments, and if it is a tuple,
            its elements become separate arguments. Graph breaks are not supported, and
            neither is activation checkpointing, because torch.func.grad cannot trace it.
            Frozen parameters of a module are constants.
        loss_fn: A function `(output, batch) -> loss` that returns a 0-d tensor, or a tuple
            `(loss, aux)` in which aux is a tree of tensors. The loss must not be scaled by
            a GradScaler.
        optimizer: An instance of an optimizer class of `optimi_func` that contains the
            module's parameters, or a pure optimizer that a factory has created. For a
            transform, such as a chain, write a function that calls torch.func.grad and the
            transform's step, and compile this function with torch.compile.
        clip_global_norm: The largest norm of all gradients together, as in
            torch.nn.utils.clip_grad_norm_. None neither limits nor measures the norm. inf
            only measures it.

    Raises:
        ValueError, TypeError: An argument is not supported. The error names the argument,
            and is raised here or in the call of the step, before anything is written.

    >>> from optimi_func import adamw
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(output, batch):
    ...     return (output - batch[1]).square().mean()
    >>> optimizer = adamw(lr=lambda step: 0.1 / (step + 1))
    >>> step = train_step(model, loss_fn, optimizer)
    >>> state = step.init()
    >>> batch = torch.ones(4, 2), torch.full((4, 1), 5.0)
    >>> state, first = step(state, batch)
    >>> state, second = step(state, batch)
    >>> bool(second.loss < first.loss)
    True
    """
    settings = _Settings(model_or_fn, loss_fn, clip_global_norm)
    _check(settings)
    if isinstance(optimizer, torch.optim.Optimizer):
        return ClassStep(settings, optimizer)
    if not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            f"optimizer={optimizer!r:.80}: allowed are optimi_func's classes, and those "
            "of factories, as optimi_func.adamw(lr=1e-3). For a transform or an optimizer "
            "of your own, compile a function that calls torch.func.grad and its step"
        )
    return PureStep(settings, optimizer)


GRAD_AND_STEP = "torch.func.grad and the step of a pure optimizer"


class _Settings(NamedTuple):
    model: Callable[..., PyTree]
    loss_fn: LossFn
    clip_global_norm: float | None

    def module(self) -> torch.nn.Module | None:
        return self.model if isinstance(self.model, torch.nn.Module) else None


def _check(settings: _Settings) -> None:
    model, loss_fn, clip = settings
    if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
        raise TypeError(
            "model_or_fn was returned by torch.compile, and this step compiles the model "
            "itself: pass the module that you gave to torch.compile (it has the same "
            "parameters)"
        )
    for name, x in (("model_or_fn", model), ("loss_fn", loss_fn)):
        if not callable(x):
            raise TypeError(f"{name}={x!r}: allowed are callables")
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError:
        allowed = "a function of two arguments, loss_fn(output, batch)"
        raise TypeError(f"loss_fn={loss_fn!r}: allowed is {allowed}") from None
    except ValueError:
        pass  # a builtin without a signature
    number = isinstance(clip, Real | None) and not isinstance(clip, bool)
    if not number or (clip is not None and not float(clip) > 0.0):
        raise (ValueError if number else TypeError)(
            f"clip_global_norm={clip!r}: allowed are positive numbers and None"
        )
    module = settings.module()
    modules = () if module is None else module.modules()
    # Only the wrapper can be recognised. The module inside of it is trained alone.
    if any(isinstance(m, DistributedDataParallel) for m in modules):
        raise ValueError(
            "model_or_fn is wrapped in DistributedDataParallel, and this step does not "
            "reduce its gradients: train it in an ordinary loop"
        )


class PureStep:
    """The step of a pure optimizer, called as `state, outcome = step(state, batch)`.

    `train_step` creates objects of this class.
    """

    def __init__(self, settings: _Settings, optimizer: FunctionalOptimizer) -> None:
        self._settings = settings
        self._optimizer = optimizer
        self._step_graph = StepGraph(settings.clip_global_norm)

    def init(
        self, params: PyTree = None, buffers: PyTree = None, **options: Unpack[InitOptions]
    ) -> TrainState:
        """Return the first state: parameters, buffers and a new optimizer state.

        Args:
            params: The parameter tree of a function. For a module, pass None: the state
                then contains the module's parameters that require a gradient, and its
                buffers, by name.
            buffers: A tree of the tensors to which the function writes. None means that
                there are no such tensors.
            **options: Options that are passed to the optimizer's own init, such as
                `storage`.

        Raises:
            ValueError, TypeError: Trees are passed for a module, or params is None for a
                function.
        """
        module = self._settings.module()
        if module is None and params is None:
            raise TypeError("params=None: a function needs a parameter tree")
        if module is not None:
            if params is not None or buffers is not None:
                raise TypeError(
                    "params, buffers: a module brings its own; to use others, call "
                    "`init()._replace(params=..., buffers=...)`"
                )
            params = {n: p.detach() for n, p in _trainable(module).items()}
            buffers = dict(module.named_buffers())
        inner = self._optimizer.init(params, **options)
        return TrainState(params, {} if buffers is None else buffers, inner)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Outcome]:
        """Return the state after one step with a batch, and the loss, aux and norm.

        `state` comes from `init` or from the previous step, and is overwritten.
        """
        check_runs_kernels(GRAD_AND_STEP, ())
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state={type(state).__name__}: allowed is a TrainState; make one with init"
            )
        self._check_names(state)
        self._check_tensors(without_none(state))
        with torch.inference_mode(False), torch.no_grad():
            return state, self._step(state, batch)

    def _check_names(self, state: TrainState) -> None:
        """Raise an error if the state of a module has other names than the module."""
        module = self._settings.module()
        if module is None:
            return
        for name, tree in (("params", state.params), ("buffers", state.buffers)):
            if not isinstance(tree, dict):
                raise TypeError(
                    f"{name}={type(tree).__name__}: allowed is a dict by name, because "
                    "model_or_fn is a module"
                )
        for name in state.params.keys() - dict(module.named_parameters()).keys():
            raise ValueError(f"params[{name!r}] is no parameter of model_or_fn")
        ours, given = sorted(dict(module.named_buffers())), sorted(state.buffers)
        if given != ours:
            raise ValueError(f"buffers has the names {given}, and model_or_fn {ours}")

    def _check_tensors(self, state: TrainState) -> None:
        """Raise an error if a leaf is not a tensor, or cannot be overwritten."""

        def name(i: int) -> str:
            return "state" + paths_in(state)[i]

        tensors = pytree.tree_leaves(state)
        for i, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name(i)}={x!r}: allowed are trees of tensors")
        # Buffers may share memory, because the graph writes to them as the model would.
        first = len(pytree.tree_leaves(state.params))
        buffers = range(first, first + len(pytree.tree_leaves(state.buffers)))
        written = [(i, x) for i, x in enumerate(tensors) if i not in buffers]
        for i, x in written:
            if x.numel() and is_expanded(x):
                raise ValueError(
                    f"{name(i)} is expanded (strides {x.stride()}), and the step cannot "
                    "write to it: clone it"
                )
        check_apart(written, name, "clone one of them")

    def _step(self, state: TrainState, batch: PyTree) -> Outcome:
        settings, optimizer = self._settings, self._optimizer
        params, params_spec = pytree.tree_flatten(without_none(state.params))
        buffers, buffers_spec = pytree.tree_flatten(state.buffers)
        params = [p.detach() for p in params]
        program = Program(settings.model, settings.loss_fn, params_spec, buffers_spec)
        tree_state = cast(TreeState, state.optimizer)
        tree = pytree.tree_unflatten(params, params_spec)
        # The graph makes gradients like their parameters, so these are checked instead.
        leaves = FlatTree.of(tree, tree, tree_state).check(optimizer)
        optimizer.warn(leaves)
        steps = TreeUpdate.of(optimizer, leaves, "kernels")

        parts: dict[int, Part] = {}
        with running(lambda *given: parts.update(steps.update(*given)), params):
            outcome = self._step_graph.step(program, params, buffers, batch)
        steps.finish_step(parts)
        tree_state.step.add_(1.0)
        return outcome


class ClassStep:
    """The step of an optimizer class, called as `outcome = step(batch)`.

    `train_step` creates objects of this class.
    """

    def __init__(self, settings: _Settings, optimizer: torch.optim.Optimizer) -> None:
        self._settings = settings
        self._optimizer: Any = optimizer
        self._step_graph = StepGraph(settings.clip_global_norm)
        self._params()

    def __call__(self, batch: PyTree) -> Outcome:
        """Take one step with a batch, and return the loss, aux and norm."""
        check_runs_kernels(GRAD_AND_STEP, ())
        optimizer, module = self._optimizer, cast(torch.nn.Module, self._settings.model)
        named = self._params()
        for name, p in named.items():
            _check_untouched(name, p)
        # Errors inside the graph come too late, after buffers or other groups are written.
        optimizer.check_train_mode("a step")
        for group in optimizer.param_groups:
            optimizer.bound_of(group, group["params"])  # raises for its numbers
        params, spec = pytree.tree_flatten(named)
        buffers, buffers_spec = pytree.tree_flatten(dict(module.named_buffers()))
        program = Program(module, self._settings.loss_fn, spec, buffers_spec)

        parts: dict[Tensor, Part] = {}

        def update(
            places: Sequence[int], grads: list[Tensor], microbatches: list[Microbatch]
        ) -> None:
            moved = [params[i] for i in places]
            parts.update(optimizer.update(moved, grads, microbatches, True, True))

        with torch.inference_mode(False), torch.no_grad(), running(update, params):
            detached = [p.detach() for p in params]
            outcome = self._step_graph.step(program, detached, buffers, batch)
            optimizer.finish_step(parts)
        # No parameter has a gradient, so this updates none. It runs the step hooks, and
        # schedulers count the step.
        optimizer.step()
        return outcome

    def _params(self) -> dict[str, Tensor]:
        """Return the parameters to train by name, or raise if the step cannot do it."""
        settings, optimizer = self._settings, self._optimizer
        module = settings.module()
        if not hasattr(optimizer, "releases"):
            raise TypeError(
                f"optimizer={type(optimizer).__name__}: allowed are optimi_func's "
                "classes, not torch.optim's"
            )
        if module is None:
            raise TypeError(
                f"model_or_fn={settings.model!r}: allowed with a class is a module that "
                "has the optimizer's parameters"
            )
        groups = optimizer.param_groups
        pre_hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        for refused, text in (
            (optimizer.releases, "gradient release: call remove_gradient_release first"),
            (optimizer.skips_steps, "skip_nonfinite='step': make it without"),
            (pre_hooks, "step pre-hooks, which would find no gradients: remove them"),
            (any(g["foreach"] for g in groups), "foreach=True: make it without"),
            (any(g["compile"] is False for g in groups), "compile=False: make it without"),
        ):
            if refused:
                raise ValueError(f"optimizer has {text}")
        trainable = _trainable(module)
        in_groups = dict.fromkeys(p for group in groups for p in group["params"])
        for name, p in trainable.items():
            if p not in in_groups:
                raise ValueError(
                    f"optimizer has not the parameter {name!r} of model_or_fn: add it, or "
                    "freeze it with requires_grad_(False)"
                )
        in_module = set(module.parameters())
        for p in in_groups:
            if p not in in_module:
                raise ValueError(
                    f"optimizer has a parameter of shape {tuple(p.shape)} that is not one "
                    "of model_or_fn's"
                )
        return trainable


def _trainable(module: torch.nn.Module) -> dict[str, Tensor]:
    pairs: list[tuple[str, Tensor]] = list(module.named_parameters())
    params = {name: p for name, p in pairs if p.requires_grad}
    if not params:
        raise ValueError("model_or_fn has no parameter that requires a gradient")
    return params


def _check_untouched(name: str, p: Tensor) -> None:
    """Raise if an ordinary backward would do more with p than this step."""
    if p.grad is not None:
        raise ValueError(
            f"the parameter {name!r} has a gradient already, and this step does not add to "
            "it: call optimizer.zero_grad() first"
        )
    if torch_private.accumulate_hooks(p) or p._backward_hooks:
        raise ValueError(
            f"the parameter {name!r} has gradient hooks, and this step does not run them: "
            "remove them"
        )
    if not is_plain(p):
        raise TypeError(
            f"the parameter {name!r} is a {type(p).__name__}: allowed are plain tensors"
        )
