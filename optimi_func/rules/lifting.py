"""The methods of a rule, traced once: scalar work for the host, the rest for tensors.

Operations on hyperparameters and the step alone become coefficients in double precision.
The others become functions of tensors, which the pipeline and its kernels call.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer, TraceError

from optimi_func.core import math
from optimi_func.core.rule import Scalar

_POWERS = (operator.pow, torch.pow, Tensor.pow)
_ROOTS = (torch.sqrt, Tensor.sqrt)
_CONDITIONS = (operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne)
_LOGICAL = (*_CONDITIONS, operator.and_, operator.or_, operator.xor)
# Operators that compute with Python numbers as with tensors.
_USUAL = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos)


class Traced(fx.Proxy):
    """A tensor or a scalar of a rule, while a method of the rule is traced."""

    def __float__(self) -> float:
        raise TypeError(
            "math's functions and float() take no traced hyperparameter: write x ** 0.5 "
            "for math.sqrt(x), and torch.exp(x), torch.log(x) and so on"
        )

    __int__ = __float__


class _Tracer(GraphAppendingTracer):
    def proxy(self, node: fx.Node) -> Traced:
        """Return the stand-in of a node's result."""
        return Traced(node, self)

    def create_arg(self, a: Any) -> Any:
        """Refuse constants that a graph cannot hold."""
        if isinstance(a, Tensor):
            raise TypeError(
                "it uses a tensor that is neither an argument nor made of one: make it a "
                "field of State, which `init` fills, or an extra that step is given"
            )
        return super().create_arg(a)


