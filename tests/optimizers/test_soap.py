"""SOAP and Shampoo: their mathematics, the shapes they take, bases and when they change."""

from functools import partial
from typing import Any

import pytest
import reference
import torch
from cases import LR, assert_moved_alike, problem
from refusals import Scene, refuses
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import (
    SOAP,
    shampoo,
    soap,
    soap_init,
    soap_step,
    unroll,
)
from optimi_func.compiled import soap_step_
from optimi_func.core import math

EAGER: dict[str, Any] = {"compile": False}
DOUBLE = torch.float64


def stepped(
    p: Tensor, grads: list[Tensor], make: Any = soap, **options: Any
) -> tuple[Tensor, Any]:
    optimizer = make(**{"lr": LR, **options})
    state = optimizer.init(p)
    for g in grads:
        p, state = optimizer.step(p, g, state)
    return p, state


# Shape, options, and what the reference calls them.
ROWS: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = [
    ((6, 6), {}, {}),
    ((7, 5), {}, {}),
    ((5, 9), {"precondition_frequency": 1}, {}),
    ((7, 5), {"max_precond_dim": 5, "precondition_frequency": 3}, {}),
    ((5, 9), {"max_precond_dim": 2}, {}),
    ((1, 6), {}, {}),
    ((6,), {}, {}),
    ((), {}, {}),
    ((6,), {"precondition_1d": True}, {}),
    ((4, 3, 5), {}, {}),
    ((4, 3, 2, 2), {}, {}),
    ((4, 3, 2, 2), {"merge_dims": True, "max_precond_dim": 12}, {"merged": (12, 4)}),
    ((4, 3, 2, 2), {"merge_dims": True, "max_precond_dim": 6}, {"merged": (4, 6, 2)}),
    ((2, 3, 7, 2), {"merge_dims": True, "max_precond_dim": 6}, {"merged": (6, 7, 2)}),
    ((6, 6), {"shampoo_beta": 0.7, "betas": (0.0, 0.9), "eps": 1e-4}, {}),
    ((6, 6), {"normalize_grads": True}, {}),
    ((6, 6), {"correct_bias": False}, {}),
]


KL: dict[str, Any] = {"kl": True}
SHAMPOO: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = [
    ((5, 9), {"precondition_frequency": 1}, {}),
    ((4, 3, 5), {"graft": False}, {}),
    ((1, 6), {"shampoo_beta": 0.7}, {}),
    ((6,), {}, {}),
    ((), {}, {}),
    ((5, 9), {**KL, "precondition_frequency": 1}, {}),
    ((7, 5), {**KL, "max_precond_dim": 5, "precondition_frequency": 3}, {}),
    ((5, 9), {"max_precond_dim": 2}, {}),
    ((6,), {**KL, "precondition_1d": True}, {}),
    ((4, 3, 5), {**KL, "correct_bias": False}, {}),
    ((4, 3, 2, 2), {**KL, "merge_dims": True, "max_precond_dim": 12}, {"merged": (12, 4)}),
]


@pytest.mark.parametrize(
    ("name", "shape", "options", "called"),
    [*[("soap", *row) for row in ROWS], *[("shampoo", *row) for row in SHAMPOO]],
    ids=str,
)
def test_sixty_steps_are_the_papers(
    name: str, shape: Any, options: Any, called: Any
) -> None:
    p, grads = problem(shape, steps=60)
    own = {name: x for name, x in options.items() if name != "merge_dims"}
    loop = getattr(reference, name)
    path = loop(p, grads, lr=LR, **own, **called)
    if options:
        usual = loop(p, grads, lr=LR)[-1]
        assert (usual - path[-1]).norm() > 1e-3 * (path[-1] - p).norm()
    optimizer = getattr(optimi_func, name)(lr=LR, **options)
    now, state = p, optimizer.init(p)
    for g, want in zip(grads, path):
        now, state = optimizer.step(now, g, state)
        assert_moved_alike(p, now, want, 1e-9)


