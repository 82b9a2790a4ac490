"""The recipes: each does what its docstring says, beside a loop written here."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import evolve_population
import gradient_transforms
import log_norms
import lookahead
import pytest
import qk_clip
import sam
import torch
from torch import Tensor, nn

from optimi_func import SGD, AdamW, population, sgd
from optimi_func.transforms import add_noise, centralize, chain, clip_value

MODULES = [evolve_population, gradient_transforms, log_norms, lookahead, qk_clip, sam]
WIDE = torch.float64


def parameters(dtype: torch.dtype = WIDE) -> list[nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (2,)]
    return [nn.Parameter(torch.randn(s, generator=drawn).to(dtype)) for s in shapes]


def loss_of(params: Any) -> Tensor:
    w, b = params
    return ((w.tanh() + b - 0.3) ** 2).sum() + 0.1 * (b**4).sum()


gradients: Callable[[Any], Any] = torch.func.grad(loss_of)


@pytest.mark.parametrize("module", MODULES, ids=lambda x: x.__name__)
def test_each_runs_by_itself(module: Any, capsys: Any) -> None:
    module.main()
    assert capsys.readouterr().out


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("cls", [partial(SGD, compile=False), torch.optim.SGD])
def test_sam_steps_along_the_gradient_at_the_worst_point(cls: Any, adaptive: bool) -> None:
    params, idle = parameters(), nn.Parameter(torch.ones(2))
    plain = [p.detach().clone() for p in params]
    optimizer = cls([*params, idle], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    for _ in range(3):
        want = loss_of(plain)
        loss = sam.sam_step(optimizer, closure, 0.3, adaptive)
        sizes = [p.abs() + 0.01 if adaptive else torch.ones_like(p) for p in plain]
        scaled = [g * t for g, t in zip(gradients(plain), sizes)]
        norm = sum(x.square().sum() for x in scaled).sqrt()
        near = [p + 0.3 * t * x / norm for p, t, x in zip(plain, sizes, scaled)]
        plain = [p - 0.1 * g for p, g in zip(plain, gradients(near))]
        torch.testing.assert_close(loss, want)
    for p, q in zip(params, plain):
        torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)
    assert torch.equal(idle.detach(), torch.ones(2))


def test_sam_puts_the_weights_back_if_the_closure_fails() -> None:
    params, calls = parameters(torch.bfloat16), []
    before = [p.detach().clone() for p in params]
    optimizer = AdamW(params, lr=0.1, compile=False)

    def closure() -> Tensor:
        calls.append(None)
        if len(calls) == 2:
            assert not torch.equal(params[0], before[0])
            raise RuntimeError("no data")
        loss = loss_of(params)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="no data"):
        sam.sam_step(optimizer, closure, rho=1.0)
    assert all(map(torch.equal, params, before)) and not optimizer.state


@pytest.mark.parametrize("cls", [partial(SGD, compile=False), torch.optim.SGD])
def test_lookahead_follows_the_slow_weights(cls: Any) -> None:
    params = parameters(torch.float32)
    plain = [p.detach().double() for p in params]
    slow = [p.clone() for p in plain]
    optimizer = cls(params, lr=0.1)
    lookahead.Lookahead(optimizer, k=3, alpha=0.4)
    for step in range(1, 8):
        optimizer.zero_grad()
        loss_of(params).backward()
        optimizer.step()
        plain = [p - 0.1 * g for p, g in zip(plain, gradients(plain))]
        if step % 3 == 0:
            slow = [s + 0.4 * (p - s) for s, p in zip(slow, plain)]
            plain = [s.clone() for s in slow]
    for p, q in zip(params, plain):
        torch.testing.assert_close(p.detach().double(), q, rtol=1e-5, atol=1e-6)


def test_lookahead_keeps_what_bfloat16_would_round_away() -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(torch.bfloat16)
        params = [nn.Parameter(p.detach().to(dtype)) for p in params]
        optimizer = SGD(params, lr=1e-4, compile=False)
        wrapper = lookahead.Lookahead(optimizer, k=2)
        for _ in range(6):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        ends.append([wrapper.weight(p) for p in params])
    for wide, narrow, start in zip(*ends, parameters(torch.bfloat16)):
        movement = (wide - start.float()).abs().max()
        assert movement > 2e-4
        assert (wide - narrow).abs().max() < 0.02 * movement


def test_lookahead_resumes_and_refuses_codes() -> None:
    def stepped(optimizer: Any, params: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(params).backward()
            optimizer.step()

    params = parameters(torch.float32)
    optimizer = SGD(params, lr=0.1, momentum=0.9, compile=False)
    wrapper = lookahead.Lookahead(optimizer, k=3)
    stepped(optimizer, params, 4)
    weights = [p.detach().clone() for p in params]
    saved, slow = copy.deepcopy((optimizer.state_dict(), wrapper.state_dict()))
    stepped(optimizer, params, 4)
    again = [nn.Parameter(p) for p in weights]
    other = SGD(again, lr=0.1, momentum=0.9, compile=False)
    other.load_state_dict(saved)
    lookahead.Lookahead(other, k=3).load_state_dict(slow)
    stepped(other, again, 4)
    assert all(map(torch.equal, params, again))
    narrow = parameters(torch.bfloat16)
    optimizer = AdamW(narrow, lr=0.1, storage="compact", compile=False)
    lookahead.Lookahead(optimizer, k=1)
    with pytest.raises(TypeError, match="cannot write 8-bit"):
        stepped(optimizer, narrow, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_step(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    named = dict(zip("wb", params))
    reports: list[tuple[int, dict[str, Any]]] = []
    optimizer = SGD(params, lr=1e-3, compile=False)
    log_norms.NormLog(
        optimizer, named.items(), lambda step, rows: reports.append((step, rows)), every=2
    )
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [step for step, _ in reports] == [2, 4]
    for name, p in named.items():
        row, size = reports[1][1][name], p.numel() ** 0.5
        assert row["grad_norm"] == pytest.approx(size)
        # In bfloat16 most weights do not change: their compensations do.
        assert row["update_norm"] == pytest.approx(1e-3 * size, rel=0.01)
        assert row["param_norm"] == pytest.approx(
            p.detach().float().norm().item(), rel=0.01
        )


def test_transforms_before_a_class_are_the_pure_chain() -> None:
    transforms = centralize(), clip_value(0.3), add_noise(0.1, seed=7)
    params, tree = (
        parameters(torch.float32),
        [p.detach() for p in parameters(torch.float32)],
    )
    named = {"w": params[0], "b": params[1], "frozen": nn.Parameter(torch.ones(2), False)}
    optimizer = SGD(params, lr=0.05, momentum=0.9, compile=False)
    recipe = gradient_transforms.TransformedGradients(optimizer, named, *transforms)
    pure = chain(*transforms, sgd(lr=0.05, momentum=0.9))
    state = pure.init(tree)
    for step in range(4):
        grads: Any = gradients(tree)
        if step == 2:  # one without a gradient, and a resume
            grads = [grads[0], None]
            saved = recipe.state_dict()
            optimizer._optimizer_step_pre_hooks.clear()
            recipe = gradient_transforms.TransformedGradients(optimizer, named, *transforms)
            recipe.load_state_dict(saved)
        for p, g in zip(params, grads):
            p.grad = None if g is None else g.clone()
        optimizer.step()
        tree, state = pure.step(tree, grads, state)
    assert all(map(torch.equal, params, tree))


def test_a_population_is_evaluated_and_perturbed() -> None:
    rates = torch.tensor([0.1, 0.2, 0.3], dtype=WIDE)
    hyper = {"lr": rates, "momentum": 0.9}
    members = population.init(sgd, {"w": torch.ones(4)}, hyper, n=3)
    members = population.step(sgd, members, {"w": torch.ones(3, 4)})
    data = torch.arange(4.0)
    got = evolve_population.evaluate(lambda p, x: (p["w"] * x).sum(), members, data)
    assert torch.equal(got, members.params["w"] @ data) and not got.requires_grad
    index, drawn = torch.tensor([0, 2]), torch.Generator().manual_seed(0)
    factors = {"lr": (0.5, 2.0), "momentum": (0.5,)}
    seen = set()
    for _ in range(10):
        new = evolve_population.perturb(members, factors, index, drawn)
        ratios = new.hyper["lr"] / rates
        assert ratios[1] == 1.0 and {*ratios[index].tolist()} <= {0.5, 2.0}
        seen |= {*ratios[index].tolist()}
        assert new.hyper["momentum"].tolist() == pytest.approx([0.95, 0.9, 0.95])
    assert seen == {0.5, 2.0} and torch.equal(members.hyper["lr"], rates)


def test_qk_clip_bounds_the_logits_of_the_heads_that_exceed_it() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(32, 16, dtype=WIDE), torch.randn(32, 16, dtype=WIDE)
    query[:8] *= 0.01  # a head whose logits are small
    small = query[:8].clone(), key[:8].clone()
    x = torch.randn(8, 6, 16, dtype=WIDE)
    largest = qk_clip.largest_logits(query, key, x, heads=4)
    qk_clip.qk_clip(query, key, largest, tau=5.0)
    assert torch.equal(query[:8], small[0]) and torch.equal(key[:8], small[1])
    after = qk_clip.largest_logits(query, key, x, heads=4)
    assert after[0] == largest[0] < 5.0
    torch.testing.assert_close(after[1:], torch.full((3,), 5.0, dtype=WIDE))
