"""The `Rule` of a class body, for one combination of its static options."""

import inspect
from collections import namedtuple
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.distributed import whole_field
from optimi_func.core.rule import (
    Direction,
    Means,
    Measure,
    NoRunning,
    NoState,
    Rule,
    along_gradient,
)
from optimi_func.core.storage import field_of
from optimi_func.rules.called import (
    RATES,
    Explicit,
    make_init,
    make_refuses,
    make_whole,
    makers_of,
)
from optimi_func.rules.coefficients import prepared, with_numbers
from optimi_func.rules.joining import measured, sums_and_join
from optimi_func.rules.lifting import Trace, Traced, check_elementwise

# The arguments that methods take, by name; direction may have others, its extras.
_TAKES = {
    "direction": ["g", "s", "t", "x", "z", "r", "c"],
    "accumulate": ["g", "s", "t", "x", "r", "c"],
    "after": ["x", "u", "s", "t", "r", "c"],
    "due": ["t", "c"],
    "eval_point": ["x", "s", "t", "r", "c"],
    "sums": ["g", "s", "x", "t", "r", "c"],
    "join": ["r", "sums"],
    "measure": ["mean", "numel", "g", "s", "x", "t", "r", "c"],
    "means": ["mean", "g", "s", "x", "d", "t", "decay", "move", "c"],
    "whole": ["d", "s", "t", "x", *RATES],
    "coeffs": ["t", "r", *RATES],
}
# Names of the first result, if it is no direction d.
_FIRST = {"after": "u", "eval_point": "x", "sums": "a sum"}
_FIRST.update(means="what mean is given", measure="what mean is given")
# Methods that are called with values.
_CALLED = ("coeffs", "init", "refuses", "whole")
# Names of an entry that are not the rule's.
_TAKEN = {"step", "kahan_comp", "train_param", "rule_state", "running"}
# Names that a field cannot have, because they are those of methods and of their arguments.
NAMES = {"self", "State", "Running", *_TAKES, *chain(*_TAKES.values())} - {"c"}


class Move(NamedTuple):
    """The move -(lr * scale * d + decay * decays), which `means` divides if it takes it.

    Attributes:
        lr: The learning rate.
        scale: The factor on d of `cautious=True`, else 1.
        decay: The share of the parameter that decay takes away.
        decays: The parameter, and 0 for elements that do not decay. Measure it only.
    """

    lr: Tensor
    scale: Tensor
    decay: Tensor
    decays: Tensor


