"""The compiled step of a tree of parameters: into new tensors, or in place."""

import torch

from optimi_func import _functional as _f
from optimi_func._distributed import (
    any_distributed,
    check_placed,
    leaf_to_local,
    redistribute_like,
    shards_of,
    to_local,
)
from optimi_func._functional import FunctionalOptimizer, TreeState
from optimi_func._rule import Leaf, PyTree
from optimi_func.execution.batching import plan_compiled, run_launches
from optimi_func.execution.jobs import Bundle, Job, check_writable
from optimi_func.execution.kernel import Numbers, kernel_context


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
    _f.warn(optimizer.likely_mistakes() + leaves.stuck_moments(optimizer))
    launches = plan_compiled(optimizer.rule, jobs, write=True)
    run_launches(launches, leaves.state.step.device)


def _fresh(leaf: Leaf) -> Leaf:
    p, state, comp = leaf
    return Leaf(
        torch.empty_like(p, requires_grad=False),
        type(state)(*(torch.empty_like(s) for s in state)),
        None if comp is None else torch.empty_like(comp),
    )
