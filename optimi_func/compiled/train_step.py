"""The whole training step: forward, backward, clipping and update compiled together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func import _torch
from optimi_func._checks import warn
from optimi_func._functional import FunctionalOptimizer
from optimi_func._rule import (
    WHOLE_BATCH,
    Microbatch,
    PureOptimizer,
    PyTree,
    Storage,
    check_pure,
)
from optimi_func._tree import FlatTree, TreeState
from optimi_func.compiled.train_arguments import check_arguments, check_single
from optimi_func.compiled.update_op import running
from optimi_func.compiled.whole import (
    Inputs,
    Program,
    StepGraph,
    TracedUpdate,
    no_grad_context,
)
from optimi_func.execution.tensors import is_expanded, is_plain
from optimi_func.execution.trees import TreeStep

LossFn = Callable[[Any, Any], Any]


class TrainState(NamedTuple):
    """Everything that changes from step to step: a pytree of tensors, to save and load."""

    params: PyTree
    buffers: PyTree
    optimizer: Any  # the optimizer's own state


class Outcome(NamedTuple):
    """What a training step returns beside the new state."""

    loss: Tensor  # 0-d; the mean over the parts of the batch
    aux: PyTree  # what loss_fn returned beside it, or None; stacked over the parts
    norm: Tensor | None  # 0-d: of all gradients, before clipping; None without clipping


@overload
def train_step(
    model_or_fn: torch.nn.Module,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    accumulate: int = 1,
    clip_global_norm: float | None = None,
    donate: bool = True,
) -> "ClassStep": ...


@overload
def train_step(
    model_or_fn: Callable[..., Any],
    loss_fn: LossFn,
    optimizer: PureOptimizer,
    *,
    accumulate: int = 1,
    clip_global_norm: float | None = None,
    donate: bool = True,
) -> "PureStep": ...


def train_step(
    model_or_fn: Callable[..., Any],
    loss_fn: LossFn,
    optimizer: Any,
    *,
    accumulate: int = 1,
    clip_global_norm: float | None = None,
    donate: bool = True,
) -> "ClassStep | PureStep":
    """A training step as one graph, in which a gradient lives until its update.

    For the batch in `accumulate` equal parts x_1..x_k, with L = loss_fn:

        g <- mean_i grad L(model(x_i)),   norm <- |g| over all parameters
        g <- g * min(1, clip_global_norm / (norm + 1e-6))
        params, state <- optimizer(params, g, state)

    The compiler puts each update where its gradient is complete and the parameter has
    been read for the last time: gradient release, without hooks. With clipping all
    gradients are held until their norm is known, and with accumulate > 1 their sum is
    (float32; float64 for float64). A call of the result compiles where a batch has a new
    shape or the model a new mode, and never because a number of the optimizer is new.

    With a class (`optimi_func.AdamW(model.parameters(), ...)`) it is called as
    `outcome = step(batch)` and stands for zero_grad, backward, clip_grad_norm_ and
    optimizer.step(). The model's parameters and buffers, `optimizer.state` and step counts
    are where those would have left them; schedulers, state_dict and add_param_group work
    as ever, and such steps may alternate with ordinary ones.

    With `optimi_func.adamw(lr=...)`, its siblings, or a transform of them, it is called as
    `state, outcome = step(state, batch)`, on from `step.init()`. The state is a pytree of
    tensors: save it, load it, go on. A loaded one is not the module's own any more, which
    is then left as it is. The step of a transform is traced into the graph leaf by leaf,
    which compiles longer.

    Dropout draws new masks at every step, those that an eager run draws from the same
    seed: the generator is the default one and moves on.

    Args:
        model_or_fn: A module, called with a batch (a tuple's or list's first element; a
            dict as keywords; a tuple as several arguments), or, with a functional
            optimizer, a function `(params, buffers, batch) -> output`, which may write to
            buffers. Without graph breaks, and without activation checkpointing, which
            torch.func.grad cannot trace. A module's frozen parameters are constants.
        loss_fn: `(output, batch) -> loss`, a 0-d tensor not scaled by any GradScaler, or
            `(loss, aux)` with aux a tree of tensors. With accumulate > 1 called on each
            part, and meant as a mean over its examples: the whole batch's gradient is the
            mean of the parts'.
        optimizer: A class of `optimi_func` that owns the module's parameters, or a
            functional optimizer.
        accumulate: Equal parts of the batch, along the first dimension of its tensors,
            that go through the model one after the other. More than 1 takes two graphs.
        clip_global_norm: Largest norm of all gradients together, as in
            torch.nn.utils.clip_grad_norm_; None for no limit, inf to measure alone.
        donate: Overwrite the parameters, buffers and optimizer state passed in, and
            return them. False copies them first, at the cost of their memory: nothing
            passed in changes. A class takes True alone.

    Returns:
        The step, to be called with a batch, or with a state and a batch.

    Raises:
        ValueError, TypeError: An argument that cannot be honoured, naming it, here or at
            the call; before anything is written.

    >>> from optimi_func import adamw
    >>> model = torch.nn.Linear(2, 1)
    >>> def loss_fn(output, batch):
    ...     return (output - batch[1]).square().mean()
    >>> step = train_step(model, loss_fn, adamw(lr=lambda step: 0.1 / (step + 1)))
    >>> state = step.init()
    >>> batch = torch.ones(4, 2), torch.full((4, 1), 5.0)
    >>> state, first = step(state, batch)
    >>> state, second = step(state, batch)
    >>> bool(second.loss < first.loss)
    True
    """
    check_arguments(model_or_fn, loss_fn, accumulate, clip_global_norm, donate)
    if isinstance(model_or_fn, torch.nn.Module):
        check_single(model_or_fn)
    settings = _Settings(model_or_fn, loss_fn, accumulate, clip_global_norm, donate)
    if isinstance(optimizer, torch.optim.Optimizer):
        return ClassStep(settings, optimizer)
    pure = check_pure("train_step", optimizer, "optimi_func's classes, ")
    return PureStep(settings, pure)


class _Settings(NamedTuple):
    model: Callable[..., Any]
    loss_fn: LossFn
    accumulate: int
    clip_global_norm: float | None
    donate: bool

    def module(self) -> torch.nn.Module | None:
        return self.model if isinstance(self.model, torch.nn.Module) else None


class PureStep:
    """`state, outcome = step(state, batch)`: made by `train_step`."""

    def __init__(self, settings: _Settings, optimizer: PureOptimizer) -> None:
        self._settings = settings
        self._optimizer = optimizer
        self._step_graphs: dict[pytree.TreeSpec, StepGraph] = {}

    def init(
        self,
        params: PyTree = None,
        buffers: PyTree = None,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
        storage: Storage | str | None = None,
    ) -> TrainState:
        """A state to begin with: these tensors, and the optimizer's fresh state.

        Args:
            params: Parameter tree; for a module None: its own parameters that require
                a gradient, by name, and its own buffers.
            buffers: Tree of what the function writes to; None has none.
            kahan_sum: As the optimizer's own init takes it.
            state_dtype: Likewise.
            storage: Likewise.

        Raises:
            ValueError, TypeError: Trees for a module, or none for a function.
        """
        module = self._settings.module()
        if module is None:
            if params is None:
                raise TypeError(
                    "params=None: a function has no parameters of its own, pass its tree"
                )
            buffers = {} if buffers is None else buffers
        else:
            if params is not None or buffers is not None:
                raise TypeError(
                    "params, buffers: a module brings its own; for others, "
                    "`init()._replace(params=..., buffers=...)`"
                )
            params = {n: p.detach() for n, p in _trainable(module).items()}
            buffers = dict(module.named_buffers())
        inner = self._optimizer.init(
            params, kahan_sum=kahan_sum, state_dtype=state_dtype, storage=storage
        )
        return TrainState(params, buffers, inner)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Outcome]:
        """One step.

        Args:
            state: From `init` or the step before; overwritten, where donate=True.
            batch: What the model and loss_fn are called with.

        Returns:
            The state after the step, and its loss, aux and norm.
        """
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state={type(state).__name__}: allowed is a TrainState; make one with init"
            )
        self._check(state)
        with no_grad_context():
            if not self._settings.donate:
                state = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), state)
            return state, self._step(state, batch)

    def _check(self, state: TrainState) -> None:
        module = self._settings.module()
        if module is not None:
            ours = dict(module.named_parameters())
            for name_of, tree in (("params", state.params), ("buffers", state.buffers)):
                if not isinstance(tree, dict):
                    raise TypeError(
                        f"{name_of}={type(tree).__name__}: allowed is a dict by name, as "
                        "model_or_fn is a module"
                    )
            for name in state.params:
                if name not in ours:
                    raise ValueError(f"params[{name!r}] is no parameter of model_or_fn")
            names = [name for name, _ in module.named_buffers()]
            if set(state.buffers) != set(names):
                raise ValueError(
                    f"buffers has the names {sorted(state.buffers)}, and model_or_fn "
                    f"{sorted(names)}"
                )
        tensors = pytree.tree_leaves(state)
        places: dict[Any, int] = {}
        for i, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                raise TypeError(f"{_path(state, i)}={x!r}: allowed are trees of tensors")
        if not self._settings.donate:
            return
        # Buffers may share memory: the graph writes to them as the model itself would.
        first = len(pytree.tree_leaves(state.params))
        buffers = range(first, first + len(pytree.tree_leaves(state.buffers)))
        for i, x in enumerate(tensors):
            if i in buffers or not x.numel():
                continue
            if is_expanded(x):
                raise ValueError(
                    f"{_path(state, i)} is expanded (strides {x.stride()}), which "
                    "donate=True cannot write to: clone it, or pass donate=False"
                )
            other = places.setdefault((x.device, x.data_ptr()), i)
            if other != i:
                raise ValueError(
                    f"{_path(state, i)} and {_path(state, other)} are the same memory, "
                    "which donate=True would write to twice: clone one, or pass "
                    "donate=False"
                )

    def _step(self, state: TrainState, batch: PyTree) -> Outcome:
        settings, optimizer = self._settings, self._optimizer
        params, params_spec = pytree.tree_flatten(state.params)
        buffers, buffers_spec = pytree.tree_flatten(state.buffers)
        flat, spec = pytree.tree_flatten(state.optimizer)
        params = [p.detach() for p in params]
        program = Program(settings.model, settings.loss_fn, params_spec, buffers_spec)
        inputs = Inputs(params, buffers, flat, _opaque_true(params), batch)
        if spec not in self._step_graphs:
            self._step_graphs[spec] = _step_graph(
                settings, _traced(optimizer, params_spec, spec)
            )
        whole = self._step_graphs[spec]
        if not isinstance(optimizer, FunctionalOptimizer):
            return _tell(whole, program, inputs)
        tree_state = cast(TreeState, state.optimizer)
        tree = pytree.tree_unflatten(params, params_spec)
        # Gradients are made in the graph, like their parameters: those stand for them.
        leaves = FlatTree.check(optimizer.rule, tree, tree, tree_state)
        warn(optimizer.likely_mistakes() + leaves.stuck_moments(optimizer))
        steps = TreeStep(optimizer, leaves, "kernels")

        def update(
            places: Sequence[int], grads: list[Tensor], scale: Tensor | None
        ) -> None:
            steps.update(places, grads, [_microbatch(scale)] * len(grads))

        with running(update, params):
            outcome = _tell(whole, program, inputs._replace(state=[]))
        tree_state.step.add_(1.0)
        return outcome


def _path(state: TrainState, index: int) -> str:
    """A leaf's name in errors; computed only for an error, as it is slow."""
    keyed, _ = pytree.tree_flatten_with_path(state)
    return "state" + pytree.keystr(keyed[index][0])


