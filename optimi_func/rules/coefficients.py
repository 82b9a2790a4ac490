"""Coefficients of a step in plain Python, for hyperparameters that are Python numbers.

What `lifting` makes of a rule's scalar work takes tensors too, and asks each number what it
is. This writes the same work as a function of floats, and what does not depend on the step
as constants around it.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from torch import fx

from optimi_func.core import math as core
from optimi_func.core.rule import Named
from optimi_func.rules import lifting

# `(t, lr, weight_decay, r) -> (coefficients, r)`, and what makes it of numbers.
AtStep: TypeAlias = Callable[..., tuple[Named, Named]]
Prepared: TypeAlias = Callable[..., AtStep]

_EXPRESSIONS: dict[Any, str] = {
    core.choose: "{1} if {0} else {2}",
    lifting._root: "_sqrt({})",
    lifting._OURS[operator.pow]: "_pow({}, {})",
    lifting._OURS[operator.truediv]: "{} / {}",
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
) -> Prepared:
    """Return `(*numbers) -> (t, lr, weight_decay, r) -> (coefficients, r)` for floats.

    `rates` are the names of t, lr and weight_decay in the graph, and `before` those of the
    running scalars r. Its results are those of `kind`, then those of `running`. Where
    Python raises and torch does not, both functions raise ArithmeticError or ValueError.
    Names here begin with _, because those of hyperparameters do not.
    """
    space: dict[str, Any] = {"_sqrt": math.sqrt, "_pow": math.pow}
    names: dict[fx.Node, str] = {}
    variables: dict[str, str] = {}  # the names of expressions
    late, inputs, first, then = {*rates, *before}, list[str](), list[str](), list[str]()
    results: list[str] = []

    def term(x: Any) -> str:
        if isinstance(x, fx.Node):
            return names[x]
        if type(x) in (float, int) and math.isfinite(x):
            return repr(float(x))
        space[name := f"_k{len(space)}"] = x
        return name

    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
            inputs += [] if node.name in late else [node.name]
            continue
        if node.op == "output":
            results = [term(x) for x in node.args[0]]
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
    count = len(kind._fields) - len(kind._field_defaults)
    space["_kind"], space["_running"] = kind, running
    now, after = f"_kind({', '.join(results[:count])})", "_r"
    if late.isdisjoint(results[:count]):
        first, now = [*first, f"_now = {now}"], "_now"
    if before:
        after = f"_running({', '.join(results[count:])})"
        then = [f"{', '.join(before)}, = _r", *then]
    lines = [*first, f"def _at({', '.join([*rates, '_r'])}):", *[f"    {x}" for x in then]]
    lines += [f"    return {now}, {after}", "return _at"]
    exec("\n    ".join([f"def prepare({', '.join(inputs)}):", *lines]), space)
    return space["prepare"]


def with_numbers(
    made: Callable[[], Prepared], own: Mapping[str, object], mapped: Sequence[str]
) -> Prepared:
    """Return what `made()` returns, with t and the numbers of `mapped` for `whole`.

    `own` are the numbers, of which those in tuples are several.
    """
    first = made()

    def prepare(*flat: float) -> AtStep:
        at, rest = first(*flat), iter(flat)
        several = [len(x) if isinstance(x, tuple) else 0 for x in own.values()]
        rows = [tuple(islice(rest, n)) if n else next(rest) for n in several]

        def found(
            t: float, lr: float, weight_decay: float, r: Named
        ) -> tuple[Named, Named]:
            c, r = at(t, lr, weight_decay, r)
            rates = {"lr": lr, "weight_decay": weight_decay}
            late = [rates[x] for x in mapped if x in rates]
            return c._replace(whole=(t, *rows, *late)), r

        return found

    return prepare
