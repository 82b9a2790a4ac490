"""Users' rules whose direction takes extras or noise, in classes."""

import copy
import weakref
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from cookbook import drawn as noise_of
from cookbook import drawn_whole
from refusals import Scene, refuses
from sgld import SGLD
from sophia import Sophia
from tiers import few, row
from torch import Tensor, nn

from optimi_func import compiled, population, prepare_for_gradient_release
from optimi_func.classes import base
from optimi_func.core import philox
from optimi_func.execution import wholes
from optimi_func.rules import Evaluated, Optimizer, Shaped, Wide, root
from optimi_func.testing import check_rule

HOW: dict[str, Any] = {"lr": 0.1, "rho": 1.0}


class Weighed(Optimizer):
    def direction(self, g: Tensor, weight: Tensor):
        return weight * g


def model() -> nn.Linear:
    torch.manual_seed(0)
    found = nn.Linear(3, 2)
    for p in found.parameters():
        p.grad = torch.randn_like(p)
    return found


WAYS: dict[str, Any] = {
    "by name": lambda m, h: dict(zip(("weight", "bias"), h)),
    "by parameter": lambda m, h: dict(zip(m.parameters(), h)),
    "a list": lambda m, h: h,
}


@pytest.mark.parametrize("way", WAYS)
def test_extras_of_a_class_are_those_of_the_pure_step(way: str) -> None:
    net = model()
    tree = {name: p.detach().clone() for name, p in net.named_parameters()}
    value = Sophia.pure(**HOW)
    optimizer = Sophia(net.named_parameters(), **HOW, compile=False)
    state = value.init(tree)
    for i in range(3):
        hessian = [(i + 1.0) * torch.rand_like(p) for p in net.parameters()]
        optimizer.step(hessian=WAYS[way](net, hessian))
        grads = {name: p.grad for name, p in net.named_parameters()}
        tree, state = value.step(tree, grads, state, hessian=dict(zip(tree, hessian)))
    for name, p in net.named_parameters():
        assert torch.equal(p, tree[name])
    kept = weakref.ref(extra := torch.rand(()))
    optimizer.step(hessian=extra)
    del extra
    assert kept() is None  # which keeps no tensor


def test_steps_in_two_threads_have_their_own_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = Weighed(net.parameters(), lr=0.1, compile=False)
    run = base.step_groups

    def interrupted(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(base, "step_groups", run)
        other = Thread(target=optimizer.step, kwargs={"weight": 2.0})
        other.start()
        other.join()
        return run(*args, **named)

    monkeypatch.setattr(base, "step_groups", interrupted)
    optimizer.step(weight=1.0)
    for p, old in zip(net.parameters(), before):
        assert p.grad is not None
        torch.testing.assert_close(p.detach(), old - 0.1 * 3.0 * p.grad)


@pytest.mark.parametrize("weight", [0.5, torch.tensor(0.5)])
def test_one_number_for_all_and_groups_that_take_none(weight: Any) -> None:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.2}]
    Weighed(groups, lr=0.1, compile=False).step(weight=weight)
    for p, old, lr in zip(net.parameters(), before, (0.1, 0.2)):
        assert p.grad is not None
        torch.testing.assert_close(p.detach(), old - lr * 0.5 * p.grad)


def sophia(net: nn.Linear, **options: Any) -> Sophia:
    return Sophia(net.named_parameters(), **HOW, compile=False, **options)


def train(net: nn.Linear, optimizer: Any, at: int, count: int = 1) -> None:
    for i in range(count):
        drawn = torch.Generator().manual_seed(10 * at + i)
        net(torch.randn(4, 3, generator=drawn)).square().mean().backward()


@pytest.mark.parametrize(
    "options", [{}, {"accumulation": "buffer"}, {"clip_param_norm": 0.1}]
)
def test_release_steps_by_what_was_given(options: dict[str, Any]) -> None:
    nets, count = [model(), model()], 2 if "accumulation" in options else 1
    plain, released = sophia(nets[0]), sophia(nets[1], gradient_release=True)
    nets[0].zero_grad()
    nets[1].zero_grad()
    with prepare_for_gradient_release(nets[1], released, **options):
        for i in range(4):
            if i % 2 == 0:  # used until others take their place
                hessian = [(i + 1.0) * torch.rand_like(p) for p in nets[0].parameters()]
                released.give(hessian=hessian)
            train(nets[0], plain, i, count)
            for p in nets[0].parameters() if "clip_param_norm" in options else ():
                nn.utils.clip_grad_norm_([p], 0.1)
            plain.step(hessian=hessian)
            plain.zero_grad()
            train(nets[1], released, i, count)
            released.step()
    for p, q in zip(*[net.parameters() for net in nets]):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert released.state[nets[1].weight]["step"] == 4
    assert not torch.equal(nets[1].weight, model().weight)


