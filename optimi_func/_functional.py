"""`FunctionalOptimizer`, the value that is an optimizer, and the trees that it steps.

What it takes and gives is described in `functional`, where users import it from; the
optimizers themselves are in `optimizers`, a file each.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import (
    Any,
    NamedTuple,
    Self,
    TypeAlias,
)

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func._leaf import (
    compute_dtype,
    init_leaf,
    is_low,
    leaf_step,
    rates,
    whole_mean,
)
from optimi_func._math import scalar_dtype
from optimi_func._rule import DecayKind, Leaf, PyTree, Rule, Scalar, Scalars

IDLE_KAHAN = "kahan_sum=True has no effect: no parameter is float16 or bfloat16."
# A number, or a schedule: 0-based step in, number out.
Number: TypeAlias = Scalar | Callable[[Tensor], Scalar]


class LeafState:
    """The state of one parameter: the rule's tensors and, where kept, `kahan_comp`.

    A registered pytree node. Fields read as attributes: `state.leaves["w"].exp_avg`.
    """

    __slots__ = ("kahan_comp", "rule_state")

    def __init__(self, rule_state: Any, kahan_comp: Tensor | None) -> None:
        self.rule_state = rule_state
        self.kahan_comp = kahan_comp

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in LeafState.__slots__:
            raise AttributeError(name)
        return getattr(self.rule_state, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LeafState, (self.rule_state, self.kahan_comp)

    def __repr__(self) -> str:
        return f"LeafState({self.rule_state!r}, kahan_comp={self.kahan_comp!r})"


def _flatten_leaf(leaf: LeafState) -> tuple[list[Tensor], Any]:
    tensors = list(leaf.rule_state)
    if leaf.kahan_comp is not None:
        tensors.append(leaf.kahan_comp)
    # An absent compensation is absent: vmap, grad and jvp refuse None.
    return tensors, (type(leaf.rule_state), leaf.kahan_comp is not None)


def _flatten_leaf_with_keys(leaf: LeafState) -> tuple[list[Any], Any]:
    tensors, (kind, compensated) = _flatten_leaf(leaf)
    names = [*kind._fields, "kahan_comp"]
    keyed = [(pytree.GetAttrKey(n), t) for n, t in zip(names, tensors)]
    return keyed, (kind, compensated)


def _unflatten_leaf(tensors: Any, context: Any) -> LeafState:
    kind, compensated = context
    tensors = list(tensors)
    comp = tensors.pop() if compensated else None
    return LeafState(kind(*tensors), comp)


pytree.register_pytree_node(
    LeafState,
    _flatten_leaf,
    _unflatten_leaf,
    serialized_type_name="optimi_func.functional.LeafState",
    flatten_with_keys_fn=_flatten_leaf_with_keys,
)


class TreeState(NamedTuple):
    """The state of a parameter tree."""

    step: Tensor  # 0-d float32 on the parameters' device: steps taken so far
    leaves: PyTree  # the parameters' structure, a LeafState in each place


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
        max_lr: The largest scheduled lr; needed for decouple_lr with a schedule.
        maximize: Climb instead of descend.

    Raises:
        ValueError: A number out of its range.
        TypeError: What is no number.
    """

    lr: Number
    weight_decay: Number = 0.0
    decouple_lr: bool = False
    max_lr: Scalar | None = None
    maximize: bool = False

    @property
    def rule(self) -> Rule[Any, Any]:
        """The mathematics."""
        raise NotImplementedError

    @property
    def decay(self) -> DecayKind:
        """What weight decay is added to, and what multiplies it."""
        return "fully" if self.decouple_lr else "decoupled"

    @property
    def numbers(self) -> dict[str, Any]:
        """The rule's own hyperparameters by name: floats, tensors, schedules, flags."""
        return {name: getattr(self, name) for name in self.rule.numbers}

    def coeffs(self, t: Scalar) -> Any:
        """The rule's coefficients at step t (1-based); no number may be a schedule."""
        return self.rule.coeffs(t, **self.numbers)

    def __post_init__(self) -> None:
        """Refuse what no step could use, before any step."""
        self.check()

    def with_lr(self, lr: float) -> Self:
        """The same with another learning rate, which alone is checked."""
        check_number("learning rate", "lr", lr)
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, lr=lr)
        if self.decay.startswith("fully"):
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
        if self.decay.startswith("fully"):
            self._check_max_lr()

    def _check_max_lr(self) -> None:
        # lr / max_lr must mean something at every step to come.
        if self.max_lr is not None:
            if not isinstance(self.max_lr, Tensor) and self.max_lr <= 0:
                raise ValueError(
                    f"Invalid maximum learning rate: max_lr={self.max_lr}: "
                    "decouple_lr=True divides by it, it must be positive"
                )
            return
        for lr in pytree.tree_leaves(self.lr):
            if isinstance(lr, Tensor) or callable(lr) or lr == 0:
                raise ValueError(
                    f"Invalid maximum learning rate: max_lr=None with lr={lr}: "
                    "decouple_lr=True needs max_lr, the largest learning rate that "
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
        if self.max_lr is not None and not self.decay.startswith("fully"):
            found.append(f"max_lr={self.max_lr} has no effect without decouple_lr=True.")
        return found + decay_mistakes([(self.decay, self.weight_decay)])

    def init(
        self,
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> TreeState:
        """Fresh state for `params`.

        Args:
            params: Parameter tree.
            kahan_sum: None compensates float16 and bfloat16 parameters; False none.
            state_dtype: The moments' dtype; None takes each parameter's. A second
                moment is never float16.
        """
        warn(self.likely_mistakes())
        return init_tree(self.rule, params, kahan_sum, state_dtype)

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
        scalars = self.scalars(leaves, step, step.to(scalar_dtype(step.device)) + 1.0)
        stepped: dict[int, Leaf] = {}
        for i, (leaf, g) in enumerate(zip(leaves.leaves, leaves.grads)):
            if g is not None:
                now = _cast(scalars[i], leaf_dtype(leaf, g), leaf.p.device)
                stepped[i] = leaf_step(self.rule, leaf, g, now, True, whole_mean)
        return leaves.rebuild(stepped)

    def scalars(self, leaves: "FlatTree", step: Tensor, t: Scalar) -> list[Scalars]:
        """The numbers of each leaf; one object where leaves share them.

        Args:
            leaves: The checked trees.
            step: Steps taken before this one, for schedules.
            t: step + 1, on the host or traced: decides where coefficients are computed.
        """
        step = step.clone()  # a schedule may write to what it is given
        own = {name: resolve_tree(name, x, step) for name, x in self.numbers.items()}
        coeffs = self.rule.coeffs(t, **own)
        max_lr = None if self.max_lr is None else resolve("max_lr", self.max_lr, step)
        lrs, lr_at = _broadcast("lr", self.lr, leaves)
        decays, decay_at = _broadcast("weight_decay", self.weight_decay, leaves)
        shared: dict[tuple[int, int], Scalars] = {}
        for i, j in dict.fromkeys(zip(lr_at, decay_at)):
            lr = resolve("lr", lrs[i], step)
            decay = resolve("weight_decay", decays[j], step)
            top = lr if max_lr is None else max_lr
            r = rates(lr, decay, self.decay, top, self.maximize)
            shared[i, j] = Scalars(coeffs, r)
        return [shared[pair] for pair in zip(lr_at, decay_at)]


def decay_mistakes(groups: list[tuple[DecayKind, Any]]) -> list[str]:
    """One warning for all groups whose fully decoupled decay looks like a decoupled."""
    high = [
        wd
        for kind, tree in groups
        if kind.startswith("fully")
        for wd in pytree.tree_leaves(tree)
        if isinstance(wd, float | int) and wd >= 1e-3
    ]
    if not high:
        return []
    return [
        f"weight_decay={max(high)} is potentially high for decouple_lr=True: fully "
        "decoupled weight decay is not multiplied by the learning rate, so a "
        "weight_decay of 1e-5 to 1e-4 is usual."
    ]


def step_to_come(step: Tensor) -> Scalar:
    """The 1-based number of the step after `step` of them.

    A count on the host gives host coefficients; a device's is never waited for.
    """
    return step.item() + 1.0 if step.device.type == "cpu" else step.double() + 1.0


def check_accumulates(optimizer: FunctionalOptimizer) -> None:
    """Refuse a rule whose state cannot take a step's gradient in parts."""
    if optimizer.rule.accumulate is None:
        raise ValueError(
            "accumulation='states' adds gradients into the state, and "
            f"{optimizer.rule.name} with these options has none that is a sum over "
            "gradients: use accumulation='buffer'"
        )


class FlatTree(NamedTuple):
    """A checked (params, grads, state), flat."""

    paths: list[str]
    spec: pytree.TreeSpec
    leaves: list[Leaf]
    grads: list[Tensor | None]
    state: TreeState
    states: list[LeafState]

    @staticmethod
    def check(
        rule: Rule[Any, Any], params: PyTree, grads: PyTree, state: TreeState
    ) -> "FlatTree":
        """Flatten the three trees, refusing whatever a step could not use."""
        paths, tensors, spec = flatten_params(params)
        if not isinstance(state, TreeState):
            raise TypeError(
                f"state={type(state).__name__} is not a TreeState: make one with "
                f"{rule.name}'s init"
            )
        flat_grads = match_tree("grads", grads, spec, params)
        states = match_tree("state", state.leaves, spec, params)
        for path, p, g, s in zip(paths, tensors, flat_grads, states):
            check_grad(path, p, g)
            _check_state(rule, path, p, s)
        leaves = [Leaf(p, s.rule_state, s.kahan_comp) for p, s in zip(tensors, states)]
        return FlatTree(paths, spec, leaves, flat_grads, state, states)

    def rebuild(self, stepped: dict[int, Leaf]) -> tuple[PyTree, TreeState]:
        """Trees again, with the leaves that moved."""
        params = [leaf.p for leaf in self.leaves]
        states = list(self.states)
        for i, (p, rule_state, comp) in stepped.items():
            params[i], states[i] = p, LeafState(rule_state, comp)
        step = self.state.step + 1.0
        return (
            pytree.tree_unflatten(params, self.spec),
            TreeState(step, pytree.tree_unflatten(states, self.spec)),
        )

    def stuck_moments(self, optimizer: FunctionalOptimizer) -> list[str]:
        """Warnings for moments too coarse for their beta."""
        dtypes = {s.dtype for leaf in self.leaves for s in leaf.state}
        return stuck_moments(getattr(optimizer, "betas", ()), dtypes)


def stuck_moments(betas: Any, dtypes: set[torch.dtype]) -> list[str]:
    """Warnings for bfloat16 moments whose steps round to nothing.

    A bfloat16 number has 8 bits: where 1 - beta < 2^-8, beta * v + (1 - beta) * g^2
    rounds back to v unless g^2 is far from it.
    """
    if torch.bfloat16 not in dtypes:
        return []
    return [
        f"betas[{i}]={beta} with bfloat16 state: 1 - beta is below 2^-8, so the moment "
        "hardly moves. Pass state_dtype=torch.float32, or a beta of at most 0.996."
        for i, beta in enumerate(betas)
        if isinstance(beta, float) and 1.0 - beta < 2.0**-8
    ]


def init_tree(
    rule: Rule[Any, Any],
    params: PyTree,
    kahan_sum: bool | None,
    state_dtype: torch.dtype | None,
) -> TreeState:
    """Fresh state for a parameter tree."""
    check_state_dtype(state_dtype)
    _, tensors, spec = flatten_params(params)
    states: list[LeafState] = []
    if kahan_sum and not any(is_low(p) for p in tensors):
        warn([IDLE_KAHAN])
    for p in tensors:
        leaf = init_leaf(rule, p, kahan_sum, state_dtype)
        states.append(LeafState(leaf.state, leaf.comp))
    step = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    return TreeState(step, pytree.tree_unflatten(states, spec))


def leaf_dtype(leaf: Leaf, g: Tensor) -> torch.dtype:
    """The dtype of one leaf's arithmetic and scalars."""
    return compute_dtype(leaf.p.dtype, g.dtype, *(s.dtype for s in leaf.state))


def check_param(path: object, p: Any) -> None:
    """Refuse what is not a dense real floating tensor."""
    if not isinstance(p, Tensor):
        raise TypeError(f"params{path}={p!r} is not a tensor")
    if p.is_complex():
        raise TypeError(
            f"params{path} has dtype {p.dtype}: optimize torch.view_as_real of it"
        )
    if not p.is_floating_point():
        raise TypeError(f"params{path} has dtype {p.dtype}: allowed are floating ones")
    if torch.finfo(p.dtype).bits < 16:
        raise TypeError(
            f"params{path} has dtype {p.dtype}: allowed are those of 16 bits or more"
        )
    if p.layout != torch.strided:
        raise TypeError(f"params{path} has layout {p.layout}: allowed is strided")


def check_grad(path: object, p: Tensor, g: Any) -> None:
    """Refuse a gradient that does not fit its parameter."""
    if g is None:
        return
    if not isinstance(g, Tensor):
        raise TypeError(f"grads{path}={g!r} is neither a tensor nor None")
    if g.layout != torch.strided:
        raise TypeError(f"grads{path} has layout {g.layout}: allowed is strided")
    if not g.is_floating_point():
        raise TypeError(f"grads{path} has dtype {g.dtype}: allowed are floating ones")
    if torch.finfo(g.dtype).bits < torch.finfo(p.dtype).bits:
        raise TypeError(
            f"grads{path} has dtype {g.dtype}, narrower than its parameter's {p.dtype}: "
            "allowed are that or wider"
        )
    if g.shape != p.shape:
        raise ValueError(
            f"grads{path} has shape {tuple(g.shape)}, its parameter {tuple(p.shape)}"
        )
    if g.device != p.device:
        raise ValueError(f"grads{path} is on {g.device}, its parameter on {p.device}")


def check_state_dtype(dtype: Any) -> None:
    """Refuse a state dtype that no moment could use."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(
            f"Invalid state_dtype: state_dtype={dtype}: allowed are floating torch "
            "dtypes and None"
        )
    if torch.finfo(dtype).bits < 16:
        raise ValueError(
            f"Invalid state_dtype: state_dtype={dtype}: allowed are dtypes of 16 bits "
            "or more"
        )


def _check_state(rule: Rule[Any, Any], path: str, p: Tensor, s: Any) -> None:
    if not isinstance(s, LeafState):
        raise TypeError(f"state.leaves{path}={s!r} is not a LeafState")
    if not isinstance(s.rule_state, rule.state):
        raise ValueError(
            f"state.leaves{path} holds {type(s.rule_state)._fields}, but "
            f"{rule.name} needs {rule.state._fields}: make it with its own init and the "
            "same options"
        )
    for name, x in zip((*rule.state._fields, "kahan_comp"), pytree.tree_leaves(s)):
        if x.shape != p.shape or x.device != p.device:
            raise ValueError(
                f"state.leaves{path}.{name} has shape {tuple(x.shape)} on {x.device}, "
                f"its parameter {tuple(p.shape)} on {p.device}"
            )


def flatten_params(params: PyTree) -> tuple[list[str], list[Tensor], pytree.TreeSpec]:
    """Paths, leaves and structure of a parameter tree, checked."""
    tensors, spec = pytree.tree_flatten(params)
    if not tensors:
        raise ValueError(f"params={params!r} holds no tensor")
    paths = _paths(params, len(tensors))
    for path, p in zip(paths, tensors):
        check_param(path, p)
    return paths, tensors, spec


def _paths(tree: PyTree, count: int, stop: Any = None) -> list[str]:
    if not torch.compiler.is_compiling():
        try:
            keyed, _ = pytree.tree_flatten_with_path(tree, is_leaf=stop)
            return [pytree.keystr(path) for path, _ in keyed]
        except ValueError:
            pass  # a node registered without names for its children
    # Nor can Dynamo trace key paths; the message then counts leaves.
    return [f"<leaf {i}>" for i in range(count)]


def match_tree(name: str, tree: PyTree, spec: pytree.TreeSpec, params: PyTree) -> list[Any]:
    """Flatten `tree` as far as `spec` goes, or name the first leaf that differs."""
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"{name} and params differ in structure{_difference(tree, params)}"
        ) from error


def _difference(tree: PyTree, params: PyTree) -> str:
    def stop(x: Any) -> bool:
        return isinstance(x, LeafState)

    ours = _paths(params, len(pytree.tree_leaves(params)))
    theirs = _paths(tree, len(pytree.tree_leaves(tree, is_leaf=stop)), stop)
    for path in ours:
        # A prefix covers what lies below it.
        if not any(path.startswith(known) for known in theirs):
            return f": params{path} has no counterpart"
    for path in theirs:
        if not any(known.startswith(path) for known in ours):
            return f": {path} is not in params"
    return ": the containers are of different types"


def _broadcast(name: str, prefix: Any, leaves: FlatTree) -> tuple[list[Any], list[int]]:
    """The numbers of a prefix of the parameter tree, and which of them each leaf has."""
    count = len(leaves.leaves)
    numbers, spec = pytree.tree_flatten(prefix)
    if callable(prefix) or spec.is_leaf():
        return [prefix], [0] * count
    places = pytree.tree_unflatten(range(count), leaves.spec)
    try:
        subtrees = spec.flatten_up_to(places)
    except ValueError as error:
        raise ValueError(
            f"{name} is no prefix of params{_difference(prefix, places)}"
        ) from error
    at = [0] * count
    for i, subtree in enumerate(subtrees):
        for place in pytree.tree_leaves(subtree):
            at[place] = i
    return numbers, at


def resolve_tree(name: str, numbers: PyTree, step: Tensor) -> PyTree:
    """Every number of a tree now: see `resolve`."""
    return pytree.tree_map(lambda x: resolve(name, x, step), numbers)


def resolve(name: str, number: Any, step: Tensor) -> Scalar:
    """A number now: schedules called, tensors checked and widened."""
    if callable(number):
        number = _call(name, number, step)
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


def check_betas(betas: Any, count: int) -> None:
    """Refuse betas that are not `count` numbers, each in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != count:
        raise ValueError(f"Invalid betas: betas={betas!r}: allowed are {count} numbers")
    for i, beta in enumerate(betas):
        check_number(f"beta{i + 1} parameter", f"betas[{i}]", beta, below=1.0)


def check_eps(eps: Any) -> None:
    """Refuse a negative eps."""
    check_number("epsilon", "eps", eps)


def check_number(
    label: str,
    name: str,
    value: Any,
    below: float | None = None,
    least: float = 0.0,
    most: float | None = None,
) -> None:
    """Refuse a host number out of its range; tensors are the caller's word."""
    if isinstance(value, Tensor) or callable(value):
        return
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, Real)
    ):
        raise TypeError(
            f"Invalid {label}: {name}={value!r}: allowed are numbers, 0-d tensors and "
            "schedules"
        )
    number = float(value)
    fits = math.isfinite(number) and number >= least
    fits = fits and (below is None or number < below) and (most is None or number <= most)
    if not fits:
        allowed = f"finite, at least {least}"
        allowed += "" if below is None else f" and below {below}"
        allowed += "" if most is None else f" and at most {most}"
        raise ValueError(f"Invalid {label}: {name}={value}: allowed is {allowed}")


def warn(texts: list[str]) -> None:
    """Give each text as a UserWarning of the caller's caller."""
    for text in texts:
        warnings.warn(text, UserWarning, stacklevel=3)


def decay_kind(decouple_wd: bool, decouple_lr: bool) -> DecayKind:
    """The kind of decay of an optimizer whose weight decay may also join the gradient."""
    return "fully" if decouple_lr else "decoupled" if decouple_wd else "l2"
