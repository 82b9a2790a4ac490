"""Users' rules with means before the direction, sums over parameters, maps of tensors."""

from typing import Any, NamedTuple

import pytest
import torch
from lars import LARS
from peaks import Peak, peak
from tiers import row
from torch import Tensor, nn

from optimi_func import compiled, population, prepare_for_gradient_release
from optimi_func.rules import Betas, Moment, Number, Optimizer, Shaped, Wide, root
from optimi_func.testing import check_rule


class Shifted(Optimizer):
    """Steps by the mean of the gradient, times the number of elements."""

    factor: float = 1.0

    def measure(self, mean: Any, numel: Tensor, g: Tensor):
        return {"total": self.factor * mean(g) * numel}

    def direction(self, g: Tensor, total: Tensor):
        return 0.0 * g + total


@pytest.mark.parametrize("how", [{"compile": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (7,), ()], ids=str)
def test_numbers_are_those_of_the_whole_parameter(how: Any, shape: Any) -> None:
    ps = [torch.zeros(shape, requires_grad=True), torch.zeros(2, requires_grad=True)]
    optimizer = Shifted(ps, lr=1.0, factor=2.0, **how)
    for p in ps:
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in ps:
        assert p.grad is not None
        want = torch.full_like(p, -2.0 * p.grad.sum().item())
        torch.testing.assert_close(p.detach(), want)


def test_slices_of_a_large_parameter_know_the_whole() -> None:
    p = torch.zeros(1_000_000, requires_grad=True)
    optimizer = Shifted([p], lr=1.0, compile=False)
    p.grad = torch.linspace(-1.0, 1.5, p.numel())
    optimizer.step()
    torch.testing.assert_close(p[:2].detach(), torch.full((2,), -0.25e6))
    assert torch.equal(p, p[:1].expand_as(p))


class Twice(Shifted):
    """Steps of g over its norm, and of x, scaled by their mean."""

    def direction(self, g: Tensor, x: Tensor, total: Tensor):
        return g / total + x

    def after(self, mean: Any, u: Tensor):
        return -self.lr * u / mean(u)


@pytest.mark.parametrize(
    ("n", "how"),
    [
        row(5, {"compile": False}, id="eager"),
        row(1_000_000, {"compile": False}, id="eager, in slices"),
        row(5, {"foreach": True}, id="foreach"),
        row(5, {"compile": True}, id="kernels", tier="full"),
        row(1_000_000, {"compile": True}, id="kernels, in slices", tier="full"),
    ],
)
def test_means_before_and_after_the_direction(n: int, how: Any) -> None:
    p = torch.linspace(1.0, 2.0, n, dtype=torch.float64, requires_grad=True)
    g = torch.linspace(3.0, 5.0, n, dtype=torch.float64)
    x = p.detach().clone()
    r = g / g.sum() + x + 0.5 * x
    want = x - 0.1 * r / r.mean()
    short = p[:3].detach().clone().requires_grad_()
    optimizer = Twice([p, short], lr=0.1, weight_decay=0.5, **how)
    p.grad, short.grad = g, g[:3].clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), want, rtol=1e-12, atol=0.0)
    r = g[:3] / g[:3].sum() + x[:3] + 0.5 * x[:3]
    want = x[:3] - 0.1 * r / r.mean()
    torch.testing.assert_close(short.detach(), want, rtol=1e-12, atol=0.0)


@pytest.mark.full
def test_means_before_and_after_the_direction_are_three_kernels(graphs: Any) -> None:
    for n in (5, 70_000):
        trees = [torch.linspace(1.0, 2.0, n + i) for i in range(3)]
        grads = [torch.linspace(3.0, 5.0, n + i) for i in range(3)]
        value = Twice.pure(lr=0.1, weight_decay=0.5)
        found, _ = compiled.step(value, trees, grads, value.init(trees))
        want, _ = value.step(trees, grads, value.init(trees))
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0.0)
    assert graphs() == 3  # two measure, and one moves


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_maxima_before_and_after_the_direction(compile: bool) -> None:
    check_rule(Peak, peak, compile=compile, steps=6)


