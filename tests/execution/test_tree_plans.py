"""Plans of the compiled functions, which are found again by the structure of trees."""

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func import adamw_init, adamw_step, compiled
from optimi_func.core.runtime import runtime
from optimi_func.core.tree import FlatTree
from optimi_func.execution import plans, trees

pytestmark = pytest.mark.kernels

Step = Callable[..., Any]
STEPS: dict[str, Step] = {"in place": compiled.adamw_step_, "pure": compiled.adamw_step}
either = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


class Pair(NamedTuple):
    """A node that torch flattens."""

    first: Any
    second: Any


def draw(seed: int) -> dict[str, Any]:
    own = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=own)

    ordered = OrderedDict(x=made(4), y=made(2, 2))
    rest = {"d": [made(70), (made(2, 3, 4),)], "e": Pair(made(9), ordered), "f": made(0)}
    return {"a": made(6, 5), "b": made(), "c": rest}


def unplanned(step: Step) -> Step:
    """The step without a plan of an earlier one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        runtime.tree_plans.clear()
        return step(*args, **kwargs)

    return run


def same(a: Any, b: Any) -> None:
    flat, spec = pytree.tree_flatten(a)
    others, other = pytree.tree_flatten(b)
    assert spec == other and all(map(torch.equal, flat, others))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was checked and planned since it was last cleared."""
    runtime.tree_plans.clear()
    calls: list[str] = []
    checks = FlatTree.check

    def noted(name: str, run: Step) -> Step:
        return lambda *args, **kw: calls.append(name) or run(*args, **kw)

    monkeypatch.setattr(FlatTree, "check", noted("check", checks))
    monkeypatch.setattr(trees, "make_slots", noted("slots", trees.make_slots))
    monkeypatch.setattr(plans, "plan_launches", noted("launches", plans.plan_launches))
    return calls


@either
def test_later_steps_check_and_plan_nothing(step: Step, made: list[str]) -> None:
    params, state = draw(0), adamw_init(draw(0))
    for t in range(4):
        params, state = step(params, draw(t + 1), state, lr=0.1 / (t + 1))
        assert (made == []) == (t > 0)
        made.clear()
    state.step.fill_(2.0)  # the user's
    step(params, draw(9), state, lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))
    assert made == []


def test_new_tensors_of_one_kind_need_no_plan(made: list[str]) -> None:
    """A pure step's tensors are others at each call; so are those of a checkpoint."""
    params, state = draw(0), adamw_init(draw(0))
    compiled.adamw_step(params, draw(1), state, lr=0.1)
    made.clear()
    loaded = copy.deepcopy((draw(5), state))
    compiled.adamw_step(loaded[0], draw(2), loaded[1], lr=0.1)
    assert made == []


def others(seed: int) -> Any:
    """Gradients in another memory order."""
    return pytree.tree_map(
        lambda g: g.t().contiguous().t() if g.dim() == 2 else g, draw(seed)
    )


def fewer(seed: int) -> Any:
    """Gradients, of which some are missing."""
    grads = draw(seed)
    grads["a"], grads["c"]["d"][0] = None, None
    return grads


def turned(seed: int) -> Any:
    """Gradients in a dict of another order."""
    return dict(reversed(draw(seed).items()))


@either
def test_what_changes_between_steps_is_noticed(step: Step) -> None:
    """The results are those of steps that are planned each time, bit for bit."""
    ends = []
    for way in (step, unplanned(step), adamw_step):
        runtime.tree_plans.clear()
        params, state = draw(0), adamw_init(draw(0))
        for t, grads in enumerate((draw, draw, others, fewer, draw, turned, draw) * 2):
            params, state = way(params, grads(t), state, lr=0.01 * (t % 3 + 1))
            if t == 4:
                params, state = copy.deepcopy((params, state))  # a checkpoint
            if t == 6:
                params["a"] = params["a"].t().contiguous().t()  # another memory order
            if t == 8:
                state.leaves["a"].exp_avg.mul_(0.5)
        # Another tree between the steps of this one.
        small = {k: x[:1] if x.dim() else x for k, x in draw(3)["c"]["e"][1].items()}
        small, other = way(small, small, adamw_init(small), lr=0.1)
        params, state = way(params, draw(20), state, lr=0.01)
        ends.append((params, state, small, other))
    same(*ends[:2])
    for a, b in zip(pytree.tree_leaves(ends[0]), pytree.tree_leaves(ends[2])):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@either
