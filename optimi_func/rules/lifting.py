"""The methods of a rule, traced once: scalar work for the host, the rest for tensors.

Operations on hyperparameters and the step alone become coefficients in double precision.
The others become functions of tensors, which the pipeline and its kernels call. Values are
torch's in both; derivatives of roots at 0 are finite.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from math import isfinite, pow, sqrt
from numbers import Real
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_arg
from torch.fx.proxy import GraphAppendingTracer, TraceError

from optimi_func.core import math
from optimi_func.core.rule import Named, Scalar

_POWERS = (operator.pow, torch.pow, Tensor.pow)
_FLOORS = (operator.floordiv, torch.floor_divide, Tensor.floor_divide)
_LOGICAL = (operator.and_, operator.or_, operator.xor)
_CONDITIONS = (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)
_USUAL = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos)
_KINDS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64}
# torch, and this package, whose bodies have no errors.
_OUTSIDE = str(Path(fx.__file__).parents[1]), str(Path(__file__).parents[1])


class Traced(fx.Proxy):
    """A tensor or a scalar of a rule, while a method of the rule is traced."""

    def __float__(self) -> float:
        raise TypeError(
            "math's functions and float() take no traced hyperparameter: write x ** 0.5 "
            "for math.sqrt(x), and torch.exp(x), torch.log(x) and so on"
        )

    __int__ = __float__


class _Tracer(GraphAppendingTracer):
    def __init__(self, graph: fx.Graph, host: set[fx.Node]) -> None:
        super().__init__(graph)
        self.host, self._known = host, dict[tuple[object, ...], fx.Node]()

    def create_node(self, kind: str, target: Any, *args: Any, **more: Any) -> fx.Node:
        """Return a node, for scalar work the one that does the same, if there is one."""
        node = super().create_node(kind, target, *args, **more)
        inputs = node.all_input_nodes
        if not inputs or target is math.rounded or not self.host.issuperset(inputs):
            return node
        key = kind, target, repr(node.args), repr(node.kwargs)
        if (first := self._known.setdefault(key, node)) is not node:
            self.graph.erase_node(node)
        self.host.add(first)
        return first

    def proxy(self, node: fx.Node) -> Traced:
        """Return the stand-in of a node's result, which knows the method's line."""
        node.meta.setdefault("line", _line(walk_stack(sys._getframe())))
        return Traced(node, self)

    def create_arg(self, a: object) -> Argument:
        """Refuse constants that a graph cannot hold."""
        if isinstance(a, Tensor):
            raise TypeError(
                "it uses a tensor that is neither an argument nor made of one: make it a "
                "field of State, which `init` fills, or an extra that step is given"
            )
        return super().create_arg(a)


def _line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the first line that is not torch's or this package's."""
    lines = [(frame.f_code.co_filename, n) for frame, n in frames]
    return next((f" ({x}:{n})" for x, n in lines if not x.startswith(_OUTSIDE)), "")


def line_of(error: BaseException) -> str:
    """Return the line of a user's file that an error comes from."""
    return _line(reversed([*walk_tb(error.__traceback__)]))