@pytest.mark.parametrize(
    "how", [{"compile": False}, pytest.param({"compile": True}, marks=pytest.mark.full)]
)
def test_maxima_of_parameters_in_pieces(how: Any) -> None:
    starts = [torch.randn(n, dtype=torch.float64) for n in (5, 70_000, 1_000_003)]
    ps = [x.float().requires_grad_() for x in starts]
    starts = [p.detach().double() for p in ps]
    optimizer, steps = Peak(ps, lr=0.1, **how), list[Any]()
    for _ in range(2):
        for p in ps:
            p.grad = torch.randn_like(p)
            p.grad[-2] = 9.0 if p.numel() > 5 else 0.0  # in the last piece
        steps.append([p.grad.double() for p in ps if p.grad is not None])
        optimizer.step()
    for p, want in zip(ps, peak(list(starts), steps, 0.1)):
        torch.testing.assert_close(p.detach().double(), want, rtol=1e-5, atol=1e-5)


def test_release_accumulates_and_members_are_measured_apart() -> None:
    p = torch.zeros(4, requires_grad=True)
    model = torch.nn.ParameterList([p])
    optimizer = Shifted(model.parameters(), lr=1.0, gradient_release=True, compile=False)
    how: Any = {"accumulation": "buffer", "accumulation_steps": 2}
    prepare_for_gradient_release(model, optimizer, **how)
    for i in (1.0, 2.0):
        (i * model[0]).sum().backward()
    assert model[0].tolist() == [-12.0] * 4
    hyper = {"factor": torch.tensor([1.0, 2.0])}
    members = population.init(
        Shifted.pure, {"w": torch.zeros(4)}, {"lr": torch.ones(2), **hyper}, n=2
    )
    members = population.step(
        Shifted.pure, members, {"w": torch.tensor([1.0, 3.0])[:, None].expand(2, 4)}
    )
    assert members.params["w"][:, 0].tolist() == [-4.0, -24.0]


def test_parts_of_a_gradient_are_measured_by_themselves() -> None:
    class Summed(LARS):
        def accumulate(self, g: Tensor, s: Any, x: Tensor, ratio: Tensor):
            return self.direction(g, s, x, ratio)

    w = torch.nn.ParameterList([torch.full((3,), 2.0)])
    hyper: Any = {"lr": 1.0, "momentum": 1.0, "trust": 1.0, "l2": 0.0}
    optimizer = Summed(w, **hyper, gradient_release=True, compile=False)
    how: Any = {"accumulation": "states", "accumulation_steps": 2}
    prepare_for_gradient_release(w, optimizer, **how)
    for i in (1.0, -3.0):  # halves of each; the ratio does not depend on their sizes
        (i * w[0]).sum().backward()
    torch.testing.assert_close(w[0].detach(), torch.full((3,), 2.0))


class Kept(Shifted):
    """Steps by the sum of all gradients' sums, and of first values."""

    class State(NamedTuple):
        total: Number

    def init(self, p: Tensor):
        return self.State(torch.ones(()) * self.factor)

    def measure(self, mean: Any, numel: Tensor, g: Tensor, s: State):
        return {"total": s.total + mean(g) * numel}


