"""The methods of a rule, traced once: scalar work for the host, the rest for tensors.

Operations on hyperparameters and the step alone become coefficients in double precision.
The others become functions of one tensor, which the pipeline and its kernels call.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx

from optimi_func.core import math
from optimi_func.core.rule import Scalar

_POWERS = (operator.pow, torch.pow, Tensor.pow)
_ROOTS = (torch.sqrt, Tensor.sqrt)
_INVERSE_ROOTS = (torch.rsqrt, Tensor.rsqrt)
_NUMBERS = tuple(
    getattr(operator, name)
    for name in "add sub mul truediv floordiv mod neg pos gt ge lt le eq ne".split()
)
_CONDITIONS = (*_NUMBERS[-6:], operator.and_, operator.or_, operator.xor)


class Traced(fx.Proxy):
    """A tensor or a scalar of a rule, while a method of the rule is traced."""

    def __float__(self) -> float:
        raise TypeError(
            "math's functions and float() take no traced hyperparameter: write x ** 0.5 "
            "for math.sqrt(x), and torch.exp, torch.where, torch.minimum and so on"
        )

    __int__ = __float__


class _Tracer(fx.proxy.GraphAppendingTracer):
    def proxy(self, node: fx.Node) -> Traced:
        """Return the stand-in of a node's result."""
        return Traced(node, self)

    def create_arg(self, a: Any) -> Any:
        """Refuse constants that a graph cannot hold."""
        if isinstance(a, Tensor):
            raise TypeError(
                "it uses a tensor that is neither its argument nor made of one: make it a "
                "field of State (`init` fills it), or an argument that step is given"
            )
        return super().create_arg(a)


