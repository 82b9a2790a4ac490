"""The `Rule` of a class body, for one combination of its static options."""

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.codes import NEAREST
from optimi_func.core.math import moment
from optimi_func.core.rule import Direction, Means, NoRunning, NoState, Rule
from optimi_func.core.storage import encode
from optimi_func.rules.lifting import Trace, Traced, check_elementwise

# The arguments that methods take, by name.
_TAKES = {
    "direction": ["g", "s", "t", "x", "r"],
    "accumulate": ["g", "s", "t", "x", "r"],
    "after": ["x", "u", "s", "t"],
    "eval_point": ["x", "s", "t"],
    "means": ["mean", "g", "s", "x", "d", "t"],
    "whole": ["d", "t"],
}
# Names of an entry that are not the rule's.
_TAKEN = {"step", "kahan_comp", "train_param", "rule_state", "running"}


class Making:
    """The trace of a class's methods, and the functions that its Rule is made of."""

    def __init__(self, cls: Any, numbers: dict[str, Any], statics: dict[str, Any]) -> None:
        """Make stand-ins; `numbers` are the hyperparameters with their defaults."""
        self.cls, self.name, self.statics = cls, cls.__name__, statics
        self.trace = trace = Trace(self.name)
        self.defaults = {"t": 3.0, **numbers, "lr": 0.1, "weight_decay": 0.1}
        self.scalars: dict[str, Any] = {
            name: tuple([trace.scalar(f"{name}_{i}") for i in range(len(x))])
            if isinstance(x, tuple)
            else trace.scalar(name)
            for name, x in self.defaults.items()
        }
        self.me = cls.bare({**statics, **self.scalars})
        del self.me.t
        self.before = dict(self.me.__dict__)
        self.kind: Any = getattr(self.me, "State", NoState)
        self.makers = _makers(self.name, self.kind)
        self.running: Any = getattr(cls, "Running", NoRunning)
        self.given: dict[str, Any] = {name: trace.tensor(name) for name in "gxud"}
        self.given["t"] = self.scalars["t"]
        self.given["s"] = self.kind(*[trace.tensor(f"s_{f}") for f in self.kind._fields])
        self.given["r"] = self.running(
            *[trace.scalar(f"r_{f}") for f in self.running._fields]
        )
        self.extras = [x for x in self.names("direction") if x not in _TAKES["direction"]]
        self.given |= {name: trace.tensor(name) for name in self.extras}

    def names(self, method: str) -> list[str]:
        """Return the names of a method's arguments."""
        _, *found = inspect.signature(getattr(self.cls, method)).parameters.values()
        names = [p.name for p in found]
        if method in ("direction", "accumulate"):
            # The gradient and the state may have other names.
            names[: 1 + bool(self.kind._fields)] = ["g", "s"][: 1 + bool(self.kind._fields)]
        known = [*_TAKES[method], *(self.extras if method == "accumulate" else ())]
        unknown = [x for x in names if x not in known and method != "direction"]
        if unknown or any([p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found]):
            raise TypeError(
                f"{self.name}.{method}{tuple(names)}: allowed are arguments from {known}"
            )
        return names

    def call(self, method: str, **more: Any) -> Any:
        """Trace a method. Raise if it writes to `self`."""
        given = [({**self.given, **more})[x] for x in self.names(method)]
        found = self.trace.call(method, getattr(self.me, method), *given)
        if self.me.__dict__ != self.before:
            raise TypeError(
                f"{self.name}.{method} writes to self, but it is traced once: what a step "
                "keeps is a field of State"
            )
        return found

    def results(self, method: str, found: Any) -> list[Traced]:
        """Return the results of a method as a list. Raise if they are no tensors."""
        kind, first = self.kind, {"after": "u"}.get(method, "d")
        if not kind._fields and isinstance(found, Traced):
            found = found, kind()
        parts = [kind]
        if method in ("direction", "accumulate") and self.running._fields:
            parts.append(self.running)
        fits = isinstance(found, tuple) and len(found) == 1 + len(parts)
        if not fits or not all(map(isinstance, found[1:], parts)):
            shown = found if isinstance(found, tuple) else (found,)
            said = ", ".join([type(x).__name__ for x in shown])
            wanted = ", ".join([f"self.{x.__name__}(...)" for x in parts])
            raise TypeError(
                f"{self.name}.{method} returned ({said}): allowed is ({first}, {wanted})"
            )
        flat = [found[0], *found[1]]
        for name, x in zip([first, *kind._fields], flat):
            if not isinstance(x, Traced) or self.trace.is_scalar(x):
                raise TypeError(
                    f"{self.name}.{method} returned {name} as a {type(x).__name__} that no "
                    "tensor is in: allowed are tensors of the gradient's shape"
                )
        for name, x in zip(self.running._fields, found[2] if len(parts) > 1 else ()):
            if not isinstance(x, Traced) or not self.trace.is_scalar(x):
                raise TypeError(
                    f"{self.name}.{method} returned Running.{name} as something else than "
                    "a scalar made of hyperparameters, lr, t and r"
                )
            flat.append(x)
        return flat

    def has(self, method: str) -> bool:
        """Return True if the class has this method."""
        return hasattr(self.cls, method)

    def rule(self) -> Rule[Any, Any]:
        """Trace all methods, try them, and return the Rule."""
        trace, kind, me = self.trace, self.kind, self.given
        size = 1 + len(kind._fields)
        moves = [x for x in ("direction", "accumulate", "after") if self.has(x)]
        found = {method: self.results(method, self.call(method)) for method in moves}
        advanced = found["direction"][size:]
        found = {method: x[:size] for method, x in found.items()}
        if self.has("eval_point"):
            found["eval_point"] = [self.call("eval_point")]
        new = kind(*[trace.tensor(f"new_{f}") for f in kind._fields])
        measured: list[Traced] = []
        means: list[Traced] = []

        def mean(x: Traced) -> Traced:
            measured.append(x)
            means.append(trace.tensor(f"mean_{len(means)}"))
            return means[-1]

        divisor = [self.call("means", mean=mean, s=new)] if self.has("means") else []
        whole = self._whole() if self.has("whole") else None
        trace.require([*chain(*found.values()), *measured, *divisor])

        # lr and weight_decay are given to coeffs only if they are read.
        used = trace.used(advanced)
        rates = [x for x in ("lr", "weight_decay") if self.scalars[x].node in used]
        numbers = [x for x in self.scalars if x not in ("t", "lr", "weight_decay")] + rates
        scalars = [self.scalars["t"], *_flat([self.scalars[x] for x in numbers])]
        host = trace.on_host([*scalars, *me["r"]], advanced)
        coeffs = self._coeffs(host, numbers)

        moved = [me["g"], *me["s"], me["x"], *[me[x] for x in self.extras]]
        inputs = {"direction": moved, "accumulate": moved}
        inputs["after"] = [me["x"], me["u"], *me["s"]]
        inputs["eval_point"] = [me["x"], *me["s"]]
        run = {method: trace.on_tensors(inputs[method], x) for method, x in found.items()}
        measuring = [me["g"], me["x"], me["d"], *new]
        run["measure"] = trace.on_tensors(measuring, measured)
        run["settle"] = trace.on_tensors(means, divisor)

        count, more = len(trace.coeffs), len(self.extras)
        begins = (0.1, self.running()) if advanced else ()
        tried = coeffs(3.0, *begins, **{x: self.defaults[x] for x in numbers})
        now = tried[0] if advanced else tried
        tried = list(now[:count])
        for method, x in {**inputs, "measure": measuring}.items():
            if method in run and (method != "measure" or measured):
                first = {"after": ["u"], "eval_point": ["x"]}.get(method, ["d"])
                names = [*first, *(kind._fields if method in moves else ())]
                names = ["mean"] * len(measured) if method == "measure" else names
                owner = f"{self.name}.{'means' if method == 'measure' else method}"
                check_elementwise(owner, names, run[method], len(x), tried)

        def direction(g: Tensor, s: Any, c: Any, x: Any = None) -> Direction:
            further = run["accumulate"] if c.further else run["direction"]
            d, *state = further(g, *s, x, *c[count : count + more], *c[:count])
            state = kind(*state)
            return Direction(d, state, state)

        def after(x: Tensor, u: Tensor, s: Any, c: Any) -> tuple[Tensor, Any]:
            u, *state = run["after"](x, u, *s, *c[:count])
            return u, kind(*state)

        def eval_point(x: Tensor, s: Any, c: Any) -> Tensor:
            return run["eval_point"](x, *s, *c[:count])[0]

        def measure(g: Tensor, x: Tensor, d: Tensor, _: Any, s: Any, c: Any) -> Any:
            return list(run["measure"](g, x, d, *s, *c[:count]))

        def settle(found: Any, scale: Any, lr: Any, decay: Any, c: Any) -> Any:
            return run["settle"](*found, *c[:count])[0]

        stored = [x.__qualname__ for x in self.makers]
        return Rule(
            *(self.name, kind, self._init(), coeffs, direction),
            after=after if self.has("after") else None,
            accumulate=_further if self.has("accumulate") else None,
            means=Means(len(means), measure, settle) if divisor else None,
            whole=whole,
            refuses=self._refuses(whole, now),
            running=self.running,
            eval_point=eval_point if self.has("eval_point") else None,
            reads_param=any("x" in self.names(x) for x in moves if x != "after"),
            extras=tuple(self.extras),
            digest=trace.digest(kind._fields, stored, self.running._field_defaults),
        )

    def _coeffs(self, host: Callable[..., Any], names: list[str]) -> Any:
        """Return `Rule.coeffs`, which computes the scalars of a step."""
        count, running = len(self.trace.coeffs), self.running
        fields = [(f"c{i}", Any) for i in range(count)] + [(x, Any) for x in self.extras]
        kind: Any = NamedTuple("Coeffs", [*fields, ("further", Any)])
        empty = (None,) * len(self.extras)

        def coeffs(t: Any, *before: Any, **given: Any) -> Any:
            values = [t]
            for name in names:
                x = given[name]
                values += x if isinstance(x, tuple | list) else (x,)
            found = host(*values, *(before[1] if before else ()))
            now = kind(*found[:count], *empty, ())
            return (now, running(*found[count:])) if before else now

        own = [inspect.Parameter("t", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        if running._fields:
            own += [own[0].replace(name=x) for x in ("lr", "running")]
        own += [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in names]
        coeffs.__signature__ = inspect.Signature(own)  # pyright: ignore[reportFunctionMemberAccess]
        return coeffs

    def _init(self) -> Callable[..., Any]:
        """Return `Rule.init`: zeros, or what the class's own init returns."""
        kind, makers, where = self.kind, self.makers, f"{self.name}.init"
        own = self.cls.bare(self.statics).init if self.has("init") else None

        def init(p: Tensor, kept: Any) -> Any:
            zeros = kind(*[make(p, kept) for make in makers])
            if own is None:
                return zeros
            found = own(p)
            if not isinstance(found, kind):
                raise TypeError(f"{where} returned {found!r}: allowed is self.State(...)")
            fields: list[Any] = []
            for name, x, zero in zip(kind._fields, found, zeros):
                if x is not None and x.shape != p.shape:
                    raise TypeError(
                        f"{where} returned {name} as {tuple(x.shape)} for a parameter "
                        f"of {tuple(p.shape)}: allowed is its shape, and None for zeros"
                    )
                # A copy, because fields share no memory with p.
                fields.append(zero if x is None else encode(x.clone(), zero, NEAREST))
            return kind(*fields)

        return init

    def _whole(self) -> Callable[[Tensor, Any], Tensor]:
        """Return `Rule.whole`, which has the hyperparameters as attributes of self."""
        cls, statics, timed = self.cls, self.statics, "t" in self.names("whole")
        own = {
            name: x
            for name, x in self.scalars.items()
            if name not in ("lr", "weight_decay") and (timed or name != "t")
        }
        leaves, spec = pytree.tree_flatten(own)
        self.trace.read(leaves)
        places = [self.trace.coeffs.index(x.node) for x in leaves]

        def whole(d: Tensor, c: Any) -> Tensor:
            now = pytree.tree_unflatten([c[i] for i in places], spec)
            t = (now.pop("t"),) if timed else ()
            found = cls.bare({**statics, **now}).whole(d, *t)
            if not isinstance(found, Tensor) or found.shape != d.shape:
                raise TypeError(
                    f"{cls.__name__}.whole returned {found!r} for a direction of shape "
                    f"{tuple(d.shape)}: allowed is a tensor of its shape and dtype"
                )
            return found.to(d.dtype)

        return whole

    def _refuses(self, whole: Any, tried: Any) -> Callable[[Tensor], str | None] | None:
        """Return `Rule.refuses`, which also tries `whole` on a parameter's shape."""
        own = self.cls.bare(self.statics).refuses if self.has("refuses") else None
        if own is None and whole is None:
            return None

        def refuses(p: Tensor) -> str | None:
            why = own(p) if own is not None else None
            if why is None and whole is not None:
                try:
                    whole(torch.empty(p.shape, dtype=torch.float32, device="meta"), tried)
                except NotImplementedError:
                    pass  # an operation without a meta function
                except Exception as error:
                    return f"whole raises {type(error).__name__} for its shape: {error}"
            return why

        return refuses


def _further(c: Any) -> Any:
    return c._replace(further=(True,))


def _flat(values: list[Any]) -> list[Any]:
    return [y for x in values for y in (x if isinstance(x, tuple) else (x,))]


def _makers(owner: str, kind: Any) -> list[Callable[..., Any]]:
    """Return the functions that make the fields of a State, by their annotations."""
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{owner}.State has an annotation of no known name: {error}"
        ) from error
    for name in kind._fields:
        if name in _TAKEN:
            raise TypeError(
                f"{owner}.State has a field {name!r}, which an entry has already: choose "
                "another name"
            )
    annotated = [get_args(hints[name])[1:] for name in kind._fields]
    return [next(filter(callable, x), moment) for x in annotated]
