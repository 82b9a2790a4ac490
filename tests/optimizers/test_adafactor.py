"""Adafactor beside torch's and transformers'; what it keeps and what it refuses."""

import gc
import warnings
from typing import Any

import pytest
import reference
import torch
from cases import assert_moved_alike, problem
from refusals import Scene, refuses
from torch import Tensor, nn

import optimi_func
from optimi_func import Adafactor, adafactor, adafactor_init, prepare_for_gradient_release

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64
SHAPES = [(7, 5), (9,), (2, 3, 4), (2, 3, 3, 3), ()]


def started(steps: int, make: Any, dtype: torch.dtype = DOUBLE) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in SHAPES]
    optimizer = make(ps)
    train(ps, optimizer, range(steps))
    return ps, optimizer


def train(ps: list[Any], optimizer: Any, steps: range) -> None:
    for i in steps:
        torch.manual_seed(i)
        for p in ps:
            p.grad = torch.randn(p.shape).to(p.dtype) * (0.01 + i % 7)
        optimizer.step()


def assert_alike(ours: Any, theirs: Any, steps: int = 70) -> None:
    found, want, start = (
        [p.detach() for p in started(n, make)[0]]
        for n, make in ((steps, ours), (steps, theirs), (0, ours))
    )
    for p, q, x in zip(found, want, start):
        assert_moved_alike(x, p, q, 1e-11)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"clip_threshold": 1.5},
    {"decay_rate": -0.5},
    {"eps": (0.1, 1e-3)},
    {"eps": (0.1, 3.0)},
]


MORE: list[dict[str, Any]] = [
    {"beta1": 0.9},
    {"scale_parameter": True},
    {"scale_parameter": True, "eps": (1e-30, 2.0), "beta1": 0.5},
]


@pytest.mark.full  # `make test-full` installs transformers
@pytest.mark.parametrize("options", [*OPTIONS, *MORE], ids=str)
def test_equals_transformers(options: dict[str, Any]) -> None:
    others = pytest.importorskip("transformers.optimization").Adafactor
    usual = {"scale_parameter": False, "relative_step": False}
    assert_alike(
        lambda ps: Adafactor(ps, lr=1e-2, **options, **EAGER),
        lambda ps: others(ps, lr=1e-2, **{**usual, **options}),
    )


@pytest.mark.parametrize(
    "options",
    [{"beta1": 0.9}, {"relative_step": True}, {"relative_step": True, "beta1": 0.5}],
    ids=str,
)
def test_equals_the_paper_at_one_lr(options: dict[str, Any]) -> None:
    """The step's length is part of the mean, but lr is that of now."""
    p, grads = problem()
    want = reference.adafactor(p, grads, lr=0.5, **options)
    usual = reference.adafactor(p, grads, lr=0.5)
    state = adafactor_init(p, beta1=options.get("beta1"))
    q = p
    for g, x in zip(grads, want):
        q, state = adafactor(lr=0.5, **options).step(q, g, state)
        assert_moved_alike(p, q, x, 1e-12)
    assert (want[-1] - usual[-1]).norm() > 0.1 * (want[-1] - p).norm()


def test_flattened_convolutions_are_matrices() -> None:
    torch.manual_seed(1)
    kernel, stack = torch.randn(6, 4, 3, 3), torch.randn(2, 3, 4)
    grads = [(torch.randn_like(kernel), torch.randn_like(stack)) for _ in range(5)]
    flat, deep = adafactor(lr=0.1, flatten=True), adafactor(lr=0.1)
    tree, twins, plain = (kernel, stack), (kernel.flatten(1), stack.flatten(1)), kernel
    state, other, third = flat.init(tree), flat.init(twins), deep.init(plain)
    shapes = [(x.row_var.shape, x.col_var.shape) for x in state.leaves]
    assert shapes == [((6, 1), (1, 36)), ((2, 1), (1, 12))]
    assert third.leaves.row_var.shape == (6, 4, 3, 1)
    for g, h in grads:
        tree, state = flat.step(tree, (g, h), state)
        twins, other = flat.step(twins, (g.flatten(1), h.flatten(1)), other)
        plain, third = deep.step(plain, g, third)
    assert all(torch.equal(x.flatten(1), y) for x, y in zip(tree, twins))
    assert (plain - tree[0]).norm() > 0.1 * (plain - kernel).norm()