class Trace:
    """The graph of a rule's methods, and the functions that are taken out of it."""

    def __init__(self, owner: str) -> None:
        self.owner, self.code = owner, ""
        self.hint = ""  # why a field of State may be None
        self.host: set[fx.Node] = set()  # what depends on scalars alone
        self.coeffs: list[fx.Node] = []  # those of them that tensor work reads
        self.chosen: fx.Node | None = None  # a coefficient that is a bool, if it can be
        self._graph = fx.Graph()
        self._tracer = _Tracer(self._graph, self.host)

    def input(self, name: str, scalar: bool = False) -> Traced:
        """Return the stand-in of a tensor, or of a scalar."""
        node = self._graph.placeholder(name)
        self.host |= {node} if scalar else set()
        shape = () if scalar else (2,)
        node.meta["value"] = torch.full(shape, 3.0, dtype=torch.float64, device="cpu")
        return Traced(node, self._tracer)

    def call(self, method: str, fn: Callable[..., object], *args: object) -> object:
        """Call a method with stand-ins. Raise TypeError for what cannot be traced."""
        first, where = len(self._graph.nodes), f"{self.owner}.{method}"
        try:
            result = fn(*args)
        except Exception as error:
            where += line_of(error)
            if not isinstance(error, TraceError):
                hint = self.hint * ("NoneType" in str(error))
                raise TypeError(f"{where} cannot be traced: {error}{hint}") from error
            raise TypeError(
                f"{where} decides by the value of a tensor or of a hyperparameter (if, "
                "while, and, or, min, max, loops): write torch.where(condition, x, y), "
                "x.clamp_max(1.0) for min(x, 1.0), clamp_min for max, or make the "
                f"hyperparameter a bool or a str, which is static ({error})"
            ) from error
        for node in list(self._graph.nodes)[first:]:
            name = str(getattr(node.target, "__name__", node.target))
            here = where + node.meta.get("line", "")
            written = name.endswith("_") and name[-2:] != "__"
            if written and node.target not in _LOGICAL:
                raise TypeError(f"{here} writes in place: use {name[:-1]} for {name}")
            if node.kwargs.get("out") is not None:
                raise TypeError(f"{here} writes in place: use {name} without out=")
            if node.target is getattr:
                raise TypeError(
                    f"{here} reads .{node.args[1]} of a tensor, which may be flat or a "
                    "part here: only `whole` is given whole tensors"
                )
            if node.op != "placeholder":
                self._choose(here, node)
        return result

    def _choose(self, where: str, node: fx.Node) -> None:
        """Choose the function of a node, and note one of its values, for the dtype."""
        try:
            fn, args, kwargs = _normal(node)
            chosen = _in_double(fn) if node in self.host else fn
            values, named = map_arg((args, kwargs), lambda x: x.meta["value"])
            value: Any = chosen(*values, **named)
        except Exception as error:
            raise TypeError(f"{where} cannot be traced: {error}") from error
        floats = isinstance(value, Tensor) and value.is_floating_point()
        node.meta["value"] = value.double() if floats else value
        kinds = {_kind(x) for x in args if isinstance(x, fx.Node)}
        if node in self.host and fn is torch.where and floats:
            more = [x if isinstance(x, fx.Node) else float(x) for x in args[1:]]
            chosen, args = math.choose, (args[0], *more)
        elif (
            fn is _OURS[operator.truediv] and is_scalar(values[0]) and node not in self.host
        ):
            chosen = _over
        elif (fn, *kinds) in _PLAIN:
            chosen = fn
        node.meta["call"] = chosen, args, kwargs

    @property
    def coefficients(self) -> list[Traced]:
        """The stand-ins of `coeffs`."""
        return [Traced(node, self._tracer) for node in self.coeffs]

    def require(self, results: Iterable[Traced]) -> None:
        """Make coefficients of the scalars that tensor work reads for these results."""
        nodes = self.needed([x.node for x in results])
        for node in self._graph.nodes:
            if node in nodes and node not in self.host:
                read = [x for x in node.all_input_nodes if x in self.host]
                self.coeffs += [x for x in read if x not in self.coeffs]

    def needed(
        self, results: Sequence[fx.Node], given: Sequence[fx.Node] = ()
    ) -> set[fx.Node]:
        """Return the nodes that results are computed of, up to the given ones."""
        nodes, waiting = set[fx.Node](), list(results)
        while waiting:
            node = waiting.pop()
            if node not in nodes:
                nodes.add(node)
                waiting += () if node in given else node.all_input_nodes
        return nodes

    def function(
        self, given: list[Traced], results: list[Traced], on_host: bool = False
    ) -> tuple[Callable[..., Any], fx.Graph]:
        """Return `(*given, *coefficients) -> results`, and its graph.

        With `on_host`, `(*given) -> results` for numbers and 0-d tensors.
        """
        inputs, outputs = [x.node for x in given], [x.node for x in results]
        inputs += [] if on_host else self.coeffs
        graph, count = fx.Graph(), len(given)
        at = {node: graph.placeholder(node.name) for node in inputs}
        needed = self.needed(outputs, inputs)
        for node in inputs[count:]:
            if node in needed and (kind := _kind(node)) != torch.float64:
                at[node] = graph.call_function(_restored, (at[node], kind))
        for node in self._graph.nodes:
            if node not in needed or node in at:
                continue
            if node.op == "placeholder":
                raise TypeError(
                    f"{self.owner}: {node.name} is not known in this method (means are "
                    "taken at once, so that none is of another)"
                )
            nodes = at if on_host else self._widened(node, at, graph)
            fn, args, kwargs = map_arg(node.meta["call"], nodes.__getitem__)
            if fn is torch.where and not on_host:
                fn, args = _where, (*args, at[inputs[0]], _kind(node))
            if node.op == "call_method" and fn is getattr(Tensor, str(node.target)):
                at[node] = graph.call_method(node.target, args, kwargs)
            else:
                at[node] = graph.call_function(fn, args, kwargs)
            at[node].meta["line"] = node.meta["line"]
        # As a coefficient, a bool would choose a graph.
        floats = [not on_host or _kind(x) == torch.float64 for x in outputs]
        kinds = [as_choice if x is self.chosen else as_scalar for x in outputs]
        graph.output(
            tuple(
                at[x] if is_float else graph.call_function(kind, (at[x],))
                for x, is_float, kind in zip(outputs, floats, kinds)
            )
        )
        code = graph.python_code("self")
        self.code += code.src
        space = dict(code.globals)
        exec(code.src, space)
        run = space["forward"]
        return (_on_scalars(run) if on_host else _on_tensors(run, count)), graph

    def _widened(
        self, node: fx.Node, at: dict[fx.Node, fx.Node], graph: fx.Graph
    ) -> dict[fx.Node, fx.Node]:
        """Return `at` with casts of bools and ints, of which torch would make a float32."""
        fn, args, _ = node.meta["call"]
        tensors = [x for x in args if isinstance(x, fx.Node) and x not in self.host]
        floats = [x for x in tensors if _kind(x) == torch.float64]
        if floats or _kind(node) != torch.float64 or fn is torch.where:
            return at
        like = next(iter(at.values()))
        return at | {x: graph.call_method("type_as", (at[x], like)) for x in tensors}