def test_given_extras_are_those_of_steps_without_their_own() -> None:
    nets = [model(), model()]
    plain, other = map(sophia, nets)
    hessian = [torch.rand_like(p) for p in nets[0].parameters()]
    other.give(hessian=dict(zip(("weight", "bias"), hessian)))
    for given in (hessian, hessian, torch.tensor(2.0)):
        plain.step(hessian=given)
        other.step(**({} if given is hessian else {"hessian": given}))
    assert all(map(torch.equal, *[net.parameters() for net in nets]))


def test_release_without_extras_says_how_to_give_them() -> None:
    net = model()
    net.zero_grad()
    optimizer, before = sophia(net, gradient_release=True), copy.deepcopy(net)
    with prepare_for_gradient_release(net, optimizer):
        with pytest.raises(
            RuntimeError, match=r"nothing was given as hessian .*give\(hess"
        ):
            train(net, optimizer, 0)
    assert all(map(torch.equal, net.parameters(), before.parameters()))


def test_extras_are_checked_in_every_way() -> None:
    def weights(grads: list[Tensor]) -> dict[str, Any]:
        return {"weight": [2.0 + g.cos() for g in grads]}

    check_rule(Weighed, compile=False, steps=6, extras=weights)


def drawn(shape: Any = (1000,), steps: int = 1, place: int = 0, **hyper: Any) -> Any:
    """Return the noise of a step, of the parameter at a place of the group."""
    ps = [torch.zeros(2, requires_grad=True) for _ in range(place)]
    ps.append(torch.zeros(shape, requires_grad=True))
    optimizer = SGLD(ps, lr=0.5, temperature=1.0, compile=False, **hyper)
    for _ in range(steps):
        before = ps[-1].detach().clone()
        for p in ps:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return (before - ps[-1]).detach()


def test_noise_is_normal_and_differs_by_seed_step_parameter_and_element() -> None:
    z = drawn((200_000,))
    assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01
    assert z.unique().numel() > 190_000
    first = z[:1000]
    assert torch.equal(drawn(), first)
    for other in (drawn(steps=2), drawn(seed=1), drawn(place=1)):
        assert abs((other * first).mean()) < 0.15
        assert (other != first).all()


def test_released_steps_draw_the_same_numbers() -> None:
    found: list[Any] = []
    for release in (False, True):
        net, x = model(), torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        net.zero_grad()
        optimizer: Any = SGLD(
            net.parameters(), lr=0.1, gradient_release=release, compile=False
        )
        if release:
            prepare_for_gradient_release(net, optimizer)
        for _ in range(3):
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach() for p in net.parameters()])
    assert all(map(torch.equal, *found))


def test_members_may_have_seeds_of_their_own() -> None:
    class Seeded(SGLD):
        seed: float = 0.0  # type: ignore

    hyper = {"lr": torch.full((3,), 0.5), "seed": torch.tensor([0.0, 1.0, 0.0])}
    members = population.init(Seeded.pure, {"w": torch.zeros(5)}, hyper, n=3)
    members = population.step(Seeded.pure, members, {"w": torch.zeros(3, 5)})
    one, other, again = members.params["w"]
    assert torch.equal(one, again) and (one != other).all()


class Sketched(Optimizer):
    """Draws z, first values, and two tensors for the map of each step."""

    seed: int = 3

    class State(NamedTuple):
        kept: Shaped

    def init(self, p: Tensor, normal: Any) -> Any:
        return self.State(normal((5,)))  # type: ignore

    def direction(self, g: Tensor, z: Tensor):
        return g + z

    def whole(self, d: Tensor, s: State, normal: Any):
        first, kept = normal(d.shape), normal((5,))
        return d + first + s.kept.sum(), self.State(kept)


