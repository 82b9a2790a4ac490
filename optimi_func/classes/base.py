"""The base class of all optimizers: a torch.optim.Optimizer that runs a pure one.

Param groups hold hyperparameters under torch's names, and every step reads them again, so
that schedulers work. `state[p]` is a flat dict: `step`, the rule's tensors and, if there is
a compensation, `kahan_comp`.

docs/house.md follows one step from here to the kernel, and explains the terms.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar
from difflib import get_close_matches
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, distributed

from optimi_func.classes.copies import check_divides
from optimi_func.classes.extras import (
    found_extras,
    loss_extra,
)
from optimi_func.classes.fields import EMPTY, Closure, Fields, Float, Params
from optimi_func.classes.groups import (
    as_scalar,
    check_modes,
    check_numbers,
    check_skip,
    likely_mistakes,
    normalize_group,
    plain_numbers,
    take_torchs_decay,
    warn_of_torchs_order,
)
from optimi_func.classes.joined import finish, lead_of, publish_running
from optimi_func.classes.resets import reset
from optimi_func.classes.skipping import check_unscaled, finite_works
from optimi_func.classes.stepping import executor_of, step_groups
from optimi_func.classes.work import Request, Work
from optimi_func.core import checks
from optimi_func.core.distributed import any_distributed, comparable
from optimi_func.core.hooks import Hook, restored
from optimi_func.core.lists import grouped
from optimi_func.core.owners import Holders, holders_of
from optimi_func.core.packed import flatten
from optimi_func.core.rule import WHOLE_BATCH, Microbatch, Scalar, StorageLike
from optimi_func.core.storage import group_storage
from optimi_func.core.torch_private import (
    between_graphs,
    has_memory,
    unwrapped,
    watched_if_needed,
)
from optimi_func.execution.cpp import retry, start
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.plans import ClassPlan
from optimi_func.execution.sums import Part
from optimi_func.pure.casts import PLAIN
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.checkpoints import Checkpoints
from optimi_func.state.convert import TORCHS, Entry, Group, renamed
from optimi_func.state.entry import ensure_state, insert_made, wants_state_alone
from optimi_func.state.names import Names, Path, homes_in

_version = attrgetter("_version")
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
        cautious: True is short for the hook `hooks.cautious()` before all others. It moves
            an element only if the direction and the gradient have the same sign
            (arXiv:2411.16085).
        hooks: Changes of the direction before it is multiplied by lr and written, in order,
            such as [hooks.floor(0.35)]: see `optimi_func.hooks`. Weight decay does not
            change.
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
    hooks: InitVar[Sequence[Hook]] = ()
    skip_nonfinite: InitVar[Literal["step", False]] = False
    process_group: "torch.distributed.ProcessGroup | None" = None

    _positional = ("decouple_lr", "max_lr", *POSITIONAL)

    factory: ClassVar[type[FunctionalOptimizer]]
    step_calls = 0  # updates that move parameters, for `EMA`: several a step under release
    takes_extras = False  # True if a group's rule has extras
    given = MappingProxyType[str, Mapping[Tensor, Tensor]]({})  # by `give`
    # Set by a loss scaler. If found_inf is not 0, the step is skipped. The gradients are
    # divided by grad_scale, if it is set.
    found_inf: ClassVar[Tensor | None] = None
    grad_scale: ClassVar[Tensor | None] = None

    def __init_subclass__(cls) -> None:
        """Make the constructor of a class that has a factory."""
        super().__init_subclass__()
        if "factory" in cls.__dict__:
            cls._make_constructor()

    @classmethod
    def _make_constructor(cls) -> None:
        """Make the constructor, and read `keywords` from the factory's signature."""
        cls.keywords = cls.factory.keywords
        missing = [name for name in cls.keywords if name not in cls._arguments]
        if cls.keywords[0] != "lr" or missing:
            raise TypeError(
                f"{cls.__name__}.factory={cls.factory.__name__} takes {cls.keywords}: "
                f"allowed are lr first, and fields of the class, which lacks {missing}"
            )
        before, cls._call = cls._call, cls._signature()
        if "__init__" in vars(cls) or cls._call == before:
            return  # with the constructor that a user wrote

        def __init__(self: BaseOptimizer, *args: object, **kwargs: object) -> None:
            kind = type(self)  # may be a subclass with more fields
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
        groups = [x for x in self.param_groups if executor_of(x) in ("auto", "kernels")]
        if any(p.is_cpu and has_memory(p) for group in groups for p in group["params"]):
            start()

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
            usual = {name: x.default for name, x in self._arguments.items()}
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
        names = self._names.copy()
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
                publish_running(self, group)
            if self._constructed:
                self._warn_of_mistakes(count)
        except Exception:
            del self.param_groups[count:]
            self._names = names
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
        return self._under_keys({**self._factory_of(group)[0].number_defaults})

    def _check_numbers(self, group: Group) -> None:
        check_numbers(group, self._number_defaults(group))

    def _warn_of_mistakes(self, first: int) -> None:
        """Warn once of options in `param_groups[first:]` that are probably a mistake."""
        check_divides(self)
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
            works.append(Work(group, params, grads))
        if self._empty_steps is not None and not self.releases:
            self._note_empty_step([p for work in works for p in work.params])
        scaled = self.found_inf is not None or self.grad_scale is not None
        begin = None
        if self.skips_steps or scaled:
            works, begin = finite_works(self, works)
            if not works:
                return loss
        # A local name and no attribute, because several threads may step at once.
        found = self.given
        if extras or self.takes_extras:
            found = found_extras(self, {**found, **loss_extra(self, loss), **extras})
        request = Request(not self.optimizer_accumulation, True, found, {}, begin)
        if parts := step_groups(self, works, request, whole=True):
            finish(self, parts, found)
        return loss

    def init_state(self) -> None:
        """Create the state of every trainable parameter that has none.

        Without this call, the state of a parameter is created in its first step. Call this
        method before you load a checkpoint into existing tensors, as
        torch.distributed.checkpoint does. No parameter moves, and no step is counted.
        """
        made: dict[Tensor, Entry] = {}
        for group in self.param_groups:
            how = self.bound_of(group), group_storage(group), group["capturable"]
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
        and the result see `Request` and `step_groups`.
        """
        self.check_train_mode("an update")
        check_unscaled(self)
        self._empty_steps = None  # gradients need not be in p.grad
        rows = grouped(zip(params, grads, microbatches), lambda x: id(self.group_of(x[0])))
        works = [Work(self.group_of(x[0][0]), *map(list, zip(*x))) for x in rows.values()]
        return step_groups(self, works, Request(write, count, self.given, {}))

    def check_accumulates(self) -> None:
        """Raise if the state of a group cannot accumulate a step's gradient in parts."""
        for group in self.param_groups:
            checks.check_accumulates(self.rule_of(group), self.bound_of(group).every_hook)

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
        lines, usual = [f"{type(self).__name__} ("], self._arguments
        for i, group in enumerate(self.param_groups):
            entries = [self.state.get(p, {}).values() for p in group["params"]]
            tensors = [x for x in chain(group["params"], *entries) if isinstance(x, Tensor)]
            kinds = {str(x.dtype)[6:] for x in tensors}
            rows = {"params": len(group["params"]), "dtypes": ", ".join(sorted(kinds))}
            rows["runs"] = _RUNS.get(how := executor_of(group), how)
            for k, x in sorted(group.items()):
                default = usual[k].default if k in usual else EMPTY
                number = type(default) in (float, int, tuple) and default != ()
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
        for group in self.param_groups:
            group["hooks"] = tuple(map(restored, group.get("hooks", ())))
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

    def _note_empty_step(self, params: list[Tensor]) -> None:
        """Warn at the second step of a distributed run in which no parameter has stepped.

        After the first step with gradients, which `params` then have, nothing is counted,
        because steps without gradients may be intended, as those of an actor that waits.
        """
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        alone = not (distributed.is_available() and distributed.is_initialized())
        fine = bool(alone or params or any_distributed(trained))
        count = (self._empty_steps or 0) + bool(trained)
        self._empty_steps = None if fine or count == 2 else count
        if not fine and count == 2:
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

    def _clear_caches(self) -> None:
        """Empty the caches, except for plans and names of parameters. None is pickled."""
        self._bound: dict[int, tuple[Any, Any]] = {}
        self._plans: dict[object, ClassPlan] = self.__dict__.get("_plans", {})
        self._has_stepped = False
        self._empty_steps: int | None = 0  # None: they are not counted any more
        self._homes: dict[int, tuple[int, int]] = {}
        self._stepped: list[object] = []
        self._names: Names = self.__dict__.get("_names") or Names()

    def _factory_of(
        self, group: Group
    ) -> tuple[type[FunctionalOptimizer], tuple[str, ...]]:
        """Return the function that makes a group's value, and its keywords, lr first."""
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
        flat = flatten(inputs[:-1])
        plain, numbers = PLAIN.issuperset(map(type, flat)), inputs[:-1]
        if not plain:
            self._check_numbers(group)
            numbers = [as_scalar(x, params, capturable) for x in numbers]
        bound = factory.kept(**renamed(dict(zip(keywords, numbers)), self._our_names))
        # Tensors and numpy's arrays have this.
        objects = () if plain else flat
        mutable = any([type(x) in (list, dict) or hasattr(x, "__array__") for x in objects])
        self._bound[id(group)] = (None if mutable else inputs), bound
        return bound

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
        reset(self, params, rows)

    def in_cycle(self) -> bool:
        """Return True if a step has taken only a part of its gradients."""
        return self.optimizer_accumulation or any(x.accumulating for x in self.releases)

    def unit_of(self, group: Group) -> list[Group]:
        """Return the groups that have the same running scalars, if their rule joins."""
        return [group]

    def lead_of(self, group: Group) -> Entry | None:
        """Return the entry whose running scalars are those of a group, if one has any."""
        return lead_of(self, group)

    def finish_step(self, parts: dict[Tensor, Part], count: bool = True) -> None:
        """End a step: join what follows from sums over parameters (see `Rule.join`).

        `parts` are what `update` has returned for all parameters that stepped.
        """
        if parts and count:
            finish(self, parts, self.given)

    def note_loaded(self) -> None:
        """Show the running scalars of a state that was loaded or reset in the groups."""
        for group in self.param_groups:
            publish_running(self, group)


_RUNS = {"auto": "compiled if a compiler is found", "kernels": "compiled"}
# Caches, and what others attach: a scheduler of torch's replaces `step` by a bound wrapper,
# which cannot be pickled.
_CACHES = (
    "_bound",
    "_plans",
    "_has_stepped",
    "_empty_steps",
    "_homes",
    "_stepped",
    "_names",
)
_HELD = ("_masters", "_versions", "holds_averages", "releases", "process_group")
_LEFT = (*_CACHES, *_HELD, "step", "_zero_grad_profile_name", "_opt_called")