def _on_tensors(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a compiled function of `count` tensors and of scalars, in their dtype."""

    def on_tensors(*args: Any) -> tuple[Tensor, ...]:
        # A 0-d float64 would widen a bool tensor, and other functions refuse it.
        dtype = args[0].dtype
        for x in args[count:]:
            if isinstance(x, Tensor) and x.dtype == dtype:
                break  # tensors of one dtype
            if isinstance(x, Tensor):
                cast = [x.to(dtype) if isinstance(x, Tensor) else x for x in args[count:]]
                return run(None, *args[:count], *cast)
        return run(None, *args)

    return on_tensors


def _on_scalars(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function of scalars, in double precision."""

    def on_scalars(*args: Scalar) -> tuple[Scalar, ...]:
        return run(None, *[x if type(x) is float else as_scalar(x) for x in args])

    return on_scalars


def _normal(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Argument]]:
    """Return the function of a node and its arguments, of one spelling each."""
    method, args, kwargs = node.op == "call_method", node.args, dict(node.kwargs)
    fn: Any = getattr(Tensor, str(node.target)) if method else node.target
    if fn in (torch.where, Tensor.where) or fn in _POWERS:
        names = "condition", "input", "self", "other", "exponent"
        args, kwargs = (*args, *[kwargs[x] for x in names if x in kwargs]), {}
    if fn is Tensor.where:
        args = (args[1], args[0], *args[2:])
    if fn in _POWERS and args[1:] == (0.5,):
        fn, args = torch.sqrt, args[:1]
    if any([isinstance(kwargs.get(x), fx.Node) for x in ("alpha", "value")]):
        fn = _SCALED.get(fn, fn)
    return _OURS.get(fn, fn), args, kwargs


def _kind(node: fx.Node) -> torch.dtype:
    """Return the dtype of a value; all floats are float64."""
    dtype = getattr(node.meta["value"], "dtype", torch.float64)
    return torch.float64 if dtype.is_floating_point else dtype


def is_scalar(x: object) -> bool:
    """Return True for a number and for a 0-d tensor."""
    return x.dim() == 0 if isinstance(x, Tensor) else isinstance(x, Real)


def as_scalar(x: Scalar) -> Scalar:
    """Return a number or a 0-d tensor in double precision; a bool would choose a graph."""
    if not isinstance(x, Tensor):
        return float(x)
    return x if x.dtype == torch.float64 else x.to(math.scalar_dtype(x.device))


def as_choice(x: Scalar) -> Scalar:
    """Return a bool, which chooses a graph, or a 0-d tensor as a number."""
    return as_scalar(x) if isinstance(x, Tensor) else bool(x)


