"""The `Rule` of a class body, for one combination of its static options."""

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from hashlib import sha256
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from optimi_func.core.codes import NEAREST, Codes, to
from optimi_func.core.distributed import distribute_like, number_field, whole, whole_field
from optimi_func.core.math import moment
from optimi_func.core.philox import FIRST, normal_of
from optimi_func.core.rule import (
    AfterMeans,
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
from optimi_func.rules.lifting import (
    Trace,
    Traced,
    as_scalar,
    check_elementwise,
    is_scalar,
    line_of,
    prepared,
)

RATES = ("lr", "weight_decay")
# The arguments that methods take, by name; direction may have others, its extras, which
# some of the others may take too.
_TAKES = {
    "direction": ["g", "s", "t", "x", "z", "r", "c"],
    "accumulate": ["g", "s", "t", "x", "r", "c"],
    "after": ["x", "u", "s", "t", "r", "c", "mean", "top"],
    "due": ["t", "c"],
    "eval_point": ["x", "s", "t", "r", "c"],
    "sums": ["g", "s", "x", "t", "r", "c"],
    "join": ["r", "sums"],
    "measure": ["mean", "top", "numel", "g", "s", "x", "t", "r", "c"],
    "divisor": ["mean", "top", "g", "s", "x", "d", "t", "decay", "move", "c"],
    "whole": ["d", "s", "t", "x", "normal", *RATES],
    "coeffs": ["t", "r", *RATES],
}
# Names of the first result, if it is no direction d.
_FIRST = {"after": "u", "eval_point": "x", "sums": "a sum"}
_FIRST.update(dict.fromkeys(("measure", "divisor", "after_means"), "what mean is given"))
_EXTRAS = ("accumulate", "after", "measure", "divisor", "whole", "sums", "join")
# The methods that take `mean` and `top`, and how the names of their results begin.
_REDUCED = {"divisor": "", "measure": "measured_", "after": "after_"}
# Methods and parts of them whose results are reduced.
_MEASURED = ("measure", "divisor", "after_means", "sums")
# Methods that are called with values.
_CALLED = ("coeffs", "init", "refuses", "whole")
_SHAPED = " (s has None for Shaped fields, which only whole has)"
_OF_WHOLE = ": it takes lr and weight_decay by name, and of s it has the Shaped fields"
# Names of an entry that are not the rule's.
_TAKEN = {"step", "kahan_comp", "train_param", "rule_state", "running"}
# Names that a field cannot have, because they are those of methods and of their arguments.
NAMES = {"self", "State", "Running", *_TAKES, *chain(*_TAKES.values())} - {"c"}


class Move(NamedTuple):
    """The move -(lr * scale * d + decay * decays), for a `divisor` with an argument `move`.

    Attributes:
        lr: The learning rate.
        scale: The factor by which `cautious=True` multiplies d, or 1 without it.
        decay: The fraction of the parameter that weight decay subtracts.
        decays: The parameter, with 0 in place of elements that do not decay. It may only be
            used inside `mean` and `top`.
    """

    lr: Tensor
    scale: Tensor
    decay: Tensor
    decays: Tensor


class Part(NamedTuple):
    """A traced method that becomes a function of tensors: its arguments and results."""

    inputs: list[Traced]
    results: list[Traced]


class Making:
    """The trace of a class's methods, and the functions that its Rule is made of."""

    def __init__(self, cls: Any, numbers: dict[str, Any], statics: dict[str, Any]) -> None:
        """Make stand-ins; `numbers` are the hyperparameters with their defaults."""
        self.cls, self.name, self.statics = cls, cls.__name__, statics
        self.read: set[str] = set()  # what methods have read of self
        self.by_matrix = False  # True if `whole` maps each matrix of a stack by itself
        self.trace = trace = Trace(self.name)
        self.after_means = Part([], [])  # what `after` gives to mean and top
        self.defaults = {**numbers, **dict.fromkeys(RATES, 0.1)}
        self.scalars: dict[str, Any] = {
            name: tuple([trace.input(f"{name}_{i}", True) for i in range(len(x))])
            if isinstance(x, tuple)
            else trace.input(name, True)
            for name, x in self.defaults.items()
        }
        self.me = cls.bare({**statics, **self.scalars, "_read": self.read})
        self.given: dict[str, Any] = {x: trace.input(x) for x in (*"gxud", "decay")}
        move: list[Any] = [trace.input(f"move_{x}") for x in Move._fields]
        self.given["move"] = Move(*move)
        self.given["t"] = trace.input("t", True)
        self._take_state()
        self._take_running()
        self._take_coeffs()
        # What `measure` returns, and what a step is given besides: coefficients of a leaf.
        self.more: list[str] = []
        names, known = self.names("direction"), self._known("direction")
        noise = ["z"] * ("z" in names)
        others = [x for x in names if x not in known]
        self.more, self.extras = [*others, *noise], others
        made = {x: trace.input(x) for x in self.more}
        self.measured = self._measured(made)
        own = self.measured[2]
        extras = [x for x in others if x not in own]
        self.besides, self.extras = (*extras, *noise), extras  # `Rule.given`
        self.usual = self._usual()
        self.more = [*extras, *own, *noise]
        self.starts_random = init_draws(cls)
        mapped = "normal" in self.names("whole") or self.starts_random
        for x, taken in ("z", bool(noise)), ("normal", mapped):
            if taken and "seed" not in {*numbers, *statics}:
                raise TypeError(f"{self.name} takes {x}: add a field, seed: int = 0")
        self.given |= made | {x: trace.input(x) for x in own if x not in made}
        # What `measure` keeps is in the state of methods after it.
        new = [self.given[x] for x in self.kept]
        self.given["s"] = self._state(self.given["s"][: self.count], new)

    def _usual(self) -> dict[str, float]:
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

    def _take_state(self) -> None:
        """Make the stand-in of the State. Raise for fields that it cannot have."""
        # hasattr of the class, because one of a property hides its AttributeError.
        self.kind: Any = self.me.State if hasattr(self.cls, "State") else NoState
        self.makers = self._makers()
        # Fields in shapes of their own are the last. `whole` has them, or `measure` if they
        # are numbers.
        shaped = [x for x in self.makers if x in (whole_field, number_field)]
        self.count = len(self.kind._fields) - len(shaped)
        fields = [self.trace.input(f"s_{f}") for f in self.kind._fields]
        self.kept = self.kind._fields[self.count :] if number_field in shaped else ()
        own, self.before = fields[: self.count], fields[self.count :]
        self.trace.hint = _SHAPED * (whole_field in shaped)
        self.given["s"] = self.kind(*own, *[None] * len(shaped))
        needs = {whole_field: "whole", number_field: "measure"}
        lacks = [needs[x] for x in shaped if not hasattr(self.cls, needs[x])]
        if lacks or self.makers[self.count :] != shaped or len({*shaped}) > 1:
            raise TypeError(
                f"{self.name}.State{self.kind._fields}: fields that are Shaped come last, "
                "and are for a class with `whole`, and Number for one with `measure`"
            )

    def _state(self, own: Sequence[Any], kept: Sequence[Any]) -> Any:
        """Return a State of its own fields, and what `measure` keeps."""
        lacks = len(self.kind._fields) - len(own) - len(kept)
        return self.kind(*own, *kept, *[None] * lacks)

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

    def _take_running(self) -> None:
        """Make the stand-in of the Running. Raise for names that a field cannot have."""
        self.running: Any = getattr(self.cls, "Running", NoRunning)
        reserved = set(_TAKEN)
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
        r = [self.trace.input(f"r_{f}", True) for f in self.running._fields]
        self.given["r"] = self.running(*r)

    def _take_coeffs(self) -> None:
        """Make the stand-ins of what the class's own `coeffs` returns."""
        self.named: dict[str, Traced] = {}
        self.explicit = self._explicit() if hasattr(self.cls, "coeffs") else None
        if self.explicit is not None:
            coeffs, first = self.explicit(3.0, self.running(), self.defaults)
            self.named = {name: self.trace.input(f"c_{name}", True) for name in first}
            self.given["c"] = type(coeffs)(**self.named)

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

    def _known(self, method: str) -> list[str]:
        """Return the names of the arguments that a method may have."""
        return [x for x in _TAKES[method] if x != "c" or hasattr(self.cls, "coeffs")]

    def names(self, method: str) -> list[str]:
        """Return the names of a method's arguments; none if the class lacks it.

        A property may be one of several methods, or None for these options.
        """
        if not hasattr(self.cls, method) or (fn := getattr(self.me, method)) is None:
            return []
        parameters = inspect.signature(fn).parameters.values()
        names, known = [p.name for p in parameters], self._known(method)
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
            known = [*known, *[x for x in names if x not in self.me.__dict__]]
        elif method in _EXTRAS:
            single = method in ("whole", "join")
            known = [*known, *(self.extras if single else self.more)]
            known += self.kind._fields[: self.count] if method == "whole" else ()
        many = any([p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters])
        if many or not {*names} <= {*known}:
            hints = [f", and self.{x} for {x}" for x in names if x in self.me.__dict__]
            raise TypeError(
                f"{self.name}.{method} takes {', '.join(names)}: allowed are "
                f"{', '.join(self._known(method))}{''.join(hints)}"
            )
        return names

    def call(self, method: str, **more: Any) -> Any:
        """Trace a method. Raise if it writes to `self`."""
        before = dict(self.me.__dict__)
        arguments = [{**self.given, **more}[x] for x in self.names(method)]
        result = self.trace.call(method, getattr(self.me, method), *arguments)
        now = self.me.__dict__
        if [*map(id, now.values())] != [*map(id, before.values())]:
            raise TypeError(
                f"{self.name}.{method} writes to self, but it is traced once: what a step "
                "keeps is a field of State"
            )
        return result

    def results(self, method: str) -> list[Traced]:
        """Trace a method, and return its results. Raise if they are others."""
        if method == "after":
            found, self.after_means, self.after_tops = self._reduced(method)
        else:
            found = self.call(method)
        if found is None and method == "accumulate":
            return []  # as if there was none
        kinds = [self.kind] if method == "after" else [self.kind, self.running]
        size = {self.kind: self.count, self.running: len(self.running._fields)}
        kinds = [x for x in kinds if size[x] and method != "eval_point"]
        said: Any = found if isinstance(found, tuple) else (found,)
        tails = [x[self.count :] for x in said if self.kept and isinstance(x, self.kind)]
        if [x for x in tails if [*map(id, x)] != [*map(id, self.given["s"][self.count :])]]:
            raise TypeError(
                f"{self.name}.{method} returned other values of {self.kept}, which only "
                "measure sets: return those that s has"
            )
        if not self.count:  # a State of nothing that a direction has
            said = [x for x in said if not isinstance(x, self.kind)]
        own = [x[: self.count] if isinstance(x, self.kind) else x for x in said]
        flat, first = pytree.tree_leaves(own), _FIRST.get(method, "d")
        # A property may make the State anew.
        found = [getattr(type(x), "_fields", type(x)) for x in said]
        right = found == [Traced, *[x._fields for x in kinds]]
        right = right and {Traced} == {*map(type, flat)}
        host = [x is self.running for x in kinds for _ in range(size[x])]
        if not right or [x.node in self.trace.host for x in flat] != [False, *host]:
            names = ", ".join([type(x).__name__ for x in said])
            texts = {self.kind: ", self.State(...)", self.running: ", self.Running(...)"}
            raise TypeError(
                f"{self.name}.{method} returned ({names}): allowed is "
                f"({first}{''.join([texts[x] for x in kinds])}) of tensors in the "
                "gradient's shape (in Running: of scalars; means of tensors: Shaped)"
            )
        return flat

    def rule(self, tried: bool = True, home: Sequence[str] = ()) -> Rule:
        """Trace all methods, try them on tensors if `tried`, and return the Rule.

        `home` names the class whose `whole` is compiled, if it is this one's.
        """
        trace, kind, cls, count = self.trace, self.kind, self.cls, self.count
        advanced, join = self._trace_methods(), self._join()
        averages, divisors = self._divisors()
        results = [*chain(*[part.results for part in self.parts.values()]), *divisors]
        trace.require([*results, *self.measured[2].values()])
        due, n = self._chosen(), len(trace.coeffs)
        compiled = {x: trace.function(*part) for x, part in self.parts.items()}
        run = self.run = {method: fn for method, (fn, _) in compiled.items()}
        means, measure = self._means(averages, divisors), self._measure()
        code = repr((kind._fields, trace.code, self.divides, due))
        digest = sha256(code.encode()).hexdigest()
        coeffs, names, prepare = self._coeffs(advanced)
        before = (0.1, self.running()) if advanced else ()
        now = coeffs(3.0, *before, **self.defaults)
        now = now[0] if advanced else now
        for method, (_, graph) in compiled.items() if tried else ():
            self._try(method, graph, now[:n])
        # The coefficients of a further part of a gradient, which choose another kernel.
        further: Any = namedtuple("Further", [*now._fields, "further"])  # pyright: ignore[reportUntypedNamedTuple]
        whole = self._whole(repr((*home, digest, self.statics)) if home else "")
        # Whose kernel all rules share that map the gradient.
        alone = results[0].node is self.given["g"].node and not (self.count or advanced)
        plain = whole is not None and alone and not self.more
        return Rule(
            name=cls._name or self.name,
            state=kind,
            init=(init := self._init()),
            coeffs=coeffs,
            direction=along_gradient if plain else self._direction(further),
            after=self._after(due) if "after" in run else None,
            after_means=self._after_means(),
            replaces=self.replaces,
            accumulate=(lambda c: further(*c, True)) if "accumulate" in run else None,
            means=means,
            join=join,
            measure=measure,
            whole=whole,
            refuses=self._refuses(whole, init, now),
            running=self.running,
            eval_point=(lambda x, s, c: run["eval_point"](x, *s[:count], *c[:n])[0])
            if "eval_point" in run
            else None,
            reads_param=any("x" in self.names(x) for x in ("direction", "accumulate")),
            given=self.besides,
            usual=self.usual,
            single=self.single,
            numbers=names,
            digest=digest,
            narrow=self.narrow,
            prepare=prepare,
        )

    @property
    def single(self) -> tuple[str, ...]:
        """`Rule.single`."""
        takes = self.names("whole") + self.names("join")
        return tuple([x for x in self.extras if x in takes])

    def _trace_methods(self) -> list[Traced]:
        """Trace the methods that map tensors, and return what Running becomes."""
        me, count = self.given, self.count
        own = [me["g"], *me["s"][:count], me["x"]]
        more = [me[x] for x in self.more]
        inputs = {
            "direction": [*own, *more],
            "accumulate": [*own, *more],
            "after": [me["x"], me["u"], *me["s"][:count], *more],
            "eval_point": [me["x"], *me["s"][:count]],
        }
        traced = {x: self.results(x) for x in inputs if self.names(x)}
        self.parts = {x: Part(inputs[x], y[: 1 + count]) for x, y in traced.items() if y}
        if self.after_means.results:
            self.parts["after_means"] = Part(inputs["after"], self.after_means.inputs)
            known = [*inputs["after"], *self.after_means.results]
            self.parts["after"] = self.parts["after"]._replace(inputs=known)
        # At steps that are not due, the move is u.
        moved = [x.node for x in traced.get("after", ())[:1]]
        read, means = self.trace.needed(moved), zip(*self.after_means)
        read = self.trace.needed([*moved, *[x.node for x, y in means if y.node in read]])
        self.replaces = bool(moved) and me["u"].node not in read and not self.names("due")
        if self.measured[2]:
            self.parts["measure"] = Part([*own, *more], self.measured[0])
        return traced["direction"][1 + count :]

    def _reduced(self, method: str, **more: Any) -> tuple[Any, Part, int]:
        """Trace a method that takes `mean` and `top`.

        Returns its result, a Part of what these were given, and returned, means first, and
        the number of maxima.
        """
        parts = {"mean": Part([], []), "top": Part([], [])}

        def take(kind: str, x: Traced) -> Traced:
            inputs, results = parts[kind]
            node = getattr(x, "node", None)
            if node is None or node in self.trace.host:
                raise TypeError(
                    f"{kind}({getattr(node, 'name', x)}): allowed are tensors in the shape "
                    "of the parameter, and extras"
                )
            inputs.append(x)
            name = f"{_REDUCED[method]}{kind}_{len(results)}"
            results.append(self.trace.input(name))
            return results[-1]

        takers = {kind: partial(take, kind) for kind in parts}
        result = self.call(method, **takers, **more)
        means, tops = parts.values()
        inputs, results = [*means.inputs, *tops.inputs], [*means.results, *tops.results]
        return result, Part(inputs, results), len(tops.results)

    @property
    def new_state(self) -> Any:
        """The stand-in of the State after the direction."""
        own = [self.trace.input(f"new_{f}") for f in self.kind._fields[: self.count]]
        return self._state(own, self.given["s"][self.count :] if self.kept else ())

    @property
    def divides(self) -> Literal["move", "direction", "sum"]:
        """`Means.divides`."""
        takes = self.names("divisor")
        return "move" if "move" in takes else "sum" if "decay" in takes else "direction"

    def _divisors(self) -> tuple[list[Traced], list[Traced]]:
        """Trace `divisor`; return the stand-ins of means, and what they are divided by."""
        if not self.names("divisor"):
            return [], []
        me, new = self.given, self.new_state
        divisor, part, self.tops = self._reduced("divisor", s=new)
        decays = me["move"].decays if self.divides == "move" else me["decay"]
        more = [me[x] for x in self.more]
        inputs = [me["g"], me["x"], me["d"], decays, *new[: self.count], *more]
        self.parts["divisor"] = Part(inputs, part.inputs)
        return part.results, [divisor]

    def _means(self, averages: list[Traced], divisors: list[Traced]) -> Means | None:
        """Return `Rule.means`: those that divide the move, or that are joined."""
        run = self.run

        def summed(g: Any, x: Any, d: Any, decaying: Any, s: Any, c: Any) -> list[Tensor]:
            return list(run["sums"](g, x, *s[: self.count], *self.scalars_in(c)))

        def measure(g: Any, x: Any, d: Any, decaying: Any, s: Any, c: Any) -> list[Tensor]:
            own = g, x, d, decaying, *s[: self.count]
            return list(run["divisor"](*own, *self.scalars_in(c)))

        if "sums" in run:
            return Means(len(self.parts["sums"].results), summed, None)
        if not divisors:
            return None
        rates = [*self.given["move"][:3]] if self.divides == "move" else []
        more = [self.given[x] for x in self.more]
        divided_by, _ = self.trace.function([*averages, *rates, *more], divisors)

        def divisor(means: Any, scale: Any, lr: Any, decay: Any, c: Any) -> Tensor:
            factors = (lr, scale, decay) if rates else ()
            return divided_by(*means, *factors, *self.scalars_in(c))[0]

        return Means(len(averages), measure, divisor, self.divides, self.tops)

    def scalars_in(self, c: Any) -> tuple[Any, ...]:
        """Return what a traced function takes of a step's coefficients."""
        n = len(self.trace.coeffs)
        return (*c[n : n + len(self.more)], *c[:n])

    def _measured(
        self, given: dict[str, Traced]
    ) -> tuple[list[Traced], list[Traced], dict[str, Traced]]:
        """Trace `measure`; return the tensors, the stand-ins of their means, and results.

        The stand-ins are those of `Measure.settle`.
        """
        if not (names := self.names("measure")):
            return [], [], {}
        if lacks := [x for x in ("sums", "join", "whole") if self.names(x)]:
            raise TypeError(
                f"{self.name} has measure and {lacks[0]}: allowed is one of both"
            )
        numel = self.trace.input("numel")
        state = self._state(self.given["s"][: self.count], self.before)
        more: dict[str, Any] = {**given, "numel": numel, "s": state}
        result, part, self.measured_tops = self._reduced("measure", **more)
        numbers = result._asdict() if hasattr(result, "_asdict") else result
        right = isinstance(numbers, dict) and self._traced(numbers.values(), False)
        if not (right and part.results):
            raise TypeError(
                f"{self.name}.measure({', '.join(names)}) returned {result!r}: allowed is "
                "a dict of numbers that are computed of means, as mean(loss), by the names "
                "that direction takes"
            )
        if clash := {*numbers} & {*self.given, *self.defaults, *self.statics, *names}:
            raise TypeError(
                f"{self.name}.measure returned {min(clash)!r}, which is an argument of "
                "methods or an option: choose another name"
            )
        if lacks := [x for x in self.kept if x not in numbers]:
            raise TypeError(
                f"{self.name}.measure returned {[*numbers]}: State has the Number "
                f"{lacks[0]!r}, so it is one of them"
            )
        known = [numel, *self.before, *part.results]
        # These are numbers of each tensor, and an extra may have more elements.
        nodes = self.trace.needed([numbers[x].node for x in self.kept])
        nodes -= self.trace.needed([x.node for x in part.inputs])
        if read := [x for x, y in given.items() if x != "loss" and y.node in nodes]:
            raise TypeError(
                f"{self.name}.measure keeps a number of the extra {read[0]}: allowed are "
                "means and maxima of it"
            )
        return part.inputs, known, numbers

    def _measure(self) -> Measure | None:
        """Return `Rule.measure`."""
        count, run = self.count, self.run
        tensors, known, numbers = self.measured
        if not numbers:
            return None
        more = [self.given[x] for x in self.more]
        found_of, _ = self.trace.function([*known, *more], [*numbers.values()])

        def read(g: Tensor, x: Tensor, s: Any, c: Any) -> list[Tensor]:
            return list(run["measure"](g, *s[:count], x, *self.scalars_in(c)))

        def told(known: Sequence[Tensor], c: Any) -> tuple[Any, tuple[Tensor, ...]]:
            found = dict(zip(numbers, found_of(*known, *self.scalars_in(c))))
            return c._replace(**found), tuple([found[x] for x in self.kept])

        return Measure(len(tensors), read, told, self.measured_tops, self.kept)

    def _traced(self, results: Iterable[object], on_host: bool) -> bool:
        """Return True if all results are stand-ins, of scalars if `on_host`."""
        nodes = [getattr(x, "node", None) for x in results]
        return all([x is not None and (x in self.trace.host) is on_host for x in nodes])

    def _join(self) -> Callable[..., Named] | None:
        """Trace `sums` and `join`, and return `Rule.join`.

        The hyperparameters that `join` reads become coefficients.
        """
        trace, names = self.trace, self.running._fields
        lacks = [x for x in ("sums", "join") if not self.names(x)]
        if len(lacks) == 2:
            return None
        lacks += [] if names else ["Running"]
        if lacks or self.names("divisor") or self.after_means.inputs:
            raise TypeError(
                f"{self.name} has {'no ' + lacks[0] if lacks else 'a divisor'}: `sums` go "
                "with a `join`, which returns a Running, and without a `divisor` or means "
                "in `after`"
            )
        if twice := {*names} & {*self.defaults, *self.statics}:
            raise TypeError(
                f"{self.name}.Running has a field {min(twice)!r}, which is an option: a "
                "group shows both, so choose another name"
            )
        result = self.call("sums", s=(new := self.new_state))
        tensors, spec = pytree.tree_flatten(result)
        if not tensors or not self._traced(tensors, False):
            raise TypeError(
                f"{self.name}.sums returned {result!r}: allowed are tensors in the "
                "gradient's shape"
            )
        more = [self.given[x] for x in self.more]
        inputs = [self.given["g"], self.given["x"], *new[: self.count], *more]
        self.parts["sums"] = Part(inputs, tensors)
        sums = [trace.input(f"sum_{i}", True) for i in range(len(tensors))]
        r = self.running(*[trace.input(f"joined_{name}", True) for name in names])
        taken = [x for x in self.names("join") if x in self.extras]
        given = {x: trace.input(f"joined_{x}", True) for x in taken}
        after = self.call("join", r=r, sums=pytree.tree_unflatten(sums, spec), **given)
        right = getattr(type(after), "_fields", None) == names
        if not (right and self._traced(after, True)):
            raise TypeError(
                f"{self.name}.join returned {after!r}: allowed is self.Running(...) of "
                "scalars, computed of r, of the sums and of hyperparameters"
            )
        nodes, running = trace.needed([x.node for x in after]), self.running
        scalars = [x for x in pytree.tree_leaves(self.scalars) if x.node in nodes]
        trace.coeffs += [x.node for x in scalars if x.node not in trace.coeffs]
        places = [trace.coeffs.index(x.node) for x in scalars]
        inputs = [*r, *sums, *given.values(), *scalars]
        compute, _ = trace.function(inputs, [*after], on_host=True)

        def join(r: Named, sums: list[Tensor | float], c: Any) -> Named:
            numbers = [*[getattr(c, x) for x in taken], *[c[i] for i in places]]
            return running(*compute(*r, *sums, *numbers))

        return join

    def _try(self, method: str, graph: fx.Graph, scalars: Sequence[Scalar]) -> None:
        """Try a method on tensors. Raise if it is not elementwise."""
        inputs, results = self.parts[method]
        first, many = [_FIRST.get(method, "d")], method in _MEASURED
        labels = first * len(results) if many else [*first, *self.kind._fields]
        where = f"{self.name}.{method.removesuffix('_means')}"
        if views := check_elementwise(where, labels, graph, len(inputs), scalars):
            self.run[method] = partial(_without_views, self.run[method], views)

    def _direction(self, further: Any) -> Callable[..., Direction]:
        """Return `Rule.direction`, which accumulates if the coefficients are `further`."""
        n, kind, count = len(self.trace.coeffs), self.kind, self.count
        usual = self.run["direction"]
        again = self.run.get("accumulate", usual)

        def direction(g: Tensor, s: Any, c: Any, x: Any = None) -> Direction:
            fn = again if isinstance(c, further) else usual
            scalars = c if len(c) == n else self.scalars_in(c)
            d, *state = fn(g, *s[:count], x, *scalars)
            return Direction(d, new := kind(*state, *s[count:]), new)

        return direction

    def _after(self, due_place: int | None) -> Callable[..., tuple[Tensor, Any]]:
        """Return `Rule.after`, which acts where the coefficient at due_place is True."""
        kind, run, count = self.kind, self.run["after"], self.count

        n, end = len(self.trace.coeffs), len(self.trace.coeffs) + len(self.more)

        def after(
            x: Tensor, u: Tensor, s: Any, c: Any, *means: Tensor
        ) -> tuple[Tensor, Any]:
            due = due_place is None or c[due_place]
            if due is False:
                return u, s
            moved, *state = run(x, u, *s[:count], *c[n:end], *means, *c[:n])
            state += s[count:]
            if due is True:
                return moved, kind(*state)
            pairs = [*zip((moved, *state), (u, *s))]  # of a t that is a tensor
            u, *state = [a if a is b else torch.where(due != 0, a, b) for a, b in pairs]
            return u, kind(*state)

        return after

    def _after_means(self) -> AfterMeans | None:
        """Return `Rule.after_means`."""
        if (run := self.run.get("after_means")) is None:
            return None

        def measure(x: Tensor, u: Tensor, s: Any, c: Any) -> list[Tensor]:
            return list(run(x, u, *s[: self.count], *self.scalars_in(c)))

        return AfterMeans(len(self.after_means.results), measure, self.after_tops)

    def _init(self) -> Callable[..., Named]:
        """Return `Rule.init`: zeros, or what the class's own init returns."""
        cls, statics, usual, kind = self.cls, self.statics, self.defaults, self.kind
        where, makers, draws = f"{self.name}.init", self.makers, self.starts_random

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

    def _whole(self, text: str) -> Whole | None:
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
            d: Tensor, read: tuple[Tensor, ...], fields: tuple[Tensor, ...], c: Any
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            now = dict(zip(numbers, c.whole[1:]))
            arguments = {**now, "d": d, "s": kind(*rest, *fields), "t": c.whole[0]}
            arguments |= dict(zip(reads, read))
            arguments |= {name: getattr(c, name) for name in extras}
            me = cls.bare({**statics, **now})
            if "normal" in takes:
                # 0 while it is tried, and on meta and fake tensors.
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
        return Whole(mapped, names, digest, "normal" in takes, reads, self.by_matrix)

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
                    tried.map(d, tuple(read), tuple(fields), now._replace(**extras))
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

    @property
    def narrow(self) -> int | None:
        """The number of betas whose moments are stored in the parameter's dtype."""
        # On the meta device zeros_like would import sympy, which takes half a second.
        low = torch.empty(1, dtype=torch.bfloat16, device="cpu")
        for i, make in enumerate(self.makers):
            if make is whole_field or make(low, low.dtype).dtype != low.dtype:
                return i
        return None

    def _chosen(self) -> int | None:
        """Make a coefficient of `due`, whether `after` acts, and return its place."""
        if not self.names("due"):
            return None
        result: Any = self.call("due")
        node = getattr(result, "node", None)
        if node not in self.trace.host or node.meta["value"].dtype != torch.bool:
            raise TypeError(
                f"{self.name}.due returned {result!r}: allowed is a condition on t and on "
                "hyperparameters, as t % self.k == 0"
            )
        self.trace.chosen, coeffs = node, self.trace.coeffs
        coeffs += [] if node in coeffs else [node]
        return coeffs.index(node)

    def _coeffs(
        self, more: list[Traced]
    ) -> tuple[Callable[..., Any], tuple[str, ...], Any]:
        """Return `Rule.coeffs`, the names of its hyperparameters, and `Rule.prepare`."""
        n, running, mapped = len(self.trace.coeffs), self.running, self.mapped
        explicit, named = self.explicit, self.named
        nodes = self.trace.needed([*self.trace.coeffs, *[x.node for x in more]])
        takes = {*self.names("coeffs"), *self.names("whole")}
        if self.untraced:  # these methods may read any number
            takes |= {*self.scalars} - {*RATES}
        leaves = {k: pytree.tree_leaves(x) for k, x in self.scalars.items()}
        read = {k for k, xs in leaves.items() if nodes & {x.node for x in xs}}
        # `Rule.coeffs` of rules with running scalars is given lr besides.
        beside = {"lr"} if running._fields else set[str]()
        names = [x for x in self.scalars if x in (read | takes) - beside]
        scalars = [self.scalars[x] for x in names]
        scalars += [self.scalars["lr"]] if running._fields else []
        scalars = pytree.tree_leaves(scalars)
        inputs = [self.given["t"], *scalars, *self.given["r"], *self.named.values()]
        results = [*self.trace.coefficients, *more]
        host, graph = self.trace.function(inputs, results, on_host=True)
        extra = [(x, ()) for x in self.more] + [("whole", ())] * (mapped is not None)
        fields = [*[f"c{i}" for i in range(n)], *[x for x, _ in extra]]
        kind: Any = namedtuple(  # pyright: ignore[reportUntypedNamedTuple]
            "Coeffs", fields, defaults=[x for _, x in extra]
        )

        def coeffs(t: Any, *before: Any, **given: Any) -> Any:
            values, r = [t], ()
            for name in names:
                x = given[name]
                # One of several numbers may be None, for `whole`.
                several = isinstance(x, tuple | list)
                values += [0.0 if y is None else y for y in x] if several else [x]
            if before:
                given["lr"], r = before
                values.append(given["lr"])
            _, c = explicit(t, r, given, named) if explicit else ((), {})
            outputs = host(*values, *r, *[c[name] for name in named])
            now = kind(*outputs[:n])
            if mapped is not None:
                own = [given[x] for x in mapped]
                own = [tuple(x) if isinstance(x, list) else x for x in own]
                now = now._replace(whole=(t, *own))
            return (now, running(*outputs[n:])) if before else now

        late = [self.given["t"], *[self.scalars[x] for x in RATES]]
        prepare = None
        if not explicit:
            rates, r = ([x.node.name for x in y] for y in (late, self.given["r"]))
            own = [self.scalars[x] for x in mapped or ()]
            own = None if mapped is None else (self.given["t"], *own)
            prepare = cache(partial(prepared, graph, rates, r, kind, running, own))
        return coeffs, tuple(names), prepare

    @property
    def mapped(self) -> list[str] | None:
        """The names of the numbers that `whole` is called with, if there is one."""
        takes = self.names("whole")
        numbers = [x for x in self.scalars if x not in RATES]
        return numbers + [x for x in RATES if x in takes] if takes else None

    @property
    def untraced(self) -> bool:
        """True if the class has methods that are not traced, but called with values."""
        return any([hasattr(self.cls, x) for x in _CALLED])


def _without_views(fn: Callable[..., Any], views: dict[int, int], *args: Any) -> list[Any]:
    """Call fn, with the bases of views in their place, which the pipeline copies."""
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
