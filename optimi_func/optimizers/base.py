"""What every class is: a torch.optim.Optimizer with param groups, schedules, checkpoints.

A class adds nothing to the mathematics. Its groups hold plain numbers under torch's names,
read anew at every step, and `state[p]` is a flat dict: `step`, the rule's tensors and,
where kept, `kahan_comp`.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY
from typing import Any, ClassVar, TypeAlias, cast, dataclass_transform

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from optimi_func._checks import (
    check_accumulates,
    check_moves_state,
    check_taken,
    warn,
    warn_user,
)
from optimi_func._functional import FunctionalOptimizer
from optimi_func._rule import WHOLE_BATCH, Microbatch, Storage
from optimi_func._storage import group_storage
from optimi_func._torch import uncompiled
from optimi_func.execution.kernels import kernel_context
from optimi_func.optimizers._checkpoints import Checkpoints
from optimi_func.optimizers._groups import (
    GroupNumbers,
    Path,
    check_group,
    check_modes,
    check_torchs_own,
    constructor_signature,
    likely_mistakes,
    plain_number,
)
from optimi_func.optimizers._state import ensure_state, insert_made, wants_state_alone
from optimi_func.optimizers._step import Stepper, Work

Params: TypeAlias = (
    Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
)
Closure: TypeAlias = Callable[[], Any]


@dataclass_transform()
class _Fields:
    """A constructor's arguments are the fields of its class, then those of its base."""