@pytest.mark.full  # 12,000 steps
def test_kl_shampoos_factors_are_those_of_the_gradients_covariance() -> None:
    """Of gradients A z B the Kronecker product of AA^T and B^TB, with the paper's 1 / n."""
    torch.manual_seed(0)
    a, b = (torch.randn(n, n, dtype=DOUBLE) + 2 * torch.eye(n) for n in (4, 6))
    optimizer = shampoo(lr=0.0, kl=True, shampoo_beta=0.999, precondition_frequency=1)
    state = optimizer.init(p := torch.zeros(4, 6, dtype=DOUBLE))
    for _ in range(12000):
        p, state = optimizer.step(p, a @ torch.randn_like(p) @ b, state)
    left, right = (
        x.view(n, n) for x, n in zip(state.leaves.factors.split([16, 36]), (4, 6))
    )
    got, want = torch.kron(left, right), torch.kron(a @ a.mT, b.mT @ b)
    assert (got - want).norm() < 0.1 * want.norm()


def test_kl_shampoos_roots_are_bounded_and_zeros_move_nothing() -> None:
    p, grads = problem((6, 4))
    for scale in (1e-3, 0.0):
        small = [scale * g for g in grads]
        options: dict[str, Any] = {"lr": LR, "kl": True, "shampoo_beta": 0.5}
        want = reference.shampoo(p, small, **options)[-1]
        assert_moved_alike(p, stepped(p, small, make=shampoo, **options)[0], want, 1e-9)
    for graft in (False, True):  # the first of which makes no roots
        late = [0 * p, *grads[:1] * 5]
        moved, _ = stepped(p, late, make=shampoo, graft=graft, weight_decay=0.0)
        assert 0 < (moved - p).abs().max() < 20 * LR


def test_the_first_gradient_makes_the_bases_and_moves_nothing_but_decay() -> None:
    p, (g, *_) = problem((6, 4))
    moved, state = stepped(p, [g], weight_decay=0.1)
    torch.testing.assert_close(moved, p * (1 - LR * 0.1), rtol=1e-15, atol=0.0)
    s = state.leaves
    assert not s.exp_avg.any() and not s.exp_avg_sq.any()
    left, right = (x.unflatten(0, (n, n)) for n, x in zip((6, 4), s.bases.split([36, 16])))
    values = left.mT @ g @ g.mT @ left
    assert (values.diagonal().diff() <= 1e-12).all()  # from the largest
    torch.testing.assert_close(values, values.diagonal().diag(), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(right.mT @ right, torch.eye(4, dtype=DOUBLE))


@pytest.fixture
def decomposed(monkeypatch: Any) -> list[str]:
    """The decompositions that were computed."""
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda x: (calls.append(name), function(x))[1]

    for name in ("eigh", "qr"):
        monkeypatch.setattr(torch.linalg, name, noted(name, getattr(torch.linalg, name)))
    return calls


WAYS: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "foreach": {"foreach": True},
    "capturable": {**EAGER, "capturable": True},
    "pure": {},
    "pure with a schedule": {"lr": lambda step: LR / (1 + step)},
}


@pytest.mark.parametrize("way", WAYS)
def test_only_every_fth_step_pays_for_other_bases(way: str, decomposed: list[str]) -> None:
    p, grads = problem((6, 4), steps=12)
    found, before, state = [], torch.zeros(()), None
    if way.startswith("pure"):
        optimizer: Any = soap(**{"lr": LR, **WAYS[way]}, precondition_frequency=4)
        state = optimizer.init(p)
    else:
        p = nn.Parameter(p)
        optimizer = SOAP([p], lr=LR, precondition_frequency=4, **WAYS[way])
    for g in grads:
        decomposed.clear()
        if way.startswith("pure"):
            p, state = optimizer.step(p, g, state)
            bases = state.leaves.bases
        else:
            p.grad = g
            optimizer.step()
            bases = optimizer.state[p]["bases"].clone()
        found.append(list(decomposed))
        assert (found[-1] == []) == torch.equal(bases, before)
        before = bases
    at = {0: ["eigh"] * 2, 4: ["qr"] * 2, 8: ["qr"] * 2}
    assert found == [at.get(i, []) for i in range(12)]


