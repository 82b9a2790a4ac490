"""Codes under transformations: vmap, derivatives, and the transforms of optimizers."""

from io import BytesIO
from typing import Any, NamedTuple

import pytest
import torch
from cases import CASES, NAMES, NO_CODES, SENSITIVE, Case, problem
from refusals import refused
from stored import BF16, same_bits
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import adamw, lion, population, sgd, transforms, unroll
from optimi_func.core.codes import Moment8, SecondMoment8, widen
from optimi_func.core.rule import Storage
from optimi_func.rules import Optimizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:eps=", "ignore:weight_decay=", "ignore:max_lr="
)
KINDS: dict[str, Any] = {
    "compact": "compact",
    "exact": Storage("exact", "8bit"),
    "kahan": Storage("kahan", "8bit"),
}


def weights(dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(128, 64, generator=generator).to(dtype)


def directions(steps: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(128, 64, generator=generator).to(dtype) for _ in range(steps)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("storage", [None, "compact", "exact"])
def test_states_load_with_weights_only(name: str, storage: Any) -> None:
    p = {"w": weights()}
    optimizer = getattr(optimi_func, name)(lr=0.1)
    state = optimizer.init(p, storage=storage)
    state = optimizer.step(p, {"w": directions(1)[0]}, state)[1]
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert pytree.tree_structure(loaded) == pytree.tree_structure(state)
    assert all(map(same_bits, pytree.tree_leaves(loaded), pytree.tree_leaves(state)))
    optimizer.step(p, p, loaded)


def test_states_of_transforms_load_with_weights_only() -> None:
    """But not of partitions and of own rules, whose leaves do."""

    class Own(Optimizer):
        class State(NamedTuple):
            exp_avg: Tensor

        def direction(self, g: Tensor, s: Any) -> Any:
            m = 0.9 * s.exp_avg + 0.1 * g
            return m, self.State(m)

    p = {"w": torch.ones(2), "v": torch.ones(2)}
    parts = transforms.partition(("w", adamw(lr=0.1)), rest=sgd(lr=0.1))
    alone = [parts, Own.pure(lr=0.1)]
    for optimizer in (
        *alone,
        transforms.ema(adamw(lr=0.1), 0.9),
        transforms.chain(
            transforms.clip_value(1.0), transforms.add_noise(0.1, seed=0), lion(lr=1)
        ),
        transforms.every_k(adamw(lr=0.1), 2),
    ):
        state = optimizer.init(p)
        file = BytesIO()
        torch.save(pytree.tree_leaves(state) if optimizer in alone else state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        given = pytree.tree_leaves(loaded), pytree.tree_leaves(state)
        assert len(given[0]) == len(given[1]) and all(map(torch.equal, *given))


# Of whose rows these are not those of CASES.
FITTING = [
    case for case in CASES if "split" not in case.options and case.name not in SENSITIVE
]


@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.id)
def test_every_option_follows_its_reference(case: Case) -> None:
    """Every decay, maximize, AMSGrad and the rest, beside the reference in float64."""
    none = case.name in NO_CODES and "momentum" not in case.options
    if none or case.name == "schedule_free_sgd" or "centered" in case.options:
        storage: Any = "exact"  # it has nothing to put in codes
    elif case.name == "adadelta":
        storage = Storage("exact", "8bit")  # its first steps are below kahan8's bits
    else:
        storage = "compact"
    # In groups of 64 that are of one size.
    start, grads = problem((128, 64), steps=15)
    p = start.to(BF16)
    given = [g.to(BF16) for g in grads]
    optimizer = case.functional()
    state = optimizer.init(p, storage=storage)
    codes = [isinstance(x, Moment8 | SecondMoment8) for x in state.leaves.rule_state]
    assert storage == "exact" or any(codes)
    start = p.double()
    for g in given:
        p, state = optimizer.step(p, g, state)
    moved = widen(p, state.leaves.kahan_comp, torch.float32)[1].double() - start
    wanted = case.reference(start, [g.double() for g in given])[-1] - start
    # Lion's sign of a mean near 0 turns.
    limit = 0.2 if case.name == "lion" else 0.05
    assert (moved - wanted).norm() < limit * wanted.norm()


# vmap


@pytest.mark.parametrize("kind", KINDS)
def test_members_step_as_each_alone(kind: str) -> None:
    p = torch.stack([weights(), 2 * weights(), -weights()])
    lrs = torch.tensor([0.1, 0.01, 0.001], dtype=torch.float64)
    members = population.init(adamw, {"w": p}, {"lr": lrs}, storage=KINDS[kind])
    q = members.state.leaves["w"].exp_avg.q
    assert q.dtype == torch.int8 and q.shape == p.shape and len(members) == 3
    alone = [({"w": x}, adamw(lr=lr)) for x, lr in zip(p, lrs)]
    states = [opt.init(x, storage=KINDS[kind]) for x, opt in alone]
    for g in directions(3):
        grads = {"w": torch.stack([g, -g, 2 * g])}
        members = population.step(adamw, members, grads)
        for i, (x, opt) in enumerate(alone):
            new, states[i] = opt.step(x, {"w": grads["w"][i]}, states[i])
            alone[i] = new, opt
    for i, ((x, _), state) in enumerate(zip(alone, states)):
        mine = population.select(members, torch.tensor([i]))
        ours = pytree.tree_map(lambda t: t[0], mine.state.leaves["w"])
        theirs = state.leaves["w"]
        a = widen(mine.params["w"][0], ours.kahan_comp, torch.float32)[1]
        b = widen(x["w"], theirs.kahan_comp, torch.float32)[1]
        assert (a - b).norm() < 2e-3 * (b - p[i].float()).norm()
        assert (ours.exp_avg.q.int() - theirs.exp_avg.q.int()).abs().max() <= 1


def test_vmap_over_gradients_alone() -> None:
    """The state of one, and the gradients of many."""
    p, (g, h) = weights(), directions(2)
    optimizer = adamw(lr=0.1)
    state = optimizer.init(p, storage="compact")
    p, state = optimizer.step(p, g, state)
    both = vmap(lambda x: optimizer.step(p, x, state))(torch.stack([g, h]))
    for i, x in enumerate((g, h)):
        one = optimizer.step(p, x, state)
        for a, b in zip(pytree.tree_leaves(both), pytree.tree_leaves(one)):
            # The count of steps is the same for all.
            assert same_bits(a[i] if a.shape[1:] == b.shape and a.dim() else a, b)


# Derivatives


@pytest.mark.parametrize("kind", [*KINDS, "kahan8", "exact float32"])
def test_differentiating_through_codes_raises(kind: str) -> None:
    storage = {
        **KINDS,
        "kahan8": Storage("kahan8", torch.float32),
        "exact float32": "exact",
    }[kind]
    p, (g, h) = weights(), directions(2)
    state = adamw(lr=0.1).init(p, storage=storage)

    def moved(lr: Tensor) -> Tensor:
        q, new = adamw(lr=lr).step(p, g, state)
        q, _ = adamw(lr=lr).step(q, h, new)
        return q.float().sum()

    def of_gradient(x: Tensor) -> Tensor:
        _, new = adamw(lr=0.1).step(p, x, state)
        return adamw(lr=0.1).step(p, h, new)[0].float().sum()

    lr, follower = torch.tensor([0.1, 0.1], dtype=torch.float64)
    follower = follower.clone().requires_grad_()
    of_lr: list[Any] = [
        lambda: grad(moved)(lr),
        lambda: jvp(moved, (lr,), (torch.ones_like(lr),)),
        lambda: moved(follower).backward(),
    ]
    for call in (
        *(of_lr if storage != KINDS["kahan"] else []),
        lambda: grad(of_gradient)(g.float()),
        lambda: jvp(of_gradient, (g.float(),), (h.float(),)),
    ):
        refused(call, (ValueError, RuntimeError), "has no derivative", [p, state])


def test_unrolled_runs_step_codes_and_have_no_derivative() -> None:
    p = {"w": weights(torch.float32)}
    batches = [{"x": x} for x in directions(3, torch.float32)]

    def loss(params: Any, batch: Any) -> Tensor:
        return ((params["w"] - batch["x"]) ** 2).sum()

    state = adamw(lr=0.1).init(p, storage=Storage(None, "8bit"))
    run = unroll(adamw(lr=0.1), loss, p, state, batches)
    assert isinstance(run.state.leaves["w"].exp_avg, Moment8) and run.state.step == 3
    wide = unroll(adamw(lr=0.1), loss, p, None, batches)
    moved = (wide.params["w"] - p["w"]).norm()
    assert (run.params["w"] - wide.params["w"]).norm() < 0.05 * moved

    def end(lr: Tensor) -> Tensor:
        last = unroll(adamw, loss, p, state, batches, hyper={"lr": lr}).params["w"]
        return last.sum()

    one = torch.tensor(1.0)
    for call in (lambda: grad(end)(one), lambda: jvp(end, (one,), (one,))):
        refused(call, (ValueError, RuntimeError), "has no derivative", [p, state])


# Transforms


TRANSFORMS: dict[str, Any] = {
    "chain": lambda base: transforms.chain(transforms.clip_global_norm(1.0), base),
    "ema": lambda base: transforms.ema(base, 0.9),
    "every_k": lambda base: transforms.every_k(base, 2),
    "partition": lambda base: transforms.partition(("w", base), rest=lion(lr=0.1)),
    "masked": lambda base: transforms.masked(base, "w"),
    "apply_if_finite": lambda base: transforms.apply_if_finite(base),
}


def coded(state: Any) -> list[Moment8]:
    found: list[Any] = []

    def look(x: Any) -> bool:
        found.append(x)
        return isinstance(x, Moment8)

    pytree.tree_flatten(state, is_leaf=look)
    return [x for x in found if isinstance(x, Moment8)]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_pass_the_storage_on(name: str) -> None:
    optimizer = TRANSFORMS[name](adamw(lr=0.01))
    params = {"w": weights(), "norm": torch.ones(64)}
    start = params["w"].float()
    state = optimizer.init(params, storage="compact")
    wide = {"w": weights().float(), "norm": torch.ones(64)}
    known = optimizer.init(wide)
    assert len(coded(state)) == 1 and not coded(known)
    spec = pytree.tree_structure(state)
    for g in directions(6):
        small = torch.ones(64)
        params, state = optimizer.step(params, {"w": g, "norm": small}, state)
        wide, known = optimizer.step(wide, {"w": g.float(), "norm": small}, known)
        assert pytree.tree_structure(state) == spec
    assert coded(state)[0].q.dtype == torch.int8 and coded(state)[0].q.any()
    moved = wide["w"] - start
    assert moved.norm() > 0.01 * start.norm()
    # Without its compensation: of a weight in bfloat16 that moves by 6 of 100.
    assert (params["w"].float() - start - moved).norm() < 0.1 * moved.norm()
    assert torch.allclose(params["norm"], wide["norm"])


def test_init_takes_the_storage_by_every_name() -> None:
    p = weights()
    for storage in ("compact", Storage("kahan8", "8bit")):
        state = optimi_func.adamw_init(p, storage=storage)
        assert state.leaves.kahan_comp.dtype == torch.int8
        assert state.leaves.exp_avg_sq.q.dtype == torch.uint8
    state = optimi_func.adamw_init(p, storage=Storage("plain", BF16))
    assert state.leaves.kahan_comp is None and state.leaves.exp_avg.dtype == BF16
