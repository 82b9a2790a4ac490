"""The types that all modules share: rule, direction, leaf, scalars, storage.

A `Rule` turns one tensor's gradient into a direction. The pipeline in `leaf` turns
directions into deltas and adds them. All other modules decide where and when it runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    TypedDict,
    TypeGuard,
    TypeVar,
    cast,
    runtime_checkable,
)

import torch
from torch import Tensor

from optimi_func.core.layout import Layout

T = TypeVar("T")

# A number that may be traced, differentiated or vmapped: 0-d if it is a Tensor.
Scalar: TypeAlias = float | Tensor
# Storage of float16 and bfloat16 parameters, and of moments.
ParamStorage: TypeAlias = Literal["plain", "kahan", "kahan8", "exact", "stochastic"]
MomentStorage: TypeAlias = torch.dtype | Literal["8bit"]
# Anything torch.utils._pytree can flatten.
PyTree: TypeAlias = Any
# The hyperparameters for `Rule.init`, by name.
Numbers: TypeAlias = Mapping[str, Any] | None


class Named(Protocol):
    """A NamedTuple of a rule: its State, its Coeffs or its running scalars."""

    _fields: tuple[str, ...]
    _field_defaults: dict[str, Any]

    def __init__(self, *fields: object) -> None:
        """Make one of all its fields."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Return its fields in order."""
        ...

    def __len__(self) -> int:
        """Return the number of its fields."""
        ...

    def __getitem__(self, at: Any, /) -> Any:
        """Return a field, or some for a slice."""
        ...

    def _asdict(self) -> dict[str, Any]: ...

    def _replace(self, **fields: object) -> Self: ...


class NoRunning(NamedTuple):
    """The running scalars of a rule without any."""


class Direction(NamedTuple):
    """The result of a rule for one gradient, before learning rate and decay."""

    d: Tensor  # shape of p; the move is -lr * d
    state: Named  # the rule's State after this gradient


class Means(NamedTuple):
    """Means over a whole tensor, which the pipeline takes for a rule.

    Only the pipeline knows whether a tensor is whole, a shard, or one of many in a list.
    For `Rule.sums`, the executors multiply each mean by the number of elements.

    Attributes:
        measure: The function that returns the tensors whose means are taken, in the shape
            of the parameter x. It is `(g, x, state, coeffs) -> tensors` for `Rule.sums`,
            with the state after the direction, and `(x, u, state, coeffs) -> tensors` for
            `Rule.after_means`, with the finished delta u.
        tops: The number of the last of them that are maxima, not means.
    """

    measure: Callable[[Tensor, Tensor, Any, Any], list[Tensor]]
    tops: int = 0


class Measure(NamedTuple):
    """Means over a whole tensor that a rule takes before its direction, which reads them.

    Attributes:
        measure: `(g, x, state, coeffs) -> tensors`, in the shape of the parameter x, whose
            means are taken. The state is that before the step.
        settle: `(known, coeffs) -> (coeffs, kept)`: what `direction` reads, and the next
            values of the fields that are kept. `known` are the number of elements of the
            whole tensor, the fields that are kept, and the means, all 0-d, or a column of
            each for several tensors.
        tops: How many of the last are maxima, not means.
        kept: The names of the State's last fields, if they are numbers of the tensor, 0-d.
            Kernels are given them among the means known, and None in their place.
    """

    measure: Callable[[Tensor, Tensor, Any, Any], list[Tensor]]
    settle: Callable[[Sequence[Tensor], Any], tuple[Any, tuple[Tensor, ...]]]
    tops: int = 0
    kept: tuple[str, ...] = ()