class BaseOptimizer(_Fields, Checkpoints):
    """What all classes share: `step` over groups, state, loading, argument checks.

    A subclass is the constructor of its groups' defaults, and names the value whose step
    it takes; whatever that value takes by keyword is read from the param group.

    Args:
        params: Parameters, named parameters, or param groups.
        defaults: The groups' options: what the subclass takes, and these.

    Every optimizer takes these options:

    Args:
        decouple_lr: Fully decouple weight decay from lr: it is multiplied by lr / max_lr.
        max_lr: The largest lr that will be scheduled, where the lr given is not it; for
            decouple_lr and corrected_decay.
        kahan_sum: Compensated summation: None for every float16 and bfloat16 parameter,
            False for none.
        foreach: Eager multi-tensor step, without a compiler.
        triton: optimi's name; True asks for the compiled step, None and False change
            nothing.
        gradient_release: Allow the step to be fused into backward, parameter by
            parameter.
        compile: None compiles where a toolchain is found, True raises where none is,
            False runs eagerly.
        maximize: Climb instead of descend.
        capturable: Keep step counts and coefficients on the device, for CUDA graphs.
        state_dtype: The moments' dtype, or its name; None takes each parameter's.
        storage: In place of kahan_sum and state_dtype, how parameters and moments are kept:
            "compact", "exact" or `Storage(param, moments)`.
        cautious_decay: Decay an element only where the step moves it towards 0, or not at
            all (arXiv:2510.12402); not for decay that joins the gradient.
        corrected_decay: Multiply weight_decay by lr^2 / max_lr, in place of lr, so that it
            fades as the schedule does (AdamC, arXiv:2506.02285). Not with decouple_lr.
        cautious: Move an element only where direction and gradient have one sign, and
            those further, by one over their share of the tensor, at most 1000
            (arXiv:2411.16085). Decay is as without.

    Raises:
        ValueError: A number out of its range, or options that exclude each other.
        TypeError: A parameter that is not a dense real floating tensor.
    """

    factory: ClassVar[Callable[..., FunctionalOptimizer]]

    params: Params
    lr: float | Tensor
    _: KW_ONLY
    decouple_lr: bool = False
    max_lr: float | None = None
    kahan_sum: bool | None = None
    foreach: bool | None = None
    triton: bool | None = None
    gradient_release: bool = False
    compile: bool | None = None
    maximize: bool = False
    capturable: bool = False
    state_dtype: torch.dtype | str | None = None
    storage: Storage | str | None = None
    cautious_decay: bool = False
    corrected_decay: bool = False
    cautious: bool = False

    def __init_subclass__(cls) -> None:
        """Read the keywords off the factory's signature, and make the constructor."""
        super().__init_subclass__()
        if "factory" not in cls.__dict__:
            return
        cls.keywords = tuple(inspect.signature(cls.factory).parameters)
        assert cls.keywords[0] == "lr"
        cls.__signature__ = signature = constructor_signature(cls, BaseOptimizer)

        def construct(self: BaseOptimizer, *args: Any, **kwargs: Any) -> None:
            # Torch's, which its users pass as what they are there by default.
            check_torchs_own(kwargs.pop("fused", None), kwargs.pop("differentiable", False))
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            (_, params), *defaults = given.arguments.items()
            BaseOptimizer._construct(self, params, dict(defaults))

        cls.__init__ = construct

    def _construct(self, params: Params, defaults: dict[str, Any]) -> None:
        self.optimizer_accumulation = False
        # The gradient releases attached to this optimizer.
        self.releases: list[Any] = []
        self._unprepared: RemovableHandle | None = None
        self._constructed = False
        self._clear_caches()
        defaults = {name: plain_number(x) for name, x in defaults.items()}
        if isinstance(
            moments := getattr(defaults["storage"], "moments", None), torch.dtype
        ):
            defaults["storage"] = defaults["storage"]._replace(moments=str(moments))
        torch.optim.Optimizer.__init__(self, cast(Any, params), defaults)
        self._constructed = True
        self._warn_of_mistakes(0)
        if self.defaults["gradient_release"]:
            self._unprepared = _warn_where_unprepared(self)

    def attach(self, release: Any) -> None:
        """Note that a gradient release steps this optimizer; it detaches itself."""
        self.releases.append(release)
        if self._unprepared is not None:
            self._unprepared.remove()
            self._unprepared = None

    def _clear_caches(self) -> None:
        """Forget what can be found out again; none of it is saved (`_CACHES`)."""
        self._numbers = self._group_numbers()
        self._grouped: list[tuple[int, int]] = []
        self._group_index: dict[Tensor, int] = {}
        self._stepper = Stepper(self._numbers)

    def _group_numbers(self) -> GroupNumbers:
        return GroupNumbers(type(self).factory, self.keywords)

    def bound_of(self, group: dict[str, Any]) -> FunctionalOptimizer:
        """Return the pure optimizer with a group's present hyperparameters."""
        return self._numbers.bind(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; numbers left out take the constructor's.

        Raises:
            TypeError: A parameter that is not a dense real floating tensor.
            ValueError: A number out of its range; nothing is added then.
        """
        count = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            group = self.param_groups[count]
            keywords, choices = self._numbers.keywords(group)
            group.update({name: plain_number(group[name]) for name in keywords})
            check_group(group, tuple([k for k in keywords if k not in choices]))
            rule = self._numbers.bind(group).rule
            for p in group["params"]:
                check_taken(rule, Path(group, p), p)
            check_modes(group)
            if self._constructed:
                self._warn_of_mistakes(count)
        except Exception:
            del self.param_groups[count:]
            raise

    def _warn_of_mistakes(self, first: int) -> None:
        """Warn, once for all groups from one on, of what is allowed but hardly meant."""
        bounds = [self._numbers.bind(group) for group in self.param_groups]
        warn(likely_mistakes(self.param_groups, bounds, first))

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Closure | None = None, param: Tensor | None = None
    ) -> Any:
        """Update every parameter that has a gradient, or one.

        As in torch, threads may step one optimizer at a time without an error, and what
        they write to the same parameter at the same time is that of either.

        With every lr and every gradient 0 a first step makes the state, as `init_state`:
        torch.distributed.checkpoint asks for it so.

        Args:
            closure: Reevaluates the model and returns the loss; run once, with grad.
            param: The one parameter to update, for an optimizer made with
                `gradient_release=True`. Not together with closure.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError, TypeError: A gradient that does not fit its parameter, closure
                with param, or a param without gradient release; before any write.
            RuntimeError: A step that a CUDA graph being captured could not repeat; before
                any write.
        """
        if torch.compiler.is_compiling():
            return self._step_outside_graph(closure, param)
        return self._step_now(closure, param)

    @uncompiled
    def _step_outside_graph(self, closure: Closure | None, param: Tensor | None) -> Any:
        return self._step_now(closure, param)

    def _step_now(self, closure: Closure | None, param: Tensor | None) -> Any:
        self.check_train_mode("step()")
        if param is not None:
            if closure is not None:
                raise ValueError("step takes a closure or a param, not both")
            self.step_params([param])
            return None
        if closure is None and wants_state_alone(self.state, self.param_groups):
            self.init_state()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: list[Work] = []
        for group in self.param_groups:
            params: list[Tensor] = group["params"]
            grads: list[Any] = [p.grad for p in params]
            given = [g for g in grads if g is not None]
            if len(given) < len(grads):
                params = [p for p, g in zip(params, grads) if g is not None]
            if given:
                work.append(Work(group, params, given, None))
        self._stepper.run(self.param_groups, self.state, work, write=True, count=True)
        return loss

    def init_state(self) -> None:
        """Make the state of every trainable parameter that has none.

        The first gradient of a parameter does so by itself. A checkpoint that is loaded
        into the tensors that are there, as torch.distributed.checkpoint does, needs them
        before. No parameter moves, and no step is counted.
        """
        made: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            how = self.rule_of(group), group_storage(group), group["capturable"]
            for p in group["params"]:
                if p.requires_grad and "step" not in self.state.get(p, {}):
                    with kernel_context(p.device):
                        ensure_state(self.state, made, Path(group, p), p, *how)
        insert_made(self.state, made)

    def step_params(self, params: list[Tensor]) -> None:
        """Update these parameters now, as a hook of one's own would in backward.

        With `optimizer_accumulation` their state alone moves. Groups are looked up
        here, so that schedules, manual changes and loaded states all take effect.

        Args:
            params: Parameters of any groups, each with a gradient.

        Raises:
            ValueError: Without `gradient_release=True`, for a parameter without a
                gradient, or one that is in no group; before any write.
        """
        if not self.defaults["gradient_release"]:
            raise ValueError(
                "step(param=...) is for an optimizer made with gradient_release=True"
            )
        for p in params:
            if p.grad is None:
                name = Path(self.group_of(p), p)
                raise ValueError(f"step(param=...): {name} has no gradient")
        grads = [cast(Tensor, p.grad) for p in params]
        microbatches = [WHOLE_BATCH] * len(params)
        write = not self.optimizer_accumulation
        self.update(params, grads, microbatches, write=write, count=True)

    def update(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        microbatches: list[Microbatch],
        write: bool,
        count: bool,
    ) -> None:
        """Update parameters by gradients given, which need not be the whole step's.

        What gradient release is made of; `p.grad` is neither read nor written.

        Args:
            params: Parameters of any groups.
            grads: The gradient of each.
            microbatches: What each is to its parameter's step.
            write: False moves the state alone.
            count: Whether the step ends here, for the step counts.

        Raises:
            ValueError, TypeError: What does not fit; before any write.
        """
        self.check_train_mode("an update")
        works: dict[int, Work] = {}
        for p, g, microbatch in zip(params, grads, microbatches):
            group = self.group_of(p)
            if id(group) not in works:
                works[id(group)] = Work(group, [], [], [])
                if not write:
                    check_moves_state(self.rule_of(group))
            _, ps, gs, its = works[id(group)]
            ps.append(p)
            gs.append(g)
            cast(list[Microbatch], its).append(microbatch)
        self._stepper.run(self.param_groups, self.state, list(works.values()), write, count)

    def check_numbers(self) -> None:
        """Refuse numbers of a group that its next step would refuse; nothing is written.

        Raises:
            ValueError, TypeError: A number out of its range, or none.
        """
        for group in self.param_groups:
            self._numbers.bind(group, group["params"])

    def check_accumulates(self) -> None:
        """Refuse rules whose state cannot take a step's gradient in parts.

        Raises:
            ValueError: One that cannot, of any group, or cautious=True.
        """
        for group in self.param_groups:
            check_accumulates(self.rule_of(group), group["cautious"])

    def group_of(self, param: Tensor) -> dict[str, Any]:
        """The group that holds a parameter now.

        Raises:
            ValueError: No group does.
        """
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
        """Asked by GradScaler.step and by trainers that clip: too late under release."""
        if self.releases:
            raise RuntimeError(
                "gradient release has applied and freed the gradients in backward: there "
                "is nothing left for a GradScaler to unscale, or for a trainer to clip. "
                "Train in bfloat16, which needs no scaler; clip with "
                "prepare_for_gradient_release(..., clip_global_norm=...), and set the "
                "trainer's clipping to 0"
            )
        return False

    def zero_grad(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, set_to_none: bool = True, param: Tensor | None = None
    ) -> None:
        """Reset the gradients of all parameters, or of one.

        Args:
            set_to_none: Free them, in place of filling them with zeros.
            param: The one parameter, as its hook calls this under gradient release.
        """
        if param is None:
            for release in self.releases:
                release.before_zero_grad()
            super().zero_grad(set_to_none=set_to_none)
        elif set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad = torch.zeros_like(param.grad)

    def __getstate__(self) -> dict[str, Any]:
        """Every field survives pickle and deepcopy; hooks do not."""
        # A scheduler replaces `step` by a bound wrapper of its own.
        kept = {k: v for k, v in self.__dict__.items() if not _is_not_ours_to_keep(k)}
        return {**kept, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; what is cached is found out anew."""
        self.__dict__.setdefault("releases", [])  # load_state_dict comes here too
        self.__dict__.setdefault("_unprepared", None)
        super().__setstate__(state)
        self._clear_caches()


def _warn_where_unprepared(optimizer: BaseOptimizer) -> RemovableHandle:
    """Have the first step that finds gradients say that no model was prepared."""
    said: list[bool] = []

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if said or len(args) > 2 or kwargs.get("param") is not None:
            return  # the optimizer, closure, param: a hook of the user's own
        groups = optimizer.param_groups
        if any(p.grad is not None for group in groups for p in group["params"]):
            said.append(True)
            warn_user(
                "gradient_release=True, but no model was prepared: this is the ordinary "
                "step. Call prepare_for_gradient_release(model, optimizer)",
            )

    return optimizer.register_step_post_hook(after_step)


_CACHES = ("_numbers", "_grouped", "_group_index", "_stepper")
_ATTACHED = ("releases", "_unprepared")
_TORCHS_OWN = ("step", "_zero_grad_profile_name", "_opt_called")


def _is_not_ours_to_keep(field: str) -> bool:
    return field.startswith("_optimizer_") or field in (*_CACHES, *_ATTACHED, *_TORCHS_OWN)
