"""The same steps through compiled kernels: `adamw_step` pure, `adamw_step_` in place.

One graph a (rule, dtypes), whatever the shapes, the number of tensors and the schedule do.
These run under no_grad and return detached tensors; to differentiate a step, compile your
own function over the pure one in `optimi_func`. States come from the `*_init` there.
"""

import torch

from optimi_func import functional as _f
from optimi_func._distributed import (
    any_distributed,
    check_placed,
    leaf_to_local,
    redistribute_like,
    shards_of,
    to_local,
)
from optimi_func._rule import Leaf, PyTree
from optimi_func.compiled.train_step import train_step as train_step
from optimi_func.execution.batching import plan_compiled, run_launches
from optimi_func.execution.jobs import Bundle, Job, check_writable
from optimi_func.execution.kernel import Numbers, kernel_context
from optimi_func.functional import FunctionalOptimizer, TreeState


def step(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """The step through compiled kernels, into new tensors."""
    leaves = _checked(optimizer, params, grads, state)
    with kernel_context(state.step.device):
        given = enumerate(leaves.grads)
        fresh = {i: _fresh(leaves.leaves[i]) for i, g in given if g is not None}
        _run(optimizer, leaves, list(_jobs(optimizer, leaves, fresh).values()))
        return leaves.rebuild(fresh)


def step_(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """The step through compiled kernels, written into params and state."""
    leaves = _checked(optimizer, params, grads, state)
    for path, leaf in zip(leaves.paths, leaves.leaves):
        check_writable(path, *to_local([leaf.p]))
    with kernel_context(state.step.device):
        jobs = _jobs(optimizer, leaves, {})
        _run(optimizer, leaves, list(jobs.values()))
        moved = [leaves.leaves[i].p for i in jobs]
        if any_distributed(moved):
            # Autograd has not seen their parts written.
            torch.autograd.graph.increment_version(moved)
        state.step.add_(1.0)
    return params, state


def _checked(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> _f.FlatTree:
    if not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not a FunctionalOptimizer: a "
            "transformed one is compiled by torch.compile(optimizer.step)"
        )
    return _f.FlatTree.check(optimizer.rule, params, grads, state)


def _jobs(
    optimizer: FunctionalOptimizer, leaves: _f.FlatTree, into: dict[int, Leaf]
) -> dict[int, Job]:
    """A job a gradient, onto the leaves given or, without any, in place."""
    step = leaves.state.step
    scalars = optimizer.scalars(leaves, step, _f.step_to_come(step))
    numbers = {i: Numbers(s) for i, s in {id(s): s for s in scalars}.items()}
    jobs: dict[int, Job] = {}
    for i, (leaf, g, s) in enumerate(zip(leaves.leaves, leaves.grads, scalars)):
        if g is not None:
            path, shards = leaves.paths[i], shards_of(leaf.p)
            check_placed(path, leaf.p)
            (g,) = to_local([redistribute_like(path, leaf.p, g)])
            source = Bundle(leaf_to_local(leaf), shards)
            target = Bundle(leaf_to_local(into[i]), shards) if into else source
            jobs[i] = Job(source, g, numbers[id(s)], target, None, None, None)
    return jobs


def _run(optimizer: FunctionalOptimizer, leaves: _f.FlatTree, jobs: list[Job]) -> None:
    _f.warn(optimizer.likely_mistakes() + leaves.stuck_moments(optimizer.hyper))
    launches = plan_compiled(optimizer.rule, jobs, write=True)
    run_launches(launches, leaves.state.step.device)


def _fresh(leaf: Leaf) -> Leaf:
    p, state, comp = leaf
    return Leaf(
        torch.empty_like(p, requires_grad=False),
        type(state)(*(torch.empty_like(s) for s in state)),
        None if comp is None else torch.empty_like(comp),
    )


sgd_step = _f.make_step(_f.sgd, step, "sgd_step")
sgd_step_ = _f.make_step(_f.sgd, step_, "sgd_step_")
adam_step = _f.make_step(_f.adam, step, "adam_step")
adam_step_ = _f.make_step(_f.adam, step_, "adam_step_")
adamw_step = _f.make_step(_f.adamw, step, "adamw_step")
adamw_step_ = _f.make_step(_f.adamw, step_, "adamw_step_")
stableadamw_step = _f.make_step(_f.stableadamw, step, "stableadamw_step")
stableadamw_step_ = _f.make_step(_f.stableadamw, step_, "stableadamw_step_")
radam_step = _f.make_step(_f.radam, step, "radam_step")
radam_step_ = _f.make_step(_f.radam, step_, "radam_step_")
ranger_step = _f.make_step(_f.ranger, step, "ranger_step")
ranger_step_ = _f.make_step(_f.ranger, step_, "ranger_step_")
adan_step = _f.make_step(_f.adan, step, "adan_step")
adan_step_ = _f.make_step(_f.adan, step_, "adan_step_")
lion_step = _f.make_step(_f.lion, step, "lion_step")
lion_step_ = _f.make_step(_f.lion, step_, "lion_step_")