def sketched(params: Any, grads: Any, lr: float) -> Any:
    kept = [*drawn_whole(3, 0, 2**31 - 1, (5,))] * len(params)
    for t, gs in enumerate(grads):
        for i, (p, z, g) in enumerate(zip(params, noise_of(params, 3, t), gs)):
            first, new = drawn_whole(3, t, i, p.shape, (5,))
            params[i], kept[i] = p - lr * (g + z + first + kept[i].sum()), new
    return params


def test_maps_and_first_values_draw_by_seed_step_parameter_and_call(small: None) -> None:
    check_rule(Sketched, sketched, compile=False)


@pytest.mark.parametrize(
    "way", few(("in batches", "in a graph", "as members"), ("in batches", "as members"))
)
def test_maps_draw_the_same(way: str, monkeypatch: Any) -> None:
    ps, grads = [torch.zeros(3, 4)] * 3, [[torch.ones(3, 4)] * 3] * 4
    want = sketched([p.double() for p in ps], grads, 0.1)
    params: Any = ps
    if way == "in batches":
        monkeypatch.setattr(wholes, "_batches", lambda x: True)
        params = [p.clone().requires_grad_() for p in ps]
        optimizer = Sketched(params, lr=0.1, compile=False)
        for gs in grads:
            for p, g in zip(params, gs):
                p.grad = g
            optimizer.step()
    elif way == "in a graph":
        value = Sketched.pure(lr=0.1)
        step = torch.compile(value.step, backend="eager", fullgraph=True)
        state = value.init(ps)
        for gs in grads:
            params, state = step(params, gs, state)
    else:

        class Seeded(Sketched):
            seed: float = 0.0  # type: ignore

        hyper = {"lr": torch.full((3,), 0.1), "seed": torch.tensor([3.0, 4.0, 3.0])}
        members = population.init(Seeded.pure, ps, hyper, n=3)
        for gs in grads:
            every = [torch.stack([g] * 3) for g in gs]
            members = population.step(Seeded.pure, members, every)
        for x in members.params:
            assert torch.equal(x[0], x[2]) and (x[0] != x[1]).all()
        params = [x[0] for x in members.params]
    for x, y in zip(params, want):
        torch.testing.assert_close(x.detach().double(), y, rtol=1e-5, atol=1e-5)


class Averaged(Optimizer, Evaluated):
    """Evaluates the mean of all points."""

    class State(NamedTuple):
        mean: Wide

    def direction(self, g: Tensor, s: State, x: Tensor, t: float):
        return g, self.State(s.mean + (x - s.mean) / t)

    def eval_point(self, x: Tensor, s: State):
        return s.mean


def test_own_rules_have_eval_and_train() -> None:
    w = torch.zeros(2, requires_grad=True)
    optimizer: Any = Averaged([w], lr=1.0, compile=False)
    for _ in range(3):
        w.grad = torch.ones(2)
        optimizer.step()
    optimizer.eval()
    assert w.tolist() == [-1.0, -1.0]
    again = Averaged([w], lr=1.0, compile=False)
    again.load_state_dict(optimizer.state_dict())
    for some in (optimizer, again):
        some.train()
        assert w.tolist() == [-3.0, -3.0]
        some.eval()


class Masked(Optimizer):
    """A momentum whose step is scaled by a number, and by 0.1 where a mask is false."""

    class State(NamedTuple):
        m: Tensor

    def direction(self, g: Tensor, s: State, mask: Tensor, scale: Tensor):
        m = 0.9 * s.m + g
        return torch.where(mask > 0, m * scale, 0.1 * m), self.State(m)


