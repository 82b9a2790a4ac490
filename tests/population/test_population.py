"""Populations: members equal models trained alone, in one graph; indexing; bad input."""

import functools
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import (
    ITERATED,
    NAMES,
    SCHEDULE_FREE,
    SENSITIVE,
    TOLERANCE,
    TORCHS,
    assert_moved_alike,
    count_betas,
)
from refusals import Scene, refuses
from tiers import few
from torch import nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

import optimi_func
from optimi_func import adamw, population, sgd, transforms
from optimi_func.core.rule import Storage
from optimi_func.population import Population

DOUBLE = torch.float64
LRS = torch.tensor([0.05, 0.1, 0.2], dtype=DOUBLE)
DECAYS = torch.tensor([0.0, 0.1, 0.2], dtype=DOUBLE)


def numbers_of(name: str) -> dict:
    """Return all hyperparameters of a rule, different for each of three members."""
    hyper = {"lr": LRS, "weight_decay": DECAYS}
    if name == "sgd":
        return {**hyper, "momentum": torch.tensor([0.0, 0.5, 0.9], dtype=DOUBLE)}
    if name == "kron":  # each of the last two decides of some steps whether they fit
        own = [[0.0, 0.5, 0.9], [0.1, 0.3, 0.5], [0.6, 0.6, 0.7], [2.0, 3.0, 6.5]]
        names = "precond_lr", "precond_update_prob", "precond_flat_start"
        numbers = zip(("momentum", *names), torch.tensor(own, dtype=DOUBLE))
        return {**hyper, **dict(numbers)}
    if name in ITERATED:  # an eps above every norm
        momentum, eps = torch.tensor([[0.0, 0.5, 0.9], [50, 70, 90]], dtype=DOUBLE)
        hyper |= {"row_beta": momentum + 0.05} if name == "normuon" else {}
        return {**hyper, "momentum": momentum, "eps": eps}
    if name in TORCHS and not count_betas(name):
        a, b = torch.tensor([[0.5, 0.7, 0.9], [0.0, 2.0, 4.0]], dtype=DOUBLE)
        sizes = (0.8 * LRS, 1.1 * LRS)
        own = {
            "rmsprop": {"alpha": a, "eps": 0.1 * a, "momentum": DECAYS},
            "adagrad": {"lr_decay": a, "eps": 0.1 * a},
            "adadelta": {"rho": a, "eps": 0.1 * a},
            "asgd": {"lambd": a, "alpha": a, "t0": b},
            "rprop": {"step_sizes": sizes, "weight_decay": DECAYS},
        }
        return hyper | own[name]
    if name == "adafactor":
        numbers = torch.tensor([[1e-3, 1e-2, 0.1], [0.1, 0.2, 0.3]], dtype=DOUBLE)
        own = {"eps": (numbers[0], 20 * numbers[1]), "clip_threshold": numbers[1]}
        return {**hyper, **own, "decay_rate": -numbers[1], "beta1": DECAYS}
    if name in SCHEDULE_FREE:
        powers = torch.tensor([[0.0, 0.5, 1.0], [0.0, 1.0, 2.0]], dtype=DOUBLE)
        hyper |= {"r": powers[0], "weight_lr_power": powers[1]}
        if name != "schedule_free_radam":
            hyper["warmup_steps"] = torch.tensor([0.0, 5.0, 20.0], dtype=DOUBLE)
    if name == "schedule_free_sgd":  # 0 is refused, as in the betas of the others
        return {**hyper, "momentum": torch.tensor([0.1, 0.5, 0.9], dtype=DOUBLE)}
    betas = torch.tensor(
        [[0.0, 0.5, 0.9], [0.8, 0.9, 0.95], [0.9, 0.8, 0.95]], dtype=DOUBLE
    )
    if name in SCHEDULE_FREE:
        betas[0, 0] = 0.1
    hyper["betas"] = tuple(betas[: count_betas(name)])
    if name != "lion":
        hyper["eps"] = torch.tensor([1e-8, 1e-6, 1e-2], dtype=DOUBLE)
    if name == "nadam":
        hyper["momentum_decay"] = torch.tensor([0.0, 0.5, 5.0], dtype=DOUBLE)
    if name == "adopt":  # it divides by the root of v or by eps, whichever is larger
        hyper["eps"] = torch.tensor([1.0, 3.0, 10.0], dtype=DOUBLE)
    if name == "ademamix":
        warmups = torch.tensor([0.0, 5.0, 20.0], dtype=DOUBLE)
        hyper |= {"alpha": DECAYS + 0.4, "alpha_warmup": warmups, "beta3_warmup": warmups}
    if name == "ranger":
        hyper |= {"k": torch.tensor([2.0, 3.0, 5.0]), "alpha": DECAYS + 0.4}
    return hyper