class Trace:
    """The graph of a rule's methods, and the functions that are taken out of it."""

    def __init__(self, owner: str) -> None:
        self._owner, self._code = owner, ""
        self._graph = fx.Graph()
        self._tracer = _Tracer(self._graph)
        self._host: set[fx.Node] = set()
        self.coeffs: list[fx.Node] = []  # the coefficients that tensor work reads

    def tensor(self, name: str) -> Traced:
        """Return the stand-in of a tensor."""
        return Traced(self._graph.placeholder(name), self._tracer)

    def scalar(self, name: str) -> Traced:
        """Return the stand-in of a hyperparameter, or of the step."""
        found = self.tensor(name)
        self._host.add(found.node)
        return found

    def call(self, method: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a method with stand-ins. Raise TypeError for what cannot be traced."""
        first = len(self._graph.nodes)
        try:
            found = fn(*args)
        except fx.proxy.TraceError as error:
            raise TypeError(
                f"{self._owner}.{method} decides by the value of a tensor or of a "
                "hyperparameter (if, while, and, or, min, max, bool, loops): write "
                "torch.where(condition, x, y), or make the hyperparameter a bool or a str, "
                f"which is static ({error})"
            ) from error
        except (TypeError, NotImplementedError, RuntimeError, AttributeError) as error:
            text = f"{self._owner}.{method} cannot be traced: {error}"
            raise TypeError(text) from error
        for node in list(self._graph.nodes)[first:]:
            self._check(method, node)
            inputs = node.all_input_nodes
            if inputs and all([x in self._host for x in inputs]):
                self._host.add(node)
        return found

    def _check(self, method: str, node: fx.Node) -> None:
        name = str(getattr(node.target, "__name__", node.target))
        if (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs:
            self._refuse(method, f"writes in place ({name})", f"{name.rstrip('_')}")
        if node.target is getattr:
            what = f"reads .{node.args[1]} of a tensor, which may be flat or a part here"
            self._refuse(method, what, "whole(d), which is given the whole tensor")

    def _refuse(self, method: str, what: str, instead: str) -> None:
        raise TypeError(f"{self._owner}.{method} {what}: use {instead} instead")

    def require(self, results: Iterable[Any]) -> None:
        """Make the scalars coefficients that these results need."""
        nodes = self._before([x.node for x in results], set())
        for node in nodes:
            inputs = [] if node in self._host else node.all_input_nodes
            for x in inputs:
                if x in self._host and x not in self.coeffs:
                    self.coeffs.append(x)

    def read(self, scalars: Iterable[Traced]) -> None:
        """Make these scalars coefficients."""
        self.coeffs += [x.node for x in scalars if x.node not in self.coeffs]

    def used(self, results: Sequence[Traced]) -> set[fx.Node]:
        """Return all nodes that coefficients and these results are computed from."""
        return self._before([*self.coeffs, *[x.node for x in results]], set())

    def on_host(self, given: Sequence[Traced], results: Sequence[Traced]) -> Any:
        """Return `(*given) -> (*coefficients, *results)`, for numbers and 0-d tensors."""
        found = [*self.coeffs, *[x.node for x in results]]
        return self._function([x.node for x in given], found, _on_scalars)

    def on_tensors(self, given: Sequence[Traced], results: Sequence[Traced]) -> Any:
        """Return `(*given, *coefficients) -> results`."""
        nodes = [*[x.node for x in given], *self.coeffs]
        return self._function(nodes, [x.node for x in results], self._on_tensors)

    def is_scalar(self, x: Traced) -> bool:
        """Return True if x depends on hyperparameters and the step alone."""
        return x.node in self._host

    def digest(self, *facts: object) -> str:
        """Return a hash of the code of all functions, and of these facts."""
        return sha256(repr((self._owner, self._code, facts)).encode()).hexdigest()

    def _before(self, results: list[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes that results are computed from, up to the given ones."""
        found: set[fx.Node] = set()
        open_ = list(results)
        while open_:
            node = open_.pop()
            if node not in found:
                found.add(node)
                open_ += [] if node in given else node.all_input_nodes
        return found

    def _function(
        self,
        given: list[fx.Node],
        results: list[fx.Node],
        replaced: Callable[[fx.Node], Callable[..., Any] | None],
    ) -> Any:
        graph, at = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in given:
            at[node] = graph.placeholder(node.name)
        needed = self._before(results, set(given))
        for node in self._graph.nodes:
            if node not in needed or node in at:
                continue
            if node.op == "placeholder":
                raise TypeError(f"{self._owner} uses {node.name} where it is not given")
            at[node] = graph.node_copy(node, at.__getitem__)
            fn = replaced(node)
            if fn is not None:
                at[node].op, at[node].target = "call_function", fn
        found = [at[x] for x in results]
        for i, x in enumerate(results):
            if x in self._host and x.target in _CONDITIONS:
                # As a coefficient, a bool would choose a graph.
                found[i] = graph.call_function(operator.mul, (found[i], 1.0))
        graph.output(tuple(found))
        code = graph.python_code("self")
        self._code += code.src
        space = dict(code.globals)
        exec(code.src, space)
        made = space["forward"]
        return lambda *args: made(None, *args)

    def _on_tensors(self, node: fx.Node) -> Callable[..., Any] | None:
        """Return the function that replaces an operation on tensors, if one does."""
        target = _function_of(node)
        if target in _ROOTS:
            return math.root
        if target in _INVERSE_ROOTS:
            return _inverse_root
        if target in _POWERS and not isinstance(node.args[1], fx.Node):
            return _power_of_tensor
        if target is torch.where and node.args[0] in self._host:
            return _select
        return None


def _function_of(node: fx.Node) -> Any:
    if node.op == "call_method":
        return getattr(Tensor, str(node.target))
    return node.target


def _on_scalars(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that computes an operation on scalars."""
    target: Any = _function_of(node)
    if target in _ROOTS:
        return math.sqrt
    if target in _POWERS:
        if isinstance(node.args[1], fx.Node):
            return math.power
        return _root if node.args[1] == 0.5 else operator.pow
    if target is torch.where:
        return math.choose
    if target is operator.invert:
        target = torch.logical_not
    if target in (*_NUMBERS, operator.and_, operator.or_, operator.xor):
        return None

    def on_scalar(*args: Any, **kwargs: Any) -> Scalar:
        tensors = [x for x in args if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        wide = math.scalar_dtype(device)
        given = [
            torch.full((), x, dtype=wide, device=device) if isinstance(x, float) else x
            for x in args
        ]
        found = target(*given, **kwargs)
        return found if tensors else found.item()

    on_scalar.__name__ = on_scalar.__qualname__ = f"scalar_{target.__name__}"
    return on_scalar


def _root(x: Scalar, half: float) -> Scalar:
    del half
    return math.sqrt(x)


def _power_of_tensor(x: Tensor, exponent: float) -> Tensor:
    """Return x**exponent, with finite derivatives at 0."""
    if exponent == 0.5:
        return math.root(x)
    if exponent == int(exponent):
        return x**exponent
    return x.clamp_min(torch.finfo(x.dtype).tiny) ** exponent


def _inverse_root(x: Tensor) -> Tensor:
    return 1.0 / math.root(x)


def _select(condition: Scalar, yes: Any, no: Any) -> Any:
    """Return torch.where for a condition that is a coefficient, 1.0 or 0.0."""
    if isinstance(condition, Tensor):
        return torch.where(condition != 0.0, yes, no)
    return yes if condition else no


def check_elementwise(
    method: str, names: Sequence[str], run: Callable[..., Any], count: int, scalars: Any
) -> None:
    """Raise unless each element of the results depends on that of `count` tensors alone.

    `run` is given random tensors, parts of them, and the scalars as floats and as tensors.
    """
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")
        return made.abs() + 0.01

    given = [draw(13) for _ in range(count)]
    given[0] = given[0] * torch.tensor([1.0, -1.0] * 6 + [1.0], dtype=torch.float64)
    some = torch.tensor([11, 2, 3, 7], device="cpu")
    tensors = [torch.full((), x, dtype=torch.float64, device="cpu") for x in scalars]
    whole = run(*given, *scalars)
    parts = run(*[x[some] for x in given], *tensors)
    rows = run(*[x[None].expand(2, 13) for x in given], *tensors)
    for name, x, again, part, row in zip(
        names, whole, run(*given, *scalars), parts, rows, strict=True
    ):
        if not isinstance(x, Tensor) or x.shape != (13,) or x.dtype != torch.float64:
            found = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
            raise TypeError(
                f"{method} returns {name} as {found} for tensors of (13,) torch.float64: "
                "allowed are results of the shape and dtype of the gradient"
            )
        if not torch.equal(x.nan_to_num(), again.nan_to_num()):
            raise TypeError(f"{method} draws random values in {name}: keep none there")
        for y, z in (x[some], part), (x.expand(2, 13), row):
            if y.shape != z.shape or not torch.allclose(y, z, equal_nan=True):
                raise TypeError(
                    f"{method} is not elementwise: {name} of some elements depends on the "
                    "others. Put what needs the whole tensor into whole(d), or a mean "
                    "over it into means"
                )
