"""Cautious updates: what moves, who refuses, and what the mask is taken over."""

from typing import Any

import pytest
import torch
from cases import CLASSES, ELEMENTWISE, SCHEDULE_FREE, assert_moved_alike
from refusals import Scene, refuses
from torch import Tensor
from torch.func import vmap

import optimi_func
from optimi_func import AdamW, Mixed, adamw, muon, prepare_for_gradient_release

EAGER: dict[str, Any] = {"compile": False}


def stepped(optimizer: Any, ps: list[Tensor], grads: list[list[Tensor]]) -> None:
    for step in grads:
        for p, g in zip(ps, step):
            p.grad = g.clone()
        optimizer.step()


def test_where_nothing_agrees_weights_decay_and_nothing_else() -> None:
    p = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = AdamW([p], lr=0.1, weight_decay=0.5, cautious=True, **EAGER)
    stepped(optimizer, [p], [[torch.ones_like(p)]])
    before = p.detach().clone()
    # The mean still points the other way.
    stepped(optimizer, [p], [[torch.full_like(p, -0.01)]])
    assert torch.allclose(p, before * (1 - 0.1 * 0.5), rtol=1e-15)


def test_the_elements_that_agree_move_further() -> None:
    """By one over their share, but by no more than 1000 times."""
    signs = torch.ones(4096, dtype=torch.float64)
    signs[0] = -1.0
    for numel, factor in ((4, 4.0), (4096, 1000.0)):
        moves = []
        for cautious in (False, True):
            p = torch.zeros(numel, dtype=torch.float64, requires_grad=True)
            optimizer = AdamW([p], lr=0.1, weight_decay=0.0, cautious=cautious, **EAGER)
            first = torch.ones_like(p)
            stepped(optimizer, [p], [[first]])
            before = p.detach().clone()
            stepped(optimizer, [p], [[-0.01 * signs[:numel]]])
            moves.append(p.detach() - before)
        plain, masked = moves
        assert torch.allclose(masked[0], factor * plain[0], rtol=1e-12)
        assert not masked[1:].any()


MIXES = r"muon .* hook cautious\(\): its direction.* mixes the elements"


@refuses(
    {
        "muon(lr=0.1, cautious=True)": MIXES,
        "Muon([w], cautious=True)": MIXES,
        "Muon([{'params': [w], 'cautious': True}])": MIXES,
    }
)
def test_a_rule_that_maps_matrices_refuses() -> Scene:
    return {"w": torch.ones(4, 3, requires_grad=True)}


def test_the_part_of_a_mixture_that_is_elementwise_may_be() -> None:
    w, bias = torch.ones(4, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    parts = ("w", muon(lr=0.1)), ("b", adamw(lr=0.1, cautious=True))
    optimizer = Mixed([("w", w), ("b", bias)], *parts, **EAGER)
    assert [g["cautious"] for g in optimizer.param_groups] == [False, True]


@pytest.mark.parametrize("way", [EAGER, {"foreach": True}], ids=["eager", "foreach"])
def test_groups_of_one_optimizer_differ(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ps = [torch.randn(5, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    qs = [p.detach().clone().requires_grad_() for p in ps]
    grads = [[torch.randn_like(p) for p in ps] for _ in range(5)]
    groups = [{"params": [ps[0]], "cautious": True}, {"params": [ps[1]]}]
    stepped(AdamW(groups, lr=0.1, **way), ps, grads)
    for i, cautious in enumerate((True, False)):
        alone = AdamW([qs[i]], lr=0.1, cautious=cautious, **way)
        stepped(alone, [qs[i]], [[g[i]] for g in grads])
        assert torch.equal(ps[i], qs[i])
    assert not torch.equal(ps[0] - qs[1], torch.zeros_like(ps[0]))


@pytest.mark.parametrize("name", [*SCHEDULE_FREE, "prodigy"])
def test_a_rule_along_the_gradient_refuses(name: str) -> None:
    why = (
        r"hook cautious\(\): its direction has sums"
        if name == "prodigy"
        else "always has the gradient's sign"
    )
    with pytest.raises(ValueError, match=why):
        getattr(optimi_func, name)(lr=0.1, cautious=True)


@pytest.mark.parametrize(
    "name", [x for x in ELEMENTWISE if x not in (*SCHEDULE_FREE, "prodigy")]
)
def test_members_of_a_population_have_masks_of_their_own(name: str) -> None:
    torch.manual_seed(0)
    more = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = getattr(optimi_func, name)(lr=0.1, cautious=True, **more)
    params = torch.randn(3, 4, 2, dtype=torch.float64)
    grads = torch.randn(4, 3, 4, 2, dtype=torch.float64)
    together, state = params, vmap(optimizer.init)(params)
    for g in grads:
        together, state = vmap(optimizer.step)(together, g, state)
    for i, p in enumerate(params):
        alone, own = p, optimizer.init(p)
        for g in grads[:, i]:
            alone, own = optimizer.step(alone, g, own)
        assert_moved_alike(p, together[i], alone, 1e-12)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_gradient_release_takes_the_same_steps(name: str) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        CLASSES[name](
            m.parameters(), lr=0.1, cautious=True, gradient_release=released, **EAGER
        )
        for m, released in zip(models, (True, False))
    ]
    prepare_for_gradient_release(models[0], optimizers[0])
    for _ in range(4):
        x = torch.randn(8, 4, dtype=torch.float64)
        for model, optimizer in zip(models, optimizers):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(p, q)


def test_a_gradient_that_only_the_state_has_is_refused() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), lr=0.1, gradient_release=True, **EAGER)
    optimizer.param_groups[0]["cautious"] = True
    optimizer.param_groups[0]["cautious"] = False
    handle = prepare_for_gradient_release(model, optimizer, accumulation="states")
    optimizer.param_groups[0]["cautious"] = True
    with pytest.raises(ValueError, match=r"'states' with the hook cautious"):
        model(torch.randn(8, 4)).square().mean().backward()
    handle.remove()


@pytest.mark.full
def test_kernels_measure_masks_by_the_step_of_each_parameter() -> None:
    """A parameter that has had no gradient before shares its kernel with another."""
    drawn, ends = torch.Generator().manual_seed(0), list[Tensor]()
    start, *gs = torch.randn(31, 100, 100, generator=drawn).unbind()
    for how in ({"compile": True}, EAGER):
        ps = [start.clone().requires_grad_() for _ in range(2)]
        optimizer = optimi_func.NAdam(ps, lr=0.1, cautious=True, **how)
        for i, g in enumerate(gs):
            ps[0].grad, ps[1].grad = g.clone(), g.clone() if i >= 28 else None
            optimizer.step()
        ends.append(ps[1].detach())
    assert_moved_alike(start, *ends, 1e-5)