class Trace:
    """The graph of a rule's methods, and the functions that are taken out of it."""

    def __init__(self, owner: str) -> None:
        self.owner, self.code = owner, ""
        self.host: set[fx.Node] = set()  # what depends on scalars alone
        self.coeffs: list[fx.Node] = []  # those of them that tensor work reads
        self._graph = fx.Graph()
        self._tracer = _Tracer(self._graph)

    def input(self, name: str, scalar: bool = False) -> Traced:
        """Return the stand-in of a tensor, or of a scalar."""
        node = self._graph.placeholder(name)
        self.host |= {node} if scalar else set()
        return Traced(node, self._tracer)

    def call(self, method: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a method with stand-ins. Raise TypeError for what cannot be traced."""
        first, where = len(self._graph.nodes), f"{self.owner}.{method}"
        try:
            found = fn(*args)
        except TraceError as error:
            raise TypeError(
                f"{where} decides by the value of a tensor or of a hyperparameter (if, "
                "while, and, or, min, max, loops): write torch.where(condition, x, y), or "
                f"make the hyperparameter a bool or a str, which is static ({error})"
            ) from error
        except Exception as error:
            raise TypeError(f"{where} cannot be traced: {error}") from error
        for node in list(self._graph.nodes)[first:]:
            name = str(getattr(node.target, "__name__", node.target))
            written = name.endswith("_") and name[-2:] != "__"
            if (written and node.target not in _LOGICAL) or "out" in node.kwargs:
                raise TypeError(
                    f"{where} writes in place: use {name.rstrip('_')} for {name}"
                )
            if node.target is getattr:
                raise TypeError(
                    f"{where} reads .{node.args[1]} of a tensor, which may be flat or a "
                    "part here: only `whole` is given whole tensors"
                )
            inputs = node.all_input_nodes
            if inputs and self.host.issuperset(inputs):
                self.host.add(node)
        return found

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
        found, rest = set[fx.Node](), list(results)
        while rest:
            node = rest.pop()
            if node not in found:
                found.add(node)
                rest += () if node in given else node.all_input_nodes
        return found

    def function(
        self, given: list[Traced], results: list[Traced], on_host: bool = False
    ) -> tuple[Callable[..., Any], fx.Graph]:
        """Return `(*given, *coefficients) -> results`, and its graph.

        With `on_host`, `(*given) -> (*coefficients, *results)` for numbers and 0-d tensors.
        """
        inputs, outputs = [x.node for x in given], [x.node for x in results]
        if on_host:
            outputs = [*self.coeffs, *outputs]
        else:
            inputs += self.coeffs
        graph = fx.Graph()
        at = {node: graph.placeholder(node.name) for node in inputs}
        needed = self.needed(outputs, inputs)
        for node in self._graph.nodes:
            if node not in needed or node in at:
                continue
            if node.op == "placeholder":
                raise TypeError(f"{self.owner}: {node.name} is not known in this method")
            at[node] = graph.node_copy(node, at.__getitem__)
            method = node.op == "call_method"
            fn = getattr(Tensor, str(node.target)) if method else node.target
            if fn := _on_scalars(node, fn) if on_host else self._on_tensors(node, fn):
                at[node].op, at[node].target = "call_function", fn
        # As a coefficient, a bool would choose a graph.
        graph.output(
            tuple(
                graph.call_function(operator.mul, (at[x], 1.0))
                if x in self.host and x.target in _LOGICAL
                else at[x]
                for x in outputs
            )
        )
        code = graph.python_code("self")
        self.code += code.src
        space = dict(code.globals)
        exec(code.src, space)
        made = space["forward"]
        return (lambda *args: made(None, *args)), graph

    def _on_tensors(self, node: fx.Node, target: Any) -> Callable[..., Any] | None:
        if target in _ROOTS:
            return math.root
        if target in _POWERS and not isinstance(node.args[1], fx.Node):
            return _power
        return _select if target is torch.where and node.args[0] in self.host else None


def is_scalar(x: Any) -> bool:
    """Return True for a number and for a 0-d tensor."""
    return x.dim() == 0 if isinstance(x, Tensor) else isinstance(x, Real)


def as_scalar(x: Any) -> Scalar:
    """Return a number or a 0-d tensor in double precision; a bool would choose a graph."""
    return x.to(math.scalar_dtype(x.device)) if isinstance(x, Tensor) else float(x)


def _on_scalars(node: fx.Node, target: Any) -> Callable[..., Any] | None:
    if target in _ROOTS:
        return _scalar_power
    if target in _POWERS:
        return _varying_power if isinstance(node.args[1], fx.Node) else _scalar_power
    if target in _HOST:
        return _HOST[target]
    if target in _USUAL or target in _LOGICAL:
        return None
    target = torch.logical_not if target is operator.invert else target

    def scalar(*args: Any, **kwargs: Any) -> Scalar:
        tensors = [x for x in args if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        wide = math.scalar_dtype(device)
        dtypes = [torch.bool if isinstance(x, bool) else wide for x in args]
        given = [
            x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype, device=device)
            for x, dtype in zip(args, dtypes)
        ]
        found = target(*given, **kwargs)
        return found if tensors else found.item()

    scalar.__name__ = scalar.__qualname__ = f"scalar_{target.__name__}"
    return scalar


def _as_tensors(name: str, fn: Callable[[Any, Any], Any]) -> Callable[..., Scalar]:
    """Return fn for scalars, with the result of tensors where Python raises."""

    def scalar(x: Scalar, y: Scalar) -> Scalar:
        try:
            found = fn(x, y)
        except (OverflowError, ZeroDivisionError):
            found = None
        if found is None or isinstance(found, complex):
            return fn(torch.tensor(x, dtype=torch.float64, device="cpu"), y).item()
        return found

    scalar.__name__ = scalar.__qualname__ = name
    return scalar


_float_power = _as_tensors("float_power", operator.pow)
_HOST = {
    operator.truediv: _as_tensors("quotient", operator.truediv),
    operator.floordiv: _as_tensors("floor_quotient", operator.floordiv),
    operator.mod: _as_tensors("remainder", operator.mod),
    torch.where: math.choose,
}


def _scalar_power(x: Scalar, exponent: float = 0.5) -> Scalar:
    if exponent == 0.5 and (isinstance(x, Tensor) or x > 0):
        return math.sqrt(x)
    return _float_power(x, exponent)


def _varying_power(x: Scalar, exponent: Scalar) -> Scalar:
    tensors = isinstance(x, Tensor) or isinstance(exponent, Tensor)
    return math.power(x, exponent) if tensors else _float_power(x, exponent)


def _power(x: Tensor, exponent: float) -> Tensor:
    """Return x**exponent, with a finite derivative at 0."""
    if exponent == int(exponent):
        return x**exponent
    root = math.root(x)
    return root if exponent == 0.5 else root ** (2.0 * exponent)


def _select(condition: Scalar, yes: Any, no: Any) -> Any:
    """Return torch.where for a condition that is a coefficient, 1.0 or 0.0."""
    if isinstance(condition, Tensor):
        return torch.where(condition != 0.0, yes, no)
    chosen, other = (yes, no) if condition else (no, yes)
    return torch.full_like(other, chosen) if isinstance(chosen, float | int) else chosen


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
            raise TypeError(f"{where} raises in {fn.__name__}: {error}") from error
        if not isinstance(at[node], Tensor) or at[node].shape != given[0].shape:
            raise TypeError(
                _NOT_ELEMENTWISE.format(where, f"{node.name} has another shape")
            )


_NOT_ELEMENTWISE = (
    "{} is not elementwise: {}. What maps whole tensors is for `whole`, and what takes "
    "means for `means`"
)


def check_elementwise(
    where: str, names: Sequence[str], graph: fx.Graph, count: int, scalars: Any
) -> dict[int, int]:
    """Raise unless an element of each result depends on that of `count` tensors alone.

    Returns for each result that is a view the index of its base: that of a given tensor,
    or below 0 that of a result, from the end.
    """
    drawn, wide = torch.Generator().manual_seed(0), torch.float64
    given = torch.rand(count, 15, generator=drawn, dtype=wide, device="cpu") + 0.01
    given[0] -= 0.5
    some = torch.tensor([11, 2, 3, 7], device="cpu")
    tensors = [torch.tensor(x, dtype=wide, device="cpu") for x in scalars]
    rows = [x.clone() for x in given]
    results = _tried(where, graph, *rows, *scalars)
    again = _tried(where, graph, *given, *tensors)
    parts = _tried(where, graph, *given[:, some], *tensors)
    for shape in (3, 5), (3, 1, 5):  # for what t, flatten and squeeze do
        _tried(where, graph, *given.view(count, *shape), *scalars)
    for name, x, same, part in zip(names, results, again, parts):
        if x.dtype != wide:
            raise TypeError(f"{where} returns {name} as {x.dtype} for tensors of {wide}")
        if not torch.allclose(x, same, equal_nan=True):
            raise TypeError(f"{where} draws random numbers in {name}: leave them out")
        if not torch.allclose(x[some], part, equal_nan=True):
            raise TypeError(_NOT_ELEMENTWISE.format(where, f"{name} depends on the others"))
    at = [x.data_ptr() for x in results]
    memory = {x: i - len(at) for i, x in reversed([*enumerate(at)])}
    memory |= {x.data_ptr(): i for i, x in enumerate(rows)}
    return {i: memory[x] for i, x in enumerate(at) if memory[x] != i - len(at)}
