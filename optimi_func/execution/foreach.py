"""The same rule through torch._foreach_*: many tensors an op, and no compiler.

The leaf pipeline is traced once; each of its operations then runs on lists of tensors, in
place where the operand is a temporary that nothing else needs. No formula stands here.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from optimi_func._leaf import compute_dtype, leaf_step, whole_mean
from optimi_func._rule import Rule, Scalar, Scalars
from optimi_func.execution.jobs import Job, chunks, foreach_copy_
from optimi_func.execution.kernel import (
    Key,
    fill,
    flat_leaf,
    job_key,
    measure,
    unpack,
)
from optimi_func.execution.means import plan_over_shards

aten = torch.ops.aten
# What flows through the trace: one tensor a leaf, or one number for all, which is a 0-d
# tensor where the device has computed it.
Value: TypeAlias = list[Tensor] | Scalar

# float32 (float64) numbers an element that are alive at once, at most: those of Adan with
# a compensation.
TEMPORARIES = 9
# Elements that are updated together, at most and at least: between the two, as many as
# leave the temporaries smaller than the parameters. Of a rule that takes means, and of
# tensors whose gradient lies in another order, the largest tensor is one chunk.
CHUNK = 1 << 18
LEAST = 1 << 12


def _larger(a: Any, b: Any) -> Any:
    # Of two tensors Python's max asks the device.
    return torch.maximum(*map(torch.as_tensor, (a, b))) if _on_device(a, b) else max(a, b)


def _on_device(*numbers: Any) -> bool:
    return any(isinstance(x, Tensor) for x in numbers)


_BINARY: dict[Any, tuple[str, Callable[[Any, Any], Any]]] = {
    aten.add.Tensor: ("add", operator.add),
    aten.sub.Tensor: ("sub", operator.sub),
    aten.mul.Tensor: ("mul", operator.mul),
    aten.div.Tensor: ("div", operator.truediv),
    aten.maximum.default: ("maximum", _larger),
    aten.clamp_min.Tensor: ("clamp_min", _larger),
    aten.clamp_min.default: ("clamp_min", _larger),
}
_UNARY: dict[Any, str] = {
    aten.neg.default: "neg",
    aten.sign.default: "sign",
    aten.sqrt.default: "sqrt",
}


class Trace(NamedTuple):
    """The pipeline's operations, and when each value is needed for the last time."""

    inputs: list[fx.Node]  # the numbers, p, g, state and comp
    # What to call, which temporaries it may overwrite, and what nothing needs after it.
    calls: list[tuple[fx.Node, set[fx.Node], list[fx.Node]]]
    outputs: list[fx.Node]  # p, state and comp; or the mean alone


# Made once a process.
_traces: dict[tuple[Key, bool], Trace] = {}


def trace(key: Key, scalars: Scalars, measured: bool) -> Trace:
    """The trace of a key, or of its operations up to the mean.

    Args:
        key: What it is made for.
        scalars: Of these only their structure counts.
        measured: Up to the mean, which is then the one result.
    """
    if (key, measured) not in _traces:
        spec = pytree.tree_structure(scalars)
        _traces[key, measured] = _trace(key, spec, measured)
    return _traces[key, measured]


def _trace(key: Key, spec: pytree.TreeSpec, measured: bool) -> Trace:
    def run(numbers: list[Tensor], *tensors: Tensor) -> list[Tensor]:
        scalars = fill(key.statics, spec, numbers)
        leaf, g = unpack(key.rule, key.compensated, tensors)
        if measured:
            return [measure(key.rule, leaf, g, scalars)]
        new = leaf_step(key.rule, leaf, g, scalars, key.write, whole_mean)
        return flat_leaf(new)

    wide = compute_dtype(*key.dtypes)
    numbers = [torch.ones((), dtype=wide) for s in key.statics if s is None]
    tensors = [torch.ones(2, dtype=d) for d in key.dtypes]
    with torch.no_grad():
        graph = make_fx(run)(numbers, *tensors).graph
    graph.eliminate_dead_code()
    *nodes, output = graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    calls = nodes[len(inputs) :]
    outputs: Any = output.args[0]
    temporaries: set[fx.Node] = set()
    last = {n: user for user in [*calls, output] for n in user.all_input_nodes}
    ordered: list[tuple[fx.Node, set[fx.Node], list[fx.Node]]] = []
    for node in calls:
        _check(node)
        dead = [n for n in node.all_input_nodes if last[n] is node]
        ordered.append((node, temporaries.intersection(dead), dead))
        temporaries.add(node)
    return Trace(inputs, ordered, list(outputs))


def _check(node: fx.Node) -> None:
    known = {*_BINARY, *_UNARY, aten._to_copy.default, aten.mean.default}
    if node.target not in known:
        raise NotImplementedError(f"{node.target} has no foreach counterpart here")


class _Slice(NamedTuple):
    """A leaf's tensors, or the same stretch of each."""

    numel: int
    reads: list[Tensor]  # p, g, state, comp
    writes: list[Tensor]  # p, state, comp
    ok: Tensor | None  # as the job's
    mean: Callable[[Tensor], Tensor]  # likewise; never of a stretch
    given: Tensor | None  # likewise: where a measurement goes


def plan_foreach(
    rule: Rule[Any, Any], jobs: list[Job], write: bool
) -> list[Callable[[], None]]:
    """Launches of jobs that share dtypes and numbers, a chunk each."""
    measured = partial(plan_measures, rule)
    move = partial(plan_moves, rule, write)
    return plan_over_shards(rule, jobs, write, measured, move)


