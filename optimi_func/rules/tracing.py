"""The trace of a rule's methods, and the functions that are generated from it.

A method of a class body runs once, on small example tensors, and with a `Symbol` in place
of each hyperparameter and of the step number t. The `Trace`, a mode of torch, sees each
call of a function or a method of torch, and notes it as a `Node`:

- A call that involves only numbers is computed on the host, in double precision, once in
  each step. Its result is another `Symbol`.
- A number that is combined with a tensor becomes a coefficient of the step.
- All other calls become part of a function of tensors and coefficients, which executors
  call and compile.

For example, the method

    def direction(self, g, s):
        m = self.beta * s.m + (1 - self.beta) * g
        return m, self.State(m)

becomes the two functions

    def direction(x0, x1, x2, x3, x4):  # g, the parameter, s.m; beta and 1 - beta
        v5 = x3 * x2
        v6 = x4 * x0
        v7 = v5 + v6
        return (v7, v7, )

    def coeffs(x0, x1):  # t, beta
        v2 = 1 - x1
        return (x1, v2, )
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite, pow, sqrt
from os import sep
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode, handle_torch_function

from optimi_func.core import math
from optimi_func.core.rule import Named, Scalar
from optimi_func.rules import arithmetic

# The shape of the example tensors. A function that flattens, transposes or squeezes a
# tensor returns another shape.
_SHAPE = (3, 1, 5)
# torch, and this package, whose class bodies have no errors.
_OUTSIDE = tuple(
    [f"{x}{sep}" for x in (Path(overrides.__file__).parent, Path(__file__).parents[1])]
)

# Python's operators, by the names of their methods, and how code spells them.
_NAMES = "add sub mul truediv and or xor gt ge lt le eq ne"
_SYMBOLS = dict(zip(_NAMES.split(), "+ - * / & | ^ > >= < <= == !=".split()))
_OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, f"__{name}__")
    for name in (*_SYMBOLS, "floordiv", "mod", "pow", "neg", "pos", "invert", "abs")
}
_FORMS: dict[Any, str] = {
    _OPERATORS[name]: f"{{}} {symbol} {{}}" for name, symbol in _SYMBOLS.items()
} | {
    operator.neg: "-{}",
    operator.pos: "+{}",
    operator.invert: "~{}",
}
# Names of torch's functions, and of a Tensor's methods, that do what an operator does.
_SPELLINGS = {
    **dict.fromkeys(("div", "divide", "true_divide"), "truediv"),
    "__rdiv__": "__rtruediv__",
    "subtract": "sub",
    "multiply": "mul",
    "remainder": "mod",
    "floor_divide": "floordiv",
    "positive": "pos",
}
_ROOTS = (torch.sqrt, Tensor.sqrt)
# What is called in place of a function: if an argument is a tensor, and if all are numbers.
_WITH_TENSORS: dict[Any, Callable[..., Any]] = {
    operator.mod: arithmetic.remainder,
    operator.floordiv: arithmetic.floor_quotient,
    operator.pow: math.power,
    **dict.fromkeys(_ROOTS, arithmetic.square_root),
}
_OF_SCALARS: dict[Any, Callable[..., Any]] = {
    operator.truediv: arithmetic.quotient_of_scalars,
    operator.mod: arithmetic.remainder_of_scalars,
    operator.floordiv: arithmetic.floor_quotient_of_scalars,
    operator.pow: arithmetic.power_of_scalars,
    **dict.fromkeys(_ROOTS, arithmetic.square_root),
}
# Functions that accept a Python number wherever they accept a 0-d tensor. Others are passed
# 0-d tensors in place of numbers.
_TAKE_NUMBERS = {torch.clamp_min, torch.clamp_max, Tensor.clamp_min, Tensor.clamp_max}
# Calls that take Python numbers in place of all tensors.
_ARITHMETIC = {*_FORMS, math.power}
# Functions with a keyword `alpha` or `value`, by which the product of the others is scaled.
_SCALED = {"add", "sub", "subtract", "addcmul", "addcdiv"}
# Pairs of a function and a type of numbers for which plain Python gives torch's result.
_LOGICAL = (operator.and_, operator.or_, operator.xor)
_PLAIN = {(fn, bool) for fn in _LOGICAL} | {
    (fn, float)
    for fn in (*_OF_SCALARS.values(), *_FORMS)
    if fn not in (*_LOGICAL, operator.invert, operator.truediv)
}
# How code spells calls whose arguments are all Python floats.
_OF_FLOATS = _FORMS | {
    math.choose: "{1} if {0} else {2}",
    arithmetic.square_root: "_sqrt({})",
    arithmetic.power_of_scalars: "_pow({}, {})",
    arithmetic.quotient_of_scalars: "{} / {}",
}


class Refused(Exception):
    """A method does what cannot be traced. The text follows the method's name and line.

    It is no TypeError, which Python's operators would take for another operand to try.
    """


_DECIDES = (
    "decides by the value of a tensor or of a hyperparameter (if, while, and, or, min, "
    "max, loops): write torch.where(condition, x, y), x.clamp_max(1.0) for min(x, 1.0), "
    "clamp_min for max, or make the hyperparameter a bool or a str, which is static"
)
_NO_FLOAT = (
    "math's functions and float() take no traced hyperparameter: write x ** 0.5 for "
    "math.sqrt(x), and torch.exp(x), torch.log(x) and so on"
)
_FOREIGN = (
    "cannot be traced: it uses a tensor that is neither an argument nor made of one: make "
    "it a field of State, which `init` fills, or an extra that step is given"
)
_NOT_ELEMENTWISE = (
    "is not elementwise: {}. What maps whole tensors is for `whole`, and what takes means "
    "is for `measure` or `after`"
)


class Node:
    """A number or a tensor of a traced method: an input, or the result of a call.

    Attributes:
        value: The value in the example on which the method runs.
        fn: The function that is called. For an input, its name.
        args: The arguments of the call: nodes and constants.
        kwargs: The keyword arguments of the call.
    """

    def __init__(
        self, value: Any, fn: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> None:
        self.value, self.fn, self.args, self.kwargs = value, fn, args, kwargs or {}

    @property
    def read(self) -> list["Node"]:
        """The nodes among the arguments."""
        return [x for x in _flat((self.args, self.kwargs)) if isinstance(x, Node)]


class Symbol(Node):
    """A hyperparameter, the step number, or what a method computes from these alone.

    The operators of Python return a `Symbol` for two numbers, and a tensor for a number and
    a tensor. A `Symbol` also has the methods of a 0-d tensor, such as `sqrt`.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)  # raises for a name that a tensor lacks
        if name[:2] == "__" or not callable(method):
            raise AttributeError(f"a hyperparameter has no attribute {name!r}")
        return lambda *args, **kwargs: _called(method, self, *args, **kwargs)

    def __bool__(self) -> bool:
        raise Refused(_DECIDES)

    def __float__(self) -> float:
        raise TypeError(_NO_FLOAT)

    def __repr__(self) -> str:
        return self.fn if isinstance(self.fn, str) else f"{self.fn.__name__}(...)"

    def __copy__(self, memo: object = None) -> "Symbol":
        return self

    __deepcopy__ = __copy__
    __iter__ = __len__ = __bool__
    __int__ = __index__ = __float__
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, fn: Any, types: object, args: Any, kwargs: Any) -> Any:
        """Raise an error. While a method is traced, torch calls the trace instead."""
        raise TypeError(f"{fn} is called with a number of a trace that has ended")