def _in_double(fn: Callable[..., Any]) -> Callable[..., Scalar]:
    """Return a function of tensors for numbers too, in double precision."""

    def scalar(*args: object, **kwargs: object) -> Scalar:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        wide = math.scalar_dtype(device)
        arguments = [
            x
            if not isinstance(x, int | float)
            else torch.tensor(x, dtype=_KINDS.get(type(x), wide), device=device)
            for x in args
        ]
        result = fn(*arguments, **kwargs)
        if result.is_floating_point() and result.dtype != wide:
            arguments = [x.to(wide) if isinstance(x, Tensor) else x for x in arguments]
            result = fn(*arguments, **kwargs).to(wide)
        return result if tensors else result.item()

    scalar.__name__ = scalar.__qualname__ = f"scalar_{fn.__name__}"
    return scalar


def _of_numbers(
    fn: Callable[[float, float], complex], of_tensors: Callable[..., Scalar]
) -> Callable[[Scalar, Scalar], Scalar]:
    """Return of_tensors, and fn for two numbers, with torch's result where it raises."""
    in_double = _in_double(of_tensors)

    def both(x: Scalar, y: Scalar) -> Scalar:
        if not (isinstance(x, float | int) and isinstance(y, float | int)):
            return of_tensors(x, y)
        try:
            result = fn(x, y)
        except (OverflowError, ZeroDivisionError):
            result = 0j
        return in_double(x, y) if isinstance(result, complex) else result

    both.__name__ = both.__qualname__ = of_tensors.__name__
    return both


