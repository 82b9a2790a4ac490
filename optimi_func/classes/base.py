"""The base class of all optimizers: a torch.optim.Optimizer that runs a pure one.

Param groups hold hyperparameters under torch's names, and every step reads them again, so
that schedulers work. `state[p]` is a flat dict: `step`, the rule's tensors and, if there is
a compensation, `kahan_comp`.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, InitVar
from difflib import get_close_matches
from functools import partial, wraps
from itertools import chain, product
from operator import attrgetter, is_, itemgetter
from types import MappingProxyType
from typing import Any, ClassVar, Literal, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor, distributed

from optimi_func.classes.fields import Closure, Fields, Float, Params
from optimi_func.classes.groups import (
    TORCHS,
    aligned,
    as_scalar,
    check_capture,
    check_modes,
    check_numbers,
    check_skip,
    executor_of,
    likely_mistakes,
    normalize_group,
    number_defaults,
    plain_numbers,
    take_torchs_decay,
    warn_of_torchs_order,
)
from optimi_func.core import checks
from optimi_func.core.distributed import (
    all_finite,
    any_distributed,
    comparable,
    is_distributed,
    same_placements,
    to_local,
)
from optimi_func.core.leaf import (
    compute_dtype,
    init_leaf,
    leaf_dtype,
    leaf_step,
    microbatch_scalars,
    whole_means,
    with_given,
)
from optimi_func.core.owners import Holders, agree, holders_of
from optimi_func.core.packed import Packed, is_capturing
from optimi_func.core.pairs import as_real_for
from optimi_func.core.philox import Noise, drawn
from optimi_func.core.rule import (
    WHOLE_BATCH,
    Leaf,
    Microbatch,
    Named,
    Rule,
    Scalar,
    Scalars,
    Storage,
    StorageLike,
)
from optimi_func.core.storage import flat_leaf, group_storage, seed_of, state_in
from optimi_func.core.torch_private import (
    between_graphs,
    has_memory,
    unwrapped,
    watched_if_needed,
)
from optimi_func.execution.counts import write_scalar
from optimi_func.execution.cpp import retry
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.plans import ClassPlan
from optimi_func.execution.scalars import pack, scalars_after
from optimi_func.execution.slots import Step
from optimi_func.execution.sums import Part, Unit, join, write_running
from optimi_func.execution.tensors import uncollected
from optimi_func.pure.casts import PLAIN
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.checkpoints import Checkpoints
from optimi_func.state.convert import Entry, Group, renamed
from optimi_func.state.entry import ensure_state, insert_made, wants_state_alone
from optimi_func.state.names import Names, Path, homes_in, without_repeats
from optimi_func.state.stored import begin, mask_like, rows_of

# A group, some of its parameters, their gradients, and what each is to its step.
Work = tuple[Group, list[Tensor], list[Tensor], list[Microbatch] | None]
_version = attrgetter("_version")
Extras = Mapping[str, Mapping[Tensor, Tensor]]  # by name and parameter
Write = tuple[Tensor, Scalar, Tensor | None]  # a target, its value, and if it is written
# Plans that are kept, besides one for each parameter. If lists of parameters never come
# again, as with experts, the oldest plans are dropped.
_LISTS = 32
_asked = itemgetter("storage", "kahan_sum", "state_dtype")
_on_host, _is_cuda = attrgetter("on_host"), attrgetter("is_cuda")
P = ParamSpec("P")
T = TypeVar("T")
_grad, _is_none = attrgetter("grad"), partial(is_, None)
# optimi's users pass these options by position, behind decouple_lr and max_lr.
POSITIONAL = ("kahan_sum", "foreach", "triton", "gradient_release")


class BaseOptimizer(Fields, Checkpoints):
    """Base class of all optimizers: a torch.optim.Optimizer that runs a pure optimizer.

    A subclass declares its hyperparameters as fields and sets `factory`, the class of the
    pure optimizer that it runs. Every step reads the hyperparameters of the pure optimizer
    from the param group.

    Args:
        params: Parameters, named parameters, or param groups.
        defaults: Options for param groups that do not set them: the hyperparameters of the
            subclass and the options below.

    Every optimizer takes these options:

    Args:
        lr: Learning rate: a number, or a tensor with one element.
        decouple_lr: Multiply weight decay by lr / max_lr instead of lr, so that weight
            decay does not depend on how large the learning rate is.
        max_lr: The largest value that lr will have in its schedule. Only decouple_lr and
            corrected_decay use max_lr. None means the lr with which the param group is
            created.
        kahan_sum: False turns off Kahan summation, which stores the rounding error of each
            float16 and bfloat16 parameter and adds it back at the next step. None turns
            Kahan summation on.
        foreach: Run the step with the multi-tensor operations of torch (foreach),
            without a compiler.
        triton: The name of `compile` in optimi. True requests the compiled step; None and
            False have no effect.
        gradient_release: Allow gradient release, which updates each parameter during the
            backward pass.
        compile: None compiles the step if a compiler is found, and otherwise runs the step
            eagerly. True raises an error if no compiler is found. False always runs the
            step eagerly.
        maximize: Maximize the objective instead of minimizing it.
        capturable: Store step counts and coefficients on the device, so that CUDA graphs
            can capture the step.
        state_dtype: The dtype of the moments, or the name of the dtype. None uses the dtype
            of each parameter, except that second moments are never float16.
        storage: How parameters and moments are stored, in place of kahan_sum and
            state_dtype: "compact", "exact" or `Storage(param, moments)`.
        cautious_decay: Decay an element only if the step moves it towards 0 or does not
            move it (arXiv:2510.12402). Raises an error if weight decay is added to the
            gradient.
        corrected_decay: Multiply weight decay by lr^2 / max_lr instead of lr, so that
            weight decay fades together with the schedule (AdamC, arXiv:2506.02285). Raises
            an error together with decouple_lr.
        cautious: Move an element only if the direction and the gradient have the same sign.
            The moves of these elements are divided by the fraction of elements that move,
            so that steps do not become shorter, but a move is multiplied by at most 1000
            (arXiv:2411.16085). Weight decay does not change. Muon, SOAP and other rules
            whose direction is not elementwise raise an error, and so do Prodigy and
            Schedule-Free.
        skip_nonfinite: With "step", all processes skip a step if any gradient in any
            process contains an inf or NaN. `optimizer.skipped_steps` counts the skipped
            steps. The host waits for the device in every step, unless capturable=True.
        process_group: A group of processes that all have copies of the same plain
            parameters (not DTensors) and equal gradients, as with DistributedDataParallel.
            The matrices of Muon and SOAP are then divided among these processes, and the
            results are bitwise the same as without process_group. A copy of the optimizer
            (deepcopy, pickle) has no process group.

    Raises:
        ValueError: A hyperparameter is out of its range, or options exclude each other.
        TypeError: A parameter is not a dense floating-point or complex tensor.
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
    process_group: "torch.distributed.ProcessGroup | None" = None

    _positional = ("decouple_lr", "max_lr", *POSITIONAL)

    factory: ClassVar[Callable[..., FunctionalOptimizer]]
    step_calls = 0  # updates that move parameters, for `EMA`: several a step under release
    takes_extras = False  # True if a group's rule has extras
    given = MappingProxyType[str, Mapping[Tensor, Tensor]]({})  # by `give`
    # What a loss scaler may set: not 0 leaves a step out, and the factor of all gradients.
    found_inf: ClassVar[Tensor | None] = None
    grad_scale: ClassVar[Tensor | None] = None

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
            bound = checks.bind_call(kind.__name__, kind._call, args, kwargs)
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
        checks.check_no_module(params)
        self._begin(defaults)
        self._constructed = False
        super().__init__(params, plain_numbers(defaults))
        self._constructed = True
        self._warn_of_mistakes(0)

    def _begin(self, options: Group) -> None:
        """Make the attributes. Options that are no group's are taken out."""
        self.optimizer_accumulation = False
        group = options.pop("process_group", None)
        self.process_group = checks.check_process_group(group)
        self.skips_steps = check_skip(options.pop("skip_nonfinite", False))
        self.skipped_steps: int | Tensor = 0  # a tensor if capturable
        self.releases = []
        self._constructed = True
        self._clear_caches()
        retry()

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group. Options that it does not set have the constructor's values.

        Raises:
            TypeError: A parameter is not a dense floating-point or complex tensor.
            ValueError: A hyperparameter is out of its range. No group is added in this
                case.
        """
        if "releases" not in self.__dict__:  # a subclass calls torch's __init__ alone
            usual = {name: x.default for name, x in self._parameters.items()}
            del usual["params"]
            self.defaults = {**usual, **self._fixed, **self.defaults}
            self._begin(self.defaults)
        count = len(self.param_groups)
        if isinstance(param_group, dict):  # else torch raises
            take_torchs_decay(param_group, *self._factory_of(param_group))
            self._add_names(param_group)
        if self._constructed:  # the new names may be those of parameters that left
            self._names.note(self.param_groups)
        unwrapped(super().add_param_group)(param_group)
        group = self.param_groups[count]
        names = self._names.pairs_of(group["params"])
        try:
            self._names.remember([group])
            keywords = self._factory_of(group)[1]
            group.update(plain_numbers({name: group[name] for name in keywords}))
            normalize_group(group, self._number_defaults(group), self.path_of)
            rule = self.rule_of(group)
            self.takes_extras = self.takes_extras or bool(rule.extras)
            for p in group["params"] if rule.refuses or rule.whole or rule.measure else ():
                checks.check_taken(rule, self.path_of(group, p), p)
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
            self._names.forget(self.param_groups[count:])
            del self.param_groups[count:]
            self._names.restore(names)
            raise

    def _add_names(self, group: Group) -> None:
        """Put the names of parameters that had one before into a group without names."""
        if "param_names" in group or isinstance(source := group["params"], Tensor | set):
            return
        params = group["params"] = list(source)
        named = params and any("param_names" in other for other in self.param_groups)
        names = [self.name_of(p) for p in params] if named else [None]
        if None not in names:
            group["param_names"] = names

    def _number_defaults(self, group: Group) -> Group:
        return self._under_keys(number_defaults(self._factory_of(group)[0]))

    def _check_numbers(self, group: Group) -> None:
        check_numbers(group, self._number_defaults(group))

    def _warn_of_mistakes(self, first: int) -> None:
        """Warn once of options in `param_groups[first:]` that are probably a mistake."""
        self._check_group()
        bounds = list(map(self.bound_of, self.param_groups))
        checks.warn(likely_mistakes(self.param_groups, bounds, first))
        for group in self.param_groups[first:]:
            options = {*self.defaults, *self._factory_of(group)[1]}
            for key in group.keys() - {*options, "params", "param_names"}:
                for name in get_close_matches(key, options, 1, 0.85):
                    checks.warn_user(f"a group has {key!r}, unused: did you mean {name!r}?")

    @watched_if_needed
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Closure | None = None, param: Tensor | None = None, **extras: object
    ) -> Any:
        """Update every parameter that has a gradient, or only one parameter.

        As in torch, several threads may call this method at the same time without an error.
        If two threads update the same parameter at the same time, the result is the result
        of one of them.

        To create missing state, torch.distributed.checkpoint calls this method in a trial
        step in which every lr and every gradient is 0. In such a trial step, this method
        only calls `init_state`, and the step is not counted.

        Args:
            closure: A function that evaluates the model and returns the loss. It is called
                once, with gradients enabled.
            param: The only parameter to update. This requires `gradient_release=True` in
                the constructor, and excludes closure.
            **extras: Further arguments of the `direction` of a rule of your own, by name.
                Each is a float or a 0-d tensor for all parameters, a dict by parameter or
                by parameter name, or a list with one tensor for each parameter.

        Returns:
            The loss that the closure returned, or None.

        Raises:
            ValueError, TypeError: A gradient does not fit its parameter, closure and param
                are both given, or param is given without `gradient_release=True`.
            RuntimeError: A CUDA graph is being captured and could not repeat this step.
                Nothing is written if an error is raised.
        """
        self.check_train_mode("step()")
        if param is not None:
            if closure is not None:
                raise ValueError("step takes a closure or a param, not both")
            self.step_params([param])
            return None
        fresh = not (self._has_stepped and self.state)
        if closure is None and fresh and wants_state_alone(self.state):
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
        # A local name and no attribute, because several threads may step at once.
        found = self.given
        if extras or self.takes_extras:
            found = found_extras(self, {**found, **self._loss(loss), **extras})
        write = not self.optimizer_accumulation
        if parts := self._update(works, write, True, found, whole=True):
            self._finish(parts, found)
        return loss

    def _loss(self, loss: object) -> dict[str, object]:
        """Return a closure's loss as an extra, if a rule takes one."""
        if loss is None or not any(["loss" in rule.extras for rule in self.rules()]):
            return {}
        if not isinstance(loss, Tensor):
            loss = torch.tensor(loss, dtype=torch.float32, device="cpu")
        return {"loss": loss}

    def init_state(self) -> None:
        """Create the state of every trainable parameter that has none.

        Without this call, the state of a parameter is created in its first step. Call this
        method before you load a checkpoint into existing tensors, as
        torch.distributed.checkpoint does. No parameter moves, and no step is counted.
        """
        made: dict[Tensor, Entry] = {}
        for group in self.param_groups:
            how = self.rule_of(group), group_storage(group), group["capturable"]
            for p in group["params"]:
                if p.requires_grad and "step" not in self.state.get(p, {}):
                    with kernel_context(p.device):
                        ensure_state(self.state, made, self.path_of(group, p), p, *how)
        insert_made(self.state, made)

    def step_params(self, params: list[Tensor]) -> None:
        """Update these parameters now, for example in a backward hook.

        With `optimizer_accumulation`, only the state of the parameters is updated. Every
        call reads the param groups again, so that schedules, manual changes and loaded
        states take effect.

        Raises:
            ValueError: The optimizer was created without `gradient_release=True`, or a
                parameter has no gradient or is in no group. Nothing is written in this
                case.
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
                name = self.path_of(self.group_of(p), p)
                raise ValueError(f"step(param=...): {name} has no gradient")
            if self.rule_of(group := self.group_of(p)).join is not None:
                raise ValueError(
                    f"step(param=...): {self.path_of(group, p)} follows "
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
        return self._update(list(works.values()), write, count, self.given)

    def check_accumulates(self) -> None:
        """Raise if the state of a group cannot accumulate a step's gradient in parts."""
        for group in self.param_groups:
            checks.check_accumulates(self.rule_of(group), group["cautious"])

    def group_of(self, param: Tensor) -> Group:
        """Return the group that holds a parameter; raise if none does."""
        if (group := self.find_group(param)) is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is in none of the groups"
            )
        return group

    def find_group(self, param: Tensor) -> Group | None:
        """Return the group that holds a parameter, or None.

        Programs edit the lists, so a place counts only while the parameter is there.
        """
        groups = self.param_groups
        for _ in range(2):
            i, k = self._homes.get(id(param), (len(groups), 0))
            params = groups[i]["params"] if i < len(groups) else ()
            if k < len(params) and params[k] is param:
                return groups[i]
            self.check_lists()
        return None

    def check_lists(self) -> None:
        """Raise if a parameter is in two groups; note what programs did to the lists."""
        groups, homes = self.param_groups, homes_in(self.param_groups)
        alone = len(homes) == sum([len(group["params"]) for group in groups])
        for i, group in enumerate(groups if not alone else ()):
            for p in group["params"]:
                if (j := homes[id(p)][0]) != i:
                    raise ValueError(
                        f"{self.path_of(group, p)} is in param_groups[{j}] and in "
                        f"param_groups[{i}], and has one state: take it out of one"
                    )
        if homes != self._homes:
            self._homes = homes
            self._names.note(groups)

    def name_of(self, p: Tensor) -> str | None:
        """Return the name that a parameter was given with, or None."""
        return self._names.get(p)

    def named_groups(self) -> list[Group]:
        """Return the groups with "param_names" as they belong to the parameters now.

        Raises:
            ValueError: A parameter that was put without a name into a group with names.
        """
        return self._names.named(self.param_groups)

    def path_of(self, group: Group, p: Tensor) -> Path:
        """Return a parameter's name, or its place in the group, for errors."""
        return Path(self._names, group, p)

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
        """Reset the gradients of all parameters, or of one parameter.

        Args:
            set_to_none: Free the gradients instead of filling them with zeros.
            param: The only parameter whose gradient is reset. Hooks of gradient release use
                this argument.
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

    _call: ClassVar[inspect.Signature] = inspect.Signature()

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for pickle and deepcopy, without caches and hooks."""
        names = [k for k in self.__dict__ if k not in _LEFT and k[:11] != "_optimizer_"]
        state = {**{k: self.__dict__[k] for k in names}, **super().__getstate__()}
        return {**state, "param_groups": self.named_groups()}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore the attributes and make new caches; load_state_dict calls this too."""
        self.__dict__.setdefault("releases", [])
        for name in ("process_group", "skips_steps"):
            self.__dict__.setdefault(name, None)
        super().__setstate__(state)
        self._clear_caches()
        self._names.remember(self.param_groups)

    def give(self, **extras: object) -> None:
        """Store extras for all following steps, until the next call replaces them.

        Under gradient release, this is the only way to pass extras. Extras that are passed
        to `step` take precedence over the stored extras. Stored extras are not saved in
        checkpoints, so call `give` again after you load a checkpoint.

        Args:
            **extras: The same as for `step`, but with a value for every trainable
                parameter.

        Raises:
            TypeError, ValueError: An extra does not fit. The extras that were stored before
                are unchanged in this case.
        """
        self.given = found_extras(self, extras, every=True)

    def _check_group(self) -> None:
        """Raise if there is nothing that a process_group could divide."""
        rules = self.rules() if self.process_group is not None else []
        if rules and all(rule.whole is None for rule in rules):
            raise ValueError(
                f"process_group= with {rules[0].name}, which maps no matrices that could "
                "be divided: omit it. To divide states, make the optimizer by "
                "torch.distributed.optim.ZeroRedundancyOptimizer"
            )

    def _note_idle(self, params: list[Tensor]) -> None:
        """Warn at the second step of a distributed run if none of params has stepped."""
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        alone = not (distributed.is_available() and distributed.is_initialized())
        if alone or params or any_distributed(trained):
            self._idle = 3  # from now on it is no mistake, as of an actor that waits
        elif trained:
            self._idle += 1
        if self._idle == 2:
            checks.warn_user(
                f"{type(self).__name__} has taken two steps, and none of its "
                f"{len(trained)} trainable parameters "
                f"({self.path_of(self.group_of(trained[0]), trained[0])}, ...) has had a "
                "gradient. fully_shard and parallelize_module replace a model's "
                "parameters: make the optimizer after them"
            )

    def holders_of(self, group: Group, p: Tensor, name: object = "") -> Holders | None:
        """Return the processes that divide the map of p, or None if one maps it alone."""
        whole = self.rule_of(group).whole
        return whole and holders_of(p, name, whole, self.process_group)

    def numbers(
        self, of_device: Callable[[Tensor], object] = _version, only: Container[int] = ()
    ) -> dict[str, object]:
        """Return groups' hyperparameters, to compare; `only` are the ids of some groups."""
        return {
            f"{name} of param group {i}": comparable(group[name], of_device)
            for i, group in enumerate(self.param_groups)
            if not only or id(group) in only
            for name in self._factory_of(group)[1]
        }

    def _facts(self, divided: Container[int], works: list[Work]) -> dict[str, object]:
        """Return what processes compare before they step: numbers of the divided groups.

        Copies have every parameter, number and gradient in common, and equal weights.
        """
        if self.process_group is None:
            return self.numbers(type, divided)
        facts = self.numbers(type)
        for i, (group, params, _, _) in enumerate(works):
            # Those of divided groups are in `agree`'s message by name.
            if id(group) not in divided and len(params) < len(group["params"]):
                names = [str(self.path_of(group, p)) for p in params]
                facts[f"parameters with gradients of param group {i}"] = names
        if not self._has_stepped:
            params = [p.detach() for group in self.param_groups for p in group["params"]]
            plain = to_local([p for p in params if p.numel() and not is_distributed(p)])
            hashes = [str(torch.hash_tensor(p)) for p in plain]
            facts["hashes of parameters, which process_group= says are copies"] = hashes
        return facts

    def _by_leaf(
        self,
        work: Work,
        write: bool,
        count: bool,
        extras: Extras,
        made: dict[Tensor, Entry],
    ) -> Callable[[], None]:
        """Compute an update of meta or fake tensors, and return what writes it."""
        group, params, grads, batches = work
        bound, writes = self.bound_of(group, params, group["capturable"]), list[Write]()
        rule, names = bound.rule, ("step", *bound.rule.running._fields)
        how = bound.starting_rule, group_storage(group), group["capturable"]
        batches = batches or [WHOLE_BATCH] * len(params)
        paths = [self.path_of(group, p) for p in params]
        for path, p, g in zip(paths, params, grads):
            checks.check_grad(path, p, g)
        entries = [
            ensure_state(self.state, made, path, p, *how) for path, p in zip(paths, params)
        ]
        tensors = [[entry[name] for name in names] for entry in entries]
        counts = [(x, y) for x, *y in [list(map(_number, some)) for some in tensors]]
        scalars, after = scalars_after(bound, counts, coded=True)
        at, given = [*range(len(params))], list[list[Any]]()
        bits = rounding(self, group, params, counts, at) if write else []
        if rule.given:
            rows = bound, params, scalars, counts, at
            scalars, at, given = given_to(self, extras, *rows)
        given += bits
        for i, (p, m, entry) in enumerate(zip(params, batches, entries)):
            leaf = Leaf(p.detach(), *state_in(rule, entry))
            now = microbatch_scalars(rule, scalars[at[i]], m, write)
            with kernel_context(p.device):
                row = [column[i] for column in given if column[i] is not None]
                row = drawn(row, leaf_dtype(leaf, grads[i]))
                inputs, now = with_given(rule, leaf, now, row)
                new = leaf_step(rule, inputs, grads[i], now, write, whole_means)
            pairs = zip(flat_leaf(leaf), flat_leaf(new))
            writes += [(x, y, m.finite) for x, y in pairs if y is not x]
            last = zip(tensors[i], (tensors[i][0] + 1.0, *after[i])) if count else ()
            writes += [(x, y, m.finite) for x, y in last]
        return partial(write_all, writes)

    def _clear_caches(self) -> None:
        """Make new caches, but for plans. They are not pickled."""
        self._bound: dict[int, tuple[Any, Any]] = {}
        self._plans: dict[object, ClassPlan] = self.__dict__.get("_plans", {})
        self._has_stepped, self._idle = False, 0
        self._homes: dict[int, tuple[int, int]] = {}
        self._stepped: list[object] = []
        self._names: Names = self.__dict__.get("_names") or Names()

    def _factory_of(
        self, group: Group
    ) -> tuple[Callable[..., FunctionalOptimizer], tuple[str, ...]]:
        """Return the function that makes a group's value, and its keywords, lr first."""
        del group
        return type(self).factory, self.keywords

    def bound_of(
        self, group: Group, params: Sequence[Tensor] = (), capturable: bool = False
    ) -> FunctionalOptimizer:
        """Return the pure optimizer with a group's present hyperparameters.

        It is the same object as before if none has changed. Tensors go through `as_scalar`
        with params and capturable.
        """
        factory, keywords = self._factory_of(group)
        inputs = *map(group.__getitem__, keywords), factory
        last, bound = self._bound.get(id(group), (None, None))
        # Values that are the same objects as before were checked before.
        if last is not None and all(map(is_, inputs[1:], last[1:])):
            if inputs[0] is last[0]:
                return bound
            if type(inputs[0]) is type(last[0]) is float:
                bound = bound.with_lr(inputs[0])
                self._bound[id(group)] = inputs, bound
                return bound
        flat = [y for x in inputs[:-1] for y in (x if isinstance(x, tuple) else (x,))]
        plain, numbers = PLAIN.issuperset(map(type, flat)), inputs[:-1]
        if not plain:
            self._check_numbers(group)
            numbers = [as_scalar(x, params, capturable) for x in numbers]
        make = getattr(factory, "kept", factory)
        bound = make(**renamed(dict(zip(keywords, numbers)), self._our_names))
        # Tensors and numpy's arrays have this.
        objects = () if plain else flat
        mutable = any([type(x) in (list, dict) or hasattr(x, "__array__") for x in objects])
        self._bound[id(group)] = None if mutable else inputs, bound
        return bound

    def _update(
        self,
        works: list[Work],
        write: bool,
        count: bool,
        extras: Extras,
        whole: bool = False,
    ) -> dict[Tensor, Part]:
        """Check everything, compile everything, and then write.

        `works` are groups, some of their parameters, a gradient for each, and what each is
        to its step, or None if it is the whole of it. write=False moves the state alone,
        and count=False leaves the step counts, because the step goes on. `extras` are the
        tensors that the rules take in this step, from `found_extras`. whole=True is a step
        of all groups. Returns the parts of sums that `finish_step` joins.
        """
        # First gradients make state, which joins the optimizer once nothing can fail.
        # Written as literals: dict[Tensor, Entry]() takes a microsecond at every step.
        made: dict[Tensor, Entry] = {}
        parts: dict[Tensor, Part] = {}
        divided: dict[int, list[Holders]] = {}
        runs: list[Callable[[], dict[int, Part] | None]] = []
        lists: list[object] = []
        on_host, where = True, None
        for work in works:
            run, host, holders, plan = self._prepare(work, write, count, extras, made)
            runs.append(run)
            lists += plan, len(work[0]["params"])
            on_host = on_host and host
            if holders:
                divided[id(work[0])] = holders
            if where is None and work[1]:
                where = work[1][0].device
        # A plan is for one list, so that equal plans have the parameters of the last step.
        if whole and lists != self._stepped:
            self.check_lists()
            if any([len(work[1]) > len({*map(id, work[1])}) for work in works]):
                return self._update(list(map(_once, works)), write, count, extras, whole)
            self._stepped = lists
        if write and divided:
            facts = self._facts(divided, works)
            agree([x for holders in divided.values() for x in holders], facts)
        self._has_stepped = True
        if write and count:
            self.step_calls += 1
        if write and count and "step" in self.__dict__:
            self._opt_called = True  # A scheduler asks, and release need not call `step`.
        with nullcontext() if on_host or where is None else kernel_context(where):
            if made:
                insert_made(self.state, made)
            for (_, params, _, _), run in zip(works, runs):
                if sums := run():
                    parts.update({params[i]: part for i, part in sums.items()})
        return parts

    def _prepare(
        self,
        work: Work,
        write: bool,
        count: bool,
        extras: Extras,
        made: dict[Tensor, Entry],
    ) -> tuple[Callable[[], dict[int, Part] | None], bool, list[Holders], ClassPlan | None]:
        """Check and compile a group's update, and return the function that runs it.

        The second result is True if that calls no operation of torch, so that modes such as
        autocast do not matter. The third are the processes that divide it, and the last is
        the plan of these parameters, if one is kept.
        """
        group, params, grads, microbatches = work
        if not params:  # other processes may have gradients, and are told
            idle = [self.holders_of(group, p) for p in group["params"]]
            return lambda: None, True, [x for x in idle if x is not None], None
        if _is_cuda(params[0]) and is_capturing(params[0].device):
            check_capture(
                group, self.path_of, params, self.state, self._factory_of(group)[1]
            )
        counting = group["capturable"], False
        if microbatches is not None:
            counting = _counting(group["capturable"], microbatches)
        capturable, _ = counting
        bound = self.bound_of(group, params, capturable)
        if group.get("differentiable"):
            check_modes(group)  # raises
        if not write:
            checks.check_moves_state(bound.rule)
        ids = tuple(map(id, params))
        key = *_asked(group), *counting, *ids
        if bound.rule.draws:  # by the places of the parameters, which may change
            key = *key, *_places(self, params)
        plan, tensors = self._plans.get(key), None
        if plan is not None and plan.rule is not bound.rule:
            plan = None
        if plan is not None:
            # A tensor's hash is a call of Python.
            alone = len(self.state) == len(ids) and tuple(map(id, self.state)) == ids
            entries = self.state.values() if alone else map(self.state.get, params)
            tensors = plan.current(params, list(entries))
        if plan is None or tensors is None:
            if not all(map(has_memory, params)):
                return self._by_leaf(work, write, count, extras, made), False, [], None
            with uncollected(), kernel_context(params[0].device):
                plan = self._plan(group, bound, counting, params, made, plan)
                tensors, plan.made = plan.made, []
                self._keep(key, plan)
        if plan.viewed:
            grads = to_local(aligned(partial(self.path_of, group), params, grads))
        packed, at, after, given = self._scalars(
            work, bound, plan, tensors, capturable, write, extras, made
        )
        columns = plan.columns(tensors, grads)
        step = Step(columns._replace(given=given) if given else columns, packed, at, write)

        def check() -> None:
            if any_distributed(grads):
                # Raises, because their parameters are none.
                aligned(partial(self.path_of, group), params, grads)
            for p, part, g in zip(params, step.columns.own[0], grads):
                checks.check_grad(self.path_of(group, p), part, g)

        launches, host = plan.launches(executor_of(group), step, check)
        host = host and plan.counts.native is not None and all(map(_on_host, packed))
        # Autograd has not seen that the local shards of these were written.
        moved = params if write and plan.viewed else []
        run = partial(plan.run, launches, tensors, step, after, moved, count)
        return run, host, plan.holders, plan

    def _scalars(
        self,
        work: Work,
        bound: FunctionalOptimizer,
        plan: ClassPlan,
        tensors: list[Any],
        capturable: bool,
        write: bool,
        extras: Extras,
        made: dict[Tensor, Entry],
    ) -> tuple[list[Packed], list[int], Sequence[Named], list[list[Any]]]:
        """Return the different scalars, the place of each parameter, and r after it.

        The last are the columns of what the rule is given besides.
        """
        group, params, _, microbatches = work
        counts, at = plan.counts.now(tensors), plan.counts.at
        if bound.rule.join is not None:
            new = [p for p in params if p in made and "step" not in self.state.get(p, {})]
            where = params[0].device if capturable else None
            running = self._running(bound, group, [made[p] for p in new], where)
            counts = [(step, running) for step, _ in counts]
        scalars, after = scalars_after(bound, counts, plan.coded)
        given: list[list[Any]] = []
        bits = rounding(self, group, params, counts, at) if plan.rounds and write else []
        if bound.rule.given:
            rows = bound, params, scalars, counts, at
            scalars, at, given = given_to(self, extras, *rows)
        return *pack(bound.rule, scalars, at, microbatches, write), after, given + bits

    def _plan(
        self,
        group: Group,
        bound: FunctionalOptimizer,
        counting: tuple[bool, bool],
        params: list[Tensor],
        made: dict[Tensor, Entry],
        old: ClassPlan | None,
    ) -> ClassPlan:
        """Return a plan, if possible of an old one. New entries are put in `made`."""
        capturable, _ = counting
        if old is not None and self.state and not (made or capturable):
            # Entries that differ from checked ones in addresses: only counts are checked.
            plan = old.moved(params, [self.state.get(p, {}) for p in params])
            if plan and plan.counts.valid:
                return plan
        how = bound.starting_rule, group_storage(group), capturable
        named = [(self.path_of(group, p), p) for p in params]
        entries = [ensure_state(self.state, made, *pair, *how) for pair in named]
        if old is not None and (plan := old.moved(params, entries)) is not None:
            return plan
        holders = [self.holders_of(group, p, path) for path, p in named]
        places = _places(self, params) if bound.rule.draws else ()
        plan = ClassPlan(bound.rule, counting, list(zip(params, entries, holders)), places)
        plan.rounds = group_storage(group).param == "stochastic"
        return plan

    @torch.no_grad()
    def reset(
        self, params: Tensor | Iterable[Tensor] | None = None, rows: object = None
    ) -> None:
        """Set the state of parameters to its first values, as after writing to them.

        Moments, step counts, running scalars and compensations begin anew, in the tensors
        that are there and in every storage. No parameter is written to, and values that
        other code keeps in `state[p]` stay. Running scalars that several parameters have in
        common, as Prodigy's d, begin anew if all of these are given.

        Args:
            params: A parameter, or several. None: all.
            rows: Indices along the first dimension of each of `params`, or a bool for each.
                Only the state of these rows begins anew, and counts go on. None: all.

        Raises:
            ValueError: A parameter that is not the optimizer's; rows without params, out of
                range, or of state that is not divided by rows; an open accumulation cycle.
            TypeError: Something that is no parameter.
            RuntimeError: In eval mode (Schedule-Free). Nothing is written if it raises.

        >>> from optimi_func import SGD
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> w.grad, optimizer = torch.ones(3), SGD([w], lr=1.0, momentum=0.9)
        >>> optimizer.step()
        >>> optimizer.reset(w, rows=[0])
        >>> optimizer.state[w]["momentum_buffer"]
        tensor([0., 1., 1.])
        """
        self.check_train_mode("reset()")
        if self.in_cycle():
            raise ValueError("reset() inside an accumulation cycle: end the cycle first")
        if rows is not None and params is None:
            raise ValueError("reset(rows=...) without params: say of which parameters")
        every = [p for group in self.param_groups for p in group["params"]]
        some = [params] if isinstance(params, Tensor) else params
        targets = every if some is None else list(some)
        works: list[tuple[Rule, Named, Tensor, Storage, Tensor | None, bool]] = []
        made = dict[Tensor, Entry]()
        for p in targets:
            if not isinstance(p, Tensor):
                raise TypeError(f"reset(params=...) got {p!r:.80}: allowed are parameters")
            group = self.group_of(p)
            capturable = group["capturable"]
            bound, where = self.bound_of(group, [p], capturable), self.path_of(group, p)
            rule, storage = bound.starting_rule, group_storage(group)
            anew = None if rows is None else rows_of(rule, where, p, rows)
            if "step" in self.state.get(p, {}):
                ensure_state(self.state, made, where, p, rule, storage, capturable)
                coeffs, _ = bound.advance(1.0, rule.running())
                units = [] if rule.join is None else self._unit_of(group)
                together = {q for x in units for q in x["params"]} <= {*targets}
                works.append((rule, coeffs, p, storage, anew, together))
        insert_made(self.state, made)
        for rule, coeffs, p, storage, anew, together in works:
            entry, mask = self.state[p], None if anew is None else mask_like(p, anew)
            begin(rule, coeffs, p, storage, entry, mask, anew)
            if mask is None:
                entry["step"].zero_()
                for name, x in rule.running()._asdict().items() if together else ():
                    entry[name].fill_(x)
        self._join_loaded()

    def in_cycle(self) -> bool:
        """Return True if a step has taken only a part of its gradients."""
        return self.optimizer_accumulation or any(x.accumulating for x in self.releases)

    def _unit_of(self, group: Group) -> list[Group]:
        """Return the groups that have the same running scalars, if their rule joins."""
        return [group]

    def lead_of(self, group: Group) -> Entry | None:
        """Return the entry whose running scalars are those of a group, if one has any."""
        params = chain.from_iterable([x["params"] for x in self._unit_of(group)])
        entries = (x for x in map(self.state.get, params) if x and "step" in x)
        first, rule = next(entries, None), self.rule_of(group)
        if first is None or rule.join is None:
            return first
        # A parameter that came from another group has that group's scalars until it steps.
        name = rule.running._fields[0]
        value = group.get(name)
        same = (x for x in chain([first], entries) if _shows(x.get(name), value))
        return next(same, first)

    def _running(
        self,
        bound: FunctionalOptimizer,
        group: Group,
        fresh: list[Entry],
        device: torch.device | None,
    ) -> tuple[Scalar, ...]:
        """Return a group's running scalars (None: as numbers), which `fresh` take over."""
        names = bound.rule.running._fields
        lead, host = self.lead_of(group) or fresh[0], device is None
        for name, entry in product(names, fresh):
            entry[name].copy_(lead[name])
        values = tuple([lead[x].item() if host else lead[x].to(device) for x in names])
        value = group.get(names[0], shown := lead[names[0]])
        # The host would wait for a tensor on a device.
        if value is not shown and (host or not isinstance(value, Tensor)):
            _, start = bound.advance(1.0, bound.rule.running())
            if value != (kept := shown.item() or float(start[0])):
                raise ValueError(
                    f"a group's {names[0]}={value!r} is computed by each step, which would "
                    f"go on from {kept}: allowed is to read it. reset() begins anew, also "
                    "after state.clear(). If all parameters with state came from another "
                    f"group, set the group's {names[0]} to {kept}, or drop their state by "
                    "optimizer.state.pop(p)"
                )
        return values

    def finish_step(self, parts: dict[Tensor, Part], count: bool = True) -> None:
        """End a step: join what follows from sums over parameters (see `Rule.join`).

        `parts` are what `update` has returned for all parameters that stepped.
        """
        if parts and count:
            self._finish(parts, self.given)

    def _finish(self, parts: dict[Tensor, Part], extras: Extras) -> None:
        homes = {id(self.group_of(p)) for p in parts}
        # In the order of the groups, because all processes send the same message.
        every = [self._unit_of(x) for x in self.param_groups if id(x) in homes]
        units = {id(groups[0]): groups for groups in every}.values()
        with kernel_context(next(iter(parts)).device):
            pairs = [self._unit(groups, parts, extras) for groups in units]
            for (_, entries), new in zip(pairs, join([unit for unit, _ in pairs])):
                write_running(entries, new)
            for group in chain.from_iterable(units):
                self._publish_running(group)

    def _unit(
        self, groups: list[Group], parts: dict[Tensor, Part], extras: Extras
    ) -> tuple[Unit, list[Entry]]:
        """Return the sums of groups, and the entries to keep what is made of them."""
        first, lead, entries = groups[0], self.lead_of(groups[0]) or {}, list[Entry]()
        bound = self.bound_of(first, first["params"], first["capturable"])
        rule, values = bound.rule, [lead[name] for name in bound.rule.running._fields]
        if not (first["capturable"] or any(map(_is_cuda, values))):
            values = [x.item() for x in values]
        coeffs, running = bound.advance(1.0, rule.running(*values))
        for name in rule.single:
            given = [*extras.get(name, {}).values()]
            coeffs = coeffs._replace(**{name: given[0] if given else rule.usual[name]})
        unit = Unit(rule, coeffs, running, [], [])
        every = list(chain.from_iterable([group["params"] for group in groups]))
        for p in [every[i] for i in without_repeats(every)]:
            if "step" in (entry := self.state.get(p, {})):
                entries.append(entry)
                leaf = partial(lambda p, entry: Leaf(p, *state_in(rule, entry)), p, entry)
            elif p.requires_grad:  # it has had no gradient yet
                leaf = partial(init_leaf, bound.starting_rule, p, group_storage(first))
            else:
                continue
            unit.add(p, leaf, parts.get(p))
        return unit, entries

    def _publish_running(self, group: Group) -> None:
        """Put the first of the joined running scalars into a group, under its name."""
        bound = self.bound_of(group, group["params"], group["capturable"])
        if bound.rule.join is not None:
            name, lead = bound.rule.running._fields[0], self.lead_of(group)
            _, first = bound.advance(1.0, bound.rule.running())
            group[name] = float(first[0])
            if lead is not None and (group["capturable"] or lead[name].is_cuda):
                group[name] = lead[name]
            elif lead is not None:
                group[name] = lead[name].item() or group[name]

    def _join_loaded(self) -> None:
        for group in self.param_groups:
            self._publish_running(group)

    def _keep(self, key: object, plan: ClassPlan) -> None:
        """Keep a plan, in the place of the oldest if there are too many."""
        most = _LISTS + sum([len(group["params"]) for group in self.param_groups])
        while len(self._plans) >= most:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[key] = plan