def test_every_way_is_the_pure_step() -> None:
    shapes = [(5, 4), (6, 2, 2, 2), (3,), ()]
    start = [problem(shape, steps=9) for shape in shapes]
    tree, optimizer = [p for p, _ in start], soap(lr=LR, precondition_frequency=3)
    state = optimizer.init(tree)
    for i in range(9):
        tree, state = optimizer.step(tree, [grads[i] for _, grads in start], state)
    for way in ("eager", "foreach", "capturable"):
        ps = [nn.Parameter(p.clone()) for p, _ in start]
        owner = SOAP(ps, lr=LR, precondition_frequency=3, **WAYS[way])
        for i in range(9):
            for p, (_, grads) in zip(ps, start):
                p.grad = grads[i]
            owner.step()
        assert all(map(torch.equal, ps, tree))
        for p, s in zip(ps, state.leaves):
            kept = owner.state[p]
            assert all(torch.equal(kept[k], x) for k, x in s.rule_state._asdict().items())


@pytest.mark.kernels
def test_steps_that_change_bases_take_the_kernels_of_those_that_do_not(graphs: Any) -> None:
    p, grads = problem((6, 4), steps=25)
    p = nn.Parameter(p.float())
    optimizer = SOAP([p], lr=LR, precondition_frequency=4, compile=True)
    counts: list[int] = []
    for g in grads:
        p.grad = g.float()
        optimizer.step()
        counts.append(graphs())
    assert counts[1] == counts[-1]


OTHER_SIDES: list[dict[str, Any]] = [
    {"max_precond_dim": 3},
    {"merge_dims": True, "max_precond_dim": 6},
    {"precondition_1d": True},
]


@pytest.mark.parametrize("sides", OTHER_SIDES, ids=str)
def test_soap_init_takes_the_sides_of_soap_step(sides: dict[str, Any]) -> None:
    tree = {"w": torch.ones(4, 2, 3), "b": torch.ones(5)}
    values = soap_init(tree, **sides), soap(lr=LR, **sides).init(tree), soap_init(tree)
    own, want, usual = [[x.shape for x in pytree.tree_leaves(state)] for state in values]
    assert own == want != usual
    moved, state = soap_step(tree, tree, values[0], lr=LR, **sides)
    soap_step(moved, tree, state, lr=LR, **sides)


