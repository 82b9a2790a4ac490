"""The vocabulary: what a rule, a direction, a leaf and its scalars are.

An optimizer is a value. A `Rule` says how one tensor's gradient becomes a direction; the
pipeline in `_leaf` turns directions into deltas and adds them; everything else in the
package decides where and when that happens.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeGuard,
    TypeVar,
    runtime_checkable,
)

import torch
from torch import Tensor

# A number that may be traced, differentiated or vmapped: 0-d where it is a Tensor.
Scalar: TypeAlias = float | Tensor
# How parameters are kept whose dtype is float16 or bfloat16, and how moments are.
ParamStorage: TypeAlias = Literal["plain", "kahan", "kahan8", "exact"]
MomentStorage: TypeAlias = torch.dtype | Literal["8bit"]
# Anything torch.utils._pytree can flatten.
PyTree: TypeAlias = Any

S = TypeVar("S")
C = TypeVar("C")


class NoRunning(NamedTuple):
    """The running numbers of a rule without any."""


class Direction(NamedTuple):
    """Where a rule wants to go, before learning rate and decay."""

    d: Tensor  # shape of p; the move is -lr * d
    state: Any  # the rule's State after this gradient
    shared: Any = None  # what `Means.measure` takes over


class Means(NamedTuple):
    """What a rule asks about a whole tensor before its move: elementwise means.

    They are the pipeline's to take: only it knows whether a tensor is whole, a shard, or
    one of many in a list.

    Attributes:
        number: How many.
        measure: `(g, x, d, decaying, shared, coeffs) -> tensors` whose means are taken, in
            the shape of the parameter x; `decaying` is x where it decays, else 0, and
            `shared` from `direction`.
        settle: `(means, scale, lr, decay, coeffs) -> divisor` of the whole move, which is
            -(lr * scale * d + decay * decaying).
    """

    number: int
    measure: Callable[[Tensor, Tensor, Tensor, Tensor, Any, Any], list[Tensor]]
    settle: Callable[[list[Tensor], Scalar, Scalar, Scalar, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Rule(Generic[S, C]):
    """One optimizer's mathematics, a value compared by identity.

    Attributes:
        name: The name by which errors, kernels and graphs call it.
        state: The State, a NamedTuple of tensors shaped like the parameter.
        init: `(p, kept) -> State`: fresh tensors, none aliasing another. Moments are made
            by `moment` and `second_moment`, kept as asked, in a dtype or in codes; whatever
            must not lose bits is in a dtype of its own choosing.
        coeffs: `(t, *, <numbers>) -> Coeffs`: all the scalar work of step t (1-based),
            for `t` an int (host, double precision) or a tensor (traced, float64 where the
            device has it). The keywords are the rule's own hyperparameters. A Python bool
            among the results is static. Of a rule with running numbers
            `(t, lr, running, *, <numbers>) -> (Coeffs, running)`.
        direction: `(g, state, coeffs) -> Direction`: the tensor work, elementwise.
        after: `(x, u, state, coeffs) -> (u, state)`: rewrites the finished delta u of
            the parameter x (lookahead and its kin).
        accumulate: `coeffs -> Coeffs`: those by which a further part of one step's gradient
            joins what the parts before it left in the state. None where the state is no
            sum over gradients.
        means: The means over a whole tensor that its move is divided by, or None.
        whole: `(d, coeffs) -> d`: maps the direction of a whole tensor, in its shape and
            dtype, before it becomes a delta. All that is not elementwise is in it:
            executors know no more of it, and gather what several processes hold.
        refuses: `p -> why`: the reason to refuse a parameter, by its shape; None where the
            rule takes it.
        running: Numbers of a leaf that depend on the lrs of all its steps, a NamedTuple of
            scalars whose defaults they begin with. `coeffs` advances them, and they are
            kept where the step count is.
        eval_point: `(x, state, coeffs) -> x`: where to evaluate, if that is not the
            parameter x, by the coefficients of the step to come. Elementwise.
        numbers: The names of the keywords of `coeffs`.
    """

    name: str
    state: type[S]
    init: Callable[[Tensor, MomentStorage], S]
    coeffs: Callable[..., Any]
    direction: Callable[[Tensor, S, C], Direction]
    after: Callable[[Tensor, Tensor, S, C], tuple[Tensor, S]] | None = None
    accumulate: Callable[[C], C] | None = None
    means: Means | None = None
    whole: Callable[[Tensor, C], Tensor] | None = None
    refuses: Callable[[Tensor], str | None] | None = None
    running: type[Any] = NoRunning
    eval_point: Callable[[Tensor, S, C], Tensor] | None = None
    numbers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Read the names of the hyperparameters off the signature of `coeffs`."""
        given = 3 if self.running._fields else 1
        names = list(inspect.signature(self.coeffs).parameters)[given:]
        object.__setattr__(self, "numbers", tuple(names))
        if self.whole is not None and (self.after is not None or self.means is not None):
            raise ValueError(f"{self.name}: whole goes with neither after nor means")

    def advance(
        self, t: Scalar, lr: Scalar, running: Any, numbers: Mapping[str, Any]
    ) -> tuple[C, Any]:
        """The coefficients of step t, and the running numbers after it."""
        if not self.running._fields:
            return self.coeffs(t, **numbers), running
        return self.coeffs(t, lr, running, **numbers)