def factory_of(name: str):
    factory = getattr(optimi_func, name)
    if name == "adafactor":  # so that both its eps count
        return functools.partial(factory, scale_parameter=True)
    return factory


def at(i: int, tree):
    return pytree.tree_map(lambda x: x[i], tree)


def loss(params, x, y):
    hidden = torch.tanh(x @ params["w"] + params["b"])
    return (hidden.sum(-1) - y).square().mean()


def members_of(name: str, dtype: torch.dtype) -> Population:
    params = {
        "w": torch.randn(3, 4, 2, dtype=DOUBLE),
        "b": torch.randn(3, 1, 2, dtype=DOUBLE),
    }
    params = pytree.tree_map(lambda x: x.to(dtype), params)
    made = population.init(factory_of(name), params, numbers_of(name))
    # Of different ages, unless the first step makes what the others need.
    first = 0.0 if name not in SENSITIVE else 1.0
    ages = torch.tensor([first, 3.0, 7.0]) * (name not in ("asgd", "rprop"))
    return replace(made, state=made.state._replace(step=ages))


def train(factory, members, x, y):
    losses, grads = population.loss_and_grad(loss, members, x, y)
    return population.step(factory, members, grads), losses


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
def test_members_equal_those_trained_alone(name: str, dtype: torch.dtype) -> None:
    """Members have their own hyperparameters and step counts; bfloat16 has compensation."""
    factory = factory_of(name)
    members = members_of(name, dtype)
    alone = [at(i, (members.params, members.state)) for i in range(3)]
    numbers = [at(i, members.hyper) for i in range(3)]
    start = members
    # A batch of matrices is multiplied in another order than one matrix, on some CPUs.
    products = name in (*ITERATED, *SENSITIVE) and dtype == torch.bfloat16
    tolerance = TOLERANCE[dtype] if products else 1e-12
    for _ in range(6):
        x, y = torch.randn(8, 4, dtype=dtype), torch.randn(8, dtype=dtype)
        members, losses = train(factory, members, x, y)
        for i, (p, state) in enumerate(alone):
            grads, value = torch.func.grad_and_value(loss)(p, x, y)
            if dtype == DOUBLE:
                torch.testing.assert_close(losses[i], value, rtol=1e-12, atol=0)
            else:
                # vmap reduces in another order: the step is compared, not the gradient.
                grads = at(i, population.loss_and_grad(loss, start, x, y)[1])
            alone[i] = factory(**numbers[i]).step(p, grads, state)
        start = members
    for i, (p, state) in enumerate(alone):
        for ours, theirs in zip(
            pytree.tree_leaves(at(i, (members.params, members.state))),
            pytree.tree_leaves((p, state)),
        ):
            # Elements near 0 are what is left of others, which may differ that much.
            near = 1e-13
            if products and theirs.numel():
                near = tolerance * theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=near)
    compensated = [
        hasattr(s, "kahan_comp") and s.kahan_comp is not None
        for s in members.state.leaves.values()
    ]
    assert all(compensated) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_changes_the_answer(name: str) -> None:
    factory = factory_of(name)
    members = members_of(name, DOUBLE)
    data = torch.randn(9, 8, 5, dtype=DOUBLE)

    def end(members):
        for batch in data:
            members, _ = train(factory, members, batch[:, :4], batch[:, 4])
        moved = pytree.tree_leaves((members.params, members.state.leaves))
        return torch.cat([x.flatten(1) for x in moved if x.dim() > 1], 1)

    want = end(members)
    for key, value in members.hyper.items():
        for leaf in pytree.tree_leaves(value):
            changed = pytree.tree_map(
                lambda v, leaf=leaf: v * 0.1 if v is leaf else v, members.hyper
            )
            if name == "ranger" and key == "k":
                changed["k"] = torch.tensor([3.0, 2.0, 2.0])
            got = end(replace(members, hyper=changed))
            moved = (got != want).any(1)
            # A tenth of zero is zero.
            assert moved.tolist() == (leaf != 0).tolist(), key