class Whole(NamedTuple):
    """The map of a whole tensor's direction, the place for what is not elementwise.

    Executors gather the shards of a tensor for it.

    Attributes:
        map: `(d, read, fields, coeffs, rates) -> (d, fields)`: maps the direction of a
            whole tensor, in its shape and dtype, before it becomes a delta, and writes to
            no argument. `read` has what `reads` names.
        fields: The names of the State's last fields, if they are the map's. `direction` is
            given None for them, and may leave them out of its result. `init` makes them by
            `whole_field`, in shapes of their own.
        digest: A hash of the map and all else of the step, if the map is sums over
            dimensions and elementwise operations, for a compiler to join; else "".
        draws: True if the map draws random numbers, and takes coeffs of `Rule.at_place`.
        reads: What else the map is given: "x" for the parameter, and names of the State's
            first fields, which are given as the direction's step stores them.
        by_matrix: True if of a stack (three dimensions) each matrix is mapped by itself,
            with its part of each field, whose first dimension is the stack's.
        layout: What has the methods `matrices` and `joined`: see `Layout`. Hooks over
            matrices and rows ask it what the matrices of a tensor are.
        hooks: How many of the first of `Rates.hooks` the map applies: see `core.hooks`.
    """

    map: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    fields: tuple[str, ...] = ()
    digest: str = ""
    draws: bool = False
    reads: tuple[str, ...] = ()
    by_matrix: bool = False
    layout: Any = Layout()
    hooks: int = 0