def _traced(
    optimizer: PureOptimizer, params_spec: pytree.TreeSpec, state_spec: pytree.TreeSpec
) -> TracedUpdate | None:
    """The step of a transformed optimizer on flat lists; None where kernels do it."""
    if isinstance(optimizer, FunctionalOptimizer):
        return None

    def update(
        params: list[Tensor], grads: list[Tensor | None], state: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        new_params, new_state = optimizer.step(
            pytree.tree_unflatten(params, params_spec),
            pytree.tree_unflatten(grads, params_spec),
            pytree.tree_unflatten(state, state_spec),
        )
        return pytree.tree_leaves(new_params), pytree.tree_leaves(new_state)

    return update


def _microbatch(scale: Tensor | None) -> Microbatch:
    """A whole batch, scaled; by a number on the host, if it is there."""
    if scale is None:
        return WHOLE_BATCH
    on_host = scale.device.type == "cpu"
    return WHOLE_BATCH._replace(grad_scale=scale.item() if on_host else scale)


class ClassStep:
    """`outcome = step(batch)`: made by `train_step` for a class."""

    def __init__(self, settings: _Settings, optimizer: torch.optim.Optimizer) -> None:
        self._settings = settings
        self._optimizer: Any = optimizer
        self._step_graph = _step_graph(settings, None)
        self._params()

    def __call__(self, batch: PyTree) -> Outcome:
        """One step: what zero_grad, backward, clip_grad_norm_ and step() do.

        Args:
            batch: What the model and loss_fn are called with.

        Returns:
            Its loss, aux and norm.
        """
        optimizer, module = self._optimizer, cast(torch.nn.Module, self._settings.model)
        named = self._params()
        for name, p in named.items():
            _check_untouched(name, p)
        # In the graph it would be too late: buffers and other groups are written by then.
        optimizer.check_train_mode("a step")
        optimizer.check_numbers()
        params, spec = pytree.tree_flatten(named)
        buffers, buffers_spec = pytree.tree_flatten(dict(module.named_buffers()))

        def update(
            places: Sequence[int], grads: list[Tensor], grad_scale: Tensor | None
        ) -> None:
            microbatches = [_microbatch(grad_scale)] * len(grads)
            some = [params[i] for i in places]
            optimizer.update(some, grads, microbatches, write=True, count=True)

        program = Program(module, self._settings.loss_fn, spec, buffers_spec)
        detached = [p.detach() for p in params]
        inputs = Inputs(detached, buffers, [], _opaque_true(detached), batch)
        with no_grad_context(), running(update, params):
            outcome = _tell(self._step_graph, program, inputs)
        # There are no gradients, so this moves nothing; it runs step hooks and tells
        # schedulers that a step was made.
        optimizer.step()
        return outcome

    def _params(self) -> dict[str, Tensor]:
        """What the step trains, by name.

        Raises:
            ValueError, TypeError: An optimizer that it could not stand for.
        """
        settings, optimizer = self._settings, self._optimizer
        module = settings.module()
        if not hasattr(optimizer, "releases"):
            raise TypeError(
                f"optimizer={type(optimizer).__name__}: allowed are optimi_func's "
                "classes, not torch.optim's"
            )
        if module is None:
            raise TypeError(
                f"model_or_fn={settings.model!r}: allowed with a class is a module, whose "
                "parameters the optimizer has"
            )
        if not settings.donate:
            raise ValueError(
                "donate=False keeps what is passed in, but a class stays in step with its "
                "model: pass optimi_func.adamw(lr=...) or its kin, or donate=True"
            )
        if optimizer.releases:
            raise ValueError(
                "optimizer has gradient release attached, whose hooks this step would not "
                "call: remove_gradient_release first"
            )
        if getattr(optimizer, "_optimizer_step_pre_hooks", None):
            raise ValueError(
                "optimizer has step pre-hooks, which would find no gradients: remove them"
            )
        for group in optimizer.param_groups:
            if group["foreach"] or group["compile"] is False:
                mode = "foreach=True" if group["foreach"] else "compile=False"
                raise ValueError(
                    f"optimizer has {mode}, and this step is compiled: make it without"
                )
        return _owned(module, optimizer)


def _owned(module: torch.nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The module's parameters that require a gradient, all of them the optimizer's."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ids = set(map(id, held))
    trainable = _trainable(module)
    for name, p in trainable.items():
        if id(p) not in ids:
            raise ValueError(
                f"optimizer has not the parameter {name!r} of model_or_fn: add it, or "
                "freeze it with requires_grad_(False)"
            )
    ours = set(map(id, module.parameters()))
    for p in held:
        if id(p) not in ours:
            raise ValueError(
                f"optimizer has a parameter of shape {tuple(p.shape)} that is not one of "
                "model_or_fn's"
            )
    return trainable


def _trainable(module: torch.nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    found.update((n, p) for n, p in module.named_parameters() if p.requires_grad)
    if not found:
        raise ValueError("model_or_fn has no parameter that requires a gradient")
    return found


def _check_untouched(name: str, p: Tensor) -> None:
    """Refuse what an ordinary backward would do and this one would not."""
    if p.grad is not None:
        raise ValueError(
            f"the parameter {name!r} has a gradient already, which this step would not "
            "add to: call optimizer.zero_grad() first"
        )
    if _torch.accumulate_hooks(p) or p._backward_hooks:
        raise ValueError(
            f"the parameter {name!r} has gradient hooks, which this step would not call: "
            "remove them"
        )
    if not is_plain(p):
        raise TypeError(
            f"the parameter {name!r} is a {type(p).__name__}: allowed are plain tensors"
        )


def _step_graph(settings: _Settings, update: TracedUpdate | None) -> StepGraph:
    return StepGraph(settings.accumulate, settings.clip_global_norm, update)


def _opaque_true(params: list[Tensor]) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=params[0].device)


def _tell(whole: StepGraph, program: Program, inputs: Inputs) -> Outcome:
    outputs, aux = whole.step(program, inputs)
    return Outcome(outputs.loss, aux, outputs.norm)