@pytest.mark.parametrize("name", few(NAMES, ["adamw", "ranger"], later="soak"))
def test_one_graph_whatever_the_numbers_do(name: str, graphs) -> None:
    """bfloat16 includes Kahan compensation."""
    dtype = torch.bfloat16
    factory = factory_of(name)
    members = members_of(name, dtype)
    x, y = torch.randn(8, 4, dtype=dtype), torch.randn(8, dtype=dtype)
    # What AOTAutograd does with a graph does not depend on the rule: it has a mean, or not.
    backend = "aot_eager" if name in ("adamw", "stableadamw") else "eager"
    with torch._dynamo.config.patch(recompile_limit=64):
        step = torch.compile(train, fullgraph=True, backend=backend)
        got, _ = step(factory, members, x, y)
        want, _ = train(factory, members, x, y)
        assert graphs() == 1
        for ours, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(want)):
            torch.testing.assert_close(ours, theirs)
        got = population.clone(got, [2], [0])
        numbers = {
            k: v if k == "k" else pytree.tree_map(lambda x: 0.9 * x, v)
            for k, v in got.hyper.items()
        } | {"lr": LRS / 3}
        step(factory, replace(got, hyper=numbers), x, y)
    assert graphs() == 1


@pytest.mark.full
def test_inductor_keeps_the_compensation(graphs) -> None:
    """Members are compared with the same members in float64."""
    members = population.init(
        adamw,
        torch.ones(3, 8, dtype=torch.bfloat16),
        {"lr": 1e-4 * LRS, "weight_decay": 0.0},
    )
    exact = population.init(adamw, torch.ones(3, 8, dtype=DOUBLE), members.hyper)
    step = torch.compile(lambda m, g: population.step(adamw, m, g), fullgraph=True)
    for _ in range(50):
        members = step(members, torch.ones(3, 8, dtype=torch.bfloat16))
        exact = population.step(adamw, exact, torch.ones(3, 8, dtype=DOUBLE))
    assert graphs() == 1
    assert (members.params == 1).all(), "one step is far below bfloat16's precision"
    # As good as bfloat16 moments are; without compensation nothing would have moved.
    ours = members.params.double() + members.state.leaves.kahan_comp.double()
    assert_moved_alike(torch.ones(3, 8), ours, exact.params, 0.05)


class Net(nn.Module):
    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, dtype=DOUBLE)
        self.norm = nn.BatchNorm1d(8, dtype=DOUBLE) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(8, 3, dtype=DOUBLE)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


def test_modules_with_buffers_equal_modules_trained_alone() -> None:
    """BatchNorm in training mode returns new buffers as aux."""
    models = [Net(norm=True) for _ in range(3)]
    members = population.init(adamw, models, {"lr": LRS, "weight_decay": DECAYS})
    assert not any(x.requires_grad for x in pytree.tree_leaves(members))
    module = Net(norm=True)
    before = {k: v.clone() for k, v in module.state_dict().items()}

    def loss_fn(params, buffers, x, y):
        logits, buffers = population.call_module(module, params, buffers, x)
        return F.cross_entropy(logits, y), buffers

    optimizers = [
        torch.optim.AdamW(
            m.parameters(),
            lr=lr.item(),
            weight_decay=wd.item(),
            betas=(0.9, 0.99),
            eps=1e-6,
        )
        for m, lr, wd in zip(models, LRS, DECAYS)
    ]
    for _ in range(5):
        x, y = torch.randn(3, 16, 4, dtype=DOUBLE), torch.randint(3, (16,))
        (_, buffers), grads = population.loss_and_grad(
            loss_fn, members, x, y, in_axes=(0, None), has_aux=True
        )
        members = population.step(adamw, replace(members, buffers=buffers), grads)
        for i, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            F.cross_entropy(model(x[i]), y).backward()
            optimizer.step()
    for i, model in enumerate(models):
        loaded = Net(norm=True)
        loaded.load_state_dict(at(i, {**members.params, **members.buffers}))
        for key, value in model.state_dict().items():
            torch.testing.assert_close(
                loaded.state_dict()[key], value, rtol=1e-8, atol=1e-10
            )
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_one_model_many_times() -> None:
    model = Net()
    members = population.init(adamw, model, {"lr": LRS}, n=3)
    assert len(members) == 3
    for name, p in model.named_parameters():
        assert torch.equal(members.params[name], p.detach().expand(3, *p.shape))
    # Memory of its own, also of what vmap sees once.
    pointers = [x.untyped_storage().data_ptr() for x in pytree.tree_leaves(members)]
    assert len(set(pointers)) == len(pointers)
    assert all(x.is_contiguous() for x in pytree.tree_leaves(members))
    assert members.hyper["lr"] is not LRS


