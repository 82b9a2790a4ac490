"""Weights that are rounded at random: means, bits, every executor, resuming, refusals."""

import math
from typing import Any

import pytest
import torch
from refusals import Scene, refuses
from stored import BF16, gradients, made, train
from torch import Tensor

import optimi_func
from optimi_func import AdamW, Storage, adamw, compiled, prepare_for_gradient_release, sgd
from optimi_func.core.codes import round_randomly
from optimi_func.core.philox import Noise, drawn
from optimi_func.execution.cpp import native

F16, F32 = torch.float16, torch.float32
RANDOM = Storage("stochastic", F32)
EVERY = torch.arange(1 << 16, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("x", [1.0017, -3.1416, 1.99999, -2.3e-5, 3e-8, 6.0977e-5, 4.0])
def test_the_mean_over_all_bits_is_the_number(dtype: torch.dtype, x: float) -> None:
    wide = torch.tensor(x)
    found = round_randomly(wide.expand(len(EVERY)), dtype, EVERY).double()
    below, above = found.min(), found.max()
    # Next to each other, in the middle of which nothing is.
    assert ((found == below) | (found == above)).all() and below <= wide <= above
    middle = ((below + above) / 2).to(dtype).double()
    assert middle in (below, above)
    spacing = max(float(above - below), 1e-30)
    assert abs(float(found.mean() - wide.double())) < 1e-3 * spacing
    assert (below == above) == (wide == wide.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_has_no_neighbours_stays(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for x in (0.0, -0.0, math.inf, -math.inf, most, -most, most * (1 + 1e-6)):
        found = round_randomly(torch.full((1 << 16,), x), dtype, EVERY)
        assert (found == torch.tensor(x).to(dtype)).all(), x
    patterns = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    for bits in (0, 0xFFFF):
        all_alike = torch.full((4,), bits, dtype=torch.int32)
        assert round_randomly(patterns.view(F32), dtype, all_alike).isnan().all()
    # What rounds to an infinity by itself may do so.
    assert round_randomly(torch.full((1 << 16,), 3.4e38), dtype, EVERY).isinf().any()


def test_a_million_draws_are_unbiased_and_apart() -> None:
    p = torch.ones(1_000_000, dtype=BF16)
    step, share = sgd(lr=1.0).step, 0.3 * 2.0**-7
    grads = torch.full((1_000_000,), -share)
    seen: list[Tensor] = []
    for seed, steps in ((0, 1), (1, 1), (0, 2)):
        state = sgd(lr=1.0).init([p, p], storage=Storage("stochastic", seed=seed))
        for _ in range(steps):
            (a, b), state = step([p, p], [grads, grads], state)
        assert abs(float(a.double().mean()) - 1.0 - share) < 1e-3 * 2.0**-7
        seen += [a, b]
    # Apart by seed, step and place; both up with a probability of 0.3 * 0.3.
    for i, x in enumerate(seen):
        for y in seen[:i]:
            both = ((x > 1) & (y > 1)).double().mean()
            assert abs(float(both) - 0.09) < 2e-3
    pairs = (seen[0][1:] > 1) & (seen[0][:-1] > 1)
    assert abs(float(pairs.double().mean()) - 0.09) < 2e-3


def test_bits_are_those_of_the_element_alone() -> None:
    """Not of what is drawn together, nor of the numbers z; and each bit is fair."""
    p, q = torch.empty(300_001), torch.empty(7, 5)
    (one,) = drawn([Noise(3, 8, 1, p, torch.int32)], F32)
    z, two, three = drawn(
        [Noise(3, 8, 1, p), Noise(3, 8, 1, p, torch.int32), Noise(3, 8, 2, q, torch.int32)],
        F32,
    )
    assert torch.equal(one, two) and z.dtype == F32 and three.shape == (7, 5)
    assert one.min() >= 0 and one.max() < 1 << 16
    for i in range(16):
        assert abs(float((one >> i & 1).double().mean()) - 0.5) < 5e-3
    (start,) = drawn([Noise(3, 8, 1, p[:35], torch.int32)], F32)
    assert torch.equal(one[:35], start) and not torch.equal(three.flatten(), start)


def test_bits_in_c_are_those_of_torch() -> None:
    functions = native()
    assert functions is not None
    for n, seed, step, place in ((1, 0, 0, 0), (300_007, 2**63 - 1, 2**40 + 3, 70_000)):
        (wanted,) = drawn([Noise(seed, step, place, torch.empty(n), torch.int32)], F32)
        found = torch.empty(n, dtype=torch.int32)
        functions.draw_bits(found.data_ptr(), n, seed, step, place, 2)
        assert torch.equal(found, wanted)


def test_small_steps_are_kept_on_average() -> None:
    """Against float64: plain bfloat16 does not move at all."""
    ends: dict[str, Tensor] = {}
    for param, dtype in (("plain", BF16), ("stochastic", BF16), ("plain", torch.float64)):
        p = torch.ones(4096, dtype=dtype, requires_grad=True)
        storage = Storage(param, None if dtype != BF16 else F32)
        optimizer = AdamW([p], lr=1e-4, storage=storage, compile=False)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[f"{param} {dtype}"] = p.detach().double()
        assert "kahan_comp" not in optimizer.state[p]
    plain, ours, exact = ends.values()
    assert (plain == 1).all()
    assert float(ours.mean() - 1) == pytest.approx(float(exact.mean() - 1), rel=0.03)


def flips(ps: list[Tensor], qs: list[Tensor]) -> float:
    """The share of elements that differ."""
    a, b = (torch.cat([x.detach().flatten() for x in xs]) for xs in (ps, qs))
    return float((a != b).double().mean())


def by_class(steps: int = 4, name: str = "adamw", **options: Any) -> list[Tensor]:
    ps, optimizer = made(name, RANDOM, BF16, **options)
    train(optimizer, ps, gradients(steps))
    return ps


@pytest.mark.parametrize("name", ["adamw", "muon", "stableadamw", "soap"])
def test_every_eager_way_rounds_alike(name: str) -> None:
    ours, foreach = by_class(name=name), by_class(name=name, foreach=True, compile=None)
    assert flips(ours, foreach) == 0
    factory = getattr(optimi_func, name)
    ps, _ = made(name, RANDOM, BF16)
    value, tree = factory(lr=0.01), [p.detach() for p in ps]
    state = value.init(tree, storage=RANDOM)
    for some in gradients(4):
        grads = [g.reshape(p.shape) for g, p in zip(some, tree)]
        tree, state = value.step(tree, grads, state)
    assert flips(tree, ours) < 1e-3
    plain, optimizer = made(name, Storage("plain", F32), BF16)
    train(optimizer, plain, gradients(4))
    assert flips(ours, plain) > 0.1


@pytest.mark.full
def test_kernels_round_alike() -> None:
    """They may differ in the last bit of float32, and then seldom in one of bfloat16."""
    ours = by_class()
    assert flips(by_class(compile=True), ours) < 1e-3
    for step in (compiled.adamw_step, compiled.adamw_step_):
        ps, _ = made("adamw", RANDOM, BF16)
        tree: Any = [p.detach() for p in ps]
        state = adamw(lr=0.01).init(tree, storage=RANDOM)
        for i, grads in enumerate(gradients(4)):
            known = tree if i else [*tree]
            tree, state = step(known, grads, state, lr=0.01)
        assert flips(tree, ours) < 1e-3
        assert {int(leaf.kahan_comp) for leaf in state.leaves} == {0}


def test_a_release_rounds_alike() -> None:
    model = torch.nn.Linear(64, 64).to(BF16)
    twin = torch.nn.Linear(64, 64).to(BF16)
    twin.load_state_dict(model.state_dict())
    for x, release in ((model, False), (twin, True)):
        options = {"storage": RANDOM, "compile": False, "gradient_release": release}
        optimizer = AdamW(x.parameters(), lr=1e-4, **options)
        handle = prepare_for_gradient_release(x, optimizer) if release else None
        for i in range(3):
            x(torch.full((2, 64), i + 1.0, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del handle
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_resumes_bit_for_bit_in_a_class_and_as_a_value() -> None:
    grads = gradients(6)
    seeded = RANDOM._replace(seed=5)
    ps, optimizer = made("adamw", seeded, BF16)
    train(optimizer, ps, grads[:3])
    qs, other = made("adamw", seeded, BF16)
    for p, q in zip(ps, qs):
        q.data.copy_(p.data)
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    assert "seed=5" in saved["param_groups"][0]["storage"]
    named = AdamW(list(zip("abcdef", qs)), lr=0.01, storage=seeded, compile=False)
    named.load_state_dict(other.state_dict())
    value, state = named.functional()
    tree = {name: q.detach().clone() for name, q in zip("abcdef", qs)}
    for x, params in ((optimizer, ps), (other, qs)):
        train(x, params, grads[3:])
    assert all(map(torch.equal, ps, qs))
    for some in grads[3:]:
        tree, state = value.step(tree, dict(zip("abcdef", some)), state)
    assert flips([*tree.values()], ps) < 1e-3
    assert {int(leaf.kahan_comp) for leaf in state.leaves.values()} == {5}
    named.load_functional(state, tree)
    assert "kahan_comp" not in named.state[qs[0]]
    rs, unlike = made("adamw", RANDOM, BF16)
    train(unlike, rs, grads)
    assert flips(ps, rs) > 0.1
    assert "bfloat16 stochastic" in optimizer.describe()


SEEDS = ("-1", "1.0", "True", "1 << 63")
REFUSED = {
    "adamw().init(p, storage=RANDOM)": "no parameter is bfloat16 or float16",
    "AdamW([low], storage=RANDOM, kahan_sum=True)": "choose one way",
    "torch.autograd.functional.jacobian(loss, torch.ones(3))": "stochastic",
    **{
        f"adamw().init(p, storage=Storage('stochastic', seed={seed}))": (r"storage\.seed=")
        for seed in SEEDS
    },
}


@refuses(REFUSED)
def test_what_cannot_honour_it_raises() -> Scene:
    p = torch.ones(3)
    low = p.to(BF16)
    state = sgd(lr=0.1).init(low, storage=RANDOM)

    def loss(g: Tensor) -> Tensor:
        return sgd(lr=0.1).step(low, g, state)[0].sum()

    return locals()