def plan_measures(rule: Rule[Any, Any], jobs: list[Job]) -> list[Callable[[], None]]:
    """Launches that leave the mean over what lies here of each job in `job.given`."""
    return _plan(rule, True, _run_measure, jobs)


def plan_moves(
    rule: Rule[Any, Any], write: bool, jobs: list[Job]
) -> list[Callable[[], None]]:
    """As `plan_foreach`, of jobs whose means over shards are given."""
    return _plan(rule, write, _run, jobs)


def _plan(
    rule: Rule[Any, Any],
    write: bool,
    run: Callable[[Trace, list[Scalar], list[_Slice]], None],
    jobs: list[Job],
) -> list[Callable[[], None]]:
    groups: dict[tuple[Key, int], list[Job]] = {}
    for job in jobs:
        if job.source.numel > 0:
            key = job_key(rule, job.source.leaf, job.g, job.numbers, write, True, False)
            groups.setdefault((key, id(job.numbers)), []).append(job)
    launches: list[Callable[[], None]] = []
    for (key, _), members in groups.items():
        numbers = members[0].numbers
        traced = trace(key, numbers.scalars, run is _run_measure)
        wide = compute_dtype(*key.dtypes)
        values = numbers.values(wide, key.device)
        room = sum(job.source.p.nbytes for job in members) // (TEMPORARIES * wide.itemsize)
        size = min(CHUNK, max(LEAST, room))
        slices = [s for job in members for s in _slices(rule, job, size)]
        launches += [partial(run, traced, values, c) for c in chunks(slices, size)]
    return launches


def _slices(rule: Rule[Any, Any], job: Job, size: int) -> list[_Slice]:
    p, *state = job.source.tensors
    reads, writes = [p, job.g, *state], job.into.tensors
    count = job.source.numel
    if count <= size or rule.per_tensor or not job.agrees():
        return [_Slice(count, reads, writes, job.ok, job.mean, job.given)]
    # Temporaries of a chunk stay in the cache; those of a large tensor would not.
    rows = [
        zip(*[x.as_strided((count,), (1,)).split(size) for x in xs])
        for xs in (reads, writes)
    ]
    return [
        _Slice(r[0].numel(), list(r), list(w), job.ok, job.mean, None)
        for r, w in zip(*rows)
    ]


def _inputs(values: list[Scalar], slices: list[_Slice]) -> list[Value]:
    return [*values, *(list(role) for role in zip(*[s.reads for s in slices]))]


def _run_measure(trace: Trace, values: list[Scalar], slices: list[_Slice]) -> None:
    means: list[Callable[[Tensor], Tensor]] = [whole_mean] * len(slices)
    (found,) = _interpret(trace, _inputs(values, slices), means)
    for s, mean in zip(slices, cast(list[Tensor], found)):
        assert s.given is not None
        s.given.copy_(mean)


def _run(trace: Trace, values: list[Scalar], slices: list[_Slice]) -> None:
    """Run the trace on the slices' tensors and write the results onto their targets."""
    means = [s.mean for s in slices]
    writes = zip(*[s.writes for s in slices])
    for target, result in zip(writes, _interpret(trace, _inputs(values, slices), means)):
        assert isinstance(result, list)
        if any(x is not y for x, y in zip(target, result)):
            kept = [
                r if s.ok is None else torch.where(s.ok, r, t)
                for s, r, t in zip(slices, result, target)
            ]
            foreach_copy_(list(target), kept)


def _interpret(
    trace: Trace, inputs: list[Value], means: list[Callable[[Tensor], Tensor]]
) -> list[Value]:
    env = dict(zip(trace.inputs, inputs))
    for node, spare, dead in trace.calls:
        args: list[Any] = [env[a] if a in env else a for a in node.args]
        if node.target is aten.mean.default:
            env[node] = [mean(x) for mean, x in zip(means, args[0])]
        else:
            env[node] = _call(node, args, spare)
        for n in dead:
            del env[n]
    return [env[n] for n in trace.outputs]


def _call(node: fx.Node, args: list[Any], spare: set[fx.Node]) -> Value:
    if node.target is aten._to_copy.default:
        dtype: Any = node.kwargs["dtype"]
        (xs,) = args
        if not isinstance(xs, list):
            return xs
        casted = [torch.empty_like(x, dtype=dtype) for x in xs]
        foreach_copy_(casted, xs)
        return casted
    if node.target in _UNARY:
        return _apply(_UNARY[node.target], args[0], node.args[0] in spare)
    name, scalar = _BINARY[node.target]
    left, right = args
    if isinstance(left, list):
        return _apply(name, left, node.args[0] in spare, right)
    if not isinstance(right, list):
        return scalar(left, right)
    # A number on the left: commute, or turn the right side around first.
    if name in ("sub", "div"):
        turn, name = {"sub": ("neg", "add"), "div": ("reciprocal", "mul")}[name]
        right = _apply(turn, right, node.args[1] in spare)
        return _apply(name, right, True, left)
    return _apply(name, right, node.args[1] in spare, left)


def _apply(name: str, xs: list[Tensor], spare: bool, *others: Any) -> list[Tensor]:
    # torch takes a list of numbers where it does not take a number on the device.
    others = tuple([x] * len(xs) if isinstance(x, Tensor) else x for x in others)
    # A mean is 0-d: results of another shape than xs cannot land in it.
    if others and isinstance(others[0], list):
        spare = spare and xs[0].dim() >= others[0][0].dim()
    if not spare:
        return list(getattr(torch, f"_foreach_{name}")(xs, *others))
    getattr(torch, f"_foreach_{name}_")(xs, *others)
    return xs