def test_derivatives_go_through_init() -> None:
    """Members made of a tensor that is differentiated have its derivative, not 0."""
    grads = {"w": torch.ones(3, 2, dtype=DOUBLE)}

    def end(lr, w, n=3):
        members = population.init(sgd, {"w": w}, {"lr": lr}, n=n)
        return (population.step(sgd, members, grads).params["w"] ** 2).sum()

    w = torch.ones(2, dtype=DOUBLE)
    moved = 1 - LRS
    by_lr, by_w = torch.func.grad(end, argnums=(0, 1))(LRS, w)
    torch.testing.assert_close(by_lr, -4 * moved)
    torch.testing.assert_close(by_w, (2 * moved.sum()).expand(2))
    stacked = torch.func.grad(end, argnums=1)(LRS, w.expand(3, 2), None)
    torch.testing.assert_close(stacked, (2 * moved)[:, None].expand(3, 2))
    torch.testing.assert_close(torch.func.jacfwd(end)(LRS, w), -4 * moved)
    lrs = LRS.clone().requires_grad_()
    end(lrs, w).backward()
    torch.testing.assert_close(lrs.grad, by_lr)
    assert not end(LRS, w.clone().requires_grad_()).requires_grad


def test_shared_or_own_data_and_randomness() -> None:
    model = Net(dropout=0.5)
    members = population.init(sgd, model, {"lr": 0.1}, n=3)
    x, y = torch.randn(16, 4, dtype=DOUBLE), torch.randint(3, (16,))

    def loss_fn(params, x, y):
        return F.cross_entropy(functional_call(model, params, x), y)

    with pytest.raises(RuntimeError, match="randomness"):
        population.loss_and_grad(loss_fn, members, x, y)
    same, _ = population.loss_and_grad(loss_fn, members, x, y, randomness="same")
    assert same[0] == same[1] == same[2]
    different, _ = population.loss_and_grad(loss_fn, members, x, y, randomness="different")
    assert len(set(different.tolist())) == 3
    model.eval()
    own = torch.stack([x, 2 * x, 3 * x])
    losses, _ = population.loss_and_grad(loss_fn, members, own, y, in_axes=(0, None))
    assert losses.tolist() == pytest.approx(
        [F.cross_entropy(model(i * x), y).item() for i in (1, 2, 3)], rel=1e-12
    )
    of_each, _ = population.loss_and_grad(
        loss_fn, members, own.movedim(0, 1), y, in_axes=(1, None)
    )
    torch.testing.assert_close(of_each, losses, rtol=1e-12, atol=0)


def test_axes_are_found_by_name() -> None:
    """Whatever the order of names is."""
    members = population.init(sgd, torch.ones(2, 3), {"lr": 0.1})
    data = {"own": torch.arange(6.0).reshape(2, 3), "shared": torch.ones(2, 3)}
    for names in (("own", "shared"), ("shared", "own")):
        axes = {name: 0 if name == "own" else None for name in names}
        (_, (own, shared)), _ = population.loss_and_grad(
            lambda p, x: (p.sum(), (x["own"].sum(), x["shared"].sum())),
            *(members, data),
            in_axes=(axes,),
            has_aux=True,
        )
        assert own.tolist() == [3.0, 12.0] and shared.tolist() == [6.0, 6.0]


class Noisy:
    """An optimizer whose step draws a random number, as transformed ones may."""

    def init(self, params):
        return {"count": torch.zeros((), dtype=torch.int64)}

    def step(self, params, grads, state):
        noise = torch.randn(())
        new = pytree.tree_map(lambda p, g: p - g * noise, params, grads)
        return new, {"count": state["count"] + 1}


def test_any_object_with_init_and_step() -> None:
    members = population.init(Noisy(), {"w": torch.zeros(2)}, n=3)
    assert members.state["count"].shape == (3,)
    grads = {"w": torch.ones(3, 2)}
    with pytest.raises(RuntimeError, match="randomness"):
        population.step(Noisy(), members, grads)
    same = population.step(Noisy(), members, grads, randomness="same").params["w"]
    assert len(same.unique()) == 1
    members = population.step(Noisy(), members, grads, randomness="different")
    assert len(members.params["w"].unique()) == 3
    assert members.state["count"].tolist() == [1, 1, 1]
    # A factory of them, with a number that this package does not know.
    scaled = population.init(
        lambda scale: sgd(lr=lambda step: scale / (step + 1)),
        *({"w": torch.zeros(2)}, {"scale": torch.tensor([1.0, 2.0])}),
        n=2,
    )
    assert list(scaled.hyper) == ["scale"]
    bound = adamw(lr=0.1)
    members = population.init(bound, {"w": torch.zeros(2)}, n=2)
    moved = population.step(bound, members, {"w": torch.ones(2, 2)})
    assert_moved_alike(torch.zeros(2, 2), moved.params["w"], -0.1 * torch.ones(2, 2), 1e-5)


