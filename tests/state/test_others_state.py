"""What other programs keep in an optimizer's state: it is theirs, and stays as it is.

Lookahead does to `state[p]` what timm's Lookahead does, statement by statement.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from schedulefree import ScheduleFreeWrapper
from torch import Tensor

from optimi_func import SGD, AdamW, adamw, prepare_for_gradient_release

EAGER = {"compile": False}


class Lookahead:
    """timm.optim.Lookahead: the slow weights lie in the base optimizer's state."""

    def __init__(self, base: Any, alpha: float = 0.5, k: int = 2) -> None:
        self.base = base
        defaults = {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}
        base.defaults.update(defaults)
        for name, default in defaults.items():
            for group in base.param_groups:
                group.setdefault(name, default)

    @torch.no_grad()
    def update_slow(self, group: Any) -> None:
        for fast_p in group["params"]:
            if fast_p.grad is None:
                continue
            param_state = self.base.state[fast_p]
            if "lookahead_slow_buff" not in param_state:
                param_state["lookahead_slow_buff"] = torch.empty_like(fast_p)
                param_state["lookahead_slow_buff"].copy_(fast_p)
            slow = param_state["lookahead_slow_buff"]
            slow.add_(fast_p - slow, alpha=group["lookahead_alpha"])
            fast_p.copy_(slow)

    def step(self) -> None:
        self.base.step()
        for group in self.base.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self.update_slow(group)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