def _called(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as torch calls its own, so that the trace notes the call."""
    return handle_torch_function(fn, args, *args, **kwargs)


def _method(fn: Callable[..., Any], reversed: bool = False) -> Callable[..., Any]:
    """Return the method of a `Symbol` for an operator."""
    if reversed:
        return lambda self, other: _called(fn, other, self)
    return lambda self, *other: _called(fn, self, *other)


for _name, _fn in _OPERATORS.items():
    setattr(Symbol, f"__{_name}__", _method(_fn))
    setattr(Symbol, f"__r{_name}__", _method(_fn, reversed=True))


class Trace(TorchFunctionMode):
    """The calls that a rule's methods make, and the functions that are made of them."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner, self.code = owner, ""
        # What errors about None add: the reason why a field of State is None.
        self.hint = ""
        # The numbers that calls with tensors read, with their places as coefficients.
        self.coeffs: dict[Symbol, int] = {}
        # The result of `due`. As the only coefficient, it stays a Python bool if t is a
        # number, so that a step may leave out `after`.
        self.due: Symbol | None = None
        self._nodes: list[Node] = []  # in the order of their calls
        self._of: dict[int, Node] = {}  # the keys are ids of the example tensors
        # Calls that need not be repeated: equal calls with numbers, and conversions.
        self._once: dict[object, Node] = {}
        # Stands for the first input of each function, from which `as_tensor` takes the
        # dtype and the device.
        self._like = Node(_filled(_SHAPE), "like")

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the example: a new input of the methods."""
        return self._noted(Node(_filled(_SHAPE), name)).value

    def number(self, name: str) -> Symbol:
        """Return a new input of the methods that is a number."""
        self._nodes.append(node := Symbol(3.0, name))
        return node

    def has(self, x: object) -> bool:
        """Return True for a tensor of the example."""
        return isinstance(x, Tensor) and id(x) in self._of

    def node(self, x: Any) -> Node:
        """Return the node of a tensor of the example, or a number, which is one."""
        if not (isinstance(x, Node) or self.has(x)):
            raise Refused(_FOREIGN)
        return x if isinstance(x, Node) else self._of[id(x)]

    # Tracing

    def run(self, method: str, fn: Callable[..., Any], *args: object) -> Any:
        """Run a method on inputs. Raise TypeError for what cannot be traced."""
        try:
            with self, torch.no_grad():
                return fn(*args)
        except Exception as error:
            where = f"{self.owner}.{method}{line_of(error)}"
            if isinstance(error, Refused):
                raise TypeError(f"{where} {error}") from error
            hint = self.hint * ("NoneType" in str(error))
            raise TypeError(f"{where} cannot be traced: {error}{hint}") from error

    def __torch_function__(
        self, fn: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a call of torch that involves a tensor or a number."""
        kwargs = kwargs or {}
        shows = getattr(fn, "__name__", "") in ("__repr__", "__format__")
        traced = any([isinstance(x, Symbol) or self.has(x) for x in _flat((args, kwargs))])
        return self.call(fn, args, kwargs) if traced and not shows else fn(*args, **kwargs)

    def call(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call, and return its result: an example tensor, or a `Symbol`."""
        fn, args, kwargs = _normal(fn, args, kwargs)
        if fn in (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip):
            return self._clamped(*args, **kwargs)
        # torch converts these two keywords to Python numbers, but a hyperparameter may be a
        # tensor in the step. So they are multiplied first.
        scaled = getattr(fn, "__name__", "") in _SCALED
        for name in ("alpha", "value"):
            if scaled and isinstance(kwargs.get(name), Symbol):
                x, y, *z = args
                factor, kwargs = kwargs[name], {k: kwargs[k] for k in kwargs if k != name}
                product = self.call(operator.mul, (factor, y), {})
                return self.call(fn, (x, product, *z), kwargs)
        if any([isinstance(x, Tensor) for x in _flat((args, kwargs))]):
            return self._with_tensors(fn, args, kwargs)
        if fn is math.rounded:
            return self._noted(Node(_filled(()), fn, args)).value
        return self._on_host(fn, args, kwargs)

    def _clamped(self, x: Any, min: Any = None, max: Any = None) -> Any:
        """Note torch.clamp as two calls, because it does not take a number and a tensor."""
        x = x if min is None else self.call(torch.clamp_min, (x, min), {})
        return x if max is None else self.call(torch.clamp_max, (x, max), {})

    def _on_host(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
        """Note a call with numbers only. A call that equals an earlier one is not noted."""
        key = fn, *[_key(x) for x in (*args, *kwargs.items())]
        if isinstance(known := self._once.get(key), Symbol):
            return known
        chosen: Any = _OF_SCALARS.get(fn, fn)
        kinds = {type(x.value) for x in args if isinstance(x, Symbol)}
        if (chosen, *kinds) not in _PLAIN:
            chosen = arithmetic.in_double(chosen)
        value = chosen(*_mapped(_example, args), **_mapped(_example, kwargs))
        if type(value) not in (bool, int, float):
            raise Refused(f"cannot be traced: {fn.__name__} returns no number")
        if fn is torch.where and type(value) is float:
            more = [x if isinstance(x, Symbol) else float(x) for x in args[1:]]
            chosen, args = math.choose, (args[0], *more)
        self._nodes.append(node := Symbol(value, chosen, args, kwargs))
        self._once[key] = node
        return node

    def _with_tensors(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Note a call with tensors."""
        # If no argument is a tensor of floats, torch would compute in float32, whatever the
        # dtype of the parameter is.
        tensors = [x for x in _flat((args, kwargs)) if isinstance(x, Tensor)]
        narrow = not any([x.is_floating_point() for x in tensors])
        if narrow and fn is not torch.where and self._returns_floats(fn, args, kwargs):
            args = tuple([self._as_floats(x) if isinstance(x, Tensor) else x for x in args])
        divides = fn is operator.truediv and _is_large(args[1])
        if divides and not _is_large(args[0]):
            # torch divides a Python number by a tensor in this way, but a 0-d tensor in
            # another. A hyperparameter is a number in some steps and a 0-d tensor in
            # others, and both have to give the same bits.
            return self._note(operator.mul, self._note(torch.reciprocal, args[1]), args[0])
        fn = _WITH_TENSORS.get(fn, fn)
        if fn not in _ARITHMETIC:
            # Other functions of torch accept only tensors as some arguments. The result of
            # `rounded`, which is 0-d here, may be a number in the step.
            symbols = any([isinstance(x, Symbol) for x in _flat((args, kwargs))])
            kinds = (Symbol, float) if narrow or symbols else Symbol
            numbers = fn in _TAKE_NUMBERS

            def convert(x: Any) -> Any:
                small = isinstance(x, Tensor) and not _is_large(x)
                converts = small or (isinstance(x, kinds) and not numbers)
                return self._as_tensor(x, narrow) if converts else x

            args, kwargs = _mapped(convert, (args, kwargs))
        return self._note(fn, *args, **kwargs)

    def _returns_floats(self, fn: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Return True if a call returns a tensor of floats in the example."""
        value = fn(*_mapped(_example, args), **_mapped(_example, kwargs))
        return isinstance(value, Tensor) and value.is_floating_point()

    def _note(self, fn: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Note a call with tensors, without changing its arguments."""
        read = _mapped(self._operand, (args, kwargs))
        value = fn(*_mapped(_example, read[0]), **_mapped(_example, read[1]))
        large = any([_is_large(x) for x in _flat((args, kwargs))])
        name = getattr(fn, "__name__", fn)
        if not isinstance(value, Tensor):
            raise Refused(_NOT_ELEMENTWISE.format(f"{name} returns no tensor"))
        if large and value.shape != _SHAPE:
            raise Refused(_NOT_ELEMENTWISE.format(f"{name} has another shape"))
        if id(value) in self._of:  # x.contiguous(), for example, is x
            value = value.view_as(value)
        return self._noted(Node(value, fn, *read)).value

    def _noted(self, node: Node) -> Node:
        self._nodes.append(node)
        self._of[id(node.value)] = node
        return node

    def _operand(self, x: Any) -> Any:
        """Return the node of a tensor or number. A coefficient is passed as a float."""
        if isinstance(x, Tensor):
            return self.node(x)
        if isinstance(x, Symbol) and type(x.value) is not float:
            return self._converted(arithmetic.restored, x, type(x.value))
        return x

    def _as_tensor(self, x: Symbol | float | Tensor, integers: bool) -> Tensor:
        """Return a number as a 0-d tensor. Integers become floats, unless `integers`."""
        if integers or type(_example(x)) is not int:
            x = self._operand(x)
        return self._converted(arithmetic.as_tensor, x, self._like).value

    def _as_floats(self, x: Tensor) -> Tensor:
        """Return a tensor of bools or integers, converted to the parameter's dtype."""
        return self._converted(Tensor.type_as, self.node(x), self._like).value

    def _converted(self, fn: Any, *args: Any) -> Node:
        """Note the conversion of a node, unless it has been noted before."""
        key = fn, *map(_key, args)
        if key not in self._once:
            value = fn(*_mapped(_example, args))
            self._once[key] = self._noted(Node(value, fn, args))
        return self._once[key]

    # Functions

    def needed(self, results: Iterable[Any], inputs: Iterable[Any] = ()) -> set[Node]:
        """Return the nodes that results are computed of, up to the inputs."""
        nodes, waiting = set[Node](), [*map(self.node, results)]
        ends = {*map(self.node, inputs)}
        while waiting:
            node = waiting.pop()
            if node not in nodes:
                nodes.add(node)
                waiting += () if node in ends else node.read
        return nodes

    def require(self, results: Iterable[Any]) -> None:
        """Make coefficients of the numbers that are needed to compute these tensors."""
        needed = self.needed(results)
        for node in self._nodes:
            if node in needed and not isinstance(node, Symbol):
                for x in node.read:
                    if isinstance(x, Symbol):
                        self.place(x)

    def place(self, x: Symbol) -> int:
        """Make a number a coefficient, and return its place among the coefficients."""
        return self.coeffs.setdefault(x, len(self.coeffs))

    def function(
        self, method: str, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """Return `(*inputs, *coefficients) -> results`, for tensors."""
        writer = _Writer([*map(self.node, inputs), *self.coeffs], _FORMS)
        writer.names[self._like] = "x0"
        return _in_one_dtype(self._written(writer, method, results), len(inputs))

    def host_function(
        self, method: str, inputs: Sequence[Symbol], results: Sequence[Symbol]
    ) -> Callable[..., tuple[Any, ...]]:
        """Return `(*inputs) -> results`, for numbers and 0-d tensors."""
        run = self._written(_Writer(inputs, _FORMS), method, results)
        scalar = arithmetic.as_scalar
        return lambda *args: run(*[x if type(x) is float else scalar(x) for x in args])

    def _written(
        self, writer: "_Writer", method: str, results: Sequence[Any]
    ) -> Callable[..., tuple[Any, ...]]:
        lines = [line for _, line in self._lines(writer, results)]
        lines.append(f"return {_tuple(self._terms(writer, results))}")
        run = writer.function(method, lines)
        self.code += writer.code
        return run

    def _terms(self, writer: "_Writer", results: Iterable[Any]) -> list[str]:
        """Return the expressions of tensors, and of numbers converted to floats.

        A bool among the coefficients would be a constant of the kernel.
        """
        terms = list[str]()
        for x in map(self.node, results):
            kind = arithmetic.as_choice if x is self.due else arithmetic.as_scalar
            plain, term = type(x.value) in (float, Tensor), writer.term(x)
            terms.append(term if plain else f"{writer.constant(kind)}({term})")
        return terms

    def prepared(
        self,
        numbers: Sequence[Symbol],
        results: Sequence[Symbol],
        rates: Sequence[Symbol],
        before: Sequence[Symbol],
        kind: type[Named],
        running: type[Named],
        whole: tuple[Any, ...] | None,
    ) -> Callable[..., Callable[..., tuple[Named, Named]]]:
        """Return `(*numbers) -> (t, lr, weight_decay, r) -> (coefficients, r)` for floats.

        It is what `host_function` makes, in plain Python, with what does not depend on the
        step as constants around it. That function takes tensors too, and asks each number
        what it is: with it a class's step of one small tensor takes 27 % longer by AdamW,
        and 16 % by SGD. Where Python raises and torch does not, this one raises
        ArithmeticError or ValueError.

        Args:
            numbers: The hyperparameters, without lr and weight_decay.
            results: The coefficients, and then the running scalars after the step.
            rates: t, lr and weight_decay.
            before: The running scalars r before the step.
            kind: The NamedTuple of the coefficients.
            running: The NamedTuple of the running scalars.
            whole: What the field `whole` of the coefficients contains: numbers, and tuples
                of numbers. None if there is no such field.
        """
        late: set[Node] = {*rates, *before}
        writer = _Writer([*rates, *before, *numbers], _OF_FLOATS, floats=True)
        first, then = list[str](), list[str]()
        for node, line in self._lines(writer, results):
            varies = not late.isdisjoint(node.read)
            (then if varies else first).append(line)
            late |= {node} if varies else set()
        count = len(kind._fields) - len(kind._field_defaults)
        terms = self._terms(writer, results)
        made, after = terms[:count], "_r"
        if whole is not None:
            made.append(f"whole={writer.term(whole)}")
        now = f"_kind({', '.join(made)})"
        if whole is None and late.isdisjoint(results[:count]):
            first, now = [*first, f"_now = {now}"], "_now"
        if before:
            after = f"_running({', '.join(terms[count:])})"
            then = [f"{', '.join([writer.names[x] for x in before])}, = _r", *then]
        inner = ", ".join([writer.names[x] for x in rates])
        first += [f"def _at({inner}, _r):", *[f"    {x}" for x in then]]
        first += [f"    return {now}, {after}", "return _at"]
        writer.space |= {"_sqrt": sqrt, "_pow": pow, "_kind": kind, "_running": running}
        return writer.function("prepare", first, numbers)

    def _lines(
        self, writer: "_Writer", results: Iterable[Any]
    ) -> Iterator[tuple[Node, str]]:
        """Yield the calls between the writer's inputs and results, with their lines."""
        needed = self.needed(results, [*writer.names])
        for node in [x for x in self._nodes if x in needed and x not in writer.names]:
            if isinstance(node.fn, str):
                raise TypeError(
                    f"{self.owner}: {node.fn} is not known in this method (all means of a "
                    "method are taken at once, so a mean cannot depend on another one)"
                )
            yield node, writer.line(node)


class _Writer:
    """Writes calls as a function in Python.

    Args:
        inputs: The nodes that the function is given.
        forms: The expressions of functions that have one of their own.
        floats: Write integers as floats.
    """

    def __init__(
        self, inputs: Sequence[Node], forms: dict[Any, str], floats: bool = False
    ) -> None:
        self.names = {x: f"x{i}" for i, x in enumerate(inputs)}
        self.space: dict[str, Any] = {}
        self.code = ""
        self._inputs, self._forms, self._floats = inputs, forms, floats

    def term(self, x: Any) -> str:
        """Return the expression of a node or of a constant."""
        if isinstance(x, Node):
            return self.names[x]
        if type(x) is tuple:
            return _tuple([*map(self.term, x)])
        if type(x) is list:
            return f"[*{self.term(tuple(x))}]"
        if type(x) in (float, int) and isfinite(x):
            return repr(float(x) if self._floats else x)
        return repr(x) if x is None or type(x) in (bool, str) else self.constant(x)

    def constant(self, x: Any) -> str:
        """Return the name of a function, or of another constant, in the code."""
        name = f"_{getattr(x, '__module__', None)}_{getattr(x, '__name__', 'constant')}"
        name = name.replace(".", "_")
        while self.space.setdefault(name, x) is not x:
            name += "_"
        return name

    def line(self, node: Node) -> str:
        """Return the line of a call."""
        args = [self.term(x) for x in node.args]
        args += [f"{k}={self.term(x)}" for k, x in node.kwargs.items()]
        name = getattr(node.fn, "__name__", "")
        if node.fn in self._forms and not node.kwargs:
            text = self._forms[node.fn].format(*args)
        elif getattr(Tensor, name, None) is node.fn:
            text = f"{args[0]}.{name}({', '.join(args[1:])})"
        else:
            text = f"{self.constant(node.fn)}({', '.join(args)})"
        self.names[node] = f"v{len(self.names)}"
        return f"{self.names[node]} = {text}"

    def function(
        self, name: str, lines: Sequence[str], inputs: Sequence[Node] | None = None
    ) -> Callable[..., Any]:
        """Return the function that these lines are the body of."""
        names = [self.names[x] for x in (self._inputs if inputs is None else inputs)]
        source = "\n    ".join([f"def {name}({', '.join(names)}):", *lines])
        others = {k: x for k, x in self.space.items() if not callable(x)}
        self.code = f"{source}\n{others}\n"
        exec(source, self.space)
        return self.space[name]


def _tuple(terms: Sequence[str]) -> str:
    return f"({''.join([f'{x}, ' for x in terms])})"


def _in_one_dtype(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function of `count` tensors and of coefficients, in the tensors' dtype."""

    def in_one_dtype(*args: Any) -> tuple[Tensor, ...]:
        # A 0-d float64 would widen a bool tensor, and other functions refuse it.
        dtype = args[0].dtype
        for x in args[count:]:
            if isinstance(x, Tensor) and x.dtype == dtype:
                break  # tensors of one dtype
            if isinstance(x, Tensor):
                cast = [x.to(dtype) if isinstance(x, Tensor) else x for x in args[count:]]
                return run(*args[:count], *cast)
        return run(*args)

    return in_one_dtype


def _normal(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a call in one spelling. Raise for what no function of tensors may do."""
    name = str(getattr(fn, "__name__", fn))
    if name == "__get__":
        read = getattr(fn.__self__, "__name__", "")
        raise Refused(
            f"reads .{read} of a tensor, which may be flat or a part here: only `whole` is "
            "given whole tensors"
        )
    if name == "__bool__":
        raise Refused(_DECIDES)
    if name == "__deepcopy__":
        raise Refused("copies a tensor: use x.clone() for copy.deepcopy(x)")
    written = name[-1] == "_" and name[-2:] != "__" and fn not in _LOGICAL
    if written or name == "__setitem__":
        use = "torch.where" if name == "__setitem__" else name.strip("_")
        also = " (x = x + y for x += y)" if hasattr(operator, f"i{use}") else ""
        raise Refused(f"writes in place: use {use} for {name}{also}")
    if kwargs.get("out") is not None:
        raise Refused(f"writes in place: use {name} without out=")
    names = "condition", "input", "self", "other", "exponent", "tensor1", "tensor2"
    named = [x for x in names if x in kwargs]
    args, kwargs = _mapped(_number, ((*args, *[kwargs[x] for x in named]), kwargs))
    if fn is torch.tensor:  # which has no derivative
        fn = torch.as_tensor
    kwargs = {k: x for k, x in kwargs.items() if k not in named}
    if fn is Tensor.where:
        fn, args = torch.where, (args[1], args[0], *args[2:])
    name = _SPELLINGS.get(name, name)
    if not kwargs and name != "abs":
        own = name.strip("_")
        if name[:3] == "__r" and own[1:] in _OPERATORS:
            fn, args = _OPERATORS[own[1:]], args[::-1]
        fn = _OPERATORS.get(own, fn)
    if fn is operator.pow and type(args[1]) is float and args[1] == 0.5:
        fn, args = torch.sqrt, args[:1]
    return fn, args, kwargs


def _flat(x: Any) -> Iterator[Any]:
    """Yield the items of nested tuples, lists and dicts."""
    if isinstance(x, tuple | list | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _flat(y)
    else:
        yield x


def _mapped(fn: Callable[[Any], Any], x: Any) -> Any:
    """Return nested tuples, lists and dicts with fn of each item."""
    if type(x) is dict:
        return {k: _mapped(fn, y) for k, y in x.items()}
    return type(x)([_mapped(fn, y) for y in x]) if type(x) in (tuple, list) else fn(x)


def _number(x: Any) -> Any:
    """Return a scalar of NumPy as a number of Python."""
    scalar = type(x).__module__ == "numpy" and getattr(x, "ndim", None) == 0
    return x.item() if scalar else x


def _example(x: Any) -> Any:
    """Return the value of a node in the example, or a constant."""
    return x.value if isinstance(x, Node) else x


def _key(x: Any) -> object:
    """Return what tells arguments apart: a `Symbol` has no comparison that does."""
    return id(x) if isinstance(x, Node) else repr(x)


def _filled(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of the example."""
    return torch.full(shape, 3.0, dtype=torch.float64, device="cpu")


def _is_large(x: Any) -> bool:
    """Return True for a tensor of the example that is not 0-d."""
    return isinstance(x, Tensor) and x.dim() > 0


def line_of(error: BaseException) -> str:
    """Return the line of a user's file that an error comes from, in brackets."""
    lines = [(frame.f_code.co_filename, n) for frame, n in walk_tb(error.__traceback__)]
    own = [f" ({x}:{n})" for x, n in lines if not x.startswith(_OUTSIDE)]
    return own[-1] if own else ""


def check_elementwise(
    where: str,
    names: Sequence[str],
    run: Callable[..., Sequence[Tensor]],
    nodes: tuple[Sequence[Node], Sequence[Node]],
    scalars: Sequence[Scalar],
) -> dict[int, int]:
    """Raise unless an element of each result depends on that of the inputs alone.

    Args:
        where: The class and its method.
        names: The names of the results.
        run: The function that is made of the method.
        nodes: Its inputs, without the coefficients, and its results.
        scalars: The coefficients.

    Returns:
        For each result that is a view, the index of the tensor that it shows: that of an
        input, or a negative index, which counts from the end of the results.
    """
    inputs, outputs = nodes
    generator, wide = torch.Generator().manual_seed(0), torch.float64
    shape = len(inputs), 15
    given = torch.rand(*shape, generator=generator, dtype=wide, device="cpu") + 0.01
    given[0] -= 0.5
    picks = torch.tensor([11, 2, 3, 7], dtype=torch.int64, device="cpu")
    tensors = [torch.tensor(x, dtype=wide, device="cpu") for x in scalars]
    rows = [x.clone() for x in given]
    try:
        results, on_tensors = run(*rows, *scalars), run(*given, *tensors)
        parts = run(*given[:, picks], *tensors)
    except Exception as error:
        text = _NOT_ELEMENTWISE.format(f"it raises for a tensor in one dimension ({error})")
        raise TypeError(f"{where} {text}") from error
    for name, x, same, part in zip(names, results, on_tensors, parts):
        if x.dtype != wide:
            raise TypeError(f"{where} returns {name} as {x.dtype} for tensors of {wide}")
        if not torch.allclose(x, same, equal_nan=True):
            raise TypeError(f"{where} draws random numbers in {name}: leave them out")
        if not torch.allclose(x[picks], part, equal_nan=True):
            text = _NOT_ELEMENTWISE.format(f"{name} depends on the others")
            raise TypeError(f"{where} {text}")
    at = [x.data_ptr() for x in results]
    memory = {x: i - len(at) for i, x in reversed([*enumerate(at)])}
    memory |= {x.data_ptr(): i for i, x in enumerate(rows)}
    # What is the same node is the same tensor, and no view of it.
    every = [*inputs, *outputs]
    views = {i: memory[x] for i, x in enumerate(at)}
    return {i: j for i, j in views.items() if every[j] is not outputs[i]}
