"""The base class of all optimizers: a torch.optim.Optimizer that runs a pure one.

Param groups hold hyperparameters under torch's names, and every step reads them again, so
that schedulers work. `state[p]` is a flat dict: `step`, the rule's tensors and, if there is
a compensation, `kahan_comp`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar
from difflib import get_close_matches
from functools import partial, wraps
from itertools import chain
from operator import attrgetter, is_
from typing import Any, ClassVar, Literal, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor

from optimi_func.classes.copies import Work, check_unscaled, finite_works
from optimi_func.classes.extras import check_runs, found_extras
from optimi_func.classes.fields import Closure, Fields, Float, Params
from optimi_func.classes.groups import (
    TORCHS,
    check_modes,
    check_numbers,
    check_skip,
    executor_of,
    likely_mistakes,
    normalize_group,
    number_defaults,
    path_of,
    plain_numbers,
    take_torchs_decay,
    warn_of_torchs_order,
)
from optimi_func.classes.step import Steps
from optimi_func.core.checks import (
    bind_call,
    check_accumulates,
    check_no_module,
    check_taken,
    warn,
    warn_user,
)
from optimi_func.core.removed import Removed
from optimi_func.core.rule import WHOLE_BATCH, Microbatch, Scalar, StorageLike
from optimi_func.core.storage import group_storage
from optimi_func.core.torch_private import between_graphs, unwrapped, watched_if_needed
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.sums import Part
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry, Group
from optimi_func.state.entry import ensure_state, insert_made, wants_state_alone
from optimi_func.transforms.gradients import GradientTransform

P = ParamSpec("P")
T = TypeVar("T")
_grad, _is_none = attrgetter("grad"), partial(is_, None)
# optimi's users pass these options by position, behind decouple_lr and max_lr.
POSITIONAL = ("kahan_sum", "foreach", "triton", "gradient_release")


class BaseOptimizer(Fields, Steps):
    """Base class of all optimizers: `step` over param groups, state, loading, checks.

    A subclass declares its hyperparameters as fields and sets `factory`, the pure optimizer
    that it runs. Every step reads the factory's keywords from the param group.

    Args:
        params: Parameters, named parameters, or param groups.
        defaults: Options of groups that do not set them: the subclass's and those below.

    Every optimizer takes these options:

    Args:
        lr: Learning rate, a number or a tensor of one element.
        decouple_lr: Fully decouple weight decay from lr by multiplying it by lr / max_lr.
        max_lr: The largest lr that will be scheduled, if that is not the lr given; for
            decouple_lr and corrected_decay.
        kahan_sum: Compensated summation: None for every float16 and bfloat16 parameter,
            False for none.
        foreach: Eager multi-tensor step, without a compiler.
        triton: optimi's name for compile; True asks for the compiled step, None and False
            change nothing.
        gradient_release: Allow the step to be fused into backward, parameter by
            parameter.
        compile: None compiles if a toolchain is found, True raises if none is, False runs
            eagerly.
        maximize: Maximize the objective instead of minimizing it.
        capturable: Keep step counts and coefficients on the device, for CUDA graphs.
        state_dtype: The moments' dtype, or its name; None takes each parameter's.
        storage: Storage of parameters and moments instead of kahan_sum and state_dtype:
            "compact", "exact" or `Storage(param, moments)`.
        cautious_decay: Decay an element only if the step moves it towards 0, or not at
            all (arXiv:2510.12402); not for decay that joins the gradient.
        corrected_decay: Multiply weight_decay by lr^2 / max_lr, instead of lr, so that it
            fades as the schedule does (AdamC, arXiv:2506.02285). Not with decouple_lr.
        cautious: Move an element only if direction and gradient have the same sign, and
            multiply its move by one over the share of such elements, at most 1000
            (arXiv:2411.16085). Decay does not change.
        skip_nonfinite: "step" leaves out a step, in all processes, if one has a gradient
            with an inf or NaN; `optimizer.skipped_steps` counts.
        process_group: The processes that hold copies of plain parameters and have equal
            gradients, as under DistributedDataParallel: each maps its share of Muon's and
            SOAP's matrices, bit for bit. A copy (deepcopy, pickle) has none.
        transforms: Gradient transforms, as `clip_param_norm(1.0)`, that the gradients of a
            step go through first.

    Raises:
        ValueError: A hyperparameter out of its range, or options that exclude each other.
        TypeError: A parameter that is no dense floating or complex tensor.
    """

    params: InitVar[Params]
    lr: Float
    _: KW_ONLY
    decouple_lr: InitVar[bool] = False
    max_lr: InitVar[Scalar | None] = None
    kahan_sum: InitVar[bool | None] = None
    foreach: InitVar[bool | None] = None
    triton: InitVar[bool | None] = None
    gradient_release: InitVar[bool] = False
    compile: InitVar[bool | None] = None
    maximize: InitVar[bool] = False
    capturable: InitVar[bool] = False
    state_dtype: InitVar[torch.dtype | str | None] = None
    storage: InitVar[StorageLike | None] = None
    cautious_decay: InitVar[bool] = False
    corrected_decay: InitVar[bool] = False
    cautious: InitVar[bool] = False
    skip_nonfinite: InitVar[Literal["step", False]] = False
    process_group: InitVar["torch.distributed.ProcessGroup | None"] = None
    transforms: InitVar[Sequence[GradientTransform]] = ()

    _positional = ("decouple_lr", "max_lr", *POSITIONAL)

    def __init_subclass__(cls) -> None:
        """Make the constructor, and read `keywords` from the factory's signature."""
        super().__init_subclass__()
        if "factory" not in cls.__dict__:
            return
        cls.keywords = tuple(inspect.signature(cls.factory).parameters)
        missing = [name for name in cls.keywords if name not in cls._parameters]
        if cls.keywords[0] != "lr" or missing:
            raise TypeError(
                f"{cls.__name__}.factory={cls.factory.__name__} takes {cls.keywords}: "
                f"allowed are lr first, and fields of the class, which lacks {missing}"
            )
        before, cls._call = cls._call, cls._signature()
        if "__init__" in vars(cls) or cls._call == before:
            return  # with the constructor that a user wrote

        def __init__(self: BaseOptimizer, *args: object, **kwargs: object) -> None:
            kind = type(self)  # which may have fields besides
            take_torchs_decay(kwargs, kind.factory, kind.keywords)
            theirs = {name: kwargs.pop(name) for name in TORCHS if name in kwargs}
            bound = bind_call(kind.__name__, kind._call, args, kwargs)
            (_, params), *defaults = bound.items()
            BaseOptimizer.__init__(self, params, {**dict(defaults), **theirs})
            warn_of_torchs_order(kind._call.parameters, args)

        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = cls._call.replace(  # pyright: ignore[reportFunctionMemberAccess]
            parameters=[self, *cls._call.parameters.values()]
        )
        __init__.__qualname__ = f"{cls.__qualname__}.__init__"
        cls.__init__ = __init__

    @between_graphs
    def __init__(self, params: Params, defaults: Group) -> None:
        check_no_module(params)
        self._begin(defaults)
        self._constructed = False
        super().__init__(params, plain_numbers(defaults))
        self._constructed = True
        self._warn_of_mistakes(0)

    def _begin(self, options: Group) -> None:
        """Make the attributes. Options that are no group's are taken out."""
        self.optimizer_accumulation = False
        self._take_options(options)
        self.skips_steps = check_skip(options.pop("skip_nonfinite", False))
        self.skipped_steps: int | Tensor = 0  # a tensor if capturable
        self.releases = []
        self._constructed = True
        self._clear_caches()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; options that it does not set are those of the constructor.

        Raises:
            TypeError: A parameter that is no dense floating or complex tensor.
            ValueError: A hyperparameter out of its range; nothing is added then.
        """
        if "releases" not in self.__dict__:  # a subclass calls torch's __init__ alone
            usual = {name: x.default for name, x in self._parameters.items()}
            del usual["params"]
            self.defaults = {**usual, **self._fixed, **self.defaults}
            self._begin(self.defaults)
        count = len(self.param_groups)
        if isinstance(param_group, dict):  # else torch raises
            take_torchs_decay(param_group, *self._factory_of(param_group))
        unwrapped(super().add_param_group)(param_group)
        try:
            group = self.param_groups[count]
            keywords = self._factory_of(group)[1]
            group.update(plain_numbers({name: group[name] for name in keywords}))
            normalize_group(group, self._number_defaults(group))
            rule = self.rule_of(group)
            check_runs(group, rule)
            if "transforms" in group:
                raise TypeError("transforms of a param group: they are the optimizer's")
            self.extras = {} if rule.extras else self.extras
            for p in group["params"] if rule.refuses or rule.whole else ():
                check_taken(rule, path_of(group, p), p)
            check_modes(group)
            if rule.join is not None and (name := rule.running._fields[0]) in group:
                raise ValueError(
                    f"a group with {name}={group[name]!r}: it is computed by each step, "
                    "and allowed is a group without it"
                )
            if rule.join is not None:
                self._publish_running(group)
            if self._constructed:
                self._warn_of_mistakes(count)
        except Exception:
            del self.param_groups[count:]
            raise

    def _number_defaults(self, group: Group) -> Group:
        return self._under_keys(number_defaults(self._factory_of(group)[0]))

    def _check_numbers(self, group: Group) -> None:
        check_numbers(group, self._number_defaults(group))

    def _warn_of_mistakes(self, first: int) -> None:
        """Warn once of options in `param_groups[first:]` that are probably a mistake."""
        self._check_group()
        bounds = list(map(self.bound_of, self.param_groups))
        warn(likely_mistakes(self.param_groups, bounds, first))
        for group in self.param_groups[first:]:
            options = {*self.defaults, *self._factory_of(group)[1]}
            for key in group.keys() - {*options, "params", "param_names"}:
                for name in get_close_matches(key, options, 1, 0.85):
                    warn_user(f"a group has {key!r}, unused: did you mean {name!r}?")

    @watched_if_needed
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Closure | None = None, param: Tensor | None = None, **extras: object
    ) -> Any:
        """Update every parameter that has a gradient, or one parameter.

        As in torch, several threads may call this without an error; if they write to the
        same parameter at the same time, the result is that of either.

        A first step with every lr and every gradient 0 only makes the state, as
        `init_state`, because torch.distributed.checkpoint takes such a step to make it.
        Call `init_state` before if it is to be counted, as by a warmup that begins at 0.

        Args:
            closure: Reevaluates the model and returns the loss; run once, with grad.
            param: The one parameter to update, for an optimizer made with
                `gradient_release=True`. Not together with closure.
            **extras: What the direction of an own rule takes besides, by name: a 0-d tensor
                for all, a dict by parameter or by its name, or a list with one for each.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError, TypeError: A gradient that does not fit its parameter, closure
                with param, or a param without gradient release.
            RuntimeError: A step that a CUDA graph being captured could not repeat. Nothing
                is written if it raises.
        """
        self.check_train_mode("step()")
        if param is not None:
            if closure is not None:
                raise ValueError("step takes a closure or a param, not both")
            self.step_params([param])
            return None
        fresh = not (self._has_stepped and self.state)
        if closure is None and fresh and wants_state_alone(self.state, self.param_groups):
            self.init_state()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works: list[Work] = []
        for group in self.param_groups:
            params: list[Tensor] = group["params"]
            grads: list[Tensor] = list(map(_grad, params))
            if any(map(_is_none, grads)):
                params = [p for p in params if p.grad is not None]
                grads = list(map(_grad, params))
            works.append((group, params, grads, None))
        if self._idle < 2 and not self.releases:
            self._note_idle([p for _, params, _, _ in works for p in params])
        scaled = self.found_inf is not None or self.grad_scale is not None
        if (self.skips_steps or scaled) and not (works := finite_works(self, works)):
            return loss
        if self.rewriters:
            extras = self._tell_transforms(extras)
        if extras or self.extras is not None:
            self.extras = found_extras(self, {**self.given, **extras})
        write = not self.optimizer_accumulation
        if parts := self._update(works, write, count=True):
            self.finish_step(parts)
        self.extras, self._told = self.extras and {}, {}
        return loss

    def init_state(self) -> None:
        """Make the state of every trainable parameter that has none.

        A parameter's first step does so too. Call this before loading a checkpoint into
        existing tensors, as torch.distributed.checkpoint does. No parameter moves, and no
        step is counted.
        """
        made: dict[Tensor, Entry] = {}
        for group in self.param_groups:
            how = self.rule_of(group), group_storage(group), group["capturable"]
            for p in group["params"]:
                if p.requires_grad and "step" not in self.state.get(p, {}):
                    with kernel_context(p.device):
                        ensure_state(self.state, made, path_of(group, p), p, *how)
                        self._ensure(group, p, made)
        self._common()
        insert_made(self.state, made)

    def step_params(self, params: list[Tensor]) -> None:
        """Update these parameters now, for example in a backward hook.

        With `optimizer_accumulation` only their state moves. Groups are looked up at every
        call, so that schedules, manual changes and loaded states take effect.

        Raises:
            ValueError: Without `gradient_release=True`, for a parameter without a
                gradient, or one that is in no group; nothing is written then.
        """
        if not self.defaults["gradient_release"]:
            raise ValueError(
                "step(param=...) is for an optimizer made with gradient_release=True"
            )
        if self.skips_steps:
            raise ValueError(
                "skip_nonfinite='step' with step(param=...), which is a part of a step"
            )
        for p in params:
            if p.grad is None:
                name = path_of(self.group_of(p), p)
                raise ValueError(f"step(param=...): {name} has no gradient")
            if self.rule_of(group := self.group_of(p)).join is not None:
                raise ValueError(
                    f"step(param=...): {path_of(group, p)} follows "
                    f"{self.rule_of(group).name}, whose steps end with sums over all "
                    "parameters: use prepare_for_gradient_release(model, optimizer)"
                )
        microbatches = [WHOLE_BATCH] * len(params)
        write = not self.optimizer_accumulation
        self.update(params, list(map(_grad, params)), microbatches, write=write, count=True)

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        microbatches: list[Microbatch],
        write: bool,
        count: bool,
    ) -> dict[Tensor, Part]:
        """Update parameters by the given gradients, each a part or all of a step's.

        Gradient release calls this; `p.grad` is neither read nor written. For write, count
        and the result see `_update`.
        """
        self.check_train_mode("an update")
        check_unscaled(self)
        self._idle = 2  # gradients need not be in p.grad
        works: dict[int, tuple[Group, list[Tensor], list[Tensor], list[Microbatch]]] = {}
        for p, g, microbatch in zip(params, grads, microbatches):
            group = self.group_of(p)
            if id(group) not in works:
                works[id(group)] = group, [], [], []
            _, ps, gs, its = works[id(group)]
            ps.append(p)
            gs.append(g)
            its.append(microbatch)
        return self._update(list(works.values()), write, count)

    def check_accumulates(self) -> None:
        """Raise if the state of a group cannot accumulate a step's gradient in parts."""
        self._check_whole(False)
        for group in self.param_groups:
            check_accumulates(self.rule_of(group), group["cautious"])

    def group_of(self, param: Tensor) -> Group:
        """Return the group that holds a parameter; raise if none does."""
        groups = [(id(group), len(group["params"])) for group in self.param_groups]
        if groups != self._grouped:
            self._group_index = {
                p: i for i, group in enumerate(self.param_groups) for p in group["params"]
            }
            self._grouped = groups
        index = self._group_index.get(param)
        if index is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is in none of the groups"
            )
        return self.param_groups[index]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return False; raise under gradient release, where unscaling comes too late.

        GradScaler.step reads this, and so do trainers that clip.
        """
        if self.releases:
            raise RuntimeError(
                "gradient release applies and frees gradients in backward, except in "
                "handle.paused(): it is too late for a GradScaler to unscale them, or for "
                "a trainer to clip. For a scaler, call handle.remove() and not paused(). "
                "Train in bfloat16, which needs no scaler; clip with the handle's "
                "clip_global_norm, and set the trainer's clipping to 0"
            )
        return False

    def zero_grad(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, set_to_none: bool = True, param: Tensor | None = None
    ) -> None:
        """Reset the gradients of all parameters, or of one.

        Args:
            set_to_none: Free them instead of filling them with zeros.
            param: The one parameter, for a hook under gradient release.
        """
        if param is None:
            for release in self.releases:
                release.before_zero_grad()
            unwrapped(super().zero_grad)(set_to_none)
        elif set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad = torch.zeros_like(param.grad)

    def __repr__(self) -> str:
        """Return hyperparameters, changed options, and each group's executor and dtypes."""
        lines, usual = [f"{type(self).__name__} ("], dict[str, inspect.Parameter]()
        for cls in (FunctionalOptimizer, type(self)):
            usual |= inspect.signature(cls).parameters
        for i, group in enumerate(self.param_groups):
            entries = [self.state.get(p, {}).values() for p in group["params"]]
            tensors = [x for x in chain(group["params"], *entries) if isinstance(x, Tensor)]
            kinds = {str(x.dtype)[6:] for x in tensors}
            rows = {"params": len(group["params"]), "dtypes": ", ".join(sorted(kinds))}
            rows["runs"] = _RUNS.get(how := executor_of(group), how)
            for k, x in sorted(group.items()):
                default = usual[k].default if k in usual else inspect.Parameter.empty
                number = type(default) in (float, int, tuple)
                if k != "param_names" and (number or str(x) != str(default)):
                    rows.setdefault(k, x)
            lines += [f"Parameter Group {i}", *[f"    {k}: {x}" for k, x in rows.items()]]
        return "\n".join([*lines, ")"])

    track, stats = Removed(), Removed()
    _call: ClassVar[inspect.Signature] = inspect.Signature()

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for pickle and deepcopy, without caches and hooks."""
        names = [k for k in self.__dict__ if k not in _LEFT and k[:11] != "_optimizer_"]
        return {**{k: self.__dict__[k] for k in names}, **super().__getstate__()}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the attributes and make new caches; load_state_dict calls this too."""
        self.__dict__.setdefault("releases", [])
        self.__dict__.setdefault("_told", {})
        for name in ("process_group", "skips_steps"):
            self.__dict__.setdefault(name, None)
        super().__setstate__(state)
        self._clear_caches()