class Options(TypedDict, total=False):
    """The options of every optimizer that concern how it runs, not its rule."""

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


def _once(work: Work) -> Work:
    """Return a work in which a parameter that is in the list twice is updated once."""
    group, params, grads, batches = work
    at = without_repeats(params)
    its = batches and [batches[i] for i in at]
    return group, [params[i] for i in at], [grads[i] for i in at], its


def found_extras(
    optimizer: Any, given: Mapping[str, object], every: bool = False
) -> dict[str, dict[Tensor, Tensor]]:
    """Return extras by name and parameter: those with a gradient, or all that take one."""
    groups: list[Group] = optimizer.param_groups
    rules: list[Rule] = list(map(optimizer.rule_of, groups))
    taken = {*chain.from_iterable([rule.extras for rule in rules])}
    usual = {*chain.from_iterable([rule.usual for rule in rules])}
    if not taken - usual <= {*given} <= taken:
        raise TypeError(
            f"step got the extras {sorted(given)}: this optimizer's direction takes "
            f"{sorted(taken)} (extras are its arguments but g, s, t, x, z, r and c)"
        )
    params = [p for group in groups for p in group["params"]]
    extras: dict[str, dict[Tensor, Tensor]] = {}
    for name, x in given.items():
        if isinstance(x, float):
            x = torch.tensor(x, dtype=torch.float64, device="cpu")
        rows = x
        if isinstance(x, Tensor) and x.dim() == 0:
            rows = dict.fromkeys(params, x)
        elif isinstance(x, Sequence) and len(x) == len(params):
            rows = dict(zip(params, x))
        if not isinstance(rows, Mapping):
            raise TypeError(
                f"{name}={checks.shown(x)}: allowed are a number for all, a dict by "
                f"parameter or by name, and a list of {len(params)}, one for each parameter"
            )
        extras[name] = {}
        for group in [g for g, rule in zip(groups, rules) if name in rule.extras]:
            for p in group["params"]:
                if p.grad is not None or (every and p.requires_grad):
                    value = rows.get(p, rows.get(optimizer.name_of(p)))
                    single = name in optimizer.rule_of(group).single
                    where = optimizer.path_of(group, p)
                    extras[name][p] = _checked(name, where, p, value, single)
    return extras


