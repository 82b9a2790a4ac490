"""The `Rule` of a class body, for one combination of its static options.

`Methods` runs each method of a class body once in a `Trace`, which makes functions of
tensors. Most of these functions receive the coefficients of a step, a NamedTuple `Coeffs`
with three groups of fields:

- c0, c1, ...: the numbers that are operands of calls with tensors.
- By name, what a step adds for each parameter: extras, the numbers that `measure` returns,
  and random numbers z. A field is () until the step adds its value. None means that a
  kernel receives the value as one of its tensors.
- `whole`, only for a class with a method `whole`: t and the hyperparameters.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from hashlib import sha256
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.codes import NEAREST, Codes, to
from optimi_func.core.distributed import distribute_like, number_field, whole, whole_field
from optimi_func.core.layout import Layout
from optimi_func.core.math import moment
from optimi_func.core.philox import FIRST, normal_of
from optimi_func.core.rule import (
    Direction,
    Means,
    Measure,
    MomentStorage,
    Named,
    NoRunning,
    NoState,
    Numbers,
    Rule,
    Scalar,
    Whole,
    along_gradient,
)
from optimi_func.core.storage import encode, field_of
from optimi_func.pure.functional import RATES
from optimi_func.rules.arithmetic import as_scalar, is_scalar
from optimi_func.rules.tracing import Symbol, Trace, check_elementwise, line_of


class Method(NamedTuple):
    """A method that a class body may have.

    Attributes:
        takes: The names of its arguments, in any order. Some methods may also take extras.
        tensors: The first arguments of the function of tensors that it becomes. Those after
            them are the fields of State, and what a step adds to the coefficients.
        result: What its first result is called in errors.
        extras: "all" if it may take each extra, "0-d" if it may take those that are 0-d.
    """

    takes: list[str]
    tensors: list[str] = []  # noqa: RUF012
    result: str = "d"
    extras: Literal["", "0-d", "all"] = ""


_MEAN = "what mean is given"
METHODS = {
    "direction": Method(["g", "s", "t", "x", "z", "r", "c"], ["g", "x"]),
    "accumulate": Method(["g", "s", "t", "x", "r", "c"], ["g", "x"], extras="all"),
    "after": Method(["x", "u", "s", "t", "r", "c", "mean", "top"], ["x", "u"], "u", "all"),
    "due": Method(["t", "c"]),
    "eval_point": Method(["x", "s", "t", "r", "c"], ["x"], "x"),
    "sums": Method(["g", "s", "x", "t", "r", "c"], ["g", "x"], "a sum", "all"),
    "join": Method(["r", "sums"], extras="0-d"),
    "measure": Method(
        ["mean", "top", "numel", "g", "s", "x", "t", "r", "c"], ["g", "x"], _MEAN, "all"
    ),
    "whole": Method(["d", "s", "t", "x", "normal", *RATES], extras="0-d"),
    "coeffs": Method(["t", "r", *RATES]),
}
# Methods that are not traced, but called with values.
_CALLED = ("coeffs", "init", "refuses", "whole")
_SHAPED = " (s has None for Shaped fields, which only whole has)"
_OF_WHOLE = ": it takes lr and weight_decay by name, and of s it has the Shaped fields"
# Names of an entry that are not the rule's.
_OF_ENTRIES = {"step", "kahan_comp", "train_param", "rule_state", "running"}
# Names that a field cannot have, because they are those of methods and of their arguments.
_ARGUMENTS = {*chain(*[method.takes for method in METHODS.values()])} - {"c"}
NAMES = {"self", "State", "Running", *METHODS, *_ARGUMENTS}


class Reduced(NamedTuple):
    """The tensors that a method has given to `mean` and `top`.

    Attributes:
        tensors: The tensors that are reduced: first those of means, then those of maxima.
        results: The inputs of the trace that stand for the means and the maxima.
        tops: The number of maxima.
    """

    tensors: list[Tensor]
    results: list[Tensor]
    tops: int


NOTHING = Reduced([], [], 0)


class Traced(NamedTuple):
    """A traced method, and the function of tensors that it becomes.

    Attributes:
        inputs: The inputs of the function.
        results: The results of the function.
        returned: The Running that the method returned besides.
        reduced: What the method has given to `mean` and `top`.
    """

    inputs: list[Tensor]
    results: list[Tensor]
    returned: list[Any] = []  # noqa: RUF012
    reduced: Reduced = NOTHING


class Measured(NamedTuple):
    """The method `measure`: the numbers that it returns, and what they are computed of.

    Attributes:
        numbers: The numbers by name.
        known: What they are computed of: the number of elements, the fields of State that
            are numbers, as they were before the step, and the means and maxima.
        reduced: What the method has given to `mean` and `top`.
    """

    numbers: dict[str, Tensor]
    known: list[Tensor]
    reduced: Reduced


class Methods:
    """The methods of a class body, and the `Rule` that they are.

    Args:
        cls: The class.
        numbers: The hyperparameters, with their defaults.
        statics: The static options and the choices, with the values to trace for.
    """

    measured = Measured({}, [], NOTHING)  # until `measure` is traced, and without it

    def __init__(self, cls: Any, numbers: dict[str, Any], statics: dict[str, Any]) -> None:
        self.cls, self.name, self.statics = cls, cls.__name__, statics
        self.read: set[str] = set()  # the attributes of self that methods have read
        self.trace = trace = Trace(self.name)
        self.defaults = {**numbers, **dict.fromkeys(RATES, 0.1)}
        self.numbers: dict[str, Any] = {
            name: tuple([trace.number(f"{name}_{i}") for i in range(len(x))])
            if isinstance(x, tuple)
            else trace.number(name)
            for name, x in self.defaults.items()
        }
        self.me = cls.bare({**statics, **self.numbers, "_read": self.read})
        # hasattr of the class, because one of a property hides its AttributeError.
        self.kind: Any = self.me.State if hasattr(cls, "State") else NoState
        self.makers = self._makers()
        self.running: Any = getattr(cls, "Running", NoRunning)
        # Fields in shapes of their own are the last. `whole` has them, or `measure` if they
        # are numbers.
        shaped = [x for x in self.makers if x in (whole_field, number_field)]
        self.count = len(self.kind._fields) - len(shaped)
        self.kept = self.kind._fields[self.count :] if number_field in shaped else ()
        self._check_fields(shaped)
        trace.hint = _SHAPED * (whole_field in shaped)
        self.arguments = self._arguments()
        self.explicit = self._explicit() if hasattr(cls, "coeffs") else None
        self.own_coeffs: dict[str, Symbol] = {}  # what the class's own `coeffs` returns
        if self.explicit is not None:
            coeffs, first = self.explicit(3.0, self.running(), self.defaults)
            self.own_coeffs = {name: trace.number(f"c_{name}") for name in first}
            self.arguments["c"] = type(coeffs)(**self.own_coeffs)
        names, takes = self.names("direction"), self._takes("direction")
        self.others = [x for x in names if x not in takes]  # extras, numbers of `measure`
        self.noise = ["z"] * ("z" in names)
        self.arguments |= {x: trace.tensor(x) for x in (*self.others, *self.noise)}
        self.measured = self._measured()
        # What a step adds to the coefficients for each parameter.
        self.added = [*self.extras, *self.measured.numbers, *self.noise]
        for x in self.measured.numbers:
            if x not in self.arguments:
                self.arguments[x] = trace.tensor(x)
        # The numbers that `measure` keeps are in the state of all other methods.
        kept = [self.arguments[x] for x in self.kept]
        self.arguments["s"] = self._state(self.arguments["s"][: self.count], kept)
        self._check_seed()

    # What the class has

    @property
    def extras(self) -> list[str]:
        """The names of the arguments of `direction` that a step is given."""
        return [x for x in self.others if x not in self.measured.numbers]

    @property
    def single(self) -> list[str]:
        """`Rule.single`: the extras that are 0-d."""
        takes = self.names("whole") + self.names("join")
        return [x for x in self.extras if x in takes]

    @property
    def mapped(self) -> list[str] | None:
        """The names of the numbers that `whole` is called with, if there is one."""
        takes = self.names("whole")
        numbers = [x for x in self.numbers if x not in RATES]
        return numbers + [x for x in RATES if x in takes] if takes else None

    @property
    def untraced(self) -> bool:
        """True if the class has methods that are not traced, but called with values."""
        return any([hasattr(self.cls, x) for x in _CALLED])

    @property
    def narrow(self) -> int | None:
        """The number of betas whose moments are stored in the parameter's dtype."""
        # On the meta device zeros_like would import sympy, which takes half a second.
        low = torch.empty(1, dtype=torch.bfloat16, device="cpu")
        for i, make in enumerate(self.makers):
            if make is whole_field or make(low, low.dtype).dtype != low.dtype:
                return i
        return None

    def usual(self) -> dict[str, float]:
        """Return the extras that have a default, a number."""
        parameters = inspect.signature(self.me.direction).parameters
        found = {x: parameters[x].default for x in self.extras}
        found = {k: x for k, x in found.items() if x is not inspect.Parameter.empty}
        for name, x in found.items():
            if not isinstance(x, int | float):
                raise TypeError(
                    f"{self.name}.direction takes {name}={x!r}: allowed is a number, which "
                    "stands for the extra at a step that is not given it. Without a "
                    "default each step is given it"
                )
        return found

    def _makers(self) -> list[Callable[..., Any]]:
        """Return the functions that make the fields of a State, by their annotations."""
        owner, kind = self.name, self.kind
        if not (isinstance(kind, type) and hasattr(kind, "_field_defaults")):
            raise TypeError(
                f"{owner}.State is {kind!r}: allowed are NamedTuples of tensors"
            )
        try:
            hints = get_type_hints(kind, include_extras=True)
        except NameError as error:
            raise TypeError(f"{owner}.State: {error} (an annotation)") from error
        for name in kind._fields:
            if getattr(hint := hints.get(name), "__origin__", hint) is not Tensor:
                raise TypeError(
                    f"{owner}.State.{name} is annotated {getattr(hint, '__name__', hint)}: "
                    "allowed are Tensor, SecondMoment, Wide, Number and Shaped; scalars go "
                    "to Running"
                )
        for name, x in kind._field_defaults.items():
            raise TypeError(
                f"{owner}.State.{name} = {x!r}: write init, which returns first values"
            )
        annotated = [get_args(hints[name])[1:] for name in kind._fields]
        return [next(filter(callable, x), moment) for x in annotated]

    def _check_fields(self, shaped: list[Callable[..., Any]]) -> None:
        """Raise for fields that State and Running cannot have."""
        needs = {whole_field: "whole", number_field: "measure"}
        lacks = [needs[x] for x in shaped if not hasattr(self.cls, needs[x])]
        if lacks or self.makers[self.count :] != shaped or len({*shaped}) > 1:
            raise TypeError(
                f"{self.name}.State{self.kind._fields}: fields that are Shaped come last, "
                "and are for a class with `whole`, and Number for one with `measure`"
            )
        reserved = set(_OF_ENTRIES)
        for part, kind in ("State", self.kind), ("Running", self.running):
            for name in kind._fields:
                if name in reserved or field_of(name) != name:
                    where = f"{self.name}.{part} has a field {name!r}"
                    raise TypeError(f"{where}: choose another name")
                reserved.add(name)
        if lacking := {*self.running._fields} - {*self.running._field_defaults}:
            raise TypeError(
                f"{self.name}.Running.{min(lacking)} has no default: write its first value"
            )

    def _check_seed(self) -> None:
        """Raise if a method draws random numbers and the class has no seed."""
        mapped = "normal" in self.names("whole") or init_draws(self.cls)
        for x, taken in ("z", bool(self.noise)), ("normal", mapped):
            if taken and "seed" not in self.defaults | self.statics:
                raise TypeError(f"{self.name} takes {x}: add a field, seed: int = 0")

    def _takes(self, method: str) -> list[str]:
        """Return the names of the arguments that a method may have, without extras."""
        takes = METHODS[method].takes
        return [x for x in takes if x != "c" or hasattr(self.cls, "coeffs")]

    def names(self, method: str) -> list[str]:
        """Return the names of a method's arguments; none if the class lacks it.

        A method may also be a property that returns a method, or None if the class lacks
        the method with these static options.
        """
        if not hasattr(self.cls, method) or (fn := getattr(self.me, method)) is None:
            return []
        parameters = inspect.signature(fn).parameters.values()
        names, allowed = [p.name for p in parameters], self._takes(method)
        if method in ("direction", "accumulate"):
            # The gradient and the state may have names of their own.
            first = ["g", "s"][: 1 + bool(self.count)]
            if len(names) < len(first):
                raise TypeError(f"{self.name}.{method} takes {names}: it has to take g, s")
            names[: len(first)] = first
            if len({*names}) < len(names):
                text = ", ".join([p.name for p in parameters])
                raise TypeError(
                    f"{self.name}.{method} takes {text}: g and s are its first two"
                )
        if method == "direction":
            allowed += [x for x in names if x not in self.me.__dict__]
        elif METHODS[method].extras == "all":
            allowed += [*self.others, *self.noise, *self.measured.numbers]
        elif METHODS[method].extras == "0-d":
            allowed += self.extras
        if method == "whole":
            allowed += self.kind._fields[: self.count]
        many = any([p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters])
        if many or not {*names} <= {*allowed}:
            hints = [f", and self.{x} for {x}" for x in names if x in self.me.__dict__]
            raise TypeError(
                f"{self.name}.{method} takes {', '.join(names)}: allowed are "
                f"{', '.join(self._takes(method))}{''.join(hints)}"
            )
        return names

    def _explicit(self) -> Callable[..., tuple[Named, dict[str, Scalar]]]:
        """Return the class's own `coeffs`, which returns its result and scalars by name.

        It raises if they have other names than those that are known.
        """
        cls, statics, takes = self.cls, self.statics, self.names("coeffs")
        where = f"{self.name}.coeffs"

        def explicit(
            t: Scalar, r: object, hyper: dict[str, Any], known: dict[str, Any] | None = None
        ) -> tuple[Named, dict[str, Scalar]]:
            numbers = {name: x for name, x in hyper.items() if name not in RATES}
            arguments = {**hyper, "t": t, "r": r}
            try:
                me = cls.bare({**statics, **numbers})
                result = me.coeffs(*[arguments[name] for name in takes])
            except Exception as error:
                raise TypeError(
                    f"{where} raises {type(error).__name__}: {error} (self has the fields, "
                    "further arguments are t, r, lr, weight_decay, and torch.where is for "
                    "an if over tensors)"
                ) from error
            scalars = result._asdict() if hasattr(result, "_asdict") else result
            right = isinstance(scalars, dict) and all(map(is_scalar, scalars.values()))
            if not right or scalars.keys() != (known or scalars).keys():
                raise TypeError(
                    f"{where} returned {result!r}: allowed are a NamedTuple and a dict of "
                    "numbers and 0-d tensors, with the same names at each step"
                )
            return result, {name: as_scalar(x) for name, x in scalars.items()}

        return explicit

    # Tracing

    def _arguments(self) -> dict[str, Any]:
        """Return the inputs of the trace, as the arguments of methods."""
        trace = self.trace
        arguments: dict[str, Any] = {x: trace.tensor(x) for x in "gxu"}
        arguments["t"] = trace.number("t")
        own = [trace.tensor(f"s_{x}") for x in self.kind._fields[: self.count]]
        arguments["s"] = self._state(own)
        r = [trace.number(f"r_{x}") for x in self.running._fields]
        arguments["r"] = self.running(*r)
        return arguments

    def _state(self, own: Sequence[Any], kept: Sequence[Any] = ()) -> Any:
        """Return a State of its own fields, and of what `measure` keeps."""
        lacks = len(self.kind._fields) - len(own) - len(kept)
        return self.kind(*own, *kept, *[None] * lacks)

    def _new_state(self) -> Any:
        """Return new inputs for the State after the direction."""
        own = [self.trace.tensor(f"new_{x}") for x in self.kind._fields[: self.count]]
        return self._state(own, self.arguments["s"][self.count :] if self.kept else ())

    def _call(self, method: str, **more: Any) -> Any:
        """Trace a method. Raise if it writes to `self`."""
        before = dict(self.me.__dict__)
        arguments = [{**self.arguments, **more}[x] for x in self.names(method)]
        result = self.trace.run(method, getattr(self.me, method), *arguments)
        now = self.me.__dict__
        if [*map(id, now.values())] != [*map(id, before.values())]:
            raise TypeError(
                f"{self.name}.{method} writes to self, but it is traced once: what a step "
                "keeps is a field of State"
            )
        return result

    def _reduced(self, method: str, prefix: str, **more: Any) -> tuple[Any, Reduced]:
        """Trace a method that takes `mean` and `top`, and return its result."""
        found: dict[str, list[tuple[Tensor, Tensor]]] = {"mean": [], "top": []}

        def reduce(kind: str, x: Tensor) -> Tensor:
            if not self.trace.has(x):
                raise TypeError(
                    f"{kind}({x.fn if isinstance(x, Symbol) else x}): allowed are tensors "
                    "in the shape of the parameter, and extras"
                )
            result = self.trace.tensor(f"{prefix}{kind}_{len(found[kind])}")
            found[kind].append((x, result))
            return result

        result = self._call(method, **{x: partial(reduce, x) for x in found}, **more)
        pairs = [*found["mean"], *found["top"]]
        tops = len(found["top"])
        return result, Reduced([x for x, _ in pairs], [x for _, x in pairs], tops)

    def _are_traced(self, results: Iterable[object], numbers: bool) -> bool:
        """Return True if all results are numbers of the trace, or all are tensors of it."""
        if numbers:
            return all([isinstance(x, Symbol) for x in results])
        return all(map(self.trace.has, results))

    def _measured(self) -> Measured:
        """Trace `measure`."""
        if not (names := self.names("measure")):
            return self.measured
        if lacks := [x for x in ("sums", "join", "whole") if self.names(x)]:
            raise TypeError(
                f"{self.name} has measure and {lacks[0]}: allowed is one of both"
            )
        trace = self.trace
        numel, before = trace.tensor("numel"), [trace.tensor(f"s_{x}") for x in self.kept]
        state = self._state(self.arguments["s"][: self.count], before)
        result, reduced = self._reduced("measure", "measured_", numel=numel, s=state)
        numbers = result._asdict() if hasattr(result, "_asdict") else result
        right = isinstance(numbers, dict) and self._are_traced(numbers.values(), False)
        if not (right and reduced.tensors):
            raise TypeError(
                f"{self.name}.measure({', '.join(names)}) returned {result!r}: allowed is "
                "a dict of numbers that are computed of means, as mean(loss), by the names "
                "that direction takes"
            )
        taken = {*self.arguments} - {*self.others} | {*self.defaults, *self.statics, *names}
        if clash := {*numbers} & taken:
            raise TypeError(
                f"{self.name}.measure returned {min(clash)!r}, which is an argument of "
                "methods or an option: choose another name"
            )
        if lacks := [x for x in self.kept if x not in numbers]:
            raise TypeError(
                f"{self.name}.measure returned {[*numbers]}: State has the Number "
                f"{lacks[0]!r}, so it is one of them"
            )
        # A number that is kept is 0-d, and an extra may have the shape of the parameter.
        nodes = trace.needed([numbers[x] for x in self.kept]) - trace.needed(
            reduced.tensors
        )
        given = [x for x in (*self.others, *self.noise) if x != "loss"]
        if read := [x for x in given if trace.node(self.arguments[x]) in nodes]:
            raise TypeError(
                f"{self.name}.measure keeps a number of the extra {read[0]}: allowed are "
                "means and maxima of it"
            )
        return Measured(numbers, [numel, *before, *reduced.results], reduced)

    def _results(self, method: str, found: Any) -> list[Any]:
        """Return what a method returned, without structure. Raise if it is not allowed."""
        if found is None and method == "accumulate":
            return []  # as if there was none
        if method == "after" and isinstance(found, Tensor):
            found = found, self.arguments["s"]  # which does not change
        kinds = [self.kind] if method == "after" else [self.kind, self.running]
        size = {self.kind: self.count, self.running: len(self.running._fields)}
        kinds = [x for x in kinds if size[x] and method != "eval_point"]
        said: Any = found if isinstance(found, tuple) else (found,)
        tails = [x[self.count :] for x in said if self.kept and isinstance(x, self.kind)]
        kept = [*map(id, self.arguments["s"][self.count :])]
        if [x for x in tails if [*map(id, x)] != kept]:
            raise TypeError(
                f"{self.name}.{method} returned other values of {self.kept}, which only "
                "measure sets: return those that s has"
            )
        if not self.count:  # an empty State may be returned or left out
            said = [x for x in said if not isinstance(x, self.kind)]
        own = [x[: self.count] if isinstance(x, self.kind) else x for x in said]
        flat = pytree.tree_leaves(own)
        # A property may make the State anew.
        found = [getattr(type(x), "_fields", type(x)) for x in said]
        right = found == [Tensor, *[x._fields for x in kinds]]
        numbers = [x is self.running for x in kinds for _ in range(size[x])]
        wanted = zip(flat, [False, *numbers])
        right = right and len(flat) == 1 + len(numbers)
        if not right or not all([self._are_traced([x], kind) for x, kind in wanted]):
            names = ", ".join([type(x).__name__ for x in said])
            texts = {self.kind: ", self.State(...)", self.running: ", self.Running(...)"}
            raise TypeError(
                f"{self.name}.{method} returned ({names}): allowed is "
                f"({METHODS[method].result}{''.join([texts[x] for x in kinds])}) of "
                "tensors in the gradient's shape (in Running: of scalars; means of "
                "tensors: Shaped)"
            )
        return flat

    def _inputs(self, method: str, state: Any) -> list[Tensor]:
        """Return the inputs of the function that a method becomes."""
        tensors = [self.arguments[x] for x in METHODS[method].tensors]
        return [*tensors, *state[: self.count], *[self.arguments[x] for x in self.added]]

    def _trace_methods(self) -> dict[str, Traced]:
        """Trace the methods that map tensors, one by one.

        What `after` gives to `mean` and `top` is a function of its own, "after_means".
        """
        count, state, traced = self.count, self.arguments["s"], dict[str, Traced]()
        for method in ("direction", "accumulate", "after", "eval_point"):
            if not self.names(method):
                continue
            inputs, reduced = self._inputs(method, state), NOTHING
            if method == "after":
                found, reduced = self._reduced(method, "after_")
            else:
                found = self._call(method)
            results = self._results(method, found)
            if reduced.tensors:
                traced["after_means"] = Traced(inputs, reduced.tensors, reduced=reduced)
            if results:
                results, rest = results[: 1 + count], results[1 + count :]
                traced[method] = Traced([*inputs, *reduced.results], results, rest, reduced)
        if self.measured.numbers:
            inputs, reduced = self._inputs("measure", state), self.measured.reduced
            traced["measure"] = Traced(inputs, reduced.tensors, reduced=reduced)
        return traced

    def _replaces(self, after: Traced | None) -> bool:
        """Return `Rule.replaces`.

        It is False for a class with `due`, because `after` does not run in each step.
        """
        if after is None or self.names("due"):
            return False
        node, move = self.trace.node, after.results[0]
        read, pairs = self.trace.needed([move]), zip(*after.reduced[:2])
        read = self.trace.needed([move, *[x for x, y in pairs if node(y) in read]])
        return node(self.arguments["u"]) not in read

    def _join(self, traced: dict[str, Traced]) -> Callable[..., Named] | None:
        """Trace `sums` and `join`, and return `Rule.join`.

        The hyperparameters that `join` reads become coefficients.
        """
        trace, running, names = self.trace, self.running, self.running._fields
        lacks = [x for x in ("sums", "join") if not self.names(x)]
        if len(lacks) == 2:
            return None
        lacks += [] if names else ["Running"]
        if lacks or "after_means" in traced:
            found = f"no {lacks[0]}" if lacks else "means in `after`"
            raise TypeError(
                f"{self.name} has {found}: `sums` go with a `join`, which returns a "
                "Running, and without means in `after`"
            )
        if twice := {*names} & {*self.defaults, *self.statics}:
            raise TypeError(
                f"{self.name}.Running has a field {min(twice)!r}, which is an option: a "
                "group shows both, so choose another name"
            )
        result = self._call("sums", s=(new := self._new_state()))
        tensors, spec = pytree.tree_flatten(result)
        if not tensors or not self._are_traced(tensors, numbers=False):
            raise TypeError(
                f"{self.name}.sums returned {result!r}: allowed are tensors in the "
                "gradient's shape"
            )
        traced["sums"] = Traced(self._inputs("sums", new), tensors)
        sums = [trace.number(f"sum_{i}") for i in range(len(tensors))]
        r = running(*[trace.number(f"joined_{name}") for name in names])
        taken = [x for x in self.names("join") if x in self.extras]
        extras = {x: trace.number(f"joined_{x}") for x in taken}
        after = self._call("join", r=r, sums=pytree.tree_unflatten(sums, spec), **extras)
        right = getattr(type(after), "_fields", None) == names
        if not (right and self._are_traced(after, numbers=True)):
            raise TypeError(
                f"{self.name}.join returned {after!r}: allowed is self.Running(...) of "
                "scalars, computed of r, of the sums and of hyperparameters"
            )
        nodes = trace.needed(after)
        scalars = [x for x in pytree.tree_leaves(self.numbers) if x in nodes]
        places = [*map(trace.place, scalars)]
        inputs = [*r, *sums, *extras.values(), *scalars]
        compute = trace.host_function("join", inputs, [*after])

        def join(r: Named, sums: list[Tensor | float], c: Any) -> Named:
            numbers = [*[getattr(c, x) for x in taken], *[c[i] for i in places]]
            return running(*compute(*r, *sums, *numbers))

        return join

    def _due(self) -> int | None:
        """Make a coefficient of `due`, whether `after` acts, and return its place."""
        if not self.names("due"):
            return None
        result: Any = self._call("due")
        if not (isinstance(result, Symbol) and type(result.value) is bool):
            raise TypeError(
                f"{self.name}.due returned {result!r}: allowed is a condition on t and on "
                "hyperparameters, as t % self.k == 0"
            )
        self.trace.due = result
        return self.trace.place(result)

    # The rule

    def rule(self, tried: bool = True, compiled: str = "", by_matrix: bool = False) -> Rule:
        """Trace all methods, and return the Rule.

        Args:
            tried: Try the methods on tensors.
            compiled: A text that tells the class's `whole` apart from others, if it is
                compiled.
            by_matrix: `whole` maps each matrix of a stack by itself.
        """
        kind, count, traced = self.kind, self.count, self._trace_methods()
        join = self._join(traced)
        run, due, digest = self._functions(traced)
        running = traced["direction"].returned
        coeffs, names, prepare = self._coeffs(running)
        before = (0.1, self.running()) if running else ()
        now = coeffs(3.0, *before, **self.defaults)
        now = now[0] if before else now
        n = len(self.trace.coeffs)
        for method in traced if tried else ():
            run[method] = self._tried(method, run[method], traced[method], now[:n])
        end = n + len(self.added)
        functions = {method: _adapted(fn, count, n, end) for method, fn in run.items()}
        # The coefficients of the second and later micro-batches have one more field, which
        # is True, so that another kernel is compiled for them.
        further: Any = namedtuple("Further", [*now._fields, "further"])  # pyright: ignore[reportUntypedNamedTuple]
        text = repr((compiled, digest, self.statics)) if compiled else ""
        whole, init = self._whole(text, by_matrix), self._init()
        # If the direction is the gradient, as in Muon without momentum, all such rules
        # share one function, and thus one kernel.
        alone = traced["direction"].results[0] is self.arguments["g"] and not count
        alone = alone and whole is not None and not running and not self.added
        usual = _direction(kind, count, functions, further)
        after = _after(kind, count, functions["after"], due) if "after" in run else None
        return Rule(
            name=self.cls._name or self.name,
            state=kind,
            init=init,
            coeffs=coeffs,
            direction=along_gradient if alone else usual,
            after=after,
            after_means=_means("after_means", functions, traced),
            replaces=self._replaces(traced.get("after")),
            accumulate=(lambda c: further(*c, True)) if "accumulate" in run else None,
            sums=_means("sums", functions, traced),
            join=join,
            measure=self._measure(functions),
            whole=whole,
            refuses=self._refuses(whole, init, now),
            running=self.running,
            eval_point=_eval_point(functions),
            reads_param=any("x" in self.names(x) for x in ("direction", "accumulate")),
            given=(*self.extras, *self.noise),
            usual=self.usual(),
            single=tuple(self.single),
            numbers=names,
            digest=digest,
            narrow=self.narrow,
            prepare=prepare,
        )

    def _functions(
        self, traced: dict[str, Traced]
    ) -> tuple[dict[str, Callable[..., Any]], int | None, str]:
        """Return the functions of tensors, the place of `due`, and a hash of them all."""
        trace, numbers = self.trace, self.measured.numbers
        results = [x for part in traced.values() for x in part.results]
        trace.require([*results, *numbers.values()])
        due = self._due()
        run = {method: trace.function(method, *part[:2]) for method, part in traced.items()}
        added = [self.arguments[x] for x in self.added]
        if numbers:
            inputs = [*self.measured.known, *added]
            run["settled"] = trace.function("settled", inputs, [*numbers.values()])
        code = repr((self.kind._fields, trace.code, due))
        return run, due, sha256(code.encode()).hexdigest()

    def _tried(
        self,
        method: str,
        run: Callable[..., Any],
        traced: Traced,
        scalars: Sequence[Scalar],
    ) -> Callable[..., Any]:
        """Try a method on tensors, and return its function. Raise if it mixes elements."""
        results = len(traced.results)
        reduced = method in ("measure", "after_means", "sums")
        first = [_MEAN] if method == "after_means" else [METHODS[method].result]
        labels = first * results if reduced else [*first, *self.kind._fields]
        where = f"{self.name}.{method.removesuffix('_means')}"
        node = self.trace.node
        nodes = [*map(node, traced.inputs)], [*map(node, traced.results)]
        views = check_elementwise(where, labels, run, nodes, scalars)
        return partial(_without_views, run, views) if views else run

    def _measure(self, functions: dict[str, Callable[..., Any]]) -> Measure | None:
        """Return `Rule.measure`."""
        if not self.measured.numbers:
            return None
        reduced, settled, kept = functions["measure"], functions["settled"], self.kept
        numbers, tops = [*self.measured.numbers], self.measured.reduced.tops

        def measure(g: Tensor, x: Tensor, s: Any, c: Any) -> list[Tensor]:
            return [*reduced((g, x), s, c)]

        def settle(known: Sequence[Tensor], c: Any) -> tuple[Any, tuple[Tensor, ...]]:
            found = dict(zip(numbers, settled(known, (), c)))
            return c._replace(**found), tuple([found[x] for x in kept])

        return Measure(measure, settle, tops, kept)

    def _coeffs(
        self, after: list[Symbol]
    ) -> tuple[Callable[..., Any], tuple[str, ...], Any]:
        """Return `Rule.coeffs`, the names of its hyperparameters, and `Rule.prepare`.

        `after` has the running scalars after a step.
        """
        trace, running, mapped = self.trace, self.running, self.mapped
        explicit, own, t = self.explicit, self.own_coeffs, self.arguments["t"]
        results, n = [*trace.coeffs, *after], len(trace.coeffs)
        needed = trace.needed(results)
        takes = {*self.names("coeffs"), *self.names("whole")}
        if self.untraced:  # these methods may read any number
            takes |= {*self.numbers} - {*RATES}
        leaves = {k: pytree.tree_leaves(x) for k, x in self.numbers.items()}
        takes |= {k for k, xs in leaves.items() if needed & {*xs}}
        # `Rule.coeffs` of rules with running scalars is given lr besides.
        beside = ["lr"] * bool(running._fields)
        names = [x for x in self.numbers if x in takes and x not in beside]
        scalars = [y for x in (*names, *beside) for y in leaves[x]]
        before = [*self.arguments["r"]]
        inputs = [t, *scalars, *before, *own.values()]
        compute = trace.host_function("coeffs", inputs, results)
        added = [*self.added, *["whole"] * (mapped is not None)]
        fields = [*[f"c{i}" for i in range(n)], *added]
        kind: Any = namedtuple("Coeffs", fields, defaults=[()] * len(added))  # pyright: ignore[reportUntypedNamedTuple]

        def coeffs(t: Any, *before: Any, **numbers: Any) -> Any:
            values, r = [t], ()
            for name in names:
                x = numbers[name]
                # One of several numbers may be None, for `whole`.
                several = isinstance(x, tuple | list)
                values += [0.0 if y is None else y for y in x] if several else [x]
            if before:
                numbers["lr"], r = before
                values.append(numbers["lr"])
            _, c = explicit(t, r, numbers, own) if explicit else ((), {})
            outputs = compute(*values, *r, *[c[name] for name in own])
            now = kind(*outputs[:n])
            if mapped is not None:
                xs = [numbers[x] for x in mapped]
                now = now._replace(
                    whole=(t, *[tuple(x) if type(x) is list else x for x in xs])
                )
            return (now, running(*outputs[n:])) if before else now

        if explicit:
            return coeffs, tuple(names), None
        rates = [t, *[self.numbers[x] for x in RATES]]
        fixed = [x for x in scalars if x not in {*rates}]
        maps = None if mapped is None else (t, *[self.numbers[x] for x in mapped])
        prepared = partial(
            trace.prepared, fixed, results, rates, before, kind, running, maps
        )
        return coeffs, tuple(names), cache(prepared)

    def _init(self) -> Callable[..., Named]:
        """Return `Rule.init`: zeros, or what the class's own init returns."""
        cls, statics, usual, kind = self.cls, self.statics, self.defaults, self.kind
        where, makers, draws = f"{self.name}.init", self.makers, init_draws(cls)

        def init(p: Tensor, kept: MomentStorage, numbers: Numbers) -> Named:
            if not hasattr(cls, "init"):
                return kind(*[_first(p, kept, make, None) for make in makers])
            try:
                found = cls.bare({**statics, **(usual if numbers is None else numbers)})
                found = first_values(found, p, draws)
            except (TypeError, RuntimeError) as error:  # vmap raises the second
                hint = "None is for zeros, and torch.zeros_like(p) + self.x for full_like"
                raise TypeError(f"{where}: {error} ({hint})") from error
            right = getattr(found, "_fields", None) == kind._fields
            if not right or not all([_fits(p, *pair) for pair in zip(makers, found)]):
                shapes = ", and in Shaped fields of any, and shapes" * (
                    whole_field in makers
                )
                raise TypeError(
                    f"{where} returned {found!r} for a parameter of {tuple(p.shape)}: "
                    "allowed is self.State of floating tensors of its shape, and None for "
                    f"zeros{shapes}"
                )
            return kind(*[_first(p, kept, *pair) for pair in zip(makers, found)])

        return init

    def _whole(self, text: str, by_matrix: bool) -> Whole | None:
        """Return `Rule.whole`: the class's, of an instance that has numbers of the step.

        `Coeffs.whole` has t and these numbers. `text` tells maps apart that are compiled.
        """
        if (numbers := self.mapped) is None:
            return None
        cls, statics, kind, takes = self.cls, self.statics, self.kind, self.names("whole")
        names, rest = kind._fields[self.count :], (None,) * self.count
        extras = [x for x in self.extras if x in takes]
        reads = tuple([x for x in takes if x in ("x", *kind._fields[: self.count])])

        def mapped(
            d: Tensor, read: tuple[Tensor, ...], fields: tuple[Tensor, ...], c: Any, r: Any
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            now = dict(zip(numbers, c.whole[1:]))
            arguments = {**now, "d": d, "s": kind(*rest, *fields), "t": c.whole[0]}
            arguments |= dict(zip(reads, read))
            arguments |= {name: getattr(c, name) for name in extras}
            me = cls.bare({**statics, **now})
            if "normal" in takes:
                # The position of the parameter. It is missing in trials, and on meta and
                # fake tensors.
                place = (*c.whole, 0)[1 + len(numbers)]
                arguments["normal"] = normal_of(me.seed, c.whole[0] - 1.0, place, d)
            value = me.whole(*[arguments[name] for name in takes])
            new_d, state = value if names and isinstance(value, tuple) else (value, ())
            right = isinstance(new_d, Tensor) and new_d.shape == d.shape
            if names and (not right or getattr(state, "_fields", ()) != kind._fields):
                raise TypeError(
                    f"{cls.__name__}.whole returned {value!r}: allowed is (d, "
                    f"self.State(...)) with a direction of shape {tuple(d.shape)}"
                )
            if not right:
                raise TypeError(
                    f"{cls.__name__}.whole returned {value!r} for a direction of shape "
                    f"{tuple(d.shape)}: allowed are tensors of its shape"
                )
            new = state[len(rest) :]
            for name, before, x in zip(names, fields, new):
                if not isinstance(x, Tensor) or x.shape != before.shape:
                    raise TypeError(
                        f"{cls.__name__}.whole returned {name}={x!r}: allowed are tensors "
                        f"of the shape {tuple(before.shape)}, which init gave it"
                    )
            return to(new_d, d.dtype), tuple([to(x, y.dtype) for x, y in zip(new, fields)])

        digest = text and sha256(text.encode()).hexdigest()
        layout = cls.bare(statics) if hasattr(cls, "matrices") else Layout()
        return Whole(mapped, names, digest, "normal" in takes, reads, by_matrix, layout)

    def _refuses(
        self, whole: Whole | None, init: Callable[..., Named], now: Any
    ) -> Callable[[Tensor], str | None] | None:
        """Return `Rule.refuses`, which tries `whole` on a parameter's shape too."""
        me, method = self.cls.bare(self.statics), getattr(self.cls, "refuses", None)
        tried = whole if self.cls.at_definition else None
        if method is None and tried is None:
            return None

        def refuses(p: Tensor) -> str | None:
            why = None if method is None else me.refuses(p)
            if why is not None or tried is None or torch.compiler.is_compiling():
                return why
            try:
                with torch.inference_mode(False):  # in which tensors have no version
                    d = torch.empty(p.shape, dtype=torch.float32, device="meta")
                    state = init(d, d.dtype, None)
                    fields = [getattr(state, name) for name in tried.fields]
                    read = [d.clone() for _ in tried.reads]
                    before = [x._version for x in (d, *read, *fields)]
                    one = torch.ones((), dtype=torch.float32, device="meta")
                    extras = dict.fromkeys(self.extras, one)
                    c = now._replace(**extras)
                    tried.map(d, tuple(read), tuple(fields), c, None)
                    if before != [x._version for x in (d, *read, *fields)]:
                        raise TypeError(
                            "it writes to d, x or s, where a new tensor is allowed"
                        )
            except NotImplementedError:
                return None  # an operation that the meta device lacks
            except Exception as error:
                text = f"whole raises {type(error).__name__}: {error}"
                odd = isinstance(error, AttributeError) or "NoneType" in text
                return text + _OF_WHOLE * odd + line_of(error)

        return refuses


def _adapted(
    run: Callable[..., Any], count: int, n: int, end: int
) -> Callable[..., tuple[Any, ...]]:
    """Return `(tensors, s, c, *means) -> results` for a function that a trace has made.

    Args:
        run: The function `(*tensors, *fields, *added, *means, *numbers) -> results`.
        count: The number of fields of State that it takes.
        n: The number of fields c0, c1, ... of the coefficients c.
        end: The fields c[n:end] are what a step adds: extras, numbers of `measure` and z.
    """

    def adapted(tensors: Sequence[Any], s: Any, c: Any, *means: Tensor) -> tuple[Any, ...]:
        return run(*tensors, *s[:count], *c[n:end], *means, *c[:n])

    return adapted


def _direction(
    kind: Any, count: int, functions: dict[str, Callable[..., Any]], further: Any
) -> Callable[..., Direction]:
    """Return `Rule.direction`, which accumulates if the coefficients are `further`."""
    usual = functions["direction"]
    again = functions.get("accumulate", usual)

    def direction(g: Tensor, s: Any, c: Any, x: Any = None) -> Direction:
        run = again if isinstance(c, further) else usual
        d, *state = run((g, x), s, c)
        return Direction(d, kind(*state, *s[count:]))

    return direction


def _after(
    kind: Any, count: int, run: Callable[..., Any], due_place: int | None
) -> Callable[..., tuple[Tensor, Any]]:
    """Return `Rule.after`, which acts where the coefficient at due_place is True."""

    def after(x: Tensor, u: Tensor, s: Any, c: Any, *means: Tensor) -> tuple[Tensor, Any]:
        due = due_place is None or c[due_place]
        if due is False:
            return u, s
        moved, *state = run((x, u), s, c, *means)
        state += s[count:]
        if due is True:
            return moved, kind(*state)
        pairs = [*zip((moved, *state), (u, *s))]  # of a t that is a tensor
        u, *state = [a if a is b else torch.where(due != 0, a, b) for a, b in pairs]
        return u, kind(*state)

    return after


def _means(
    method: str, functions: dict[str, Callable[..., Any]], traced: dict[str, Traced]
) -> Means | None:
    """Return `Rule.sums` or `Rule.after_means`."""
    if (run := functions.get(method)) is None:
        return None

    def measure(first: Tensor, second: Tensor, s: Any, c: Any) -> list[Tensor]:
        return [*run((first, second), s, c)]

    return Means(measure, traced[method].reduced.tops)


def _eval_point(functions: dict[str, Callable[..., Any]]) -> Callable[..., Tensor] | None:
    """Return `Rule.eval_point`."""
    run = functions.get("eval_point")
    return run and (lambda x, s, c: run((x,), s, c)[0])


def _without_views(fn: Callable[..., Any], views: dict[int, int], *args: Any) -> list[Any]:
    """Call fn. In place of a result that is a view, return the tensor that it shows.

    The pipeline copies results that are inputs, but does not look for views of them.
    """
    results = fn(*args)
    every = [*args, *results]
    return [every[views.get(i, len(args) + i)] for i in range(len(results))]


def init_draws(cls: Any) -> bool:
    """Return True if a class has an init that takes `normal`."""
    return hasattr(cls, "init") and "normal" in inspect.signature(cls.init).parameters


def first_values(me: Any, p: Tensor, draws: bool) -> Any:
    """Return what the init of an instance with hyperparameters returns for p."""
    if not draws:
        return me.init(p)
    return me.init(p, normal=normal_of(me.seed, 0.0, FIRST, whole_field(p, ())))


def _first(
    p: Tensor, kept: MomentStorage, make: Callable[..., Codes | Tensor], x: Any
) -> Codes | Tensor:
    """Return the first value of a field: x, or zeros for None or a shape."""
    if make not in (whole_field, number_field):
        zeros = make(p, kept)
        # Clones, because fields share no memory with p.
        if x is None:
            return zeros
        return encode(distribute_like(p, x).clone(), zeros, NEAREST)
    usual = p.shape if make is whole_field else ()
    zeros = whole_field(p, usual if x is None else getattr(x, "shape", x))
    if not isinstance(x, Tensor):
        return zeros
    return distribute_like(zeros, whole(x).clone().to(zeros.device, zeros.dtype))


def _fits(p: Tensor, make: object, x: object) -> bool:
    """Return True if x may be the first value of a field of p."""
    if make is whole_field and isinstance(x, tuple | list):
        return all([isinstance(n, int) and n >= 0 for n in x])
    return x is None or (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and (make is whole_field or x.shape == (() if make is number_field else p.shape))
    )