def masks(like: list[Tensor], step: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(step)
    found = [torch.rand(x.shape, generator=drawn) > 0.3 for x in like]
    return {"mask": found, "scale": torch.tensor(0.5 + step)}


SHAPES = ((3, 4, 5, 5), (7,), (), (64, 100), (300, 500))


def masked_moves(dtype: torch.dtype, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the moves of three steps of parameters in several orders, and by a loop."""
    torch.manual_seed(0)
    starts = [torch.randn(shape).to(dtype) for shape in SHAPES]
    starts[0] = starts[0].to(memory_format=torch.channels_last)
    ps = [nn.Parameter(x.T.clone().T if x.dim() == 2 else x.clone()) for x in starts]
    optimizer = Masked(ps, lr=0.1, **options)
    xs, ms = [x.double() for x in starts], [torch.zeros_like(x).double() for x in starts]
    for i in range(3):
        grads = [torch.randn_like(p) for p in ps]
        for p, g in zip(ps, grads):
            p.grad = g
        given = masks(starts, i)
        optimizer.step(**given)
        for k, g in enumerate(grads):
            ms[k] = 0.9 * ms[k] + g
            xs[k] -= 0.1 * torch.where(given["mask"][k], ms[k] * (0.5 + i), 0.1 * ms[k])
    # One plan for all, in which the numbers of a step are there once.
    ((plan,),) = [list(optimizer._plans.values())]
    assert len(plan.slots) == len(SHAPES)
    ours = [p.detach().double() - x.double() for p, x in zip(ps, starts)]
    return ours, [x - y.double() for x, y in zip(xs, starts)]


HOWS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "foreach": {"foreach": True},
    "kernels": {"compile": True},
    "kernels, codes": {"compile": True, "storage": "exact"},
}


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        pytest.param(how, dtype, marks=[pytest.mark.full] if "kernels" in how else [])
        for how in HOWS
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        if "codes" not in how or dtype == torch.bfloat16
    ],
)
def test_extras_of_several_dtypes_are_read_by_every_executor(
    how: str, dtype: torch.dtype
) -> None:
    ours, theirs = masked_moves(dtype, **HOWS[how])
    allowed = 0.02 if dtype == torch.bfloat16 else 1e-5
    for x, y in zip(ours, theirs):
        torch.testing.assert_close(x, y, rtol=allowed, atol=allowed)


@pytest.mark.full
@pytest.mark.parametrize("name", ["extras", "noise"])
def test_rules_with_extras_and_noise_have_kernels(name: str) -> None:
    if name == "noise":
        return check_rule(SGLD, steps=6)
    check_rule(
        Sophia, rho=1.0, steps=6, extras=lambda g: {"hessian": [x.square() for x in g]}
    )


@pytest.mark.parametrize(
    ("sizes", "compile", "together"),
    [
        ([9, 40, 3, 1 << 14, 1 << 16], False, [52, 1 << 14, 1 << 16]),
        # A kernel would read all at once.
        pytest.param(
            [5, 1 << 18, *[1 << 16] * 3],
            True,
            [5, 1 << 18, 1 << 17, 1 << 16],
            marks=pytest.mark.full,
        ),
    ],
)
def test_tensors_of_a_step_draw_together(
    sizes: list[int], compile: bool, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def counted(*given: Any, draw: Any = philox.normals) -> Any:
        drawn.append(sum(x.numel() for x in given[2] if x is not None))
        return draw(*given)

    monkeypatch.setattr(philox, "normals", counted)
    ps = [torch.zeros(n, requires_grad=True) for n in sizes]
    optimizer = SGLD(ps, lr=0.1, compile=compile)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert drawn == together


def test_complex_parameters_take_real_and_complex_extras() -> None:
    g, w = torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([0.5, 2.0])
    for weight in (w, torch.complex(w, w)):
        p = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
        p.grad = g
        Weighed([p], lr=1.0, compile=False).step(weight=[weight])
        value = Weighed.pure(lr=1.0)
        start = torch.zeros_like(p).detach()
        new, _ = value.step(start, g, value.init(start), weight=weight)
        # Rules compute with real and imaginary parts apart.
        torch.testing.assert_close(p.detach(), torch.complex(-w * g.real, -w * g.imag))
        torch.testing.assert_close(new, p.detach())


class Centred(Optimizer):
    def direction(self, g: Tensor, weight: Tensor):
        return weight * g

    def whole(self, d: Tensor):
        return d - d.mean()


@pytest.mark.parametrize(
    "how",
    [{"compile": False}, pytest.param({"compile": True}, marks=pytest.mark.full)],
)
def test_extras_before_a_map(how: dict[str, Any]) -> None:
    ps = [torch.randn(n, 3, requires_grad=True) for n in (2, 5)]
    starts, weights = [p.detach().clone() for p in ps], [torch.rand_like(p) for p in ps]
    optimizer = Centred(ps, lr=0.1, **how)
    for p in ps:
        p.grad = torch.randn_like(p)
    for _ in range(2):
        optimizer.step(weight=weights)
    for p, start, weight in zip(ps, starts, weights):
        assert p.grad is not None
        d = weight * p.grad
        torch.testing.assert_close(p.detach(), start - 0.2 * (d - d.mean()))


class SPS(Optimizer, lr="inside"):
    """The Polyak step size with a bound (arXiv:2002.10542)."""

    c: float = 0.5

    def measure(self, mean: Any, numel: Tensor, g: Tensor, loss: Tensor):
        square = numel * mean(g * g)
        return {"size": (loss / (self.c * square + 1e-6)).clamp_max(self.lr)}

    def direction(self, g: Tensor, loss: Tensor, size: Tensor):
        return size * g


def sps(params: Any, grads: Any, lr: float, c: float = 0.5) -> Any:
    for i, p in enumerate(params):
        for step in grads:
            square = step[i].square().sum()
            p = p - min(lr, float(0.7 / (c * square + 1e-6))) * step[i]
        params[i] = p
    return params


class Gated(Optimizer):
    """A weighed direction whose finished delta has norm lr, and is cut by a mask."""

    def direction(self, g: Tensor, weight: Tensor, gate: Tensor):
        return weight * g

    def after(self, mean: Any, u: Tensor, weight: Tensor, gate: Tensor):
        size = root(mean(weight * u * u)) + 1e-6 * self.lr
        return self.lr * gate / size * u


def gated(params: Any, grads: Any, lr: float) -> Any:
    for i, p in enumerate(params):
        for step in grads:
            weight, gate = step[i].cos() + 1.5, (step[i] > -0.5).double()
            d = weight * step[i]
            square = (weight * d * d).mean() if d.numel() else d.sum()
            p = p - gate * lr * d / (square.sqrt() + 1e-6)
        params[i] = p
    return params


class Told(Optimizer):
    """A rate for all, of the loss and a weighed norm of the gradients so far."""

    class Running(NamedTuple):
        rate: float = 1.0

    def direction(self, g: Tensor, r: Running, loss: Tensor, weight: Any = 0.5):
        return r.rate * g, r

    def sums(self, g: Tensor, weight: Tensor):
        return weight * g * g

    def join(self, r: Running, sums: Any, loss: Tensor):
        return self.Running(0.5 * r.rate + loss / (1 + sums))


def told(params: Any, grads: Any, lr: float, weigh: Any = lambda g: 0.5) -> Any:
    rate = 1.0
    for step in grads:
        params = [p - lr * rate * g for p, g in zip(params, step)]
        total = sum([float((weigh(g) * g * g).sum()) for g in step])
        rate = 0.5 * rate + 0.7 / (1 + total)
    return params


class Louder(Optimizer):
    """A map that takes the loss, and adds a bias of each tensor if it is given one."""

    def direction(self, g: Tensor, loss: Tensor, bias: Any = 0.25):
        return g + bias

    def whole(self, d: Tensor, loss: Tensor):
        return d / (loss + root((d * d).sum()))


def louder(params: Any, grads: Any, lr: float) -> Any:
    for i, p in enumerate(params):
        for d in [step[i] + 0.25 for step in grads]:
            p = p - lr * d / (0.7 + (d * d).sum().sqrt())
        params[i] = p
    return params


def loss_of(grads: Any) -> dict[str, Any]:
    return {"loss": torch.tensor(0.7, dtype=torch.float64)}


REACHED: dict[str, Any] = {
    "sums and join": (Told, told, loss_of),
    "a default is not taken": (
        Told,
        partial(told, weigh=lambda g: g.cos() + 1.5),
        lambda g: {**loss_of(g), "weight": [x.cos() + 1.5 for x in g]},
    ),
    "whole": (Louder, louder, loss_of),
    "measure": (SPS, sps, lambda g: {"loss": torch.tensor(0.7, dtype=torch.float64)}),
    "after and means": (
        Gated,
        gated,
        lambda g: {
            "weight": [x.cos() + 1.5 for x in g],
            "gate": [(x > -0.5).double() for x in g],
        },
    ),
}


# Kernels for these take seconds each; at night all rules have theirs.
COMPILED = ("sums and join", "whole", "a default is not taken")


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        row(name, on, id=f"{name}-{on}", tier=tier if on else "")
        for name in REACHED
        for on, tier in ((False, ""), (True, "full" if name in COMPILED else "night"))
    ],
)
def test_other_methods_take_the_extras_of_the_direction(name: str, compile: bool) -> None:
    rule, loop, extras = REACHED[name]
    jumps = {"float32": 0.1, "bfloat16": 1.0, "bfloat16 exact": 1.0}
    allowed = {**jumps, "bfloat16 compact": 1.0}
    check_rule(rule, loop, lr=0.5, extras=extras, compile=compile, steps=6, allowed=allowed)


def test_a_loss_is_the_closures_unless_step_is_given_one() -> None:
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    optimizer = SPS([w], lr=1.0, compile=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 25
    assert w.norm() < 1e-6  # the Polyak step of a square is exact
    with torch.no_grad():
        w.copy_(torch.tensor([3.0, 4.0]))
    optimizer.step(closure, loss=torch.tensor(5.0))
    # 5 / (0.5 * 100) * g
    torch.testing.assert_close(w.detach(), torch.tensor([2.4, 3.2]))


def test_lr_inside_is_no_factor_and_zero_divides_nothing() -> None:
    class Inside(Optimizer, lr="inside"):
        def direction(self, g: Tensor):
            return self.lr**2 * g

    class Child(Inside):
        pass

    for rule, lr, moved in ((Inside, 0.5, 0.25), (Child, 0.5, 0.25), (Inside, 0.0, 0.0)):
        w = torch.ones(2, requires_grad=True)
        w.grad = torch.ones(2)
        rule([w], lr=lr, weight_decay=0.1, compile=False).step()
        assert w.tolist() == pytest.approx([1 - moved - lr * 0.1] * 2)


class Squared(Optimizer, decay="own"):
    """Its decay falls with the square of lr."""

    def direction(self, g: Tensor):
        return g

    def after(self, x: Tensor, u: Tensor):
        return u - self.lr**2 * self.weight_decay * x


class Apart(Squared, decay="decoupled"):
    """Decay is added to it, and it takes that out."""

    def after(self, x: Tensor, u: Tensor):
        return u + self.lr * self.weight_decay * x + super().after(x, 0.0 * x)


class Silent(Optimizer, decay="own"):
    def direction(self, g: Tensor):
        return g


class Replaces(Optimizer):
    def direction(self, g: Tensor):
        return g

    def after(self, mean: Any, x: Tensor, u: Tensor):
        return -self.lr * x / (1 + mean(x * x))


class Joined(Replaces, decay="l2"):
    class State(NamedTuple):
        g: Tensor

    def direction(self, g: Tensor, s: State):
        return g, self.State(g)

    def after(self, x: Tensor, u: Tensor, s: State):
        return -self.lr * s.g, s


class Measured(Replaces):
    def after(self, mean: Any, x: Tensor, u: Tensor):
        return x / mean(u)


class Due(Replaces):
    def due(self, t: float):
        return t % 2 == 0


_LR, _MASKS = {"decouple_lr": True}, ({"cautious_decay": True}, {"corrected_decay": True})
_ON, _SCHEDULED = {"weight_decay": 0.1}, {"weight_decay": lambda t: 0.1}


@pytest.mark.parametrize(
    ("rule", "taken", "refused"),
    [
        (Squared, (_ON, _SCHEDULED, {"cautious": True}), (_LR, *_MASKS)),
        (Apart, (_ON, {"cautious": True}), (_LR, *_MASKS)),
        (Silent, ({"cautious": True},), (_ON, _LR, *_MASKS)),
        (Replaces, (), (_ON, _LR, *_MASKS)),
        (Joined, (_ON,), (_LR, *_MASKS)),
        (Measured, (_ON, _LR, *_MASKS, {"cautious": True}), ()),
        (Due, (_ON, _LR, *_MASKS, {"cautious": True}), ()),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_options_that_a_rule_would_drop_are_refused(
    rule: Any, taken: Any, refused: Any
) -> None:
    for options in taken:
        rule.pure(lr=0.5, **options)
    for options in refused:
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}=.*, but its .*: allowed is the"):
            rule([torch.ones(2, requires_grad=True)], lr=0.5, **options)


def test_a_decay_of_its_own_is_all_of_the_decay() -> None:
    for rule, want in (Squared, 2.0 - 0.5 - 0.05), (Apart, 1.45), (Joined, 2.0 - 0.6):
        w = torch.full((2,), 2.0, requires_grad=True)
        w.grad, value = torch.ones(2), rule.pure(lr=0.5, weight_decay=0.1)
        moved, _ = value.step(w.detach(), w.grad, value.init(w.detach()))
        rule([w], lr=0.5, weight_decay=0.1, compile=False).step()
        for x in (w, moved):
            assert x.tolist() == pytest.approx([want, want])


def test_released_steps_take_a_default() -> None:
    ends: list[Tensor] = []
    for released in (False, True):
        net = model()
        net.zero_grad()
        optimizer = Told(net.parameters(), lr=0.1, compile=False, gradient_release=released)
        loss = torch.tensor(2.0)
        if released:
            prepare_for_gradient_release(net, optimizer)
            optimizer.give(loss=loss)
        for i in range(3):
            train(net, optimizer, i)
            optimizer.step(**({} if released else {"loss": loss}))
            net.zero_grad()
        ends.append(net.weight.detach())
    torch.testing.assert_close(*ends)
    assert not torch.equal(ends[0], model().weight)


ONLY = "which only the class's step and the pure one"
EXTRAS = {
    "optimizer.step()": (
        r"TypeError: extras \[\]: this optimizer's direction takes \['hessian'\] \(e"
    ),
    "optimizer.step(hessian=one, loss=1.0)": r"TypeError: extras \['hessian', 'loss'\]",
    "optimizer.step(hessian='1')": "TypeError: hessian='1': allowed are a number for all",
    "optimizer.step(hessian={'weight': torch.ones(2, 3)})": (
        r"hessian of \['bias'\], .* is None"
    ),
    "optimizer.step(hessian=[torch.ones(2), torch.ones(2)])": (
        r"of \['weight'\].*shape \(2, 3\)"
    ),
    "optimizer.give(hessian=[torch.ones(2, 3)] * 2)": (
        r"hessian of \['bias'\], which takes a gradient, is"
    ),
    "optimizer.give(loss=one)": r"TypeError: got the extras \['loss'\]",
    "SGLD(net.parameters(), lr=0.1).step(loss=one)": (
        r"TypeError: got the extras \['loss'\]: .* takes \[\] \("
    ),
    "compiled.step(noise, q, q, noise.init(q))": f"TypeError: {ONLY}",
    "compiled.step(value, q, q, value.init(q))": f"TypeError: {ONLY}",
    "value.step(p, p, state)": r"TypeError: Sophia.*extras \[\]: .* takes \['hessian'\]",
    "value.step(p, p, state, loss=1.0)": r"TypeError: extras \['loss'\]",
    "value.step(p, p, state, hessian={'w': torch.ones(3)})": (
        r"hessian\['w'\] has the shape \(3,\)"
    ),
    "population.step(Sophia.pure, members, twice)": (
        r"TypeError: Sophia.*extras \[\]: .* takes \['hessian'\]"
    ),
    "population.step(Sophia.pure, members, twice, hessian={'w': torch.ones(3, 2)})": (
        r"hessian\['w'\] has 3 members"
    ),
    "told([p['w']], lr=0.1).step(loss=[torch.ones(2)])": "loss of .*: allowed are 0-d ones",
    "told.pure(lr=0.1).step(p, p, told.pure(lr=0.1).init(p), loss=torch.ones(2))": (
        r"loss.* has the shape \(2,\), .* are \[\(\)\]"
    ),
}


@pytest.mark.parametrize("told", [Told, Louder])
@refuses(EXTRAS)
def test_extras_that_do_not_fit_are_named_before_anything_moves(told: Any) -> Scene:
    net, one = model(), torch.tensor(1.0)
    optimizer = Sophia(net.named_parameters(), **HOW)
    p = {"w": torch.ones(2, requires_grad=True)}
    p["w"].grad = torch.ones(2)
    q = {"w": torch.ones(2)}
    noise, value = SGLD.pure(lr=0.1), Sophia.pure(lr=0.1)
    state = value.init(p)
    members = population.init(Sophia.pure, p, {"lr": torch.tensor([0.1, 0.2])}, n=2)
    twice = {"w": torch.ones(2, 2)}
    return locals() | {"compiled": compiled}