@pytest.mark.parametrize(
    "how",
    [
        row({"compile": False}, id="eager"),
        row({"foreach": True}, id="foreach"),
        row({"compile": True}, id="kernels", tier="full"),
    ],
)
def test_numbers_of_a_tensor_last(how: Any) -> None:
    """Each tensor's own, also in slices, and not those of a step that is skipped."""
    ps = [torch.zeros(n, requires_grad=True) for n in (3, 1_000_000, 4)]
    optimizer: Any = Kept(ps, lr=1.0, factor=2.0, **how)
    want = [2.0, 2.0, 2.0]
    ends = [0.0, 0.0, 0.0]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for i in range(4):
        for k, p in enumerate(ps):
            p.grad = torch.full_like(p, float("inf") if i == 1 else (k + 1) / p.numel())
            want[k] += 0.0 if i == 1 else k + 1
            ends[k] -= 0.0 if i == 1 else want[k]
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update(1.0)
    for p, total, end in zip(ps, want, ends):
        kept = optimizer.state[p]["total"]
        assert kept.shape == () and kept.dtype == torch.float32
        torch.testing.assert_close(kept, torch.tensor(total), rtol=1e-3, atol=0.0)
        torch.testing.assert_close(p.detach(), torch.full_like(p, end), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("how", [{"compile": False}, {"foreach": True}])
def test_cautious_takes_the_directions_of_measured_numbers(how: Any) -> None:
    class Signed(Optimizer):
        def measure(self, mean: Any, g: Tensor):
            return {"shift": mean(g)}

        def direction(self, g: Tensor, shift: Tensor):
            return g - shift

    x, g = torch.ones(3), torch.tensor([-1.0, 1.0, 6.0])
    want = torch.tensor([1.0 + 0.1 * 3.0 * 1.5, 1.0, 1.0 - 0.1 * 4.0 * 1.5])
    value = Signed.pure(lr=0.1, cautious=True)
    torch.testing.assert_close(value.step(x, g, value.init(x))[0], want)
    optimizer = Signed([w := x.clone().requires_grad_()], lr=0.1, cautious=True, **how)
    w.grad = g
    optimizer.step()
    torch.testing.assert_close(w.detach(), want)


class Named(NamedTuple):
    total: Any


def test_numbers_in_a_tuple_with_names() -> None:
    body = {"measure": lambda self, mean, g: Named(mean(g))}
    value: Any = type("InTuple", (Shifted,), body).pure(lr=1.0)
    p = torch.zeros(2)
    moved, _ = value.step(p, torch.tensor([1.0, 2.0]), value.init(p))
    assert moved.tolist() == [-1.5, -1.5]


class AdamMini(Optimizer):
    """Adam with one v for each row of a matrix (arXiv:2406.16793)."""

    betas: Betas = Betas(0.9, 0.99)
    eps: float = 1e-6

    class State(NamedTuple):
        exp_avg: Shaped
        rows: Shaped  # v

    def init(self, p: Tensor) -> Any:
        made: Any = self.State
        return made(None, (*p.shape[:1], *[1] * (p.dim() - 1)))

    def direction(self, g: Tensor):
        return g

    def whole(self, d: Tensor, s: State, t: float):
        b1, b2 = self.betas
        squares = d * d
        if d.dim() > 1:
            squares = squares.mean([*range(1, d.dim())], keepdim=True)
        m = b1 * s.exp_avg + (1 - b1) * d
        v = b2 * s.rows + (1 - b2) * squares
        u = m / (1 - b1**t) / (root(v / (1 - b2**t)) + self.eps)
        return u, self.State(m, v)


def adam_mini(params: Any, grads: Any, lr: float, betas: Any = (0.9, 0.99)) -> Any:
    b1, b2 = betas
    for i, p in enumerate(params):
        m, v = 0 * p, 0 * p
        for t, step in enumerate(grads, 1):
            squares = step[i] ** 2
            for n in range(len(p) if p.dim() > 1 else 0):
                squares[n] = squares[n].mean()
            m, v = b1 * m + (1 - b1) * step[i], b2 * v + (1 - b2) * squares
            p = p - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-6)
        params[i] = p
    return params


def test_a_rule_with_one_number_for_each_row_is_its_loop(small: None) -> None:
    check_rule(AdamMini, adam_mini, compile=False, betas=(0.8, 0.95))


