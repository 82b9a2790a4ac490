"""The operations of a rule's step, traced: what snapshots show and kernels have to read."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from optimi_func.core.leaf import compute_dtype, leaf_round, leaf_step, whole_means
from optimi_func.core.packed import fill
from optimi_func.core.rule import Scalars
from optimi_func.core.storage import GRAD, leaf_in, tensors_of
from optimi_func.execution.kernels import KernelKey, answers_before


class Trace(NamedTuple):
    """The operations of one step."""

    inputs: list[fx.Node]  # the scalars, p, g, state and compensation
    calls: list[fx.Node]
    outputs: list[fx.Node]  # p, state and compensation, or the means


def trace(key: KernelKey, scalars: Scalars) -> Trace:
    """Trace a kernel's step on plain tensors; only the structure of `scalars` counts."""
    spec = pytree.tree_structure(scalars)

    def run(values: list[Tensor], *tensors: Tensor) -> list[Tensor]:
        now = fill(key.statics, spec, values)
        own = dict(zip(key.names, tensors))
        leaf, g = leaf_in(key.rule, own), own[GRAD]
        if key.round is not None:
            ones = torch.ones((), dtype=wide)
            before = answers_before(key, scalars).items()
            known = {name: [ones] * count for name, count in before}
            return whole_means(leaf_round(key.rule, leaf, g, now, known).tensors)
        return [*tensors_of(leaf_step(key.rule, leaf, g, now, key.write)).values()]

    wide = compute_dtype(*key.dtypes)
    values = [torch.ones((), dtype=wide) for static in key.statics if static is None]
    tensors = [torch.ones(2, dtype=dtype) for dtype in key.dtypes]
    with torch.no_grad():
        graph = make_fx(run)(values, *tensors).graph
    graph.eliminate_dead_code()
    *nodes, output = graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    outputs: Any = output.args[0]
    return Trace(inputs, nodes[len(inputs) :], list(outputs))