@pytest.mark.parametrize(
    ("shape", "options", "sides"),
    [
        ((6, 4), {}, (6, 4)),
        ((6, 4), {"max_precond_dim": 4}, (4,)),
        ((6, 4), {"max_precond_dim": 3}, ()),
        ((6,), {}, ()),
        ((), {}, ()),
        ((1, 6), {}, (6,)),
        ((4, 3, 2, 2), {}, (4, 3, 2, 2)),
        ((4, 3, 2, 2), {"merge_dims": True, "max_precond_dim": 12}, (12, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE], ids=str)
def test_the_state_has_no_more_than_its_squares(
    shape: Any, options: Any, sides: Any, dtype: torch.dtype
) -> None:
    p = torch.ones(shape, dtype=dtype, requires_grad=True)
    optimizer = SOAP([p], lr=LR, **options, **EAGER)
    optimizer.init_state()
    s, squares = optimizer.state[p], sum(n * n for n in sides)
    assert s["factors"].shape == s["bases"].shape == (squares,)
    names = "exp_avg", "exp_avg_sq", "factors", "bases"
    wide = torch.promote_types(dtype, torch.float32)
    assert all(s[name].dtype == wide for name in names)
    held = sum(s[name].untyped_storage().nbytes() for name in names)
    assert held == (2 * p.numel() + 2 * squares) * wide.itemsize


@pytest.mark.parametrize(("make", "more"), [(soap, {}), (shampoo, {}), (shampoo, KL)])
def test_a_count_that_cannot_be_read(make: Any, more: Any) -> None:
    """Under vmap each member has a count and a frequency's bases of its own."""
    p, grads = problem((5, 5), steps=13)
    options: dict[str, Any] = {"precondition_frequency": 3, "make": make, **more}
    optimizer = make(lr=LR, precondition_frequency=3, **more)
    one, two = stepped(p, [], **options)[1], None
    two = one
    now, later = p, p
    for g in grads[:4]:  # the second member is four gradients ahead
        later, two = optimizer.step(later, g, two)
    both = torch.stack([now, later])
    states = pytree.tree_map(lambda *x: torch.stack(x), one, two)
    step = vmap(lambda p, g, s: optimizer.step(p, g, s))
    for i in range(9):
        both, states = step(both, torch.stack([grads[i], grads[i + 4]]), states)
    for got, steps in zip(both, (9, 13)):
        want, _ = stepped(p, grads[:steps], **options)
        assert_moved_alike(p, got, want, 1e-9)


@pytest.mark.full
def test_the_pure_step_under_torch_compile() -> None:
    p, grads = problem((5, 5), steps=8)
    options: dict[str, Any] = {"precondition_frequency": 3}
    want, _ = stepped(p, grads, **options)
    optimizer = soap(lr=LR, **options)
    step = torch.compile(optimizer.step, fullgraph=True)
    now, state = p, optimizer.init(p)
    for g in grads:
        now, state = step(now, g, state)
    assert_moved_alike(p, now, want, 1e-9)
    tree, state = {"w": p.clone()}, optimizer.init({"w": p})
    for g in grads:
        soap_step_(tree, {"w": g}, state, lr=LR, **options)
    assert_moved_alike(p, tree["w"], want, 1e-9)


def test_hypergradients_hold_the_bases_fixed() -> None:
    """They are those of differences if the gradients do not depend on the parameters."""
    p, grads = problem((4, 4), steps=6)

    def end(numbers: Tensor) -> Tensor:
        lr, decay, b1, b2, eps = numbers.unbind()
        hyper = {"lr": lr, "weight_decay": decay, "betas": (b1, b2), "eps": eps}
        fixed: dict[str, Any] = {"precondition_frequency": 2, "shampoo_beta": 0.9}

        def make(**given: Any) -> Any:
            return soap(**given, **fixed)

        run = unroll(make, lambda w, g: (w * g).sum(), p, None, grads, hyper=hyper)
        return (run.params * p.cos()).sum()

    at = torch.tensor([0.05, 0.1, 0.8, 0.9, 1e-3], dtype=DOUBLE)
    steps = 1e-6 * torch.eye(5, dtype=DOUBLE)
    want = torch.stack([(end(at + h) - end(at - h)) / 2e-6 for h in steps])
    assert (want.abs() > 1e-4).all()
    torch.testing.assert_close(grad(end)(at), want, rtol=1e-5, atol=1e-7)
    forward = [jvp(end, (at,), (1e6 * h,))[1] for h in steps]
    torch.testing.assert_close(torch.stack(forward), want, rtol=1e-5, atol=1e-7)
    twice = grad(lambda x: grad(end)(x).square().sum())(at)
    assert twice.isfinite().all()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(16, 3))


def train(net: nn.Module, optimizers: Any, steps: range) -> list[Tensor]:
    for i in steps:
        torch.manual_seed(i)
        x = torch.randn(5, 2, 3, 3, dtype=next(net.parameters()).dtype)
        net(x).square().mean().backward()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


OPTIONS: dict[str, Any] = {"lr": 0.05, "precondition_frequency": 2, **EAGER}


REFUSED = {
    "SOAP([w], storage=Storage(moments='8bit')).init_state()": (
        "soap keeps no moments in 8 bits"
    ),
    "soap_init(w, max_precond_dim=0)": "max_precond_dim=0: allowed are",
    # Other sides have other squares, which are not cut to fit.
    "optimizer.param_groups[0]['max_precond_dim'] = 3; optimizer.step()": (
        r"\['factors'\] has shape \(28,\).*\(12,\)"
    ),
}


@refuses(REFUSED)
def test_what_it_refuses() -> Scene:
    net, w = model(), torch.ones(4, 2, requires_grad=True)
    optimizer = SOAP(net.parameters(), **OPTIONS)
    train(net, optimizer, range(3))
    for x in net.parameters():
        x.grad = torch.ones_like(x)
    return locals()


BAD = {
    "precondition_frequency=0": "precondition_frequency=0: allowed are",
    "precondition_frequency=2.0": r"precondition_frequency=2\.0: allowed",
    "max_precond_dim=0": "max_precond_dim=0: allowed are whole numbers",
    "max_precond_dim=None": "max_precond_dim=None: allowed are whole",
    "merge_dims='yes'": "TypeError: merge_dims='yes': allowed are True and False",
    "cautious=True": "soap does not go with the hook cautious",
}


@pytest.mark.parametrize("make", [soap, partial(SOAP, [torch.ones(4, 2)])])
@refuses({f"make(lr=0.1, {options})": text for options, text in BAD.items()})
def test_options_that_are_none(make: Any) -> Scene:
    return {"make": make}


def test_what_is_not_finite_raises_nothing_and_shows() -> None:
    """As with every optimizer; eigh would raise after others have moved."""
    for bad in (float("nan"), float("inf")):
        p, good = nn.Parameter(torch.eye(3)), nn.Parameter(torch.eye(3))
        optimizer = SOAP([good, p], lr=LR, **EAGER)
        for _ in range(12):
            p.grad, good.grad = torch.full((3, 3), bad), torch.eye(3)
            optimizer.step()
        assert p.isnan().all() and good.isfinite().all()


@pytest.mark.parametrize("way", ["an error", "NaN"])
def test_eigenvectors_that_do_not_converge_are_computed_in_float64(
    way: str, monkeypatch: Any
) -> None:
    p, grads = problem((5, 5), steps=4)
    p, grads = p.float(), [g.float() for g in grads]
    want, _ = stepped(p, grads)
    eigh = torch.linalg.eigh

    def fails(x: Tensor) -> Any:
        if x.dtype == torch.float32 and way == "an error":
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        values, vectors = eigh(x)
        # As of factors with many rows of zeros, by LAPACK.
        return values, vectors / (0.0 if x.dtype == torch.float32 else 1.0)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    got, state = stepped(p, grads)
    assert state.leaves.bases.dtype == torch.float32
    assert_moved_alike(p, got, want, 1e-4)


def test_factors_by_panels_are_the_whole(monkeypatch: Any) -> None:
    start, grads = problem((12, 12), steps=25)

    def moved() -> Tensor:
        p = nn.Parameter(start.clone())
        optimizer = SOAP([p], lr=LR, compile=False)
        for g in grads:
            p.grad = g
            optimizer.step()
        return p.detach()

    before = moved()
    monkeypatch.setattr(math, "_PANELS", 3)
    assert_moved_alike(start, moved(), before, 1e-9)


def test_bases_are_never_bfloat16() -> None:
    p, grads = problem((8, 8), steps=12)
    wanted, _ = stepped(p.bfloat16().double(), [g.bfloat16().double() for g in grads])
    got, state = stepped(p.bfloat16(), [g.bfloat16() for g in grads])
    exact = got.double() + state.leaves.kahan_comp.double()
    assert_moved_alike(p.bfloat16(), exact, wanted, 1e-3)
    q = state.leaves.bases.split(64)[0].view(8, 8)
    torch.testing.assert_close(q.mT @ q, torch.eye(8), rtol=0.0, atol=1e-5)
