"""Complex leaves in pure steps: derivatives, vmap, graphs, kernels, transforms."""

from typing import Any

import pytest
import torch
from cases import ELEMENTWISE, FACTORIES, MAPPED
from refusals import Scene, refuses
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import adamw, compiled, transforms, unroll

Tree = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.complex64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


P = {"w": drawn(4, 3), "b": drawn(4, 3, seed=1).real.contiguous(), "c": drawn(5, seed=2)}
G = {"w": drawn(4, 3, seed=3).conj(), "b": P["b"] * 2, "c": drawn(5, seed=4)}


def pairs(tree: Any) -> Any:
    """A copy of a tree, of real numbers."""
    return pytree.tree_map_only(
        Tensor,
        lambda x: (
            torch.view_as_real(x.resolve_conj()).clone() if x.is_complex() else x.clone()
        ),
        tree,
    )


def stepped(optimizer: Any, params: Any, grads: Any, steps: int = 4, **how: Any) -> Any:
    state = optimizer.init(params, **how)
    for _ in range(steps):
        params, state = optimizer.step(params, grads, state)
    return params, state


def assert_same(ours: Any, theirs: Any) -> None:
    for x, y in zip(
        pytree.tree_leaves(pairs(ours)), pytree.tree_leaves(theirs), strict=True
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_are_those_of_real_pairs_bit_for_bit(name: str) -> None:
    optimizer = (FACTORIES.get(name) or getattr(optimi_func, name))(lr=0.02)
    params, state = stepped(optimizer, P, G)
    theirs, kept = stepped(optimizer, pairs(P), pairs(G))
    assert_same(params, theirs)
    assert_same(state, kept)
    assert params["w"].is_complex() and not params["b"].is_complex()
    assert_same(optimizer.eval_params(params, state), optimizer.eval_params(theirs, kept))


def test_a_step_writes_to_nothing_and_shares_nothing() -> None:
    params, grads, state = pairs(P), pairs(G), adamw(lr=0.02).init(P)
    before, sgd = pairs(state), optimi_func.sgd(lr=0.1, momentum=0.9)
    new, _ = adamw(lr=0.02).step(P, G, state)
    assert_same((P, G), (params, grads))
    assert_same(state, before)
    assert new["w"].data_ptr() != P["w"].data_ptr()
    # Ranger returns its slow weights unchanged at most steps.
    for optimizer in (optimi_func.ranger(lr=0.1), sgd):
        _, first = stepped(optimizer, P, G, 2)
        _, second = optimizer.step(P, G, first)
        known = {x.data_ptr() for x in pytree.tree_leaves(first.leaves)}
        assert known.isdisjoint([x.data_ptr() for x in pytree.tree_leaves(second.leaves)])


def test_members_of_any_axis_are_steps_of_one() -> None:
    optimizer = adamw(lr=0.02)
    (one, _), factors = stepped(optimizer, P, G, 1), torch.tensor([1.0, 3.0])
    for dim in (0, -1):
        params = pytree.tree_map(lambda x, d=dim: torch.stack([x, x], d), P)
        grads = pytree.tree_map(lambda x, d=dim: torch.stack([x, 2 * x], d), G)
        step = lambda p, g, lr: stepped(adamw(lr=lr), p, g, 1)  # noqa: E731
        found, state = vmap(step, in_dims=(dim, dim, 0), out_dims=(dim, 0))(
            params, grads, 0.02 * factors
        )
        for name, x in one.items():
            torch.testing.assert_close(found[name].select(dim, 0), x)
        assert state.leaves["w"].exp_avg.shape == (2, 4, 3)


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw", "lamb"])
def test_derivatives(name: str) -> None:
    p, g = drawn(3, dtype=torch.complex128), drawn(3, seed=1, dtype=torch.complex128)

    def after(p: Tensor, g: Tensor, lr: Tensor) -> Tensor:
        q, _ = stepped(getattr(optimi_func, name)(lr=lr, weight_decay=0.1), p, g * p, 2)
        return (q * q.abs()).real.sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    given = [x.clone().requires_grad_() for x in (p, g, lr)]
    assert torch.autograd.gradcheck(after, given)
    real = grad(lambda p, g, lr: after(*map(torch.view_as_complex, (p, g)), lr), (0, 1, 2))
    ours, theirs = grad(after, (0, 1, 2))(p, g, lr), real(*pairs((p, g)), lr)
    for x, y in zip(pairs(ours), theirs):
        torch.testing.assert_close(x, y)
    assert ours[0].abs().min() > 0 and ours[2].abs() > 0


def test_unrolled_steps_differentiate() -> None:
    start = {"w": drawn(3, dtype=torch.complex128)}
    batches = [drawn(3, seed=i, dtype=torch.complex128) for i in range(4)]

    def loss(params: Tree, x: Tensor) -> Tensor:
        return (params["w"] * x - 1).abs().square().sum()

    def outer(lr: Tensor, w: Tensor) -> Tensor:
        state = adamw(lr=0.1).init(start)
        done = unroll(adamw, loss, {"w": w}, state, batches, hyper={"lr": lr})
        return done.params["w"].abs().sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    slopes = grad(outer, (0, 1))(lr, start["w"])
    assert slopes[1].abs().min() > 0
    _, along = jvp(lambda w: outer(lr, w), (start["w"],), (batches[1],))
    torch.testing.assert_close(along, (slopes[1].conj() * batches[1]).real.sum())


AROUND: dict[str, Any] = {
    "global norm": lambda: transforms.chain(
        transforms.clip_global_norm(0.5), adamw(lr=0.02)
    ),
    "param norm": lambda: transforms.chain(
        transforms.clip_param_norm(torch.tensor(0.5)), adamw(lr=0.02)
    ),
    "noise": lambda: transforms.chain(transforms.add_noise(0.1, seed=0), adamw(lr=0.02)),
    "every_k": lambda: transforms.every_k(adamw(lr=0.02), 2),
    "finite": lambda: transforms.apply_if_finite(adamw(lr=0.02)),
    "ema": lambda: transforms.ema(adamw(lr=0.02), 0.9),
}


@pytest.mark.parametrize("name", AROUND)
def test_transforms_are_those_of_real_pairs(name: str) -> None:
    optimizer, usual = AROUND[name](), stepped(adamw(lr=0.02), P, G)[0]
    params, state = stepped(optimizer, P, G)
    theirs, kept = stepped(optimizer, pairs(P), pairs(G))
    assert_same(params, theirs)
    assert_same(state, kept)
    if name in ("noise", "every_k"):
        assert not torch.equal(params["w"], usual["w"])


def test_centralized_gradients_lose_their_complex_mean() -> None:
    sgd = optimi_func.sgd(lr=1.0)
    optimizer = transforms.chain(transforms.centralize(), sgd)
    params, _ = stepped(optimizer, P, G, 1)
    wanted = G["w"] - G["w"].mean(1, keepdim=True)
    torch.testing.assert_close(P["w"] - params["w"], wanted.resolve_conj())


REFUSED = {
    "clipped.step(P, G, clipped.init(P))": "TypeError: clip_value of a complex gradient",
    "value.step(P, {**G, 'w': torch.ones(4, 3)}, state)": (
        r"TypeError: grads\['w'\] has dtype torch.float32: .* complex"
    ),
    "value.step(P, {**G, 'b': drawn(4, 3)}, state)": (
        r"TypeError: grads\['b'\] has dtype torch.complex64: .* floating"
    ),
    **{
        f"optimi_func.{name}(lr=0.1).init({{'w': drawn(4, 4)}})": (
            r"TypeError: params\['w'\] has dtype torch.complex64: .* maps"
        )
        for name in MAPPED
    },
}


@refuses(REFUSED)
def test_what_complex_leaves_are_refused() -> Scene:
    value, clipped = (
        adamw(lr=0.1),
        transforms.chain(transforms.clip_value(0.1), adamw(lr=0.1)),
    )
    return {"value": value, "clipped": clipped, "state": value.init(P)}


def test_a_graph_takes_the_step() -> None:
    optimizer = adamw(lr=0.02)
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    found, state = step(P, G, optimizer.init(P))
    wanted, kept = stepped(optimizer, P, G, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert state.leaves["w"].exp_avg.dtype == kept.leaves["w"].exp_avg.dtype


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation")
def test_inductor_takes_the_step_and_refuses_a_training_step() -> None:
    optimizer = adamw(lr=0.02)
    wanted, _ = stepped(optimizer, P, G, 1)
    found, _ = torch.compile(optimizer.step, fullgraph=True)(P, G, optimizer.init(P))
    torch.testing.assert_close(found["w"], wanted["w"])
    members = vmap(lambda p, g: stepped(optimizer, p, g, 1)[0])
    given = pytree.tree_map(lambda x: torch.stack([x, x]), (P, G))
    found = torch.compile(members, fullgraph=True)(*given)
    torch.testing.assert_close(found["w"][1], wanted["w"])
    model = torch.nn.Linear(3, 2, dtype=torch.complex64)
    before = model.weight.detach().clone()
    for made in (optimi_func.AdamW(model.parameters(), lr=0.1), adamw(lr=0.1)):
        step: Any = compiled.train_step(model, lambda y, x: y.abs().sum(), made)
        given = (drawn(4, 3),) if not hasattr(step, "init") else (step.init(), drawn(4, 3))
        with pytest.raises(
            TypeError, match=r"params\['weight'\] has dtype torch.complex64"
        ):
            step(*given)
    assert torch.equal(model.weight, before)


@pytest.mark.kernels
def test_kernels_step_trees_into_new_tensors_and_in_place() -> None:
    optimizer = adamw(lr=0.02)
    wanted, kept = stepped(optimizer, P, G, 3)
    params, state = P, optimizer.init(P)
    for _ in range(3):
        params, state = compiled.step(optimizer, params, G, state)
    own, at = pytree.tree_map(torch.clone, P), optimizer.init(P)
    places = [x.data_ptr() for x in own.values()]
    for _ in range(3):
        own, at = compiled.step_(optimizer, own, G, at)
    for found, mine in ((params, state), (own, at)):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            mine.leaves["w"].exp_avg_sq, kept.leaves["w"].exp_avg_sq, rtol=1e-5, atol=1e-9
        )
    assert [x.data_ptr() for x in own.values()] == places and own["w"]._version > 0
    assert_same(P, pairs(P))