class Options(TypedDict, total=False):
    """The options of every optimizer that concern how it runs and not its rule."""

    kahan_sum: bool | None
    foreach: bool | None
    triton: bool | None
    gradient_release: bool
    compile: bool | None
    capturable: bool
    state_dtype: torch.dtype | str | None
    storage: StorageLike | None
    skip_nonfinite: Literal["step", False]
    process_group: "torch.distributed.ProcessGroup | None"
    transforms: Sequence[GradientTransform]


def with_options(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that takes and shows `Options` in the place of its `**options`."""
    options = [BaseOptimizer._parameters[name] for name in Options.__annotations__]
    defaults = {x.name: x.default for x in options}
    own = inspect.signature(function)
    shown = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
    shown += [x.replace(kind=x.KEYWORD_ONLY) for x in options]
    signature, name = own.replace(parameters=shown), function.__qualname__.split(".")[0]
    run: Callable[..., T] = function

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs.keys() - signature.parameters.keys():
            bind_call(name, signature, args, kwargs)  # raises
        return run(*args, **{**defaults, **kwargs})

    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call


_RUNS = {"auto": "compiled if a compiler is found", "kernels": "compiled"}
# Caches, and what others attach: a scheduler of torch's replaces `step` by a bound wrapper,
# which cannot be pickled.
_LEFT = (
    *("_bound", "_plans", "_has_stepped", "_idle", "_grouped", "_group_index"),
    *("_versions", "holds_averages", "_layouts", "releases", "process_group"),
    *("step", "_zero_grad_profile_name", "_opt_called"),
)