class NoState(NamedTuple):
    """What a rule keeps, and takes, that steps along the gradient."""


def no_init(p: Tensor, kept: MomentStorage) -> NoState:
    """Its state."""
    del p, kept
    return NoState()


def no_coeffs(t: Scalar) -> NoState:
    """Its coefficients."""
    del t
    return NoState()


def along_gradient(g: Tensor, s: Any, c: Any) -> Direction:
    """Its direction, which leaves any state as it is."""
    del c
    return Direction(g, s)


sgd_rule: Rule[NoState, NoState] = Rule("sgd", NoState, no_init, no_coeffs, along_gradient)


class Rates(NamedTuple):
    """What turns a direction into a delta.

        u = -(lr * d(grad_scale * g + l2 * p) + decay * p)

    Every kind of decay, maximize and gradient scaling are values of these four numbers,
    so that none of them is another graph. Cautious decay and cautious updates each are
    one: they cost operations.
    """

    lr: Scalar
    decay: Scalar  # share of p to lose in this step: already multiplied by lr or not
    l2: Scalar  # share of p to add to g
    grad_scale: Scalar  # factor on g: -1 to maximize
    # Cautious decay: the one lr of elements that do not decay, because d and p have unlike
    # signs. Empty, which pytrees and kernels see nothing of: all decay.
    undecayed_lr: tuple[Scalar, ...] = ()
    # (True,): cautious updates, which move only the elements whose direction and gradient
    # have one sign. Empty: all move.
    cautious: tuple[bool, ...] = ()


class Scalars(NamedTuple):
    """All the numbers of one step of one leaf."""

    coeffs: Any  # the rule's Coeffs
    rates: Rates
    dither: Scalar = 0.5  # in [0, 1): what codes are rounded by; 0.5 to the nearest


DecayKind: TypeAlias = Literal[
    "l2",
    "decoupled",
    "fully",
    "corrected",
    "proximal",
    "fully proximal",
    "corrected proximal",
]


class Microbatch(NamedTuple):
    """What a gradient is to its step, where it may be less than the whole of it."""

    grad_scale: Scalar  # factor on it: clipping, unscaling
    accumulate: bool  # another part of the step's gradient was here before
    finite: Tensor | None  # 0-d bool on the device: False changes nothing at all


WHOLE_BATCH = Microbatch(1.0, False, None)


class Storage(NamedTuple):
    """How parameters and moments are kept.

    Attributes:
        param: Of bfloat16 (and float16) parameters: "plain" as they are; "kahan" with a
            compensation of their own dtype; "kahan8" with one of 8 bits, 24 bits in all;
            "exact" with 16 bits more, which make a bfloat16 parameter a float32. None:
            "kahan". float32 parameters are as they are.
        moments: The moments' dtype, or "8bit": 8 bits an element and a float32 for each
            64 of them. None: the parameter's dtype.
    """

    param: ParamStorage | None = None
    moments: MomentStorage | None = None


class Leaf(NamedTuple):
    """One parameter and everything that moves with it."""

    p: Tensor
    state: Any  # the rule's State: a NamedTuple of tensors
    comp: Tensor | None  # Kahan compensation: what rounding took from p so far


@runtime_checkable
class PureOptimizer(Protocol):
    """Two pure functions over pytrees: what every transform of an optimizer takes and is.

    A gradient of None leaves its parameter alone. Neither function writes to what it is
    given. A state is a pytree of tensors; no step changes its structure, shapes or dtypes.
    """

    def init(
        self,
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
        storage: Storage | str | None = None,
    ) -> Any:
        """Fresh state for `params`: see `FunctionalOptimizer.init`."""
        ...

    def step(self, params: PyTree, grads: PyTree, state: Any) -> tuple[PyTree, Any]:
        """One update: new parameters and new state."""
        ...


def check_pure(owner: str, optimizer: Any, others: str) -> PureOptimizer:
    """Refuse what has no init and step.

    Args:
        owner: What was given the optimizer, for the error.
        optimizer: Anything.
        others: What the owner takes beside pure optimizers, "" or "... , ".
    """
    if not is_pure(optimizer):
        raise TypeError(
            f"{owner} got {optimizer!r}, which has no init or no step: allowed are {others}"
            "optimizers of the pure API, as optimi_func.adamw(lr=1e-3), and transforms of "
            "them"
        )
    return optimizer


def is_pure(x: Any) -> TypeGuard[PureOptimizer]:
    """Whether x can initialise and step; a class of such things cannot."""
    return not isinstance(x, type) and has_init_and_step(x)


def has_init_and_step(x: Any) -> bool:
    """Whether x is a pure optimizer, or a class of them."""
    return all(callable(getattr(x, method, None)) for method in ("init", "step"))