def test_transformed_optimizers_with_numbers_by_member() -> None:
    """Each member has its own bound for clipping, its own counts and averages."""

    def factory(lr, bound):
        clipped = transforms.chain(transforms.clip_global_norm(bound), sgd(lr=lr))
        return transforms.ema(clipped, decay=0.9)

    bounds = torch.tensor([0.5, 1.0, 100.0], dtype=DOUBLE)
    start = {"w": torch.zeros(4, dtype=DOUBLE)}
    members = population.init(factory, start, {"lr": LRS, "bound": bounds}, n=3)
    grads = {"w": torch.full((3, 4), 2.0, dtype=DOUBLE)}
    members = population.step(factory, members, grads)
    want = -LRS * torch.minimum(bounds, torch.tensor(4.0)) / 4 * 2
    torch.testing.assert_close(members.params["w"][:, 0], want, rtol=1e-6, atol=0)


def test_static_options_belong_to_the_factory() -> None:
    factory = functools.partial(adamw, amsgrad=True)
    members = population.init(factory, {"w": torch.zeros(2)}, {"lr": LRS}, n=3)
    assert members.state.leaves["w"].max_exp_avg_sq.shape == (3, 2)
    half = population.init(
        adamw, torch.zeros(2), {"lr": 0.1}, n=2, state_dtype=DOUBLE, kahan_sum=False
    )
    assert half.state.leaves.exp_avg.dtype == DOUBLE
    low = torch.zeros(2, dtype=torch.bfloat16)
    assert population.init(adamw, low, {"lr": 0.1}, n=2).state.leaves.kahan_comp is not None
    bare = population.init(adamw, low, {"lr": 0.1}, n=2, kahan_sum=False)
    assert bare.state.leaves.kahan_comp is None


def test_axes_of_ones_own() -> None:
    """Members on another axis, gradients and a step count for all, prefixes of params."""
    params = {"a": torch.randn(2, 3, dtype=DOUBLE), "b": torch.randn(5, 3, dtype=DOUBLE)}
    grads = {"a": torch.randn(2, dtype=DOUBLE), "b": torch.randn(5, dtype=DOUBLE)}
    state = optimi_func.TreeState(
        torch.tensor(4.0), vmap(adamw(lr=0.1).init, in_dims=1)(params).leaves
    )
    step = population.vmap_step(adamw, (1, None, optimi_func.TreeState(None, 0), 0))
    lr = {"a": LRS, "b": 0.3}
    hyper = {"lr": lr, "betas": (torch.tensor(0.5), LRS), "weight_decay": 0.0}
    got, after = step(params, grads, state, hyper)
    assert after.step.tolist() == [5.0, 5.0, 5.0]
    for i in range(3):
        one = {k: p[:, i] for k, p in params.items()}
        optimizer = adamw(lr={"a": LRS[i], "b": 0.3}, betas=(0.5, LRS[i]), weight_decay=0.0)
        leaves = at(i, state.leaves)
        want, _ = optimizer.step(one, grads, optimi_func.TreeState(state.step, leaves))
        for key in params:
            assert_moved_alike(one[key], got[key][i], want[key], 1e-12)


def test_none_gradients_leave_a_parameter_alone() -> None:
    members = population.init(
        adamw, {"a": torch.ones(2), "b": torch.ones(2)}, {"lr": LRS}, n=3
    )
    new = population.step(adamw, members, {"a": None, "b": torch.ones(3, 2)})
    assert torch.equal(new.params["a"], members.params["a"])
    assert (new.params["b"] < 1).all()


def test_select_and_clone() -> None:
    members = members_of("adamw", DOUBLE)
    x, y = torch.randn(8, 4, dtype=DOUBLE), torch.randn(8, dtype=DOUBLE)
    members, _ = train(adamw, members, x, y)
    some = population.select(members, [2, 0, 0, 1])
    assert len(some) == 4
    for ours, theirs in zip(pytree.tree_leaves(some), pytree.tree_leaves(members)):
        assert torch.equal(ours, theirs[[2, 0, 0, 1]])
    kept = population.select(members, torch.tensor([True, False, True]))
    assert torch.equal(kept.hyper["lr"], LRS[[0, 2]])
    # Params, state and hyperparameters went along: the next step is the same.
    for i, j in enumerate([2, 0, 0, 1]):
        for ours, theirs in zip(
            pytree.tree_leaves(at(i, train(adamw, some, x, y)[0])),
            pytree.tree_leaves(at(j, train(adamw, members, x, y)[0])),
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    cloned = population.clone(members, source=[1], into=[0])
    assert cloned.state.step.tolist() == [4.0, 4.0, 8.0]
    assert cloned.hyper["lr"].tolist() == LRS[[1, 1, 2]].tolist()
    assert members.state.step.tolist() == [1.0, 4.0, 8.0]
    rows = [at(i, members) for i in range(3)]
    again = pytree.tree_map(lambda *x: torch.stack(x), *rows)
    assert type(again) is Population
    for ours, theirs in zip(pytree.tree_leaves(again), pytree.tree_leaves(members)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "schedule_free_adamw", "ema"])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