def test_what_it_keeps() -> None:
    """float32 at least, whatever the parameter's dtype and state_dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, DOUBLE):
        p = torch.ones(5, 3, dtype=dtype, requires_grad=True)
        b = torch.ones(4, dtype=dtype, requires_grad=True)
        optimizer = Adafactor([p, b], state_dtype=torch.bfloat16, **EAGER)
        optimizer.init_state()
        shapes = {k: tuple(x.shape) for k, x in optimizer.state[p].items()}
        for name, shape in {"row_var": (5, 1), "col_var": (1, 3), "variance": (0,)}.items():
            assert shapes[name] == shape
            wide = torch.promote_types(dtype, torch.float32)
            assert optimizer.state[p][name].dtype == wide
        assert optimizer.state[b]["variance"].shape == (4,)
    averaged = Adafactor([p], beta1=0.9, **EAGER)
    averaged.init_state()
    assert averaged.state[p]["exp_avg"].shape == p.shape


def layers(side: int, count: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(side, side) for _ in range(count)])
    return model.to(torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_param_norm": 0.1},
        {"accumulation": "buffer", "accumulation_steps": 2},
    ],
    ids=str,
)
def test_four_bytes_a_parameter_in_all(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 with Kahan summation, released: after a step and within its backward."""
    model = layers(256, 4)
    optimizer = Adafactor(model.named_parameters(), gradient_release=True, **EAGER)
    count = sum(p.numel() for p in model.parameters())
    alive: list[int] = []
    update = optimizer.update

    def noted(params: Any, grads: list[Tensor], *how: Any, **more: Any) -> Any:
        parts = update(params, grads, *how, **more)
        alive.append(sum(g.nbytes for g in grads))
        return parts

    monkeypatch.setattr(optimizer, "update", noted)
    handle = prepare_for_gradient_release(model, optimizer, **options)
    before = [p.detach().clone() for p in model.parameters()]
    for i in range(2 * (1 + ("accumulation" in options))):
        torch.manual_seed(i)
        model(torch.randn(2, 256).bfloat16()).square().sum().backward()
        optimizer.step()
    del handle
    gc.collect()
    kept = [x for state in optimizer.state.values() for x in state.values()]
    total = sum(x.nbytes for x in [*model.parameters(), *kept])
    assert total / count == pytest.approx(4, abs=0.06)
    assert all(p.grad is None for p in model.parameters())
    # Of gradients there are those of a layer, and none after it.
    wide = 2 if "accumulation" in options else 1  # float32 sums
    assert max(alive) <= wide * 2 * (256 * 256 + 256 * 4)
    assert not any(map(torch.equal, before, [p.detach() for p in model.parameters()]))


def test_states_of_torch_load_and_go_back() -> None:
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.2, "d": 1.5}
    ps, theirs = started(4, lambda ps: torch.optim.Adafactor(ps, **options))
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    ours = Adafactor(qs, **EAGER)
    ours.load_state_dict(theirs.state_dict())
    group = ours.param_groups[0]
    assert (group["clip_threshold"], group["decay_rate"], group["lr"]) == (1.5, -0.8, 0.05)
    assert group["torch_form"] and group["eps"] == (None, 1e-3)
    rs = [nn.Parameter(p.detach().clone()) for p in ps]
    back = torch.optim.Adafactor(rs)
    back.load_state_dict(ours.torch_state_dict())
    assert {*back.state[rs[1]]} == {"step", "variance"}
    assert back.param_groups[0]["d"] == 1.5
    assert "torch_form" not in back.param_groups[0]
    starts = [p.detach().clone() for p in ps]
    for params, optimizer in ((ps, theirs), (qs, ours), (rs, back)):
        train(params, optimizer, range(4, 8))
    for p, q, r, start in zip(ps, qs, rs, starts):
        assert torch.equal(p, r)
        assert_moved_alike(start, q.detach(), p.detach(), 1e-11)


REFUSED = {
    "eps=1e-8": "Invalid eps: eps=1e-08: allowed are 2 numbers",
    "eps=(1e-8,)": "allowed are 2 numbers",
    "eps=(None, 1e-3)": r"TypeError: eps\[0\]=None",  # torch's form alone
    "cautious=True": "adafactor does not go with the hook cautious",
    "storage=optimi_func.Storage(moments='8bit')": "keeps no moments in 8 bits",
}


@refuses({f"Adafactor([w], {options})": text for options, text in REFUSED.items()})
def test_refusals() -> Scene:
    return {"w": torch.ones(2, 2).bfloat16().requires_grad_()}


def test_lr_of_a_part_of_the_tree_is_its_own() -> None:
    """lr is in the rule with relative_step."""
    tree = {"a": torch.ones(3, 2), "b": torch.ones(3, 2)}
    grads = {name: torch.arange(6.0).view(3, 2) + 1 for name in tree}
    lrs = {"a": 0.1, "b": 0.9}
    both = adafactor(lr=lrs, relative_step=True)
    state, now = both.init(tree), tree
    for _ in range(5):
        now, state = both.step(now, grads, state)
    for name, lr in lrs.items():
        one = adafactor(lr=lr, relative_step=True)
        q, alone = tree[name], one.init(tree[name])
        for _ in range(5):
            q, alone = one.step(q, grads[name], alone)
        assert torch.equal(now[name], q)


def test_zeros_and_what_is_not_finite() -> None:
    """No gradient moves nothing, and an infinite one is in the state, as torch has it."""
    p = torch.ones(3, 2, requires_grad=True)
    for options in ({}, {"eps": (0.0, 0.0)}, {"torch_form": True, "eps": (0.0, 0.0)}):
        optimizer = Adafactor([p], lr=0.1, **options, **EAGER)
        p.grad = torch.zeros(3, 2)
        optimizer.step()
        assert torch.equal(p.detach(), torch.ones(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = Adafactor([p], lr=0.1, **EAGER)
    p.grad = torch.full((3, 2), float("inf"))
    optimizer.step()
    assert not p.isfinite().all()


@pytest.mark.full
def test_compiled_steps_are_the_eager_ones() -> None:
    def ended(**way: Any) -> list[Tensor]:
        ps, optimizer = started(
            5, lambda ps: Adafactor(ps, lr=0.1, scale_parameter=True, **way), torch.float32
        )
        kept = [optimizer.state[p][x] for p in ps for x in ("row_var", "variance")]
        return [*[p.detach() for p in ps], *kept]

    for got, want in zip(ended(compile=True), ended(**EAGER)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    step = torch.compile(optimi_func.adafactor_step, fullgraph=True)
    p, g = torch.randn(5, 3), torch.randn(5, 3)
    want = optimi_func.adafactor_step(p, g, adafactor_init(p), lr=0.1)
    got = step(p, g, adafactor_init(p), lr=0.1)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1].leaves.col_var, want[1].leaves.col_var)