def _floor_quotient(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")  # the operator has no derivative


def _remainder(x: Scalar, y: Scalar) -> Scalar:
    if isinstance(x, int | float) and isinstance(y, Tensor):  # which has no derivative
        x = torch.full_like(y, x, dtype=torch.result_type(x, y))
    return x % y


def _root(x: Scalar) -> Scalar:
    """Return sqrt(x), with the derivative 0 at 0."""
    if isinstance(x, int | float):
        return math.sqrt(x) if x >= 0 else float("nan")
    if not math.may_be_differentiated(x):
        return x.sqrt()
    zero = x == 0
    return torch.where(zero, x.detach(), torch.where(zero, 1, x).sqrt())


def _restored(x: Scalar, kind: torch.dtype) -> Scalar:
    """Return the bool or the integer that a coefficient is."""
    if kind == torch.bool:
        return x != 0.0
    return x.to(kind) if isinstance(x, Tensor) else int(x)


def _where(
    condition: bool | Tensor, yes: Scalar, no: Scalar, like: Tensor, kind: torch.dtype
) -> Tensor:
    """Return torch.where in the shape of `like`, and in its dtype if it is of floats."""
    dtype = like.dtype if kind.is_floating_point else kind
    yes, no = [
        x if isinstance(x, int | float) or x.dtype == dtype else x.to(dtype)
        for x in (yes, no)
    ]
    if isinstance(condition, bool):
        yes = no = yes if condition else no
        if not (isinstance(yes, int | float) or is_scalar(yes)):
            return yes
        condition = torch.ones_like(like, dtype=torch.bool)
    if isinstance(yes, int | float) and isinstance(no, int | float):
        yes = torch.full_like(like, yes, dtype=dtype)
    return torch.where(condition, yes, no)


def _clamp(x: Tensor, min: Scalar | None = None, max: Scalar | None = None) -> Tensor:
    """Return torch.clamp, of a number and a tensor too."""
    x = x if min is None else x.clamp_min(min)
    return x if max is None else x.clamp_max(max)


def _over(x: Scalar, y: Tensor) -> Tensor:
    """Return x / y with the bits that torch gives if x is a number, also if x is 0-d.

    torch multiplies a number by the reciprocal, and divides a 0-d tensor. A hyperparameter
    is a number in some steps and a tensor in others, whose last bits would differ.
    """
    return y.reciprocal() * x


def _lerp(input: Tensor, end: Tensor, weight: Scalar) -> Tensor:
    """Return torch.lerp, whose weight may be an integer of each member under vmap too."""
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        weight = weight.to(input.dtype)
    return torch.lerp(input, end, weight)


def _scaled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function whose alpha or value may be a tensor."""

    def scaled(x: Tensor, y: Tensor, *z: Tensor, **named: Scalar) -> Tensor:
        (factor,) = named.values()
        scales = isinstance(factor, Tensor)
        return fn(x, factor * y, *z) if scales else fn(x, y, *z, **named)

    scaled.__name__ = scaled.__qualname__ = f"{fn.__name__}_scaled"
    return scaled


_SCALED = {
    home: _scaled(getattr(torch, name))
    for name in ("add", "sub", "addcmul", "addcdiv")
    for home in (getattr(torch, name), getattr(Tensor, name))
}
_OURS = {
    operator.truediv: _of_numbers(operator.truediv, operator.truediv),
    operator.mod: _of_numbers(operator.mod, _remainder),
    Tensor.where: torch.where,
    **dict.fromkeys(_POWERS, _of_numbers(operator.pow, math.power)),
    **dict.fromkeys((torch.sqrt, Tensor.sqrt), _root),
    **dict.fromkeys((torch.clamp, Tensor.clamp), _clamp),
    **dict.fromkeys((torch.lerp, Tensor.lerp), _lerp),
    **dict.fromkeys(_FLOORS, _of_numbers(operator.floordiv, _floor_quotient)),
}
# What computes with Python's floats, or bools, as with tensors.
_PLAIN = {(fn, torch.bool) for fn in _LOGICAL} | {
    (fn, torch.float64)
    for fn in (*_OURS.values(), *_USUAL, *_CONDITIONS)
    if fn not in (_clamp, _lerp, torch.where)
}

# `(t, lr, weight_decay, r) -> (coefficients, r)`, and what makes it of numbers.
AtStep: TypeAlias = Callable[..., tuple[Named, Named]]
Prepared: TypeAlias = Callable[..., AtStep]

_EXPRESSIONS: dict[Any, str] = {
    math.choose: "{1} if {0} else {2}",
    _root: "_sqrt({})",
    _OURS[operator.pow]: "_pow({}, {})",
    _OURS[operator.truediv]: "{} / {}",
    operator.add: "{} + {}",
    operator.sub: "{} - {}",
    operator.mul: "{} * {}",
    operator.neg: "-{}",
    operator.gt: "{} > {}",
    operator.ge: "{} >= {}",
    operator.lt: "{} < {}",
    operator.le: "{} <= {}",
    operator.eq: "{} == {}",
    operator.ne: "{} != {}",
}


def prepared(
    graph: fx.Graph,
    rates: Sequence[str],
    before: Sequence[str],
    kind: type[Named],
    running: type[Named],
    whole: tuple[Any, ...] | None,
) -> Prepared:
    """Return `(*numbers) -> (t, lr, weight_decay, r) -> (coefficients, r)` for floats.

    It is the scalar work of a graph in plain Python, with what does not depend on the step
    as constants around it. What `function` makes takes tensors too, and asks each number
    what it is: with it a class's step of one small tensor takes 27 % longer by AdamW, and
    16 % by SGD.

    `rates` are the names of t, lr and weight_decay in the graph, and `before` those of the
    running scalars r. Its results are those of `kind`, then those of `running`. `whole` are
    the stand-ins in the field of this name that `kind` has, in tuples where they are
    several. Where Python raises and torch does not, both functions raise ArithmeticError or
    ValueError. Names here begin with _, because those of hyperparameters do not.
    """
    space: dict[str, Any] = {"_sqrt": sqrt, "_pow": pow, "_kind": kind, "_running": running}
    late, count = {*rates, *before}, len(kind._fields) - len(kind._field_defaults)
    inputs, first, then, results = _lines(graph, late, space)
    given, after = results[:count], "_r"
    if whole is not None:
        given.append(f"whole={_names(whole)}")
    now = f"_kind({', '.join(given)})"
    if whole is None and late.isdisjoint(given):
        first, now = [*first, f"_now = {now}"], "_now"
    if before:
        after = f"_running({', '.join(results[count:])})"
        then = [f"{', '.join(before)}, = _r", *then]
    lines = [*first, f"def _at({', '.join([*rates, '_r'])}):", *[f"    {x}" for x in then]]
    lines += [f"    return {now}, {after}", "return _at"]
    exec("\n    ".join([f"def prepare({', '.join(inputs)}):", *lines]), space)
    return space["prepare"]


def _names(x: Any) -> str:
    """Return the expression of a stand-in, or of a tuple of them."""
    return f"({', '.join(map(_names, x))},)" if isinstance(x, tuple) else x.node.name


def _lines(
    graph: fx.Graph, late: set[str], space: dict[str, Any]
) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the inputs of a graph, its lines, and the names of its results.

    Lines that depend on names in `late` are apart, and their own names are added to it.
    Constants and functions are added to `space`.
    """
    names: dict[fx.Node, str] = {}
    variables: dict[str, str] = {}  # the names of expressions
    inputs, first, then = list[str](), list[str](), list[str]()

    def term(x: Any) -> str:
        if isinstance(x, fx.Node):
            return names[x]
        if type(x) in (float, int) and isfinite(x):
            return repr(float(x))
        space[name := f"_k{len(space)}"] = x
        return name

    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
            inputs += [] if node.name in late else [node.name]
            continue
        if node.op == "output":
            break
        args = [term(x) for x in node.args]
        if node.target in _EXPRESSIONS and not node.kwargs:
            text = _EXPRESSIONS[node.target].format(*args)
        else:
            space[fn := f"_f{len(space)}"] = node.target
            args += [f"{k}={term(x)}" for k, x in node.kwargs.items()]
            text = f"{fn}({', '.join(args)})"
        if text not in variables:
            variables[text] = f"_x{len(variables)}"
            varies = any([names[x] in late for x in node.all_input_nodes])
            (then if varies else first).append(f"{variables[text]} = {text}")
            late |= {variables[text]} if varies else set()
        names[node] = variables[text]
    results: Any = graph.output_node().args[0]
    return inputs, first, then, [term(x) for x in results]


def _tried(where: str, graph: fx.Graph, *given: Any) -> Any:
    """Run a graph on tensors of one shape. Raise for results of another."""
    inputs, at = iter(given), dict[fx.Node, Any]()
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), at.__getitem__)
        if node.op == "placeholder":
            at[node] = next(inputs)
            continue
        if node.op == "output":
            return args[0]
        fn = getattr(Tensor, node.target) if node.op == "call_method" else node.target
        try:
            at[node] = fn(*args, **kwargs)
        except Exception as error:
            here = where + node.meta.get("line", "")
            raise TypeError(f"{here} raises in {fn.__name__}: {error}") from error
        read = [at[x] for x in node.all_input_nodes]
        if fn is _restored or (read and all(map(is_scalar, read))):
            continue
        if not isinstance(at[node], Tensor) or at[node].shape != given[0].shape:
            raise TypeError(
                _NOT_ELEMENTWISE.format(
                    where + node.meta.get("line", ""), f"{node.name} has another shape"
                )
            )