def test_a_saved_population_goes_on(name: str, dtype: torch.dtype) -> None:
    factory: Any = adamw if name == "ema" else factory_of(name)
    members = members_of("adamw" if name == "ema" else name, dtype)
    if name == "ema":  # a transform's state, codes and a frozen parameter
        hyper, storage = members.hyper, Storage("exact", "8bit")
        factory = lambda **hyper: transforms.ema(adamw(**hyper), decay=0.9)  # noqa: E731
        more = {} if dtype == DOUBLE else {"storage": storage}
        members = population.init(factory, {**members.params, "c": None}, hyper, **more)
        members = replace(members, buffers={"mean": torch.ones(3, 2)})

    def grads(i: int) -> Any:
        draw = torch.Generator().manual_seed(i)
        return pytree.tree_map_only(
            torch.Tensor,
            lambda p: torch.randn(p.shape, generator=draw).to(p.dtype),
            members.params,
        )

    for i in range(2):
        members = population.step(factory, members, grads(i))
    file = io.BytesIO()
    torch.save(members, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert type(again) is Population and len(again) == 3
    for i in range(2, 5):
        members, again = (population.step(factory, x, grads(i)) for x in (members, again))
    assert pytree.tree_structure(again) == pytree.tree_structure(members)
    for x, y in zip(pytree.tree_leaves(members), pytree.tree_leaves(again)):
        assert x is y is None or torch.equal(x, y)


@pytest.mark.parametrize("index", [[2, 0], torch.tensor([True, False, True])], ids=str)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16], ids=str)
def test_some_members_step_alone(dtype: torch.dtype, index) -> None:
    """They have the bits of a population of their own; the others keep every bit."""
    members = members_of("adamw", dtype)
    places = index if isinstance(index, list) else index.nonzero()[:, 0].tolist()
    some = population.select(members, index)
    kept = at(1, (members.params, members.state))
    for _ in range(3):
        grads = pytree.tree_map(torch.randn_like, some.params)
        grads["b"] = None if dtype == DOUBLE else grads["b"]
        some = population.step(adamw, some, grads)
        members = population.step(adamw, members, grads, index=index)
    again = population.select(members, places)
    for ours, want in zip(pytree.tree_leaves(again), pytree.tree_leaves(some)):
        assert torch.equal(ours, want)
    left = at(1, (members.params, members.state))
    for ours, want in zip(pytree.tree_leaves(left), pytree.tree_leaves(kept)):
        assert torch.equal(ours, want)
    assert members.state.step.tolist() == [3.0, 3.0, 10.0]


TWO = {"a": torch.ones(3, 2), "b": torch.ones(3)}


