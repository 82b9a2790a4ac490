"""The same steps through compiled kernels: `adamw_step` pure, `adamw_step_` in place.

One graph a (rule, dtypes), whatever the shapes, the number of tensors and the schedule do.
These run under no_grad and return detached tensors; to differentiate a step, compile your
own function over the pure one in `optimi_func`. States come from the `*_init` there.
"""

from collections.abc import Callable

import torch

from optimi_func import functional as _f
from optimi_func._types import Leaf, PyTree
from optimi_func.compiled.batching import plan_compiled, run_launches
from optimi_func.compiled.jobs import Bundle, Job, check_writable
from optimi_func.compiled.kernel import Numbers, ambient
from optimi_func.compiled.train_step import train_step as train_step
from optimi_func.functional import FunctionalOptimizer, TreeState


def step(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """The step through compiled kernels, into new tensors."""
    leaves = _checked(optimizer, params, grads, state)
    with ambient(state.step.device):
        jobs = _jobs(optimizer, leaves, _fresh)
        _run(optimizer, leaves, list(jobs.values()))
        return leaves.rebuild({i: job.into.leaf for i, job in jobs.items()})


def step_(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> tuple[PyTree, TreeState]:
    """The step through compiled kernels, written into params and state."""
    leaves = _checked(optimizer, params, grads, state)
    for path, leaf in zip(leaves.paths, leaves.leaves):
        check_writable(path, leaf.p)
    with ambient(state.step.device):
        jobs = _jobs(optimizer, leaves, lambda source: source)
        _run(optimizer, leaves, list(jobs.values()))
        state.step.add_(1.0)
    return params, state


def _checked(
    optimizer: FunctionalOptimizer, params: PyTree, grads: PyTree, state: TreeState
) -> _f.Leaves:
    if not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not a FunctionalOptimizer: a "
            "transformed one is compiled by torch.compile(optimizer.step)"
        )
    return _f.Leaves.check(optimizer.rule, params, grads, state)


def _jobs(
    optimizer: FunctionalOptimizer,
    leaves: _f.Leaves,
    into: Callable[[Bundle], Bundle],
) -> dict[int, Job]:
    step = leaves.state.step
    scalars = optimizer.scalars(leaves, step, _f.step_to_come(step))
    numbers = {i: Numbers(s) for i, s in {id(s): s for s in scalars}.items()}
    jobs: dict[int, Job] = {}
    for i, (leaf, g, s) in enumerate(zip(leaves.leaves, leaves.grads, scalars)):
        if g is not None:
            source = Bundle(leaf)
            jobs[i] = Job(source, g, numbers[id(s)], into(source), None, None)
    return jobs


def _run(optimizer: FunctionalOptimizer, leaves: _f.Leaves, jobs: list[Job]) -> None:
    _f.warn(optimizer.advice() + leaves.stuck_moments(optimizer.hyper))
    launches = plan_compiled(optimizer.rule, jobs, write=True)
    run_launches(launches, leaves.state.step.device)


def _fresh(source: Bundle) -> Bundle:
    p, state, comp = source.leaf
    fields = (torch.empty_like(s) for s in state)
    return Bundle(
        Leaf(
            torch.empty_like(p, requires_grad=False),
            type(state)(*fields),
            None if comp is None else torch.empty_like(comp),
        )
    )


sgd_step = _f.stepper(_f.sgd, step, "sgd_step")
sgd_step_ = _f.stepper(_f.sgd, step_, "sgd_step_")
adam_step = _f.stepper(_f.adam, step, "adam_step")
adam_step_ = _f.stepper(_f.adam, step_, "adam_step_")
adamw_step = _f.stepper(_f.adamw, step, "adamw_step")
adamw_step_ = _f.stepper(_f.adamw, step_, "adamw_step_")
stableadamw_step = _f.stepper(_f.stableadamw, step, "stableadamw_step")
stableadamw_step_ = _f.stepper(_f.stableadamw, step_, "stableadamw_step_")
radam_step = _f.stepper(_f.radam, step, "radam_step")
radam_step_ = _f.stepper(_f.radam, step_, "radam_step_")
ranger_step = _f.stepper(_f.ranger, step, "ranger_step")
ranger_step_ = _f.stepper(_f.ranger, step_, "ranger_step_")
adan_step = _f.stepper(_f.adan, step, "adan_step")
adan_step_ = _f.stepper(_f.adan, step_, "adan_step_")
lion_step = _f.stepper(_f.lion, step, "lion_step")
lion_step_ = _f.stepper(_f.lion, step_, "lion_step_")