_NOT_ELEMENTWISE = (
    "{} is not elementwise: {}. What maps whole tensors is for `whole`, and what takes "
    "means for `divisor`"
)


def check_elementwise(
    where: str, names: Sequence[str], graph: fx.Graph, count: int, scalars: Sequence[Scalar]
) -> dict[int, int]:
    """Raise unless an element of each result depends on that of `count` tensors alone.

    Returns for each result that is a view the index of its base: that of a given tensor,
    or below 0 that of a result, from the end.
    """
    generator, wide = torch.Generator().manual_seed(0), torch.float64
    inputs = torch.rand(count, 15, generator=generator, dtype=wide, device="cpu") + 0.01
    inputs[0] -= 0.5
    picks = torch.tensor([11, 2, 3, 7], dtype=torch.int64, device="cpu")
    tensors = [torch.tensor(x, dtype=wide, device="cpu") for x in scalars]
    rows = [x.clone() for x in inputs]
    results = _tried(where, graph, *rows, *scalars)
    on_tensors = _tried(where, graph, *inputs, *tensors)
    parts = _tried(where, graph, *inputs[:, picks], *tensors)
    for shape in (3, 5), (3, 1, 5):  # for what t, flatten and squeeze do
        _tried(where, graph, *inputs.view(count, *shape), *scalars)
    for name, x, same, part in zip(names, results, on_tensors, parts):
        if x.dtype != wide:
            raise TypeError(f"{where} returns {name} as {x.dtype} for tensors of {wide}")
        if not torch.allclose(x, same, equal_nan=True):
            raise TypeError(f"{where} draws random numbers in {name}: leave them out")
        if not torch.allclose(x[picks], part, equal_nan=True):
            raise TypeError(_NOT_ELEMENTWISE.format(where, f"{name} depends on the others"))
    at = [x.data_ptr() for x in results]
    memory = {x: i - len(at) for i, x in reversed([*enumerate(at)])}
    memory |= {x.data_ptr(): i for i, x in enumerate(rows)}
    # What is the same node is the same tensor, and no view of it.
    nodes: list[Any] = [*graph.nodes]
    nodes = [*nodes[:count], *nodes[-1].args[0]]
    views = {i: memory[x] for i, x in enumerate(at)}
    return {i: j for i, j in views.items() if nodes[j] is not nodes[count + i]}