class ScheduleFree(ScheduleFreeWrapper):
    """schedulefree's wrapper in train mode: `z` is there before any step is."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.train_mode = True


def params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (1,)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def fill(ps: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(wrapped: Any, ps: list[Tensor], start: int, steps: int) -> None:
    for i in range(start, start + steps):
        fill(ps, i)
        wrapped.step()


def saved_and_loaded(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


HOW = {"eager": EAGER, "foreach": {"foreach": True}, "kernels": {"compile": True}}


@pytest.mark.kernels
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wrapper", [Lookahead, ScheduleFree])
def test_wrappers_train_as_around_torchs_class_and_resume(wrapper: Any, how: str) -> None:
    ps, qs = params(), params()
    # Around torch's AdamW the other wrapper fails: its state is no longer empty.
    same = wrapper is Lookahead
    options = {"betas": (0.9, 0.999), "eps": 1e-8} if same else {}
    cls, theirs_cls = (AdamW, torch.optim.AdamW) if same else (SGD, torch.optim.SGD)
    ours = wrapper(cls(ps, lr=0.1, **options, **HOW[how]))
    theirs = wrapper(theirs_cls(qs, lr=0.1))
    run(ours, ps, 0, 3)
    run(theirs, qs, 0, 3)
    saved = saved_and_loaded(ours.state_dict())
    resumed = [p.detach().clone().requires_grad_() for p in ps]
    fresh = wrapper(cls(resumed, lr=0.1, **HOW[how]))
    fresh.load_state_dict(saved)
    for optimizer, xs in ((ours, ps), (theirs, qs), (fresh, resumed)):
        run(optimizer, xs, 3, 4)
    torch.testing.assert_close(ps, qs, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, ps, resumed))


def test_torchs_checkpoint_of_a_wrapped_optimizer_goes_on_here() -> None:
    for cls, theirs_cls in ((AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)):
        qs = params()
        theirs = Lookahead(theirs_cls(qs, lr=0.1))
        run(theirs, qs, 0, 3)
        ps = [q.detach().clone().requires_grad_() for q in qs]
        ours = Lookahead(cls(ps, lr=0.5, **EAGER))
        ours.load_state_dict(theirs.state_dict())
        run(ours, ps, 3, 3)
        run(theirs, qs, 3, 3)
        torch.testing.assert_close(ps, qs, rtol=1e-5, atol=1e-6)
        # And back.
        again = [p.detach().clone().requires_grad_() for p in ps]
        back = Lookahead(theirs_cls(again, lr=0.5))
        back.load_state_dict(ours.base.torch_state_dict())
        run(ours, ps, 6, 3)
        run(back, again, 6, 3)
        torch.testing.assert_close(ps, again, rtol=1e-5, atol=1e-6)


def theirs_of(p: Tensor) -> dict[str, Any]:
    """Of every type and shape that somebody keeps."""
    return {
        "average": p.detach().double(),
        "mask": p.detach() > 0,
        "history": [torch.ones(2), torch.zeros(3)],
        "rows": torch.arange(4),
        "calls": 3,
        "mode": "slow",
        "nothing": None,
        "table": {"a": torch.ones(1), "b": ("x", 2)},
        "indices": torch.eye(3).to_sparse(),
    }


def assert_same(found: Any, kept: Any) -> None:
    assert type(found) is type(kept)
    if isinstance(kept, Tensor):
        assert found.dtype == kept.dtype and found.layout == kept.layout
        assert torch.equal(found.to_dense(), kept.to_dense())
    elif isinstance(kept, dict):
        assert list(found) == list(kept)
        for key in kept:
            assert_same(found[key], kept[key])
    elif isinstance(kept, list | tuple):
        assert len(found) == len(kept)
        for x, y in zip(found, kept):
            assert_same(x, y)
    else:
        assert found == kept


def assert_kept(optimizer: Any, kept: list[dict[str, Any]]) -> None:
    for p, expected in zip(optimizer.param_groups[0]["params"], kept, strict=True):
        assert_same({k: optimizer.state[p].get(k, KeyError) for k in expected}, expected)
    assert optimizer.state["program"] == {"epoch": 3, "names": ["a"]}
    assert optimizer.state["count"] == 5


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("when", ["before", "between"])
def test_everything_that_others_keep_stays(when: str, how: str, dtype: Any) -> None:
    ps = params(dtype)
    optimizer = AdamW(ps, lr=0.1, **HOW[how])
    if when == "between":
        run(optimizer, ps, 0, 1)
    kept = [theirs_of(p) for p in ps]
    held = [optimizer.state[p] for p in ps]
    for state, some in zip(held, kept):
        state.update(some)
    optimizer.state["program"] = {"epoch": 3, "names": ["a"]}
    optimizer.state["count"] = 5
    optimizer.init_state()
    run(optimizer, ps, 1, 2)
    assert_kept(optimizer, kept)
    # The dicts are those that others hold, and so are the tensors.
    for p, state, some in zip(ps, held, kept):
        assert optimizer.state[p] is state
        assert state["average"] is some["average"] and "exp_avg_sq" in state
    saved = optimizer.state_dict()
    assert saved["state"][0]["average"] is kept[0]["average"]
    other = AdamW([p.detach().clone().requires_grad_() for p in ps], lr=0.1, **HOW[how])
    other.load_state_dict(saved)
    assert other.state[other.param_groups[0]["params"][0]]["rows"] is not kept[0]["rows"]
    back = pickle.loads(pickle.dumps(optimizer))
    for one in (other, copy.deepcopy(optimizer), back, optimizer):
        qs = one.param_groups[0]["params"]
        run(one, qs, 3, 2)
        assert_kept(one, kept)
        for q in qs:
            q.data = q.data.clone()
        run(one, qs, 5, 2)
        assert_kept(one, kept)
        assert all(map(torch.equal, qs, ps)) or one is not optimizer
        assert int(one.state[qs[0]]["step"]) == (7 if when == "between" else 6)
    assert all(map(torch.equal, other.param_groups[0]["params"], ps))


def test_kept_where_a_model_is_cast_and_its_optimizer_changes() -> None:
    ps = params()
    optimizer = SGD(ps, lr=0.1, **EAGER)
    run(optimizer, ps, 0, 1)
    held = [optimizer.state[p] for p in ps]
    for p, state in zip(ps, held):
        state["slow"] = p.detach().clone()
        p.data = p.data.bfloat16()
    optimizer.param_groups[0]["momentum"] = 0.9
    run(optimizer, ps, 1, 1)
    for p, state in zip(ps, held):
        assert optimizer.state[p] is state and state["slow"].dtype == torch.float32
        assert {"step", "momentum_buffer", "kahan_comp", "slow"} == set(state)
        p.data = p.data.float()
    run(optimizer, ps, 2, 1)
    assert all(set(s) == {"step", "momentum_buffer", "slow"} for s in held)


def test_kept_under_gradient_release() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.1, gradient_release=True, **EAGER)
    optimizer.state[model.weight]["note"] = "mine"
    with prepare_for_gradient_release(model, optimizer):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
    assert optimizer.state[model.weight]["note"] == "mine"
    assert int(optimizer.state[model.weight]["step"]) == 2


def test_a_pure_optimizers_state_leaves_others_part_alone() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(model.named_parameters(), lr=0.1, **EAGER)
    optimizer.state[model.weight]["note"] = slow = [torch.ones(2)]
    pure, state = optimizer.functional()
    assert isinstance(pure, adamw) and int(state.step) == 0
    held = optimizer.state[model.weight]
    optimizer.load_functional(state)
    assert optimizer.state[model.weight] is held and held["note"] is slow
    assert "exp_avg" in held


@pytest.mark.parametrize(("wrapper", "steps"), [(Lookahead, 1), (ScheduleFree, 2)])
def test_wrappers_that_need_gradients_are_named_under_release(
    wrapper: Any, steps: int
) -> None:
    """They pass over parameters without p.grad; the wrapper's key names it."""
    model = torch.nn.Linear(2, 1)
    optimizer = AdamW(model.parameters(), lr=0.1, gradient_release=True, **EAGER)
    prepare_for_gradient_release(model, optimizer)
    wrapped = wrapper(optimizer)

    def train() -> None:
        model(torch.ones(1, 2)).sum().backward()
        wrapped.step()

    for _ in range(steps - 1):
        train()
    with pytest.warns(UserWarning, match=r"passes over parameters without p\.grad") as said:
        train()
    name = {Lookahead: "timm's Lookahead", ScheduleFree: "schedulefree's wrapper"}[wrapper]
    assert len(said) == 1 and str(said[0].message).startswith(name)
    train()  # said once
    if wrapper is Lookahead:  # what the warning says
        assert all("lookahead_slow_buff" not in x for x in optimizer.state.values())
