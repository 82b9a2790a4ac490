"""`FunctionalOptimizer`: an optimizer as a value, a rule with its hyperparameters.

`functional` describes its trees; the optimizers themselves are in `optimizers`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core import checks
from optimi_func.core.codes import dither_at, to
from optimi_func.core.hooks import check_hooks, checked, count_mapped, keyed, with_hooks
from optimi_func.core.leaf import (
    leaf_dtype,
    leaf_eval_point,
    leaf_step,
    noting_sums,
    rates,
)
from optimi_func.core.math import scalar_dtype
from optimi_func.core.packed import Packed, flatten
from optimi_func.core.pairs import as_real_for
from optimi_func.core.philox import Noise, drawn
from optimi_func.core.rule import (
    DecayKind,
    Leaf,
    Named,
    Numbers,
    PyTree,
    Rates,
    Rule,
    Scalar,
    Scalars,
    StorageLike,
    derived,
)
from optimi_func.core.storage import seed_in, storage_of
from optimi_func.core.tree import (
    NO_RUNNING,
    FlatTree,
    LeafState,
    TreeState,
    broadcast,
    init_tree,
    path_of,
    running_tensors,
    unflatten,
)
from optimi_func.execution.trees import eager_step
from optimi_func.pure.casts import (
    PLAIN,
    Casts,
    Kept,
    at_step,
    called,
    resolve,
    resolve_tree,
)

# A number, or a schedule from the 0-based step to one.
Number: TypeAlias = Scalar | Callable[[Tensor], Scalar]
Decay: TypeAlias = Literal["decoupled", "l2", "proximal", "own"]
T = TypeVar("T")

_NUMBERS = {float, int, bool, type(None)}
# Hyperparameters that may be trees with a number for each part of the parameters.
RATES = ("lr", "weight_decay")


class Owner(Protocol):
    """The interface of the class body in which the rule of a pure optimizer is written.

    `rules.Body` has this interface. It is not imported, because it is in a folder above
    this one. A class body may also have the methods `check`, `init` and `mistakes`.
    """

    _name: ClassVar[str]
    _lr: ClassVar[Literal["factor", "inside"]]
    _usual: ClassVar[Decay]
    _own: ClassVar[dict[str, Any]]  # fields, by name
    _choices: ClassVar[tuple[str, ...]]

    @classmethod
    def bare(cls, values: Mapping[str, object]) -> Any:
        """Return an instance with hyperparameters as attributes, and nothing else."""
        ...

    @classmethod
    def with_values(cls, value: "FunctionalOptimizer") -> Any:
        """Return an instance with the hyperparameters of a value as attributes."""
        ...

    @classmethod
    def _rule_with(cls, value: "FunctionalOptimizer") -> Rule:
        """Return the rule for the static options of a value."""
        ...


def _as_number(x: object) -> object:
    """Return the number in a tensor whose value can be read, and anything else as it is."""
    return x.item() if isinstance(x, Tensor) and checks.value_of(x) is not None else x


def _double(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def _leaves(tree: PyTree) -> Sequence[object]:
    return (tree,) if type(tree) is float else pytree.tree_leaves(tree)


@dataclass(frozen=True, kw_only=True)
class FunctionalOptimizer(Kept):
    """A pure optimizer with fixed hyperparameters, for example `adamw(lr=1e-3)`.

    Each optimizer is a subclass, whose additional fields are its own hyperparameters. A
    hyperparameter is a float, a 0-d tensor, or a schedule, which is a function of the
    number of steps taken so far. lr and weight_decay may also be trees that contain a
    number for each part of the parameter tree.

    Args:
        lr: Learning rate, at least 0.
        weight_decay: Coefficient of weight decay, at least 0. Each step multiplies this
            coefficient by lr, or by lr / max_lr if `decouple_lr` is True.
        decouple_lr: Multiply weight decay by lr / max_lr instead of lr, so that weight
            decay does not depend on how large the learning rate is.
        max_lr: The largest value that lr will have, as a number. `decouple_lr` and
            `corrected_decay` require max_lr if lr is a schedule or a tensor.
        maximize: Maximize the objective instead of minimizing it.
        cautious_decay: Decay an element only if the step moves it towards 0 or does not
            move it (arXiv:2510.12402). Raises an error if weight decay is added to the
            gradient.
        corrected_decay: Multiply weight decay by lr^2 / max_lr instead of lr, so that
            weight decay fades together with the schedule (AdamC, arXiv:2506.02285). Raises
            an error together with `decouple_lr`.
        cautious: True is short for the hook `hooks.cautious()` before all others. It moves
            an element only if the direction and the gradient have the same sign.
        hooks: Changes of the direction before it is multiplied by lr and written, in order,
            such as [hooks.floor(0.35)]: see `optimi_func.hooks`. Their numbers may be 0-d
            tensors and schedules, too.

    Raises:
        ValueError: A hyperparameter is out of range.
        TypeError: A hyperparameter is not a number.
    """

    # The class body in which the rule is written.
    owner: ClassVar[type[Owner]]
    # Names of the hyperparameters, lr first.
    keywords: ClassVar[tuple[str, ...]] = ()
    # Defaults of those that take numbers.
    number_defaults: ClassVar[Mapping[str, object]] = {}
    # Keywords that take no number, so that `check` alone can check them.
    choices: ClassVar[tuple[str, ...]] = ("hooks",)
    # Names of an entry's tensors, in any of its forms.
    entry_fields: ClassVar[frozenset[str]] = frozenset()
    # Its step returns trees of the same structure, so that no caller checks them.
    keeps_structure: ClassVar[bool] = True
    # Names and options of its class in other libraries: `state.convert.Counterparts`.
    counterparts: ClassVar[object] = None

    lr: Number
    weight_decay: Number = 0.0
    decouple_lr: bool = False
    max_lr: Scalar | None = None
    maximize: bool = False
    cautious_decay: bool = False
    corrected_decay: bool = False
    cautious: bool = False
    hooks: Sequence[Any] = ()

    @derived
    def every_hook(self) -> tuple[Any, ...]:
        """The hooks: those of the class body, of which `cautious` is one, and `hooks`."""
        hooks = checked(type(self).__name__, self.hooks)
        return (*self.owner.with_values(self).own_hooks(), *hooks)

    @derived
    def rule(self) -> Rule:
        """The mathematics, a rule for each combination of static options."""
        rule, every = self.owner._rule_with(self), self.every_hook
        if not (count := count_mapped(every)):
            return rule
        check_hooks(type(self).__name__, rule, every)
        return with_hooks(rule, every[:count])

    @derived
    def init_numbers(self) -> Numbers:
        """The hyperparameters before the first step, or None if the class has no `init`."""
        if not hasattr(self.owner, "init"):
            return None
        # torch.compile cannot trace `has_numbers`, and a trace stores no numbers.
        plain = not torch.compiler.is_compiling() and self.has_numbers
        numbers = self.numbers
        if not self.owner._name:  # an own init may read rates that no other method reads
            rates: dict[str, Any] = {name: getattr(self, name) for name in RATES}
            numbers = rates | numbers
            plain = plain and PLAIN.issuperset(map(type, rates.values()))
        numbers = resolve_tree("a number", numbers, _double(0.0))
        # They are stored, because each pure step needs them to check its state. Tensors are
        # not stored, because they may belong to a transformation such as vmap.
        if plain:
            self.__dict__["init_numbers"] = numbers
        return numbers

    @property
    def shape_numbers(self) -> Numbers:
        """`init_numbers` if shapes of fields may depend on them, else None."""
        return self.init_numbers if self.rule.whole_fields else None

    @derived
    def decay(self) -> DecayKind:
        """The kind of weight decay: see the table of `core.leaf.rates`."""
        usual = self.owner.with_values(self).usual_decay()
        if self.decouple_lr:
            return "fully proximal" if usual == "proximal" else "fully"
        if self.corrected_decay:
            return "corrected proximal" if usual == "proximal" else "corrected"
        return usual

    @property
    def needs_max_lr(self) -> bool:
        """True if decay depends on max_lr."""
        return self.decouple_lr or self.corrected_decay

    @derived
    def numbers(self) -> dict[str, Any]:
        """The hyperparameters that only this optimizer has, by name.

        The values are floats, tensors, schedules and bools.
        """
        return {name: getattr(self, name) for name in self.rule.numbers}

    @property
    def _values(self) -> dict[str, object]:
        """The hyperparameters, and the names of those that methods have read of them."""
        own = self.__dict__
        values = {name: own[name] for name in self.keywords}
        if not torch.compiler.is_compiling():
            values["_read"] = self.__dict__.setdefault("_read", set[str]())
        return values

    @property
    def narrow_betas(self) -> tuple[Number, ...]:
        """The betas of moments that are stored in the parameter's dtype by default."""
        return getattr(self, "betas", ())[: self.rule.narrow]

    def advance(self, t: Scalar, running: Named) -> tuple[Named, Named]:
        """Return the rule's coefficients at step t (1-based), and `running` after it.

        lr and weight_decay may be neither schedules nor trees.
        """
        lr = cast(Scalar, self.lr)
        if type(t) is float and self._plain is not None:
            try:
                return self._plain(t, lr, self.weight_decay, running)
            except (ArithmeticError, ValueError):
                pass  # tensors have a result
        return self.rule.advance(t, lr, running, called(self, t))

    @cached_property
    def _plain(self) -> Callable[..., tuple[Named, Named]] | None:
        """The coefficients of a step if all hyperparameters are Python numbers."""
        if self.rule.prepare is None or not self.has_numbers:
            return None
        xs = [x for name, x in self.numbers.items() if name not in ("lr", "weight_decay")]
        flat = [y for x in xs for y in (x if isinstance(x, tuple | list) else (x,))]
        try:
            return self.rule.prepare()(*map(float, flat))
        except (ArithmeticError, ValueError, TypeError):
            return None

    def rates(
        self, lr: Scalar, weight_decay: Scalar, max_lr: Scalar | None, hooks: Sequence[Any]
    ) -> Rates:
        """Return the rates of a step; if max_lr is None, lr is the largest."""
        top = lr if max_lr is None else max_lr
        kind = (self.decay, top, self.maximize, self.cautious_decay, keyed(hooks))
        found = rates(lr, weight_decay, *kind)
        if self.owner._lr == "factor":
            return found
        return found._replace(lr=1.0, undecayed_lr=found.undecayed_lr and (1.0,))

    @cached_property
    def rates_now(self) -> Rates:
        """The rates, for an lr and a weight_decay that are neither schedules nor trees."""
        lr, decay = cast(tuple[Scalar, Scalar], (self.lr, self.weight_decay))
        return self.rates(lr, decay, self.max_lr, self.every_hook)

    def rates_at(self, t: Scalar) -> Rates:
        """Return the rates of step t (1-based), for which schedules of hooks are called."""
        now = self.rates_now
        if any(map(callable, flatten(now.hooks))):
            now = now._replace(hooks=at_step(now.hooks, t))
            check_hooks(type(self).__name__, self.rule, [x for _, x in now.hooks])
        return now

    def __post_init__(self) -> None:
        """Check the hyperparameters, and compute the properties that every step reads."""
        # They are the fields, as `fields` returns them in more time.
        for name, x in () if torch.compiler.is_compiling() else [*self.__dict__.items()]:
            self.__dict__[name] = number = checks.plain(x)
            if self.__dataclass_fields__[name].type is bool:
                checks.check_flag(name, number)
        self.check()
        if not torch.compiler.is_compiling():
            self.__dict__.update(rule=self.rule, decay=self.decay, numbers=self.numbers)
            # What a schedule's number at one step does not change.
            self.__dict__["chosen"] = self.chosen

    @derived
    def chosen(self) -> dict[str, object]:
        """The choices."""
        names = self.owner._choices
        instance = self.owner.bare(self._values) if names else None
        with self._naming_schedules("a choice"):
            found = {name: getattr(instance, name) for name in names}
        # Of a tensor: methods are traced for the value that it has at this step.
        return {k: _as_number(x) for k, x in found.items()}

    def __getstate__(self) -> dict[str, object]:
        """Return the fields, because a copy of a cached rule would be another rule."""
        return {name: self.__dict__[name] for name in self.keywords}

    def __repr__(self) -> str:
        """Return the call that makes it: lr, and what differs from the defaults."""
        pairs = [(f, getattr(self, f.name)) for f in fields(self)]
        texts = [
            f"{f.name}={x!r}"
            for f, x in pairs
            if f.name == "lr"
            or isinstance(x, Tensor)
            or type(x) is not type(f.default)
            or x != f.default
        ]
        name = type(self).__name__ + ("" if self.owner._name else ".pure")
        return f"{name}({', '.join(texts)})"

    def with_lr(self, lr: float) -> Self:
        """Return the optimizer with another learning rate.

        Where the class's `check`, choices or decay have read lr, they are asked again.
        """
        if "lr" in self.__dict__.get("_read", ()):
            return replace(self, lr=lr)
        checks.check_number("learning rate", "lr", lr)
        changed = object.__new__(type(self))
        values = changed.__dict__
        values.update(self.__dict__, lr=lr)
        if "lr" in self.numbers:
            values["numbers"] = {**self.numbers, "lr": lr}
        if "rates_now" in values:
            decay = cast(Scalar, self.weight_decay)
            values["rates_now"] = changed.rates(lr, decay, self.max_lr, self.every_hook)
        if self.needs_max_lr:
            changed._check_max_lr()
        if "lr" in self.numbers or not self.owner._name:  # init may read it
            changed.__dict__.pop("init_numbers", None)
        return changed

    def check(self) -> None:
        """Raise if a hyperparameter is out of range, or if the class's `check` raises."""
        where = type(self).__name__
        for name in self.choices:
            x, usual = getattr(self, name), getattr(type(self), name, callable)
            if isinstance(x, Tensor) or (callable(x) and not callable(usual)):
                raise TypeError(
                    f"{where}: {name}={checks.shown(x)}, but {name} is static: a tensor or "
                    "a schedule needs a field whose default is a float"
                )
        if not torch.compiler.is_compiling():
            self.__dict__["every_hook"] = self.every_hook
            self.__dict__["rule"] = self.rule  # which is looked up once
        if self.every_hook:
            self._check_hooks()
        self._check_decay()
        self._check_shared()
        # A class's `check` sets the bounds of fields that have none of their own.
        bound = not hasattr(self.owner, "check")
        for option in self.owner._own.values():
            if option.name not in RATES:  # checked before, and may be a prefix of the tree
                option.check(getattr(self, option.name), bound or not option.plain)
        if not bound:
            with self._naming_schedules("check"):
                self.owner.with_values(self).check()

    @contextmanager
    def _naming_schedules(self, what: str) -> Generator[None]:
        """Say which schedule a method has read that an error of Python comes from."""
        try:
            yield
        except TypeError as error:
            read = self.__dict__.get("_read", ())
            # Choices are read too, and are no hyperparameters of this value.
            found = [k for k in sorted(read) if callable(getattr(self, k, None))]
            if not found:
                raise
            raise TypeError(
                f"{type(self).__name__}: {what} reads {found[0]}, which is a schedule "
                f"({error}): allowed are numbers, as a class's param groups have them at "
                "each step, or to read it in `coeffs` or `direction`"
            ) from error

    def _check_hooks(self) -> None:
        """Raise for hooks that do not go with the rule, or with weight decay."""
        where, hooks = type(self).__name__, self.every_hook
        check_hooks(where, self.rule, hooks, self.owner._lr == "inside")
        decays = any(map(checks.is_on, _leaves(self.weight_decay)))
        if decays and any([x.keeps_norms for x in hooks]):
            raise ValueError(
                f"Invalid weight_decay: weight_decay={checks.shown(self.weight_decay)}: "
                "allowed is 0 with hyperball, which keeps norms"
            )

    def _check_decay(self) -> None:
        """Raise for options of decay that the move would not follow."""
        rule, own = self.rule, self.owner._usual == "own"
        reads = "weight_decay" in rule.numbers
        if not (rule.replaces or own or reads):
            return
        why = 'class line has decay="own"' if own else "methods read self.weight_decay"
        why = "`after` leaves out u" if rule.replaces else why
        names = ["decouple_lr", "corrected_decay", "cautious_decay"]
        found = [f"{name}=True" for name in names if getattr(self, name)]
        decays = any(map(checks.is_on, _leaves(self.weight_decay)))
        if decays and not reads and self.decay != "l2":
            found.append(f"weight_decay={checks.shown(self.weight_decay)}")
        if found:
            where = f"{type(self).__name__}: {found[0]}"
            raise ValueError(f"{where}, but its {why}: allowed is the default")

    def _check_shared(self) -> None:
        """Raise if a hyperparameter that all optimizers have is out of range."""
        for lr in _leaves(self.lr):
            checks.check_number("learning rate", "lr", lr)
        for decay in _leaves(self.weight_decay):
            checks.check_number("weight decay", "weight_decay", decay)
        if callable(self.max_lr):
            raise TypeError(
                f"Invalid maximum learning rate: max_lr={self.max_lr!r}: allowed are "
                "numbers and 0-d tensors"
            )
        if self.max_lr is not None:
            above = 0.0 if self.needs_max_lr else None  # each step divides by it
            checks.check_number("maximum learning rate", "max_lr", self.max_lr, above=above)
        if self.decouple_lr and self.corrected_decay:
            raise ValueError(
                "decouple_lr=True with corrected_decay=True: one multiplies weight_decay "
                "by lr / max_lr, the other by lr^2 / max_lr. Choose one"
            )
        if self.cautious_decay and self.decay == "l2":
            raise ValueError(
                "cautious_decay=True with weight decay that joins the gradient, so that "
                "the step has no decay of its own to leave out. Choose decoupled decay "
                "(decouple_wd=True)"
            )
        if self.needs_max_lr:
            self._check_max_lr()

    def _check_max_lr(self) -> None:
        option = "decouple_lr=True" if self.decouple_lr else "corrected_decay=True"
        for lr in () if self.max_lr is not None else _leaves(self.lr):
            if isinstance(lr, Tensor) or callable(lr) or lr == 0:
                shown_lr = "a tensor, as in a population" if isinstance(lr, Tensor) else lr
                raise ValueError(
                    f"Invalid maximum learning rate: max_lr=None with lr={shown_lr}: "
                    f"{option} needs max_lr, the largest learning rate that "
                    "will be scheduled, unless lr is a positive float"
                )

    def likely_mistakes(self) -> list[str]:
        """Return warnings of options, but decay, that are probably a mistake."""
        texts: list[str] = []
        if self.max_lr is not None and not self.needs_max_lr:
            texts.append(
                f"max_lr={self.max_lr} has no effect without decouple_lr=True (or "
                "corrected_decay=True)."
            )
        if hasattr(self.owner, "mistakes"):
            texts += self.owner.with_values(self).mistakes()
        return texts

    @property
    def unscaled_decays(self) -> list[tuple[DecayKind, object]]:
        """The kind and coefficient of decay, unless the rule multiplies it too."""
        return [(self.decay, self.weight_decay)] if self.rule.join is None else []

    @cached_property
    def mistakes(self) -> list[str]:
        """The `likely_mistakes` of this value and its decay, for each of its steps."""
        return self.likely_mistakes() + checks.decay_mistakes(self.unscaled_decays)

    @cached_property
    def _stuck(self) -> list[str]:
        return checks.stuck_betas(self.narrow_betas)

    def warn(self, tree: FlatTree) -> None:
        """Warn of likely mistakes, and of moments of a tree that hardly move.

        A step that torch.compile traces does not warn.
        """
        if torch.compiler.is_compiling():
            return
        stuck = self._stuck and torch.bfloat16 in tree.moment_dtypes()
        checks.warn(self.mistakes + self._stuck if stuck else self.mistakes)

    @cached_property
    def has_numbers(self) -> bool:
        """True if no number is a tensor, a schedule or a tree; Dynamo cannot trace it."""
        values = [self.lr, self.weight_decay, self.max_lr]
        for x in self.numbers.values():
            values += x if isinstance(x, tuple) else (x,)
        values += flatten(self.every_hook)
        return _NUMBERS.issuperset(map(type, values))

    def init(
        self,
        params: PyTree,
        *,
        kahan_sum: bool | None = None,
        state_dtype: torch.dtype | None = None,
        storage: StorageLike | None = None,
    ) -> TreeState:
        """Return the state of the optimizer before its first step on `params`.

        Args:
            params: A floating-point or complex tensor, or any pytree of such tensors.
            kahan_sum: False turns off Kahan summation, which stores the rounding error of
                each float16 and bfloat16 parameter and adds it back at the next step. None
                turns Kahan summation on.
            state_dtype: The dtype of the moments. None uses the dtype of each parameter,
                except that second moments are never float16.
            storage: How parameters and moments are stored, in place of `kahan_sum` and
                `state_dtype`: "compact", "exact" or a `Storage`.

        Returns:
            A `TreeState` to pass to the first `step`.

        Raises:
            TypeError: A parameter is not a dense floating-point or complex tensor.
            ValueError: `params` contains no tensor, the rule does not accept the shape of a
                parameter, or the storage options exclude each other.
        """
        # Not `mistakes`, which has a lock that a graph cannot enter.
        checks.warn(self.likely_mistakes() + checks.decay_mistakes(self.unscaled_decays))
        how = storage_of(storage, kahan_sum, state_dtype)
        state = init_tree(self, params, how)
        tree = FlatTree.of(params, params, state)
        for name in ("lr", "weight_decay"):
            broadcast(name, getattr(self, name), tree)  # raises as each step would
        return state

    def step(
        self,
        params: T,
        grads: PyTree,
        state: TreeState,
        **extras: PyTree,
    ) -> tuple[T, TreeState]:
        """Return the parameters and the state after one step.

        Args:
            params: A floating-point or complex tensor, or any pytree of such tensors.
            grads: The gradients: a pytree with the same structure as `params`. Each
                gradient has the shape of its parameter, and the dtype of its parameter or a
                wider dtype. If a gradient is None, its parameter and the parameter's state
                are returned unchanged.
            state: The state that `init(params)` or the previous step returned.
            **extras: The extra arguments of the rule's `direction`, by name. Each extra is
                a pytree with a tensor for each parameter, or one number for all parameters.

        Returns:
            (params, state): The updated parameters, and the state for the next step.

        Raises:
            TypeError: An extra is missing, `direction` has no argument with the name of an
                extra, a parameter is not a dense floating-point or complex tensor, or
                `state` is not a `TreeState`.
            ValueError: The trees differ in structure, or a gradient, a state or an extra
                does not fit its parameter.
        """
        if (extras or self.rule.extras) and self.rule.lacks(extras):
            raise TypeError(
                f"the step of {type(self).__name__} got the extras {sorted(extras)}: its "
                f"direction takes {sorted(self.rule.extras)} (extras are its arguments but "
                "g, s, t, x, z, r and c)"
            )
        tree = FlatTree.of(params, grads, state).check(self)
        if not self.rule.given:
            return self._step(tree)
        leaf_extras: list[dict[str, Any]] = [{} for _ in tree.leaves]
        for i, p in enumerate(tree.leaves if "z" in self.rule.given else ()):
            leaf_extras[i]["z"] = Noise(cast(Any, self).seed, state.step, i, p)
        usual = {k: _double(x) for k, x in self.rule.usual.items()}
        for name, extra in {**usual, **extras}.items():
            rows, at = broadcast(name, extra, tree)
            for i, p in enumerate(tree.leaves):
                x = rows[at[i]]
                x = _double(x) if isinstance(x, float) else x
                leaf_extras[i][name] = x
                shapes = [(), *([] if name in self.rule.single else [tuple(p.shape)])]
                if isinstance(x, Tensor) and tuple(x.shape) not in shapes:
                    raise ValueError(
                        f"{name}{path_of(params, i)} has the shape {tuple(x.shape)}, and "
                        f"its parameter {tuple(p.shape)}: allowed are {shapes}"
                    )
        return self._step(tree, leaf_extras)

    def _step(
        self, tree: FlatTree, extras: list[dict[str, Tensor | Noise]] | None = None
    ) -> tuple[PyTree, TreeState]:
        """Step; `extras` are what the rule is given besides for each leaf, by name."""
        self.warn(tree)
        scalars, at, running, cast = self._now(tree)
        if tree.runs_at_once():
            # Derivatives may pass through a number that requires grad.
            constant = extras is None and all([Packed(x).constant for x in scalars])
            if constant and self.rule.whole is None:
                return eager_step(self.rule, tree, (scalars, at, running))
            device = tree.state.step.device
            running = [running_tensors(x, device) for x in running]  # shared so far
        pairs = zip(tree.leaves, tree.states)
        old = [Leaf(p, s.rule_state, s.kahan_comp) for p, s in pairs]
        leaves, states = tree.leaves.copy(), tree.states.copy()
        results: dict[int, Leaf] = {}
        means: dict[int, list[Tensor]] = {}
        seeds = [None if x.comp is None else seed_in(x.comp) for x in old]

        for i, (p, leaf, g) in enumerate(zip(tree.leaves, old, tree.grads)):
            if g is None:
                continue
            if not p.numel():  # as in place, where no launch has it
                results[i] = pytree.tree_map_only(Tensor, torch.clone, leaf)
                continue
            wide = leaf_dtype(leaf, g)
            now = cast(scalars[at[i]], wide, p.device)
            if extras or self.rule.draws:
                now = self._with_given(now, extras[i] if extras else {}, i, p, wide)
            if (seed := seeds[i]) is not None:
                (bits,) = drawn([Noise(seed, tree.state.step, i, p, torch.int32)], wide)
                leaf = leaf._replace(comp=bits)
            answer = noting_sums(means.setdefault(i, []))
            results[i] = leaf_step(self.rule, leaf, g, now, True, answer, wide)
        for i, new in results.items():
            # A rule may return a field unchanged, or an extra, but the results of a step
            # share no memory with its arguments.
            inputs = [*states[i].rule_state, *(extras[i].values() if extras else ())]
            rule_state = [
                pytree.tree_map(torch.clone, x) if any([x is y for y in inputs]) else x
                for x in new.state
            ]
            rule_state = type(new.state)(*rule_state)
            comp = new.comp if (seed := seeds[i]) is None else seed.clone()
            leaves[i], states[i] = new.p, LeafState(rule_state, comp, running[i])
        if self.rule.join is not None and results:
            every = [scalars[i] for i in at]
            if extras:  # of which `join` takes numbers, the first parameter's
                numbers = {name: extras[0][name] for name in self.rule.single}
                coeffs = every[0].coeffs._replace(**numbers)
                every[0] = every[0]._replace(coeffs=coeffs)
            states = cast.joined(tree, states, means, every, running[0])
        return tree.rebuild(leaves, states)

    def _with_given(
        self,
        now: Scalars,
        own: dict[str, Tensor | Noise],
        place: int,
        p: Tensor,
        wide: torch.dtype,
    ) -> Scalars:
        """Return scalars with what the rule is given for the parameter at a place."""
        given = [as_real_for(p, x) for x in drawn([*own.values()], wide)]
        coeffs = self.rule.at_place(now.coeffs, place)
        return now._replace(coeffs=coeffs._replace(**dict(zip(own, given))))

    def eval_params(self, params: T, state: TreeState) -> T:
        """Return the parameters with which to evaluate the model.

        For the Schedule-Free optimizers, these are the averaged parameters. All other
        optimizers return `params`. Like `step`, this method is a pure function, so you can
        differentiate, vmap and compile it.

        Args:
            params: The parameters that the last step returned.
            state: The state that the last step returned.

        Returns:
            A tree with the structure, shapes and dtypes of `params`.
        """
        # No gradients are needed, so the parameters are checked in their place.
        tree = FlatTree.of(params, params, state).check(self)
        if self.rule.eval_point is None:
            return params
        scalars, at, _, cast = self._now(tree)
        points: list[Tensor] = []
        for i, p, s in zip(at, tree.leaves, tree.states):
            leaf = Leaf(p, s.rule_state, s.kahan_comp)
            now = cast(scalars[i], leaf_dtype(leaf, p), p.device)
            points.append(to(leaf_eval_point(self.rule, leaf, now.coeffs), p.dtype))
        return unflatten(tree.spec, points)

    def _now(self, tree: FlatTree) -> tuple[list[Scalars], list[int], list[Named], Casts]:
        """Return what `scalars` does, and the casts for a step of the tree."""
        step, at_once = tree.state.step.detach(), tree.runs_at_once()
        if at_once and self.has_numbers and not self.rule.running._fields:
            t = step.item() + 1.0
        else:
            t = step.to(scalar_dtype(step.device)) + 1.0
        scalars, at, running = self.scalars(tree, step, t, at_once)
        return scalars, at, running, Casts(self.rule, at_once)

    def scalars(
        self, tree: FlatTree, step: Tensor, t: Scalar, at_once: bool = False
    ) -> tuple[list[Scalars], list[int], list[Named]]:
        """Return the different scalars, their index for each leaf, and running scalars.

        The last are those after the step. `step` counts the steps before this one and t is
        step + 1; if t is a tensor, coefficients are computed on its device. at_once is True
        if that is the CPU, where its values can be read.
        """
        if not (isinstance(t, Tensor) or self.rule.running._fields) and self.has_numbers:
            coeffs, after = self.advance(t, NO_RUNNING)
            single, count = Scalars(coeffs, self.rates_now, dither_at(t)), len(tree.leaves)
            return [single], [0] * count, [after] * count
        step = step.clone()  # a schedule may write to what it is given
        numbers = {k: resolve_tree(k, x, step) for k, x in self.numbers.items()}
        max_lr = None if self.max_lr is None else resolve("max_lr", self.max_lr, step)
        hooks = resolve_tree("hooks", self.every_hook, step)
        if not (torch.compiler.is_compiling() or self.has_numbers):
            now = object.__new__(type(self))
            now.__dict__.update(self.__dict__, **numbers, every_hook=hooks)
            now.check()  # the values that schedules and tensors have at this step
        lrs, lr_at = broadcast("lr", self.lr, tree)
        decays, decay_at = broadcast("weight_decay", self.weight_decay, tree)
        lr_now = {i: resolve("lr", lrs[i], step) for i in dict.fromkeys(lr_at)}
        decay_now = {j: resolve("weight_decay", decays[j], step) for j in {*decay_at}}
        reads = bool(numbers.keys() & {"lr", "weight_decay"})
        cache: dict[tuple[object, ...], tuple[Named, Named]] = {}
        places: dict[tuple[object, ...], int] = {}
        results: list[Scalars] = []
        at: list[int] = []
        running: list[Named] = []
        lead = tree.states[0].running
        if self.rule.join is not None and not isinstance(t, Tensor):
            lead = type(lead)(*[x.item() for x in lead])
        for k, (i, j, s) in enumerate(zip(lr_at, decay_at, tree.states)):
            before, alike = s.running, (i, j) if reads else ()
            if self.rule.join is not None:
                before, alike = lead, (i,)  # those of the first are those of all
            elif before and isinstance(t, Tensor) and not at_once:
                alike = (k,)  # comparing them with another leaf's would synchronize
            elif before:
                alike = (i, j, *[x.item() for x in before])
                if not isinstance(t, Tensor):
                    before = type(before)(*alike[2:])
            if alike not in cache:
                rates = {"lr": lr_now[i], "weight_decay": decay_now[j]}
                now = numbers | {x: rates[x] for x in rates if x in numbers}
                cache[alike] = self.rule.advance(t, lr_now[i], before, now)
            coeffs, after = cache[alike]
            if (alike, i, j) not in places:
                places[alike, i, j] = len(results)
                now = self.rates(lr_now[i], decay_now[j], max_lr, hooks)
                results.append(Scalars(coeffs, now, dither_at(t)))
            at.append(places[alike, i, j])
            running.append(after)
        return results, at, running