@overload  # What follows takes scalars and tensors alike, in the methods of a rule.
def where(condition: bool | Tensor, yes: Tensor, no: Tensor) -> Tensor: ...
@overload
def where(condition: Tensor, yes: Scalar, no: Scalar) -> Tensor: ...
@overload
def where(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar: ...
def where(condition: bool | Tensor, yes: Scalar, no: Scalar) -> Scalar:
    """Return `torch.where(condition, yes, no)`; the condition may also be a Python bool."""
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


@overload
def maximum(x: Tensor, y: Scalar) -> Tensor: ...
@overload
def maximum(x: Scalar, y: Tensor) -> Tensor: ...
@overload
def maximum(x: float, y: float) -> float: ...
def maximum(x: Scalar, y: Scalar) -> Scalar:
    """Return the larger of two scalars, or the elementwise maximum of tensors."""
    return _either(max, torch.maximum, "clamp_min", x, y)


@overload
def minimum(x: Tensor, y: Scalar) -> Tensor: ...
@overload
def minimum(x: Scalar, y: Tensor) -> Tensor: ...
@overload
def minimum(x: float, y: float) -> float: ...
def minimum(x: Scalar, y: Scalar) -> Scalar:
    """Return the smaller of two scalars, or the elementwise minimum of tensors."""
    return _either(min, torch.minimum, "clamp_max", x, y)


def _either(of_numbers: Any, of_tensors: Any, clamp: str, x: Any, y: Any) -> Any:
    if isinstance(x, int | float) and isinstance(y, int | float):
        return of_numbers(x, y)
    kinds = _is_known(x), _is_known(y)
    if isinstance(x, int | float) or kinds == (True, False):
        x, y = y, x
    # torch takes no number here, and a scalar of a rule is one when it steps.
    clamped = isinstance(y, int | float) or kinds[0] is not kinds[1]
    return getattr(x, clamp)(y) if clamped else of_tensors(x, y)


def _is_known(x: object) -> bool:
    """Return True for a number, and for the stand-in of a scalar."""
    if not isinstance(x, Traced):
        return isinstance(x, int | float)
    tracer: Any = x.tracer
    return x.node in tracer.host


def rounded(x: Scalar, like: Tensor | None = None) -> Scalar:
    """Return a scalar, rounded to the dtype of the tensors in the step.

    Expressions that contain only scalars are computed in double precision before the step.
    Operations on the result of `rounded` are computed together with the tensors instead,
    and rounded to their dtype. In `whole`, pass a tensor as `like`, if you combine the
    scalar with a scalar that is computed from tensors, such as a norm.
    """
    if like is not None:
        return x.to(like.dtype) if isinstance(x, Tensor) else x
    return _stand_in(math.rounded, x) if isinstance(x, Traced) else x


@overload
def root(v: Tensor) -> Tensor: ...
@overload
def root(v: Scalar) -> Scalar: ...
def root(v: Scalar) -> Scalar:
    """Return the elementwise square root of v, with a finite derivative at 0."""
    if isinstance(v, Traced):
        return _stand_in(math.root, v)
    return math.root(v) if isinstance(v, Tensor) else math.sqrt(v)


def is_zero(v: Tensor) -> Tensor:
    """Return, for each element of v, whether `root` treats the element as 0."""
    return _stand_in(math.is_zero, v) if isinstance(v, Traced) else math.is_zero(v)


def _stand_in(fn: Callable[..., object], x: Any) -> Any:
    """Return the stand-in of fn's result, given that of its argument."""
    return x.tracer.create_proxy("call_function", fn, (x,), {})
