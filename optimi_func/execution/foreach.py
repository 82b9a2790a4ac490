"""The same rule through torch._foreach_*: many tensors an op, and no compiler.

The leaf pipeline is traced once; each of its operations then runs on lists of tensors, in
place where the operand is a temporary that nothing else needs. No formula stands here.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from optimi_func._leaf import compute_dtype, count_means, leaf_means, leaf_step, whole_means
from optimi_func._rule import Rule, Scalar, Scalars
from optimi_func.execution.kernels import KernelKey, Pass, fill, kernel_key, lock, unpack
from optimi_func.execution.launches import (
    EagerLaunch,
    Launch,
    StepInputs,
    Update,
    alike,
)
from optimi_func.execution.tensors import chunks, flat_leaf, foreach_copy_

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


def _smaller(a: Any, b: Any) -> Any:
    return torch.minimum(*map(torch.as_tensor, (a, b))) if _on_device(a, b) else min(a, b)


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
    aten.clamp_max.Tensor: ("clamp_max", _smaller),
    aten.clamp_max.default: ("clamp_max", _smaller),
}
_UNARY: dict[Any, str] = {
    aten.neg.default: "neg",
    aten.reciprocal.default: "reciprocal",
    aten.sign.default: "sign",
    aten.sqrt.default: "sqrt",
}
# What torch has no list form of: rounding to a float16 below its normal numbers, and
# choices between means.
_EACH = {aten.abs.default, aten.lt.Scalar, aten.where.self}


class Trace(NamedTuple):
    """The pipeline's operations, and when each value is needed for the last time."""

    inputs: list[fx.Node]  # the numbers, p, g, state and comp
    # What to call, which temporaries it may overwrite, and what nothing needs after it.
    calls: list[tuple[fx.Node, set[fx.Node], list[fx.Node]]]
    outputs: list[fx.Node]  # p, state and comp; or the means alone


# Made once a process.
_traces: dict[KernelKey, Trace] = {}


def trace(key: KernelKey, scalars: Scalars) -> Trace:
    """The trace of a key; of the scalars only their structure counts."""
    if key not in _traces:
        with lock:  # make_fx is for one thread at a time
            _traces[key] = _trace(key, pytree.tree_structure(scalars))
    return _traces[key]


def _trace(key: KernelKey, spec: pytree.TreeSpec) -> Trace:
    def run(numbers: list[Tensor], *tensors: Tensor) -> list[Tensor]:
        scalars = fill(key.statics, spec, numbers)
        leaf, g = unpack(key.rule, key.compensated, tensors, ())
        if key.part == "mean":
            return leaf_means(key.rule, leaf, g, scalars)
        new = leaf_step(key.rule, leaf, g, scalars, key.write, whole_means)
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
    known = {*_BINARY, *_UNARY, *_EACH, aten._to_copy.default, aten.mean.default}
    if node.target not in known:
        raise NotImplementedError(f"{node.target} has no foreach counterpart here")


class _Slice(NamedTuple):
    """A parameter, or a stretch of one: what a large one is cut into."""

    update: Update
    numel: int
    start: int | None  # of a stretch; None takes the tensors as they are


def plan_foreach(rule: Rule[Any, Any], updates: list[Update], write: bool) -> list[Launch]:
    """Launches of chunks of updates that share dtypes and numbers.

    Args:
        rule: The mathematics.
        updates: What to update.
        write: False moves the state alone.
    """
    launches: list[Launch] = []
    for some in alike(updates):
        first = some[0]
        if first.slot.coded:
            # A fold over groups has no place in the table of operations.
            launches += [EagerLaunch(rule, u, write) for u in some]
            continue
        measures = write and count_means(rule, first.scalars.scalars.rates) > 0
        sharded = measures and first.slot.shard is not None
        parts: list[Pass] = ["whole", "mean"] if sharded else ["whole"]
        keys = [kernel_key(rule, first, write, part) for part in parts]
        traced = [trace(key, first.scalars.scalars) for key in keys]
        wide = compute_dtype(first.g.dtype, *first.slot.dtypes)
        room = sum(u.p.nbytes for u in some) // (TEMPORARIES * wide.itemsize)
        size = min(CHUNK, max(LEAST, room))
        slices = [s for u in some for s in _slices(u, size, measures)]
        for chunk in chunks(slices, size, lambda s: s.numel):
            launches.append(ForeachLaunch(traced, chunk))
    return launches


def _slices(u: Update, size: int, measures: bool) -> list[_Slice]:
    count = u.slot.numel
    if count <= size or measures or not (u.dense and u.aligned):
        return [_Slice(u, count, None)]
    # Temporaries of a chunk stay in the cache; those of a large tensor would not.
    starts = range(0, count, size)
    return [_Slice(u, min(size, count - start), start) for start in starts]


class ForeachLaunch(Launch):
    """A trace, run on lists of tensors; a second one measures shards."""

    def __init__(self, traces: list[Trace], slices: list[_Slice]) -> None:
        super().__init__([s.update for s in slices])
        self._traces = traces
        self._stretches = [(s.start, s.numel) for s in slices]

    def _take(self, role: list[Tensor]) -> list[Tensor]:
        return [
            role[i] if start is None else _stretch(role[i], start, numel)
            for i, (start, numel) in zip(self.places, self._stretches)
        ]

    def _read(self, inputs: StepInputs) -> list[Value]:
        p, *state = [self._take(inputs.roles[i]) for i in self._roles]
        g = self._take(inputs.grads)
        values = self.scalars(inputs).values(self.dtype, g[0].device)
        return [*values, p, g, *state]

    def measure(self, inputs: StepInputs) -> Tensor:
        """The means."""
        found = _interpret(self._traces[1], self._read(inputs), None)
        return torch.stack([torch.stack(cast(list[Tensor], x)) for x in found], dim=1)

    def run(self, inputs: StepInputs, means: Tensor | None = None) -> None:
        """Run the trace and write the results onto their targets."""
        results = _interpret(self._traces[0], self._read(inputs), means)
        finite = self.finite(inputs)
        targets = [self._take(inputs.targets[i]) for i in self._roles]
        for target, result in zip(targets, results):
            assert isinstance(result, list)
            if any(x is not y for x, y in zip(target, result)):
                if finite is not None:
                    result = [torch.where(finite, r, t) for r, t in zip(result, target)]
                foreach_copy_(target, result)


def _stretch(x: Tensor, start: int, numel: int) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).narrow(0, start, numel)


def _interpret(trace: Trace, inputs: list[Value], means: Tensor | None) -> list[Value]:
    env = dict(zip(trace.inputs, inputs))
    # Those that are known, in the order that the pipeline takes them in.
    known = iter(()) if means is None else iter(means.unbind(1))
    for node, spare, dead in trace.calls:
        args: list[Any] = [env[a] if a in env else a for a in node.args]
        if node.target is aten.mean.default:
            taken = [x.mean() for x in args[0]] if means is None else next(known).unbind()
            env[node] = [mean.to(x.dtype) for mean, x in zip(taken, args[0])]
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
    if node.target in _EACH:
        count = len(next(x for x in args if isinstance(x, list)))
        rows = [x if isinstance(x, list) else [x] * count for x in args]
        return [cast(Any, node.target)(*row) for row in zip(*rows)]
    if node.target is aten.neg.default and not isinstance(args[0], list):
        return -args[0]
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