class Left(Optimizer):
    """A matrix that begins as given, and a moment that the map does not see."""

    beta: float = 0.5

    class State(NamedTuple):
        exp_avg: Moment
        left: Shaped

    def init(self, p: Tensor) -> Any:
        made: Any = self.State
        return made(None, 2 * torch.eye(p.shape[0], dtype=p.dtype, device=p.device))

    def direction(self, g: Tensor, s: State):
        assert s.left is None
        m = self.beta * s.exp_avg + g
        return m, s._replace(exp_avg=m)

    def whole(self, d: Tensor, s: State, x: Tensor, lr: float) -> Any:
        assert s.exp_avg is None
        return s.left @ d + 0 * x * lr, s._replace(left=s.left * (1 - self.beta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_first_values_of_a_shape_of_their_own(dtype: torch.dtype) -> None:
    p, g = torch.ones(2, 3, dtype=dtype), torch.full((2, 3), 0.5, dtype=dtype)
    w = nn.Parameter(p.clone())
    optimizer: Any = Left([w], lr=0.25, compile=False)
    value: Any = Left.pure(lr=0.25)
    state = value.init(p)
    assert state.leaves.left.dtype == torch.float32
    for _ in range(2):
        w.grad = g
        optimizer.step()
        p, state = value.step(p, g, state)
    # The first moves by 0.25 * 2 * 0.5, the second by 0.25 * 1 * 0.75.
    assert torch.equal(w, p) and p.unique().tolist() == [1 - 0.25 - 0.1875]
    for left in (state.leaves.left, optimizer.state[w]["left"]):
        assert left.tolist() == [[0.5, 0.0], [0.0, 0.5]]


# Sums over all parameters


class DoG(Optimizer):
    """Ivgi et al. 2023, arXiv:2302.12022, by the sums up to the step before."""

    first: float = 0.05

    class State(NamedTuple):
        start: Wide

    class Running(NamedTuple):
        factor: float = 0.0
        far: float = 0.0
        squares: float = 0.0

    def init(self, p: Tensor) -> State:
        return self.State(p)

    def direction(self, g: Tensor, s: State, r: Running):
        return g, s, r

    def after(self, x: Tensor, u: Tensor, s: State, r: Running):
        return r.factor * u, s

    def sums(self, g: Tensor, s: State, x: Tensor):
        return {"squares": g * g, "far": (x - s.start) ** 2}

    def join(self, r: Running, sums: dict[str, Any]):
        far = torch.maximum(torch.maximum(r.far, sums["far"] ** 0.5), self.first)
        squares = r.squares + sums["squares"]
        return self.Running(far / (squares + 1e-8) ** 0.5, far, squares)


def loop(params: list[Tensor], grads: Any, lr: float, first: float = 0.05) -> list[Tensor]:
    start, factor, far, squares = params, 0.0, first, 0.0
    for step in grads:
        far = max(far, sum([((p - x) ** 2).sum() for p, x in zip(params, start)]) ** 0.5)
        squares += sum([(g * g).sum() for g in step])
        params = [p - lr * factor * g for p, g in zip(params, step)]
        factor = far / (squares + 1e-8) ** 0.5
    return params


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_users_rule_with_sums_is_its_loop(compile: bool, small: None) -> None:
    allowed = {"bfloat16": 0.2, "bfloat16 exact": 0.2}  # d follows small differences
    options: dict[str, Any] = {"lr": 1.0, "first": 0.5, "steps": 8}
    check_rule(DoG, loop, compile=compile, allowed=allowed, **options)


def test_each_group_has_sums_of_its_own_and_shows_the_first_scalar() -> None:
    ps = [torch.ones(3, requires_grad=True) for _ in range(3)]
    groups = [{"params": ps[:1]}, {"params": ps[1:], "first": 0.2}]
    optimizer = DoG(groups, lr=1.0, compile=False)
    grads = [[torch.full((3,), float(i + j)) for i in (1, 2, 3)] for j in range(4)]
    for step in grads:
        for p, g in zip(ps, step):
            p.grad = g
        optimizer.step()
    for part, first in (slice(0, 1), 0.05), (slice(1, 3), 0.2):
        found = [p.detach().double() for p in ps[part]]
        start = [torch.ones(3, dtype=torch.float64) for _ in found]
        want = loop(start, [[g.double() for g in step[part]] for step in grads], 1.0, first)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0.0)
    shown = [group["factor"] for group in optimizer.param_groups]
    assert shown == [optimizer.state[p]["factor"].item() for p in (ps[0], ps[2])]
    assert 0.0 < shown[0] != shown[1] > 0.0


def test_a_parameter_without_a_gradient_counts_with_a_gradient_of_0() -> None:
    ps = [torch.ones(2, requires_grad=True), torch.ones(5, requires_grad=True)]
    optimizer = DoG(ps, lr=1.0, compile=False)
    for i in range(3):
        for p in ps:
            p.grad = torch.full_like(p, 2.0)
        ps[1].grad = None if i == 2 else ps[1].grad
        optimizer.step()
    assert optimizer.state[ps[0]]["squares"].item() == 4.0 * (7 + 7 + 2)
    # The distance of the second counts still.
    moved = (ps[1] - 1.0).square().sum() + 2 * 2.0**2 * 0.05**2 / 28
    assert optimizer.state[ps[0]]["far"].item() == pytest.approx(moved.item() ** 0.5)


class Sized(Optimizer):
    """Its factor is the sum of all squares of parameters."""

    class Running(NamedTuple):
        total: float = 0.0

    def direction(self, g: Tensor, r: Running):
        return g, r

    def sums(self, g: Tensor, x: Tensor):
        return x * x

    def join(self, r: Running, sums: Any):
        return self.Running(sums)


def test_parameters_that_never_had_a_gradient_count() -> None:
    params = [torch.full((2,), 3.0), torch.full((3,), 2.0), torch.ones(9)]
    value = Sized.pure(lr=0.0)
    _, state = value.step(params[:2], [torch.ones(2), None], value.init(params[:2]))
    ps = [p.clone().requires_grad_(i < 2) for i, p in enumerate(params)]
    optimizer = Sized(ps, lr=0.0, compile=False)
    ps[0].grad = torch.ones(2)
    optimizer.step()
    total = optimizer.state[ps[0]]["total"].item()
    assert total == state.leaves[0].running.total.item() == 2 * 9 + 3 * 4
    assert [*optimizer.state] == ps[:1]