def _checked(name: str, path: object, p: Tensor, x: object, single: bool) -> Tensor:
    whole = isinstance(x, Tensor) and x.shape == p.shape and same_placements(p, x)
    if not ((isinstance(x, Tensor) and x.dim() == 0) or (whole and not single)):
        also = f"tensors of the shape {tuple(p.shape)}, with its placements, and "
        raise ValueError(
            f"{name} of {path}, which takes a gradient, is {checks.shown(x)}: allowed are "
            f"{'' if single else also}0-d ones"
        )
    assert isinstance(x, Tensor)
    x, part = to_local([as_real_for(p, x.detach()), p])
    # A number in float32 would not widen by what is multiplied with it.
    x = x.to(p.device, torch.promote_types(x.dtype, compute_dtype(p.dtype)))
    return x.expand(part.shape) if x.dim() else x


def given_to(
    optimizer: Any,
    extras: Extras,
    bound: Any,
    params: list[Tensor],
    scalars: list[Scalars],
    counts: Sequence[tuple[Scalar, Sequence[Scalar]]],
    at: list[int],
) -> tuple[list[Scalars], list[int], list[list[Any]]]:
    """Return scalars and their places with the numbers that a rule is given besides.

    The third result are the columns of tensors that it is given.
    """
    rule, columns = bound.rule, list[list[Any]]()
    for name in rule.extras:
        if name in rule.usual and name not in extras:
            usual = torch.tensor(rule.usual[name], dtype=torch.float64, device="cpu")
            columns.append([usual] * len(params))
            continue
        for p in params:
            if p not in extras.get(name, ()):
                where = optimizer.path_of(optimizer.group_of(p), p)
                raise ValueError(
                    f"nothing was given as {name} of {where}: allowed is to call "
                    f"optimizer.give({name}=...) before the backward"
                )
        columns.append([extras[name][p] for p in params])
    if "z" in rule.given:
        rows = zip(at, _places(optimizer, params), params)
        noise = [Noise(bound.seed, counts[i][0], place, p) for i, place, p in rows]
        columns.append(noise)
    names, indices, results = (*rule.extras, "z"), list[int](), list[Scalars]()
    known: dict[object, int] = {}
    for i, row in zip(at, zip(*columns)):
        # A number is one of the scalars, and each kind of them is there once.
        numbers = [x if _is_number(x) else None for x in row]
        key = i, *map(id, numbers)
        if key not in known:
            known[key] = len(results)
            coeffs = scalars[i].coeffs._replace(**dict(zip(names, numbers)))
            results.append(scalars[i]._replace(coeffs=coeffs))
        indices.append(known[key])
    kept = [[None if _is_number(x) else x for x in column] for column in columns]
    return results, indices, kept