BAD = {
    "population.init(adamw, Net(), {'lr': 0.1}, n=0)": "n=0",
    "population.init(adamw, Net(), {'lr': 0.1}, n=2.5)": "n=2.5",
    "population.init(adamw, Net(), {'lr': 0.1})": "n=None with one Net",
    "population.init(adamw, [Net(), Net()], {'lr': 0.1}, n=3)": (
        "n=3 with a list of 2 modules"
    ),
    "population.init(adamw, TWO, {'lr': torch.ones(4)})": (
        r"hyper\['lr'\] has 4 members.*params\['a'\] has 3"
    ),
    "population.init(adamw, {**TWO, 'b': torch.ones(4)}, {'lr': 0.1})": (
        r"params\['b'\] has 4 members along axis 0 of \(4,\)"
    ),
    "population.init(adamw, {'a': torch.ones(())}, {'lr': 0.1})": (
        r"params\['a'\] has shape \(\): no axis 0"
    ),
    "population.vmap_step(adamw, (0, 0, 0))": "allowed are four",
    "population.vmap_step(sgd, ({'c': 0}, 0, 0, 0))(*three(), {'lr': 0.1})": (
        "no prefix of params"
    ),
    "population.vmap_step(sgd, (None,) * 4)(*three(), {'lr': 0.1})": (
        "no leaf of params, grads, state, hyper has members"
    ),
    "population.vmap_step(sgd)(*three(), {'lr': torch.ones(2)})": (
        r"hyper\['lr'\] has 2 members"
    ),
    "population.step(sgd, trained(), {**TWO, 'b': torch.ones(2)})": (
        r"grads\['b'\] has 2 members.*params\['a'\] has 3"
    ),
    "population.loss_and_grad(lambda p, x: x, trained(), torch.ones(4), in_axes=0)": (
        r"data\[0\] has 4 members"
    ),
    "population.loss_and_grad(lambda p, x: x, trained(), TWO['b'], in_axes=(0, 0))": (
        r"in_axes=\(0, 0\) has 2 entries.*1 data"
    ),
    "population.loss_and_grad(lambda p: p['a'], trained())": (
        r"a loss of shape \(2,\): allowed is a scalar"
    ),
    "population.clone(TWO, [0, 1], [2])": "source has 2 members",
    "population.clone(TWO, [0, 1], [2, 2])": "a member twice",
    "population.step(sgd, trained(), population.select(TWO, [1, 1]), index=[1, 1])": (
        r"index=\[1, 1\] names a member twice"
    ),
    "population.step(sgd, trained(), TWO, index=[0])": (
        r"grads\['a'\] has 3 members.*params\['a'\] has 1"
    ),
    "population.init(sgd, frozen(), {'lr': 0.1}, n=2)": (
        "the parameter 'bias' of Linear is frozen"
    ),
    "population.init(sgd, [frozen(), frozen()], {'lr': 0.1})": (
        "the parameter 'bias' of Linear is frozen.*"
    ),
    "population.init(sgd, TWO, {'lr': torch.ones(3, 1)})": (
        r"hyper\['lr'\] has shape \(3, 1\), for 3 members"
    ),
    "population.init(adamw, TWO, {'lr': 0.1, 'betas': torch.ones(3, 2)})": (
        r"hyper\['betas'\] has shape \(3, 2\).*a tuple of them"
    ),
    "population.init(sgd, nn.BatchNorm1d(3, affine=False), {'lr': 0.1}, n=2)": (
        "source=BatchNorm1d.*has no parameters"
    ),
    "population.clone(population.select(trained(), []), [], [])": (
        r"has no members along axis 0 of \(0, 2\)"
    ),
    "population.call_module(nn.Linear(2, 1), {'wieght': TWO}, {}, TWO)": (
        "Linear has no parameter 'wieght'"
    ),
    "population.init(adamw, 3.0, {'lr': 0.1})": "TypeError: source holds float",
    "population.init(adamw, TWO, {'lr': 0.1, 'amsgrad': True})": (
        r"TypeError: hyper\['amsgrad'\]=True: allowed are numbers.*partial"
    ),
    "population.init(adamw, TWO, {'lr': 0.1, 'speed': 1.0})": (
        "TypeError: adamw has no argument 'speed': allowed are"
    ),
    "population.init(adamw(lr=0.1), TWO, {'lr': 0.1})": (
        r"TypeError: hyper has \['lr'\], but every hyperparameter.*factory"
    ),
    "population.init(torch.optim.AdamW, TWO)": "TypeError: allowed are factories",
    "population.vmap_step(sgd, ('0', 0, 0, 0))(*three(), {'lr': 0.1})": (
        "TypeError: in_axes has '0' for params"
    ),
    "population.loss_and_grad(lambda p: 1.0, trained())": (
        "TypeError: loss_fn returned float"
    ),
    "population.loss_and_grad(lambda p: p['b'], trained(), has_aux=True)": (
        r"TypeError: has to be \(loss, aux\)"
    ),
    "population.step(sgd, TWO, TWO)": "TypeError: allowed is a Population",
    "population.select(TWO, 0)": "TypeError: index=0: allowed are lists",
    "population.loss_and_grad(lambda p: (p['b'] > 0).sum(), trained())": (
        "TypeError: a loss of dtype torch.int64"
    ),
    "population.init(sgd, TWO, {'lr': torch.ones(3) > 0})": (
        r"TypeError: hyper\['lr'\] has dtype torch\.bool"
    ),
    "population.init(sgd, TWO, {'lr': lambda step: 0.1})": (
        r"TypeError: hyper\['lr'\]=<function.*a schedule\) belongs to the factory"
    ),
    "population.select(TWO, [3])": "IndexError: index has 3: .* 0 to 2",
    "population.select(TWO, [-1])": "IndexError: index has -1",
    "population.select(TWO, [0.5])": "IndexError: lists of indices",
    "population.select(TWO, torch.tensor([True]))": (
        r"IndexError: \(1,\) bools, the population 3"
    ),
    "population.clone(TWO, [0], [5])": "IndexError: into has 5",
    "population.step(sgd, trained(), TWO, index=[3])": "IndexError: index has 3",
}


