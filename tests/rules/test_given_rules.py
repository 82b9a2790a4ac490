"""Users' rules whose direction takes extras or noise, in classes."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from own_rules import SGLD, Sophia
from torch import Tensor, nn

from optimi_func import compiled, population, prepare_for_gradient_release
from optimi_func.rules import Evaluated, Optimizer, Wide
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
    optimizer, state = Sophia(net.named_parameters(), **HOW), value.init(tree)
    for i in range(3):
        hessian = [(i + 1.0) * torch.rand_like(p) for p in net.parameters()]
        optimizer.step(hessian=WAYS[way](net, hessian))
        grads = {name: p.grad for name, p in net.named_parameters()}
        tree, state = value.step(tree, grads, state, hessian=dict(zip(tree, hessian)))
    for name, p in net.named_parameters():
        assert torch.equal(p, tree[name])
    assert optimizer.extras == {}  # which keeps no tensor


def test_one_number_for_all_and_groups_that_take_none() -> None:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.2}]
    Weighed(groups, lr=0.1).step(weight=torch.tensor(0.5))
    for p, old, lr in zip(net.parameters(), before, (0.1, 0.2)):
        assert p.grad is not None
        torch.testing.assert_close(p.detach(), old - lr * 0.5 * p.grad)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {},
            r"extras \[\]: this optimizer's direction takes \['hessian'\] \(e",
        ),
        ({"hessian": torch.tensor(1.0), "loss": 1.0}, r"extras \['hessian', 'loss'\]"),
        ({"hessian": 1.0}, r"hessian=1\.0: allowed are a 0-d tensor for all"),
        ({"hessian": {"weight": torch.ones(2, 3)}}, r"hessian of \['bias'\], .* is None"),
        ({"hessian": [torch.ones(2), torch.ones(2)]}, r"of \['weight'\].*shape \(2, 3\)"),
    ],
)
def test_extras_that_do_not_fit_are_named_before_anything_moves(
    given: Any, said: str
) -> None:
    net = model()
    optimizer, before = Sophia(net.named_parameters(), **HOW), copy.deepcopy(net)
    with pytest.raises((TypeError, ValueError), match=said):
        optimizer.step(**given)
    assert all(map(torch.equal, net.parameters(), before.parameters()))
    assert not optimizer.state


def test_a_rule_without_extras_refuses_them() -> None:
    with pytest.raises(TypeError, match=r"got the extras \['loss'\]: .* takes \[\] \("):
        SGLD(model().parameters(), lr=0.1).step(loss=torch.tensor(1.0))


@pytest.mark.parametrize("name", ["foreach", "compile"])
def test_options_that_extras_do_not_go_with(name: str) -> None:
    for rule, takes, how in ((Sophia, "hessian", HOW), (SGLD, "z", {"lr": 0.1})):
        with pytest.raises(TypeError, match=rf"{name}=True with \w+, .* takes {takes}: "):
            rule(model().parameters(), **how, **{name: True})


def sophia(net: nn.Linear, **options: Any) -> Sophia:
    return Sophia(net.named_parameters(), **HOW, **options)


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
    with pytest.raises(
        ValueError, match=r"hessian of \['bias'\], which takes a gradient, is"
    ):
        other.give(hessian=hessian[:1] * 2)
    assert torch.equal(other.given["hessian"][nets[1].bias], hessian[1])


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
    with pytest.raises(TypeError, match=r"got the extras \['loss'\]"):
        optimizer.give(loss=torch.tensor(1.0))


def test_compiled_functions_and_released_trees_refuse_them() -> None:
    p = {"w": torch.ones(2)}
    for value in (SGLD.pure(lr=0.1), Sophia.pure(lr=0.1)):
        with pytest.raises(TypeError, match="which only the class's step and the pure one"):
            compiled.step(value, p, p, value.init(p))


def test_extras_are_checked_in_every_way() -> None:
    check_rule(
        Weighed, compile=False, steps=6, extras=lambda g: {"weight": [x.cos() for x in g]}
    )


def drawn(shape: Any = (1000,), steps: int = 1, place: int = 0, **hyper: Any) -> Any:
    """Return the noise of a step, of the parameter at a place of the group."""
    ps = [torch.zeros(2, requires_grad=True) for _ in range(place)]
    ps.append(torch.zeros(shape, requires_grad=True))
    optimizer = SGLD(ps, lr=0.5, temperature=1.0, **hyper)
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
        optimizer: Any = SGLD(net.parameters(), lr=0.1, gradient_release=release)
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


def test_noise_without_a_seed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes z: add a field, seed: int = 0"):

        class Lacking(Optimizer):  # type: ignore
            def direction(self, g: Tensor, z: Tensor):
                return g + z


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
    with pytest.raises(RuntimeError, match=r"step\(\) in eval mode"):
        optimizer.step()
    again = Averaged([w], lr=1.0, compile=False)
    again.load_state_dict(optimizer.state_dict())
    for some in (optimizer, again):
        some.train()
        assert w.tolist() == [-3.0, -3.0]
        some.eval()