def rounding(
    optimizer: Any,
    group: Group,
    params: list[Tensor],
    counts: Sequence[tuple[Scalar, Sequence[Scalar]]],
    at: list[int],
) -> list[list[Noise | None]]:
    """Return the column of random bits to round parameters by, if there are any."""
    if (storage := group_storage(group)).param != "stochastic":
        return []
    seeds = [seed_of(storage, p) for p in params]
    rows = zip(at, _places(optimizer, params), params, seeds)
    bits = [
        None if seed is None else Noise(seed, counts[i][0], place, p, torch.int32)
        for i, place, p, seed in rows
    ]
    return [bits] if any([x is not None for x in bits]) else []


def _places(optimizer: Any, params: list[Tensor]) -> list[int]:
    """Return the places of parameters in the optimizer, by which noise is drawn."""
    every = chain.from_iterable([group["params"] for group in optimizer.param_groups])
    places = {id(p): i for i, p in reversed([*enumerate(every)])}
    return [places[id(p)] for p in params]


def _is_number(x: Tensor | Noise) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0


def check_unscaled(optimizer: Any) -> None:
    """Raise if a loss scaler has set what an update within a backward cannot honour."""
    if optimizer.found_inf is not None or optimizer.grad_scale is not None:
        raise RuntimeError(
            "found_inf or grad_scale with gradient release, whose updates come before the "
            "scaler has seen all gradients: set both to None, scale no loss, and pass "
            "skip_nonfinite= to prepare_for_gradient_release"
        )


