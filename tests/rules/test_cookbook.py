"""The rules of `examples/rules`, beside loops of plain tensors in float64."""

from typing import Any

import cookbook
import pytest
import torch
from cases import assert_moved_alike
from own_rules import NormedLAMB, Sphere, Tangent, normed_lamb, sphere, tangent
from tiers import few, row
from torch import Tensor

from optimi_func.testing import check_rule

# Of each door one: elementwise, `measure`, numbers that last, `whole`, `after`, noise,
# noise in `whole`.
QUICK = {"laprop", "lars", "kourkoutas", "galore", "madgrad", "sgld", "apollo"}


def test_every_file_has_a_loop() -> None:
    assert cookbook.FILES == sorted(cookbook.ROWS)


@pytest.mark.parametrize("name", cookbook.ROWS)
def test_movements_are_those_of_the_paper(name: str) -> None:
    """In each number of the table, which differs from the default."""
    cls, loop = cookbook.rule_of(name), getattr(cookbook, name)
    hyper, more = cookbook.ROWS[name]
    drawn = torch.Generator().manual_seed(0)
    p, *gs = [torch.randn(4, 3, generator=drawn, dtype=torch.float64) for _ in range(9)]
    grads = [[g / (i + 1)] for i, g in enumerate(gs)]
    hyper = {"lr": more.get("lr", 0.1), **hyper}
    want = loop([p], grads, **hyper)
    value = cls.pure(**hyper)
    w = p.clone().requires_grad_()
    optimizer = cls([w], compile=False, **hyper)
    start, params, state = p, [p], value.init([p])
    for step in grads:
        extras = more["extras"](step) if "extras" in more else {}
        params, state = value.step(params, step, state, **extras)
        w.grad = step[0]
        optimizer.step(**extras)
    for got in (params[0], w.detach()):
        assert_moved_alike(start, got, want[0], 1e-9)


@pytest.mark.parametrize("name", few(cookbook.ROWS, QUICK))
def test_rules_are_right_in_every_way(name: str, small: None) -> None:
    hyper, more = cookbook.ROWS[name]
    loop = getattr(cookbook, name)
    check_rule(cookbook.rule_of(name), loop, compile=False, hyper=hyper, **more)


B = (0.8, 0.95)
TINY = {"betas": B, "eps": 1e-12}
# The class of pytorch_optimizer, hyperparameters, and those with other names there, which
# takes any. AdaMod, Padam, SPAM and Yogi differ from their papers in it.
PEERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adabelief": ("AdaBelief", {"betas": B, "eps": 1e-10}, {}),
    "adabound": ("AdaBound", {"betas": B, "gamma": 0.2, "final": 0.05}, {"final_lr": 0.05}),
    "aggmo": ("AggMo", {"betas": (0.0, 0.5, 0.9)}, {}),
    "came": ("CAME", {"betas": (0.9, 0.95, 0.9)}, {}),
    "diffgrad": ("DiffGrad", TINY, {}),
    "fromage": ("Fromage", {}, {}),
    "grams": ("Grams", TINY, {}),
    "grokfast": ("GrokFastAdamW", {**TINY, "alpha": 0.98}, {"normalize_lr": False}),
    "kate": ("Kate", {"eta": 0.3}, {"delta": 0.3}),
    "laprop": ("LaProp", TINY, {}),
    "lars": ("LARS", {"l2": 0.0}, {}),
    "madgrad": ("MADGRAD", {"eps": 1e-9}, {}),
    "mars": ("MARS", {"eps": 1e-12}, {}),
    "novograd": ("NovoGrad", {"eps": 1e-12}, {}),
    "pnm": ("PNM", {"momentum": 0.8, "negative": 0.7}, {"betas": (0.8, 0.7)}),
    "qhadam": ("QHAdam", {**TINY, "nus": (0.7, 0.9)}, {}),
    "qhm": ("QHM", {"momentum": 0.8, "nu": 0.6}, {}),
    "sgdp": ("SGDP", {"momentum": 0.8, "delta": 0.5}, {}),
    "signum": ("SignSGD", {"momentum": 0.8}, {}),
    "sm3": ("SM3", {"eps": 1e-30}, {}),
}


@pytest.mark.parametrize("name", PEERS)
def test_movements_are_those_of_pytorch_optimizer(name: str) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    peer, hyper, theirs = PEERS[name]
    ends: list[Tensor] = []
    drawn = torch.Generator().manual_seed(0)
    start, *gs = [torch.randn(4, 3, generator=drawn, dtype=torch.float64) for _ in range(9)]
    ours = cookbook.rule_of(name), {"compile": False, **hyper}
    for cls, options in (ours, (getattr(package, peer), {**hyper, **theirs})):
        w = start.clone().requires_grad_()
        optimizer = cls([w], lr=0.02, **options)
        for g in gs:
            w.grad = g.clone()
            optimizer.step()
        ends.append(w.detach())
    assert_moved_alike(start, *ends, 1e-5)


def test_means_before_and_of_the_direction(small: None) -> None:
    check_rule(NormedLAMB, normed_lamb, compile=False, weight_decay=0.1)


@pytest.mark.parametrize(
    ("rule", "loop", "compile"),
    [
        row(Tangent, tangent, False, id="tangent-False"),
        row(Sphere, sphere, False, id="sphere-False"),
        row(Tangent, tangent, True, id="tangent-True", tier="full"),
        row(Sphere, sphere, True, id="sphere-True", tier="night"),
    ],
)
def test_means_of_the_finished_delta(rule: Any, loop: Any, compile: bool) -> None:
    # A small move is what is left of x, and kernels round x otherwise.
    allowed = {"float32, kernels": 1e-3} if rule is Sphere and compile else {}
    check_rule(rule, loop, compile=compile, weight_decay=0.1, steps=6, allowed=allowed)


def test_rows_of_a_rule_with_numbers_of_a_step_begin_anew() -> None:
    w = torch.ones(2, 3, requires_grad=True)
    optimizer = Tangent([w], lr=0.1, compile=False)
    w.grad = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 2.0]])
    optimizer.step()
    optimizer.reset([w], rows=[0])
    for name in ("exp_avg", "former"):
        assert (optimizer.state[w][name] != 0).any(1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        row("lars", {"trust": 0.1, "l2": 0.1}, id="lars", tier="full"),
        row("kourkoutas", {}, id="kourkoutas", tier="night"),
    ],
)
def test_kernels_measure_before_the_direction(name: str, hyper: Any) -> None:
    hyper = hyper or {"hyper": cookbook.ROWS[name][0]}
    check_rule(cookbook.rule_of(name), getattr(cookbook, name), **hyper)


def test_check_rule_says_that_a_loop_is_nan() -> None:
    def divides(params: list[Tensor], grads: Any, lr: float) -> list[Tensor]:
        for g in grads:
            params = [p - lr * x / x.norm() for p, x in zip(params, g)]
        return params

    with pytest.raises(
        AssertionError, match=r"reference: .* as the loop, is NaN\. One step"
    ):
        check_rule(torch.optim.SGD, divides)