class derived(Generic[T]):
    """A property that an entry of the same name in the instance's `__dict__` replaces.

    Unlike `functools.cached_property`, which has a lock in Python 3.11, it can be read
    while torch.compile traces.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> T:
        """Compute the value."""
        return cast(T, self) if instance is None else self._make(instance)


class stored(derived[T]):
    """A property that is computed once and then stored in the instance's `__dict__`.

    While torch.compile traces, nothing is stored.
    """

    def __get__(self, instance: object, owner: type | None = None) -> T:
        """Compute and store the value. Later reads find it in `__dict__`."""
        value = super().__get__(instance, owner)
        if instance is not None and not torch.compiler.is_compiling():
            instance.__dict__[self._name] = value
        return value


@dataclass(frozen=True, eq=False)
class Rule:
    """The mathematics of one optimizer, compared by identity.

    Attributes:
        name: Its name in errors, kernels and graphs.
        state: The State, a NamedTuple of tensors shaped like the parameter, except for
            `whole_fields`.
        init: `(p, kept, numbers) -> State`: fresh tensors, none aliasing another. Moments
            are made by `moment` and `second_moment`, in a dtype or in codes as `kept` says.
            Fields that must not lose bits have a dtype of their own. `numbers` are the
            hyperparameters by name, which first values and the shapes of `whole_fields` may
            depend on. None stands for their defaults, where neither matters.
        coeffs: `(t, *, <numbers>) -> Coeffs`: all the scalar work of step t (1-based),
            for `t` an int (host, double precision) or a tensor (traced, float64 if the
            device has it). The keywords are the rule's own hyperparameters. A Python bool
            among the results is static. A rule with `running` has
            `(t, lr, running, *, <numbers>) -> (Coeffs, running)`.
        direction: `(g, state, coeffs) -> Direction`: the tensor work, elementwise.
        after: `(x, u, state, coeffs, *means) -> (u, state)`: rewrites the finished delta u
            of the parameter x, for example for lookahead.
        after_means: The means over a whole tensor that `after` takes, or None.
        replaces: True if the move does not depend on the u that `after` is given.
        accumulate: `coeffs -> Coeffs` for the second and later micro-batches of one step.
            None if the state cannot take a gradient in parts.
        sums: The sums over a whole tensor that `join` adds up over all, or None.
        measure: The means over a whole tensor that `direction` reads, or None.
        whole: The map of a whole tensor's direction, or None.
        refuses: `p -> why`: the reason to refuse a parameter, by its shape, or None.
        running: A NamedTuple of scalars of each parameter that depend on the lrs of all its
            steps; they begin as its defaults. `coeffs` advances them, and they are stored
            next to the step count.
        join: `(running, sums, coeffs) -> running` after the step, from the sums of what
            `sums` measures over all parameters of a param group, or of a tree. These have
            the same running scalars, and a group shows the first.
        eval_point: `(x, state, coeffs) -> x`: the parameter to evaluate with, if that is
            not x, given the coefficients of the next step. Elementwise.
        reads_param: True if `direction` takes the parameter x as its fourth argument.
        given: The names of what a step has to give to each parameter's direction, as fields
            of Coeffs: its `extras`, and "z" for standard normal numbers. For an executor
            those of tensors are None (see `with_given`).
        usual: The extras that a step need not give, with their numbers then.
        single: The names of extras that are 0-d, because `whole` or `join` take them.
        digest: A hash of all that its kernels compute. Rules with the same one share
            kernels, as those of a class that is defined again, also with other processes.
            "": it shares none.
        numbers: The names of the keywords of `coeffs`.
        narrow: The number of betas whose moments are stored in the parameter's dtype.
            None: all.
        prepare: `() -> (*numbers) -> (t, lr, weight_decay, running) -> (Coeffs, running)`:
            `coeffs` for Python numbers, with what does not depend on the step computed
            once. It may raise ArithmeticError or ValueError where `coeffs` does not.
    """

    name: str
    state: type[Named]
    init: Callable[[Tensor, MomentStorage, Numbers], Named]
    coeffs: Callable[..., Any]
    direction: Callable[..., Direction]
    after: Callable[..., tuple[Tensor, Named]] | None = None
    after_means: Means | None = None
    replaces: bool = False
    accumulate: Callable[[Any], Any] | None = None
    sums: Means | None = None
    measure: Measure | None = None
    whole: Whole | None = None
    refuses: Callable[[Tensor], str | None] | None = None
    running: type[Named] = NoRunning
    join: Callable[..., Named] | None = None
    eval_point: Callable[..., Tensor] | None = None
    reads_param: bool = False
    given: tuple[str, ...] = ()
    usual: Mapping[str, float] = field(default_factory=dict[str, float])
    single: tuple[str, ...] = ()
    digest: str = ""
    numbers: tuple[str, ...] = ()
    narrow: int | None = None
    prepare: Callable[[], Callable[..., Callable[..., tuple[Named, Named]]]] | None = None

    def __post_init__(self) -> None:
        """Raise for parts that do not go together."""
        # Stored before any trace: torch.compile would trace again if it were stored later.
        _ = self.draws
        if self.whole is not None and self.sums is not None:
            raise ValueError(f"{self.name}: whole does not go with sums")
        if self.measure is not None and (self.whole is not None or self.join is not None):
            raise ValueError(f"{self.name}: measure goes with neither whole nor join")
        if (*self.fields, *self.whole_fields) != (names := self.state._fields):
            raise ValueError(
                f"{self.name}: whole_fields={self.whole_fields} are not the last of {names}"
            )

    @property
    def whole_fields(self) -> tuple[str, ...]:
        """The State's last fields, which `whole` maps or `measure` keeps, by name."""
        if self.measure is not None:
            return self.measure.kept
        return () if self.whole is None else self.whole.fields

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the State's fields that `direction` has."""
        return self.state._fields[: len(self.state._fields) - len(self.whole_fields)]

    @property
    def counted(self) -> tuple[str, ...]:
        """The names of the counts of a parameter: "step", and its running scalars."""
        return ("step", *self.running._fields)

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of tensors that a step is given for `direction`."""
        return tuple([name for name in self.given if name != "z"])

    def lacks(self, given: Iterable[str]) -> bool:
        """Return True if these are not extras that a step may be given."""
        names = {*given}
        return not {*self.extras} - {*self.usual} <= names <= {*self.extras}

    @stored
    def draws(self) -> bool:
        """True if `whole` draws random numbers."""
        return self.whole is not None and self.whole.draws

    @property
    def mapped_hooks(self) -> int:
        """The number of the first of `Rates.hooks` that are part of the map."""
        return 0 if self.whole is None else self.whole.hooks

    def at_place(self, coeffs: Any, place: int | Tensor) -> Any:
        """Return coefficients for `whole` of the parameter at a place of the optimizer."""
        return coeffs._replace(whole=(*coeffs.whole, place)) if self.draws else coeffs

    def advance(
        self, t: Scalar, lr: Scalar, running: Named, numbers: Mapping[str, object]
    ) -> tuple[Named, Named]:
        """Return the coefficients of step t, and `running` after it."""
        if not self.running._fields:
            return self.coeffs(t, **numbers), running
        coeffs, after = self.coeffs(t, lr, running, **numbers)
        # Copies, because the running scalars are written one after another.
        tensors = [x for x in running if isinstance(x, Tensor)]
        copies = [x.clone() if any([x is y for y in tensors]) else x for x in after]
        return coeffs, type(after)(*copies)


class BoundRule(Protocol):
    """A rule with its hyperparameters, as trees and executors use it.

    `FunctionalOptimizer` has this interface, and documents it. It is not imported by the
    folders that use it, because it is in a folder above them, which calls them.
    """

    rule: derived[Rule]
    numbers: derived[dict[str, Any]]
    init_numbers: derived[Numbers]
    every_hook: derived[tuple[Any, ...]]
    has_numbers: cached_property[bool]
    rates_now: "cached_property[Rates]"

    @property
    def shape_numbers(self) -> Numbers:
        """`init_numbers` if shapes of fields may depend on them, else None."""
        ...

    def rates_at(self, t: Scalar) -> "Rates":
        """Return the rates of step t (1-based)."""
        ...

    def advance(self, t: Scalar, running: Named) -> tuple[Named, Named]:
        """Return the coefficients of step t (1-based), and `running` after it."""
        ...

    def scalars(
        self, tree: Any, step: Tensor, t: Scalar
    ) -> "tuple[list[Scalars], list[int], list[Named]]":
        """Return the different scalars of a step, and two items for each leaf of the tree.

        These are the index of its scalars, and its running scalars after the step.
        """
        ...

    def warn(self, tree: Any) -> None:
        """Warn of likely mistakes in hyperparameters."""
        ...


class NoState(NamedTuple):
    """State and coefficients of a rule that steps along the gradient."""


def along_gradient(g: Tensor, s: Named, c: object, *x: Tensor) -> Direction:
    """Return the gradient as direction, and the same state."""
    del c, x
    return Direction(g, s)


# SGD without momentum, and the second pass of rules that map whole tensors: one kernel.
gradient_rule = Rule(
    name="sgd",
    state=NoState,
    init=lambda p, kept, numbers: NoState(),
    coeffs=lambda t: NoState(),
    direction=along_gradient,
    digest="along the gradient",
)


class Rates(NamedTuple):
    """The scalars that turn a direction into a delta.

        u = -(lr * d(grad_scale * g + l2 * p) + decay * p)

    All kinds of decay, maximize and gradient scaling are values of these four, so that
    none of them needs another graph. Cautious decay and hooks do need others, because they
    cost operations. In a pure step that runs at once, a decay or l2 of None is
    0 and a grad_scale of None is 1, so that they cost none.
    """

    lr: Scalar
    decay: Scalar  # share of p to lose in this step: already multiplied by lr or not
    l2: Scalar  # share of p to add to g
    grad_scale: Scalar  # factor on g: -1 to maximize
    # Cautious decay: the lr of elements that do not decay, where d and p differ in sign. An
    # empty tuple turns it off and adds no kernel argument.
    undecayed_lr: tuple[Scalar, ...] = ()
    # The hooks that change d, each with its key before it: see `core.hooks`.
    hooks: tuple[tuple[str, Any], ...] = ()


class Scalars(NamedTuple):
    """All scalars of one step of one leaf."""

    coeffs: Any  # the rule's Coeffs
    rates: Rates
    dither: Scalar = 0.5  # in [0, 1): for the rounding of codes; 0.5 rounds to the nearest


DecayKind: TypeAlias = (
    Literal["l2", "own", "decoupled", "fully", "corrected"]
    | Literal["proximal", "fully proximal", "corrected proximal"]
)


class Microbatch(NamedTuple):
    """Scale of a gradient, and its part in a step."""

    grad_scale: Scalar  # factor on the gradient: clipping, unscaling
    accumulate: bool  # True if another part of the step's gradient is already in the state
    finite: Tensor | None  # 0-d bool on the device: False skips the update


WHOLE_BATCH = Microbatch(1.0, False, None)


class Storage(NamedTuple):
    """The formats in which parameters and moments are stored between steps.

    "compact" means `Storage("kahan8", "8bit")`, and "exact" means
    `Storage("exact", torch.float32)`.

    Moments are stored in 8 bits only for parameters p with at least 8192 elements that are
    1-D, or in which the number of elements of p[i] is a multiple of 64 (32 if p is
    complex). The 8 bits of a first moment encode its square root, and the 8 bits of a
    second moment encode its fourth root. A second moment is never rounded to 0. A fixed
    sequence over the steps decides whether second moments are rounded up or down, so that
    small changes are not lost. AMSGrad's maximum, Adan's previous gradient, Ranger's slow
    weights, and moments that are always float32, such as those of AdEMAMix and ADOPT, are
    not stored in 8 bits. With "8bit", second moments that cannot be stored in 8 bits are
    stored in float32.

    Attributes:
        param: The format of bfloat16 and float16 parameters. "plain" stores only the
            parameter. "kahan" also stores a compensation in the dtype of the parameter.
            "kahan8" also stores a compensation of 8 bits, so that each weight has 24 bits
            in total. "exact" stores 16 more bits, with which a bfloat16 parameter is a
            complete float32 number. "stochastic" stores only the parameter, and rounds each
            new weight up or down at random, so that rounding errors are 0 on average. None
            means "kahan". float32 parameters are stored unchanged with every format.
        moments: The dtype of the moments, or "8bit", which stores 8 bits for each element
            and one float32 number for each 64 elements. None means the dtype of the
            parameter.
        seed: The seed of "stochastic", from 0 to 2^63 - 1. The random numbers depend only
            on the seed, the step number, the position of the parameter in the optimizer,
            and the position of the element in the parameter.
    """

    param: ParamStorage | None = None
    moments: MomentStorage | None = None
    seed: int = 0

    @property
    def coded(self) -> bool:
        """True if moments are stored in a format such as "8bit" where possible."""
        return isinstance(self.moments, str)

    @property
    def rounds(self) -> bool:
        """True if new bfloat16 and float16 weights are rounded up or down at random."""
        return self.param == "stochastic"


StorageLike: TypeAlias = Storage | Literal["compact", "exact"]


class Leaf(NamedTuple):
    """One parameter with its state and compensation."""

    p: Tensor
    state: Named  # the rule's State: tensors
    # Kahan compensation, the sum of rounding errors of p; or of int32 and in a step alone,
    # random bits to round p by.
    comp: Tensor | None


class InitOptions(TypedDict, total=False):
    """The options of `FunctionalOptimizer.init`, passed on by transforms if given."""

    kahan_sum: bool | None
    state_dtype: torch.dtype | None
    storage: StorageLike | None


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


@runtime_checkable
class PureOptimizer(Protocol):
    """The interface of pure optimizers and of transforms: two functions over pytrees.

    A parameter whose gradient is None does not change. Neither function writes to its
    arguments. A state is a pytree of tensors; no step changes its structure, shapes or
    dtypes.
    """

    def init(self, params: PyTree, *args: Any, **options: Any) -> Any:
        """Return fresh state for `params`, perhaps with some of the `InitOptions`."""
        ...

    def step(self, params: PyTree, grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return new parameters and new state."""
        ...


def check_pure(owner: str, optimizer: object, others: str) -> PureOptimizer:
    """Raise if `optimizer` has no init and step, else return it.

    The error names the function that takes it, and other types ("..., ") that it takes.
    """
    if not is_pure(optimizer):
        raise TypeError(
            f"{owner} got {optimizer!r}, which has no init or no step: allowed are {others}"
            "optimizers of the pure API, as optimi_func.adamw(lr=1e-3), and transforms of "
            "them"
        )
    return optimizer


def is_pure(x: object) -> TypeGuard[PureOptimizer]:
    """Return True if x is a pure optimizer, and no class of them."""
    return not isinstance(x, type) and has_init_and_step(x)


def has_init_and_step(x: object) -> bool:
    """Return True if x is a pure optimizer, or a class of them."""
    return all(callable(getattr(x, method, None)) for method in ("init", "step"))