def finite_works(optimizer: Any, works: list[Work]) -> list[Work]:
    """Return the works of a step, or none if a gradient of a process is not finite.

    If a group is capturable, the device decides. Skipped steps are counted. Gradients are
    divided by a loss scaler's factor in place, as by torch's fused step.
    """
    if optimizer.optimizer_accumulation:
        raise RuntimeError(
            "skip_nonfinite='step', found_inf or grad_scale with optimizer_accumulation="
            "True, whose steps have been taken in part before: choose one"
        )
    groups, grads = optimizer.param_groups, [g for work in works for g in work[2]]
    if optimizer.releases and not grads:
        check_unscaled(optimizer)
    if not all(map(has_memory, grads)):
        return works
    every = [p for group in groups for p in group["params"]]
    found, scale = optimizer.found_inf, optimizer.grad_scale
    finite = torch.ones((), dtype=torch.bool, device="cpu")
    if found is not None:
        finite = found.reshape(()) == 0
    if optimizer.skips_steps:
        finite = finite & all_finite(grads, every, optimizer.process_group)
    on_device = any(group["capturable"] for group in groups)
    skipped = optimizer.skipped_steps
    if not (on_device or finite):
        optimizer.skipped_steps = skipped + 1
        return []
    if scale is not None:
        for g in {id(g): g for g in grads}.values():  # a parameter may be there twice
            g.div_(scale)
    if not on_device:
        return works
    if not isinstance(skipped, Tensor):
        optimizer.skipped_steps = torch.full_like(finite, skipped, dtype=torch.int64)
    optimizer.skipped_steps.add_(~finite)
    flags = {g.device: WHOLE_BATCH._replace(finite=finite.to(g.device)) for g in grads}
    return [(*work[:3], [flags[g.device] for g in work[2]]) for work in works]


