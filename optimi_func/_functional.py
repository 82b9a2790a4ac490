"""`FunctionalOptimizer`, the value that is an optimizer: a rule with its numbers.

What it takes and gives is described in `functional`, where users import it from; the
optimizers themselves are in `optimizers`, a file each.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func._checks import check_betas, check_eps, check_number, decay_mistakes, warn
from optimi_func._codes import dither_at, to
from optimi_func._leaf import leaf_dtype, leaf_eval_point, leaf_step, rates, whole_means
from optimi_func._math import scalar_dtype
from optimi_func._rule import DecayKind, Leaf, PyTree, Rule, Scalar, Scalars, Storage
from optimi_func._storage import storage_of
from optimi_func._tree import FlatTree, TreeState, broadcast, init_tree

# A number, or a schedule from the 0-based step to one.
Number: TypeAlias = Scalar | Callable[[Tensor], Scalar]


@dataclass(frozen=True, kw_only=True)
class FunctionalOptimizer:
    """A rule with its numbers: the value to pass around, and what `adamw(lr=...)` makes.

    Each optimizer is a subclass, with the numbers of its own as further fields. A number
    is a float, a 0-d tensor or a callable of the 0-based step; lr and weight_decay may
    also be prefixes of the parameter tree.

    Args:
        lr: Learning rate.
        weight_decay: Decay coefficient, multiplied by lr, or (decouple_lr) by
            lr / max_lr.
        decouple_lr: Fully decouple weight decay from lr.
        max_lr: The largest scheduled lr; needed for decouple_lr and corrected_decay with a
            schedule.
        maximize: Climb instead of descend.
        cautious_decay: Decay an element only where the step moves it towards 0, or not at
            all (arXiv:2510.12402); not for decay that joins the gradient.
        corrected_decay: Multiply weight decay by lr^2 / max_lr, in place of lr, so that it
            fades as the schedule does (arXiv:2506.02285).
        cautious: Move an element only where direction and gradient have one sign, and
            those further, by one over their share of the tensor, at most 1000
            (arXiv:2411.16085). Decay is as without.

    Raises:
        ValueError: A number out of its range.
        TypeError: What is no number.
    """

    # The keywords that are no numbers: what they may be, `check` alone knows.
    choices: ClassVar[tuple[str, ...]] = ()
    # What its class is in other libraries, as `_saved.Counterparts`.
    counterparts: ClassVar[Any] = None

    _rule: ClassVar[Rule[Any, Any]]

    def __init_subclass__(cls, rule: Rule[Any, Any] | None = None) -> None:
        """Note the mathematics, where no option chooses it."""
        super().__init_subclass__()
        if rule is not None:
            cls._rule = rule

    lr: Number
    weight_decay: Number = 0.0
    decouple_lr: bool = False
    max_lr: Scalar | None = None
    maximize: bool = False
    cautious_decay: bool = False
    corrected_decay: bool = False
    cautious: bool = False

    @property
    def rule(self) -> Rule[Any, Any]:
        """The mathematics."""
        return self._rule

    @property
    def decay(self) -> DecayKind:
        """What weight decay is added to, and what multiplies it."""
        return self._decay_kind("decoupled" if getattr(self, "decouple_wd", True) else "l2")

    @property
    def needs_max_lr(self) -> bool:
        """Whether decay is told by how lr compares with the largest scheduled one."""
        return self.decouple_lr or self.corrected_decay

    def _decay_kind(self, usual: Literal["l2", "decoupled", "proximal"]) -> DecayKind:
        """The kind of decay that is asked for, of an optimizer whose usual one is given."""
        if self.decouple_lr:
            return "fully proximal" if usual == "proximal" else "fully"
        if self.corrected_decay:
            return "corrected proximal" if usual == "proximal" else "corrected"
        return usual

    @property
    def numbers(self) -> dict[str, Any]:
        """The rule's own hyperparameters by name: floats, tensors, schedules, flags."""
        return {name: getattr(self, name) for name in self.rule.numbers}

    @property
    def narrow_betas(self) -> tuple[Number, ...]:
        """The betas of moments that are kept in the parameter's dtype, if not otherwise."""
        return getattr(self, "betas", ())

    def advance(self, t: Scalar, running: Any) -> tuple[Any, Any]:
        """The rule's coefficients at step t (1-based), and its running numbers after it.

        No number may be a schedule, nor lr a tree.
        """
        return self.rule.advance(t, cast(Scalar, self.lr), running, self.numbers)

    def __post_init__(self) -> None:
        """Refuse what no step could use, before any step."""
        self.check()

    def __repr__(self) -> str:
        """The call that makes it, without what is so by default."""
        given = [(f, getattr(self, f.name)) for f in fields(self)]
        shown = [
            f"{f.name}={x!r}"
            for f, x in given
            if isinstance(x, Tensor) or type(x) is not type(f.default) or x != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def with_lr(self, lr: float) -> Self:
        """The same with another learning rate, which alone is checked."""
        check_number("learning rate", "lr", lr)
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, lr=lr)
        if self.needs_max_lr:
            changed._check_max_lr()
        return changed

    def check(self) -> None:
        """Refuse numbers out of range; a subclass checks its own too."""
        for lr in pytree.tree_leaves(self.lr):
            check_number("learning rate", "lr", lr)
        for decay in pytree.tree_leaves(self.weight_decay):
            check_number("weight decay", "weight_decay", decay)
        if callable(self.max_lr):
            raise TypeError(
                f"Invalid maximum learning rate: max_lr={self.max_lr!r}: allowed are "
                "numbers and 0-d tensors"
            )
        if self.max_lr is not None:
            check_number("maximum learning rate", "max_lr", self.max_lr)
        if self.decouple_lr and self.corrected_decay:
            raise ValueError(
                "decouple_lr=True with corrected_decay=True: one multiplies weight_decay "
                "by lr / max_lr, the other by lr^2 / max_lr: choose one"
            )
        if self.cautious_decay and self.decay == "l2":
            raise ValueError(
                "cautious_decay=True with weight decay that joins the gradient: there is "
                "no decay apart from the step to leave out. Choose decoupled decay "
                "(decouple_wd=True)"
            )
        if self.cautious and self.rule.whole is not None:
            raise ValueError(
                f"cautious=True with {type(self).__name__}, whose direction mixes the "
                "elements of a matrix: none of them has a gradient whose sign it could "
                "have. Allowed is cautious=False"
            )
        if self.needs_max_lr:
            self._check_max_lr()
        own: Any = self
        if hasattr(self, "betas"):
            check_betas(own.betas, len(type(own).betas))
        if hasattr(self, "eps"):
            check_eps(own.eps)

    def _check_max_lr(self) -> None:
        # lr / max_lr must mean something at every step to come.
        option = "decouple_lr=True" if self.decouple_lr else "corrected_decay=True"
        if self.max_lr is not None:
            if not isinstance(self.max_lr, Tensor) and self.max_lr <= 0:
                raise ValueError(
                    f"Invalid maximum learning rate: max_lr={self.max_lr}: "
                    f"{option} divides by it, it must be positive"
                )
            return
        for lr in pytree.tree_leaves(self.lr):
            if isinstance(lr, Tensor) or callable(lr) or lr == 0:
                raise ValueError(
                    f"Invalid maximum learning rate: max_lr=None with lr={lr}: "
                    f"{option} needs max_lr, the largest learning rate that "
                    "will be scheduled, unless lr is a positive float"
                )

    def likely_mistakes(self) -> list[str]:
        """What is allowed, but probably not meant, as warning texts."""
        found: list[str] = []
        eps = getattr(self, "eps", 0.0)
        if isinstance(eps, float | int) and eps >= 1e-3:
            found.append(
                f"eps={eps} is unusually large. torch.optim's positional order is "
                "(lr, betas, eps, weight_decay), ours (lr, betas, weight_decay, eps)."
            )
        if self.max_lr is not None and not self.needs_max_lr:
            found.append(
                f"max_lr={self.max_lr} has no effect without decouple_lr=True (or "
                "corrected_decay=True)."
            )
        return found + decay_mistakes([(self.decay, self.weight_decay)])

    def init(
        self,
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
        storage: Storage | str | None = None,
    ) -> TreeState:
        """Fresh state for `params`.

        Args:
            params: Parameter tree.
            kahan_sum: None compensates float16 and bfloat16 parameters; False none.
            state_dtype: The moments' dtype; None takes each parameter's. A second
                moment is never float16.
            storage: In place of these two, how parameters and moments are kept:
                "compact", "exact" or `Storage(param, moments)`.
        """
        warn(self.likely_mistakes())
        return init_tree(self.rule, params, storage_of(storage, kahan_sum, state_dtype))

    def step(
        self, params: PyTree, grads: PyTree, state: TreeState
    ) -> tuple[PyTree, TreeState]:
        """One update.

        Args:
            params: Parameter tree.
            grads: Its gradients; None leaves a parameter and its state alone.
            state: From `init` or the step before.

        Returns:
            New parameters and new state; where a gradient is None, the same objects.
        """
        leaves = FlatTree.check(self.rule, params, grads, state)
        if not torch.compiler.is_compiling():
            warn(self.likely_mistakes() + leaves.stuck_moments(self))
        step = state.step.detach()
        t = step.to(scalar_dtype(step.device)) + 1.0
        scalars, running = self.scalars(leaves, step, t)
        stepped: dict[int, Leaf] = {}
        for i, (leaf, g) in enumerate(zip(leaves.leaves, leaves.grads)):
            if g is not None:
                now = _cast(scalars[i], leaf_dtype(leaf, g), leaf.p.device)
                stepped[i] = leaf_step(self.rule, leaf, g, now, True, whole_means)
        return leaves.rebuild(stepped, running)

    def eval_params(self, params: PyTree, state: TreeState) -> PyTree:
        """The parameters to evaluate the model with, between the steps.

        Of most optimizers these are the parameters themselves. Like a step it writes to
        nothing, and can be differentiated, vmapped and compiled.

        Args:
            params: Parameter tree.
            state: Its state, after as many steps.
        """
        # No step is taken: parameters stand for gradients, which are not looked at.
        leaves = FlatTree.check(self.rule, params, params, state)
        if self.rule.eval_point is None:
            return params
        step = state.step.detach()
        t = step.to(scalar_dtype(step.device)) + 1.0
        scalars, _ = self.scalars(leaves, step, t)
        found: list[Tensor] = []
        for leaf, now in zip(leaves.leaves, scalars):
            coeffs = _cast(now.coeffs, leaf_dtype(leaf, leaf.p), leaf.p.device)
            found.append(to(leaf_eval_point(self.rule, leaf, coeffs), leaf.p.dtype))
        return pytree.tree_unflatten(found, leaves.spec)

    def scalars(
        self, leaves: FlatTree, step: Tensor, t: Scalar
    ) -> tuple[list[Scalars], list[Any]]:
        """The numbers of each leaf, and its running ones after the step.

        One object where leaves share them.

        Args:
            leaves: The checked trees.
            step: Steps taken before this one, for schedules.
            t: step + 1, on the host or traced: decides where coefficients are computed.
        """
        step = step.clone()  # a schedule may write to what it is given
        own = {name: resolve_tree(name, x, step) for name, x in self.numbers.items()}
        max_lr = None if self.max_lr is None else resolve("max_lr", self.max_lr, step)
        lrs, lr_at = broadcast("lr", self.lr, leaves)
        decays, decay_at = broadcast("weight_decay", self.weight_decay, leaves)
        lr_now = {i: resolve("lr", lrs[i], step) for i in dict.fromkeys(lr_at)}
        coeffs: dict[Any, tuple[Any, Any]] = {}
        shared: dict[Any, Scalars] = {}
        keys: list[Any] = []
        for k, (i, j, s) in enumerate(zip(lr_at, decay_at, leaves.states)):
            before, alike = s.running, ()
            if before and isinstance(t, Tensor):
                alike = (k,)  # whether they equal another leaf's is not asked of a device
            elif before:
                before = type(before)(*[x.item() for x in before])
                alike = (i, *before)
            keys.append((alike, i, j))
            if alike not in coeffs:
                coeffs[alike] = self.rule.advance(t, lr_now[i], before, own)
            if keys[-1] not in shared:
                lr, decay = lr_now[i], resolve("weight_decay", decays[j], step)
                top = lr if max_lr is None else max_lr
                kind = (self.decay, top, self.maximize, self.cautious_decay)
                r = rates(lr, decay, *kind, self.cautious)
                shared[keys[-1]] = Scalars(coeffs[alike][0], r, dither_at(t))
        return [shared[key] for key in keys], [coeffs[alike][1] for alike, *_ in keys]