@refuses(BAD)
def test_bad_input() -> Scene:
    return {"two": TWO}


def test_whole_numbers_are_multiplied_as_real_ones() -> None:
    members = population.init(sgd, TWO, {"lr": torch.tensor([1, 2, 3])})
    assert members.hyper["lr"].dtype == torch.int64
    moved = population.step(sgd, members, pytree.tree_map(torch.ones_like, members.params))
    want = torch.tensor([-1.0, -2.0, -3.0])[:, None] * torch.ones(3, 2)
    start, end = pytree.tree_leaves(members.params)[0], pytree.tree_leaves(moved.params)[0]
    assert torch.equal((end - start).view(3, -1)[:, :2], want)


def test_call_module_takes_tied_names_and_has_frozen_parameters_itself() -> None:
    module = frozen()
    given = {"weight": torch.ones(1, 2)}
    out, _ = population.call_module(module, given, {}, torch.ones(3, 2))
    assert torch.equal(out, 2.0 + module.bias.expand(3, 1))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    x, w = torch.ones(3, 2), torch.eye(2)
    for name in ("0.weight", "1.weight"):
        out, _ = population.call_module(tied, {name: w}, {}, x)
        assert torch.equal(out, x + tied[0].bias + tied[1].bias)


def test_call_module_is_traced() -> None:
    module = nn.BatchNorm1d(2)
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    call = torch.compile(population.call_module, backend="eager", fullgraph=True)
    x = torch.randn(4, 2)
    ours, theirs = (f(module, params, buffers, x) for f in (call, population.call_module))
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("param", [None, "kahan8", "stochastic"])
def test_members_whose_state_is_in_codes(param: Any) -> None:
    """Members have their own codes and bits, which select and clone copy."""
    storage = Storage(param, "8bit")
    dtype = torch.float32 if param is None else torch.bfloat16
    params = {"w": torch.randn(64, 128).to(dtype), "b": torch.randn(3).to(dtype)}
    lrs = torch.tensor([0.01, 0.02, 0.03], dtype=DOUBLE)
    members = population.init(adamw, params, {"lr": lrs}, n=3, storage=storage)

    def grads(p, i):
        return pytree.tree_map(lambda x: torch.sin(3.0 * x + i), p)

    for i in range(3):
        members = population.step(adamw, members, grads(members.params, i))
    kinds = {x.dtype for x in pytree.tree_leaves(members.state)}
    assert {torch.int8, torch.uint8} <= kinds
    for j, lr in enumerate(lrs):
        one, alone = at(j, members), adamw(lr=lr)
        own = storage if param != "stochastic" else storage._replace(seed=j)
        p, state = params, alone.init(params, storage=own)
        for i in range(3):
            p, state = alone.step(p, grads(p, i), state)
        ours, theirs = (one.params, one.state), (p, state)
        for x, y in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs)):
            assert torch.equal(x, y)
    cloned = population.clone(members, [2], [0])
    for x in pytree.tree_leaves(cloned):
        assert torch.equal(x[0], x[2])
    after = population.step(adamw, cloned, grads(cloned.params, 3))
    assert all(x.isfinite().all() for x in pytree.tree_leaves(after.params))


def frozen() -> nn.Module:
    linear = nn.Linear(2, 1)
    linear.bias.requires_grad_(False)
    return linear


def three():
    return TWO, TWO, vmap(sgd(lr=0.1).init)(TWO)


def trained() -> Population:
    return population.init(sgd, TWO, {"lr": 0.1})


def test_buffers_written_under_vmap_are_named() -> None:
    model = Net(norm=True)
    params = {k: p.detach() for k, p in model.named_parameters()}
    members = population.init(sgd, params, {"lr": 0.1}, n=3)
    x = torch.randn(8, 4, dtype=DOUBLE)
    text = "captured Tensor.*All members share .*call_module"
    with pytest.raises(RuntimeError, match=text):
        population.loss_and_grad(
            lambda p, x: functional_call(model, p, x).square().mean(), members, x
        )
    with pytest.raises(ValueError, match=r"lack 'norm\.running_mean' of Net"):
        population.call_module(model, params, {}, x)
    with pytest.raises(ValueError, match="Net has no buffer 'speed'"):
        buffers = {**dict(model.named_buffers()), "speed": x}
        population.call_module(model, params, buffers, x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        population.loss_and_grad(lambda p, x: x @ x, members, x)