def _counting(capturable: bool, microbatches: list[Microbatch]) -> tuple[bool, bool]:
    """Return True if steps are counted on the device, and True if each by itself there."""
    flags = [m.finite for m in microbatches]
    on_device = capturable or any([flag is not None for flag in flags])
    return on_device, on_device and len(set(map(id, flags))) > 1


def _shows(x: Tensor | None, value: object) -> bool:
    """Return True if a group shows x, as itself or as a number; no device is waited for."""
    if x is value or x is None or x.is_cuda or isinstance(value, Tensor):
        return x is value
    return x.item() == value


def _number(x: Tensor) -> Scalar:
    # A count without memory is taken for 0.
    return x if x.is_cuda else x.item() if has_memory(x) else 0.0


@torch.no_grad()
def write_all(writes: list[Write]) -> None:
    """Write values to their targets, unless a flag is false."""
    for x, new, flag in writes:
        write_scalar(x, new, flag)


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
            checks.bind_call(name, signature, args, kwargs)  # raises
        return run(*args, **{**defaults, **kwargs})

    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call


_RUNS = {"auto": "compiled if a compiler is found", "kernels": "compiled"}
# Caches, and what others attach: a scheduler of torch's replaces `step` by a bound wrapper,
# which cannot be pickled.
_CACHES = ("_bound", "_plans", "_has_stepped", "_idle", "_homes", "_stepped", "_names")
_HELD = ("_masters", "_versions", "holds_averages", "releases", "process_group")
_LEFT = (*_CACHES, *_HELD, "step", "_zero_grad_profile_name", "_opt_called")