class Making:
    """The trace of a class's methods, and the functions that its Rule is made of."""

    def __init__(self, cls: Any, numbers: dict[str, Any], statics: dict[str, Any]) -> None:
        """Make stand-ins; `numbers` are the hyperparameters with their defaults."""
        self.cls, self.name, self.statics = cls, cls.__name__, statics
        self.read: set[str] = set()  # what methods have read of self
        self.trace = trace = Trace(self.name)
        self.defaults = {**numbers, **dict.fromkeys(RATES, 0.1)}
        self.scalars: dict[str, Any] = {
            name: tuple([trace.input(f"{name}_{i}", True) for i in range(len(x))])
            if isinstance(x, tuple)
            else trace.input(name, True)
            for name, x in self.defaults.items()
        }
        self.me = cls.bare({**statics, **self.scalars, "_read": self.read})
        # hasattr of the class, because one of a property hides its AttributeError.
        self.kind: Any = self.me.State if hasattr(cls, "State") else NoState
        self.makers = makers_of(self.name, self.kind)
        # On the meta device zeros_like would import sympy, which takes half a second.
        low = torch.empty(1, dtype=torch.bfloat16, device="cpu")
        wide = [
            x is whole_field or x(low, low.dtype).dtype != low.dtype for x in self.makers
        ]
        self.narrow = wide.index(True) if True in wide else None
        self.running: Any = getattr(cls, "Running", NoRunning)
        self.given: dict[str, Any] = {x: trace.input(x) for x in (*"gxud", "decay")}
        move: list[Any] = [trace.input(f"move_{x}") for x in Move._fields]
        self.given["move"] = Move(*move)
        self.given["t"] = trace.input("t", True)
        # Fields in shapes of their own are the last, and `whole` alone has them.
        self.count = len(self.kind._fields) - self.makers.count(whole_field)
        own = [trace.input(f"s_{f}") for f in self.kind._fields[: self.count]]
        self.given["s"] = self.kind(*own, *[None] * self.makers.count(whole_field))
        if whole_field in self.makers[: self.count] or not (
            self.makers == self.makers[: self.count] or hasattr(cls, "whole")
        ):
            raise TypeError(
                f"{self.name}.State{self.kind._fields}: fields that are Shaped come last, "
                "and are for a class with `whole`"
            )
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
        r = [trace.input(f"r_{f}", True) for f in self.running._fields]
        self.given["r"] = self.running(*r)
        self.explicit: Explicit | None = None
        self.named: dict[str, Traced] = {}  # the stand-ins of its results
        if hasattr(cls, "coeffs"):
            self.explicit = Explicit(cls, statics, self.names("coeffs"))
            coeffs, first = self.explicit(3.0, self.running(), self.defaults)
            self.named = {name: trace.input(f"c_{name}", True) for name in first}
            self.given["c"] = type(coeffs)(**self.named)
        # What `measure` returns, and what a step is given besides: coefficients of a leaf.
        self.measured = measured(self)
        known = {*self._known("direction"), *(own := self.measured[2])}
        self.extras = [x for x in self.names("direction") if x not in known]
        self.noise = "z" in self.names("direction")
        if self.noise and "seed" not in {*numbers, *statics}:
            raise TypeError(f"{self.name}.direction takes z: add a field, seed: int = 0")
        self.more = [*self.extras, *own, *["z"] * self.noise]
        self.given |= {name: trace.input(name) for name in self.more}

    def _known(self, method: str) -> list[str]:
        """Return the names of the arguments that a method may have."""
        return [x for x in _TAKES[method] if x != "c" or hasattr(self.cls, "coeffs")]

    def names(self, method: str) -> list[str]:
        """Return the names of a method's arguments; none if the class lacks it."""
        if not hasattr(self.cls, method):
            return []
        parameters = inspect.signature(getattr(self.me, method)).parameters.values()
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
            extras = [x for x in names if x not in self.me.__dict__]
            known = [*known, *(extras if method == "direction" else self.more)]
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
        found: Any = self.call(method)
        if found is None and method == "accumulate":
            return []  # as if there was none
        kinds = [self.kind] if method == "after" else [self.kind, self.running]
        size = {self.kind: self.count, self.running: len(self.running._fields)}
        kinds = [x for x in kinds if size[x] and method != "eval_point"]
        said: Any = found if isinstance(found, tuple) else (found,)
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

    def rule(self, tried: bool = True) -> Rule:
        """Trace all methods, try them on tensors if `tried`, and return the Rule."""
        trace, me, kind, count = self.trace, self.given, self.kind, self.count
        own = [me["g"], *me["s"][:count], me["x"]]
        arguments = [*own, *[me[x] for x in self.more]]
        inputs = {
            "measure": own,
            "direction": arguments,
            "accumulate": arguments,
            "after": [me["x"], me["u"], *me["s"]],
            "eval_point": [me["x"], *me["s"]],
        }
        tensors, known, numbers = self.measured
        traced = {x: self.results(x) for x in [*inputs][1:] if self.names(x)}
        traced = {method: x for method, x in traced.items() if x}
        advanced = traced["direction"][1 + count :]
        traced = {method: x[: 1 + count] for method, x in traced.items()}
        traced |= {"measure": tensors} if numbers else {}
        taken = self.names("means")
        by = "move" if "move" in taken else "sum" if "decay" in taken else "direction"
        averages: list[Traced] = []
        divisors: list[Traced] = []
        if self.names("means"):
            measured = traced["means"] = list[Traced]()

            def mean(x: Traced) -> Traced:
                measured.append(x)
                averages.append(trace.input(f"mean_{len(averages)}"))
                return averages[-1]

            new = kind(*[trace.input(f"new_{f}") for f in kind._fields])
            divisors = [self.call("means", mean=mean, s=new)]
            decays = me["move"].decays if by == "move" else me["decay"]
            inputs["means"] = [me["g"], me["x"], me["d"], decays, *new]
        join = None
        if self.names("sums") or self.names("join"):
            new = kind(*[trace.input(f"new_{f}") for f in kind._fields])
            traced["sums"], join = sums_and_join(self, new)
            inputs["sums"] = [me["g"], me["x"], *new]
        trace.require([*chain(*traced.values()), *divisors, *numbers.values()])
        due_place = self._chosen()
        n, more = len(trace.coeffs), len(self.more)
        rates = [*me["move"][:3]] if by == "move" else []
        divided_by, _ = trace.function([*averages, *rates], divisors)
        found_of, _ = trace.function(known, [*numbers.values()]) if numbers else (None, 0)
        compiled = {x: trace.function(inputs[x], results) for x, results in traced.items()}
        run = {method: fn for method, (fn, _) in compiled.items()}
        code = repr((kind._fields, trace.code, by, due_place))
        coeffs, names, prepare = self._coeffs(advanced)
        cls, statics, whole, mapped = self.cls, self.statics, None, self.mapped
        if mapped is not None:
            whole = make_whole(cls, statics, kind, count, self.names("whole"), mapped)
        before = (0.1, self.running()) if advanced else ()
        now = coeffs(3.0, *before, **self.defaults)
        now = now[0] if advanced else now
        for method, (_, graph) in compiled.items() if tried else ():
            first, size = _FIRST.get(method, "d"), len(inputs[method])
            many = method in ("measure", "means", "sums")
            labels = [first] * len(traced[method]) if many else [first, *kind._fields]
            where = f"{self.name}.{method}"
            if views := check_elementwise(where, labels, graph, size, now[:n]):
                run[method] = partial(_without_views, run[method], views)

        # The coefficients of a further part of a gradient, which choose another kernel.
        further: Any = namedtuple("Further", [*now._fields, "further"])  # pyright: ignore[reportUntypedNamedTuple]
        usual = run["direction"]
        again = run.get("accumulate", usual)

        def direction(g: Tensor, s: Any, c: Any, x: Any = None) -> Direction:
            fn = again if isinstance(c, further) else usual
            scalars = c if len(c) == n else (*c[n : n + more], *c[:n])
            d, *state = fn(g, *s[:count], x, *scalars)
            return Direction(d, new := kind(*state, *s[count:]), new)

        def after(x: Tensor, u: Tensor, s: Any, c: Any) -> tuple[Tensor, Any]:
            due = due_place is None or c[due_place]
            if due is False:
                return u, s
            moved, *state = run["after"](x, u, *s, *c[:n])
            if due is True:
                return moved, kind(*state)
            pairs = [*zip((moved, *state), (u, *s))]  # of a t that is a tensor
            u, *state = [a if a is b else torch.where(due != 0, a, b) for a, b in pairs]
            return u, kind(*state)

        def measure(g: Any, x: Any, d: Any, decaying: Any, s: Any, c: Any) -> list[Tensor]:
            return list(run["means"](g, x, d, decaying, *s, *c[:n]))

        def summed(g: Any, x: Any, d: Any, decaying: Any, s: Any, c: Any) -> list[Tensor]:
            return list(run["sums"](g, x, *s, *c[:n]))

        def divisor(means: Any, scale: Any, lr: Any, decay: Any, c: Any) -> Tensor:
            factors = (lr, scale, decay) if rates else ()
            return divided_by(*means, *factors, *c[:n])[0]

        def read(g: Tensor, x: Tensor, s: Any, c: Any) -> list[Tensor]:
            return list(run["measure"](g, *s[:count], x, *c[:n]))

        def told(means: list[Tensor], numel: Tensor, c: Any) -> Any:
            assert found_of is not None
            return c._replace(**dict(zip(numbers, found_of(*means, numel, *c[:n]))))

        alone = traced["direction"][0].node is me["g"].node and not (count or advanced)
        init = make_init(cls, statics, self.defaults, kind, self.makers)
        rule: Rule = Rule(
            *(cls._name or self.name, kind, init, coeffs),
            # Whose kernel all rules share that map the gradient.
            direction=along_gradient if whole and alone and not more else direction,
            after=after if "after" in run else None,
            accumulate=(lambda c: further(*c, True)) if "accumulate" in run else None,
            means=Means(len(averages), measure, divisor, by)
            if divisors
            else Means(len(traced["sums"]), summed, None)
            if join
            else None,
            join=join,
            measure=Measure(len(tensors), read, told) if numbers else None,
            whole=whole,
            whole_fields=kind._fields[count:],
            running=self.running,
            eval_point=(lambda x, s, c: run["eval_point"](x, *s, *c[:n])[0])
            if "eval_point" in run
            else None,
            reads_param=any(
                ["x" in self.names(x) for x in ("direction", "accumulate", "whole")]
            ),
            extras=tuple(self.extras),
            noise=self.noise,
            numbers=names,
            digest=sha256(code.encode()).hexdigest(),
            narrow=self.narrow,
            prepare=prepare,
        )
        object.__setattr__(rule, "refuses", make_refuses(cls, statics, rule, now))
        return rule

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
        rates = [x for x in RATES if self.scalars[x].node in nodes or x in takes]
        # Methods that are not traced may read any.
        reads = {*self.scalars}
        if not self.untraced:
            leaves = {x: pytree.tree_leaves(self.scalars[x]) for x in reads}
            reads = {x for x in reads if not nodes.isdisjoint([y.node for y in leaves[x]])}
        names = [x for x in self.scalars if (x in reads if x not in RATES else x in rates)]
        # `Rule.coeffs` of rules with running scalars is given lr besides.
        names = [x for x in names if x != "lr" or not running._fields]
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
            values = [t]
            for name in names:
                x = given[name]
                # One of several numbers may be None, for `whole`.
                several = isinstance(x, tuple | list)
                values += [0.0 if y is None else y for y in x] if several else [x]
            lr, r = ([before[0]], before[1]) if before else ([], ())
            given |= dict.fromkeys(["lr"] * len(lr), *lr)
            _, c = explicit(t, r, given, named) if explicit else ((), {})
            outputs = host(*values, *lr, *r, *[c[name] for name in named])
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
            prepare = cache(partial(prepared, graph, rates, r, kind, running))
            if mapped is not None:
                numbers = {x: self.scalars[x] for x in names if x not in RATES}
                prepare = partial(with_numbers, prepare, numbers, mapped)
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