def test_what_no_longer_fits_is_refused(step: Step) -> None:
    params, state = draw(0), adamw_init(draw(0))
    params, state = step(params, draw(1), state, lr=0.1)
    before = copy.deepcopy((params, state))

    def refused(error: Any, text: str, grads: Any, given: Any) -> None:
        for run in (step, unplanned(step)):
            with pytest.raises(error, match=text):
                run(params, grads, given, lr=0.1)
            step(*copy.deepcopy((params, draw(1), before[1])), lr=0.1)  # a plan again
        same((params, state), before)

    refused(
        ValueError, r"grads\['a'\] has shape", {**draw(1), "a": torch.ones(5, 6)}, state
    )
    refused(
        TypeError,
        r"grads\['a'\] has dtype",
        {**draw(1), "a": torch.ones(6, 5).half()},
        state,
    )
    refused(
        TypeError, r"grads\['b'\] is 1.0, which is neither", {**draw(1), "b": 1.0}, state
    )
    refused(ValueError, "structure", {"a": draw(1)["a"]}, state)
    refused(TypeError, "is not a TreeState", draw(1), tuple(state))
    leaf = copy.deepcopy(state.leaves["a"])
    leaf.rule_state = leaf.rule_state._replace(exp_avg=torch.ones(3))
    changed = state._replace(leaves={**state.leaves, "a": leaf})
    with pytest.raises(ValueError, match=r"exp_avg.*has shape"):
        step(params, draw(1), changed, lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        step(params, draw(1), state, lr=-0.1)


def test_expanded_parameters_are_refused_after_others() -> None:
    params, state = {"a": torch.ones(4, 4)}, adamw_init({"a": torch.ones(4, 4)})
    compiled.adamw_step_(params, params, state, lr=0.1)
    expanded = {"a": torch.ones(1, 4).expand(4, 4)}
    with pytest.raises(ValueError, match="is expanded"):
        compiled.adamw_step_(expanded, params, state, lr=0.1)


def test_tied_weights_are_refused_after_a_tree_without() -> None:
    """The plan of a tree is not that of a tied one, which a step in place moves twice."""
    for tied in (False, True, False, True):
        p, q = torch.ones(200), torch.ones(200)
        params = {"p": p, "q": p if tied else q}
        grads, state = {"p": p + 0.5, "q": p - 3.0}, adamw_init(params)
        want = adamw_step(params, grads, state, lr=0.1)[0]
        if tied:
            with pytest.raises(ValueError, match="share memory"):
                compiled.adamw_step_(params, grads, state, lr=0.1)
            assert torch.equal(p, torch.ones(200)) and state.step == 0
        found = compiled.adamw_step(params, grads, state, lr=0.1)[0]
        torch.testing.assert_close(found, want)
        if not tied:
            compiled.adamw_step_(params, grads, state, lr=0.1)
            torch.testing.assert_close(params, want)


def test_results_do_not_share_memory() -> None:
    """A leaf that is kept does not keep the others."""
    params, state = draw(0), adamw_init(draw(0))
    for _ in range(2):
        params, state = compiled.adamw_step(params, draw(1), state, lr=0.1)
    for x in pytree.tree_leaves((params, state)):
        assert x.untyped_storage().nbytes() == x.nbytes and not x.requires_grad


def test_plans_keep_nothing_alive() -> None:
    params, state = draw(0), adamw_init(draw(0))
    for step in STEPS.values():
        step(params, draw(1), state, lr=torch.tensor(0.1))
        step(params, draw(1), state, lr=0.1)
    seen = [weakref.ref(x) for x in pytree.tree_leaves((params, state))]
    del params, state
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_autograd_notices_every_step_in_place() -> None:
    params, state = {"a": torch.ones(3)}, adamw_init({"a": torch.ones(3)})
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        loss = (x * params["a"]).sum()
        compiled.adamw_step_(params, {"a": torch.ones(3)}, state, lr=0.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@either
def test_trees_of_every_shape(step: Step) -> None:
    x = torch.ones(3)
    trees_ = x, [x, x + 1], (x,), {"a": {"b": [x]}}, Pair(x, [x + 2]), OrderedDict(a=x)
    for tree in trees_ * 2:
        tree = copy.deepcopy(tree)
        want, _ = adamw_step(tree, tree, adamw_init(tree), lr=0.1)
        got, state = step(tree, copy.deepcopy(tree), adamw_init(tree), lr=0.1)
        assert pytree.tree_structure(got) == pytree.tree_structure(want)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want)):
            torch.testing.assert_close(a, b)
        assert state.step == 1


@either
def test_without_a_gradient_only_the_step_counts(step: Step) -> None:
    params, state = draw(0), adamw_init(draw(0))
    none = pytree.tree_map(lambda _: None, params)
    for t in range(3):
        after, state = step(params, none, state, lr=0.1)
        assert torch.equal(after["a"], params["a"]) and state.step == t + 1
        assert (after["a"] is params["a"]) == (step is STEPS["in place"])