def resolve_tree(name: str, numbers: PyTree, step: Tensor) -> PyTree:
    """Every number of a tree now: see `resolve`."""
    return pytree.tree_map(lambda x: resolve(name, x, step), numbers)


def resolve(name: str, number: Any, step: Tensor) -> Scalar:
    """A number now: schedules called, tensors checked and widened."""
    if callable(number):
        number = _call(name, number, step)
        _check_scheduled(name, number)
    if not isinstance(number, Tensor):
        return number
    if number.dim() != 0:
        raise ValueError(
            f"a hyperparameter of shape {tuple(number.shape)} reached the step, which "
            "takes numbers and 0-d tensors. Under vmap, keyword arguments are not "
            "batched: pass it positionally, as in vmap(lambda p, g, s, lr: "
            "adamw_step(p, g, s, lr=lr))"
        )
    return number.to(scalar_dtype(number.device))


def _check_scheduled(name: str, number: Any) -> None:
    """Refuse what a schedule returned and no step could use."""
    if isinstance(number, Tensor):
        if number.dim() != 0:
            raise ValueError(
                f"{name} is a schedule that returned a tensor of shape "
                f"{tuple(number.shape)}: allowed are numbers and 0-d tensors"
            )
        return
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(
            f"{name} is a schedule that returned {number!r}: allowed are numbers and 0-d "
            "tensors"
        )
    # Not finite alone: a limit may be inf for a while.
    if not float(number) >= 0.0:
        raise ValueError(
            f"{name} is a schedule that returned {number}: allowed are numbers from 0"
        )


def _call(name: str, schedule: Callable[..., Any], step: Tensor) -> Scalar:
    """A schedule's number, or why there is none in a graph or under vmap."""
    help = (
        f"{name} is a schedule that leaves the 0-d tensor step for a host number, which "
        "a graph would keep for all steps and vmap for all members: compute it by torch "
        "operations on the step (no .item(), int(), float(), math or if), or pass the "
        "number itself"
    )
    if torch.compiler.is_compiling():
        value = schedule(step)
        if not isinstance(value, Tensor):
            raise ValueError(help)
        return value
    try:
        return schedule(step)
    except RuntimeError as error:
        if ".item()" in str(error) or "data-dependent control flow" in str(error):
            raise ValueError(help) from error
        raise


def _cast(tree: PyTree, dtype: torch.dtype, device: torch.device) -> PyTree:
    """Round every tensor among the scalars once, to where and what the leaf is."""

    def cast(x: Tensor) -> Tensor:
        x = x.to(device, dtype)
        # Inductor stores what it takes a strided view of; else it would compute the
        # powers of betas anew with every few elements of a parameter.
        return x.as_strided((), ()) if torch.compiler.is_compiling() else x

    return pytree.tree_map_only(Tensor, cast, tree)
