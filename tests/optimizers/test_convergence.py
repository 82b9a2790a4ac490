"""Each optimizer minimizes two functions at the learning rate that its page recommends."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import NAMES, Case
from tiers import row
from torch import Tensor

PAGES = Path(__file__).parents[2] / "docs" / "optimizers"
STEPS = 3000
LEFT = 0.1  # of the loss
MINIMUM = torch.tensor([[1.0, -0.5], [0.25, 0.0]])
BF16 = torch.bfloat16


def recommended_lr(name: str) -> float:
    """Return the learning rate of the first example on the page of an optimizer."""
    page = (PAGES / f"{name}.md").read_text()
    found = re.search(r"\(model\.parameters\(\), lr=([\d.e-]+)", page)
    assert found is not None, f"docs/optimizers/{name}.md: no example with an lr"
    return float(found[1])


def parabola(x: Tensor) -> Tensor:
    return (x - MINIMUM.to(x)).square().sum() / 2


def rosenbrock(x: Tensor) -> Tensor:
    """The sum of Rosenbrock's function over rows: a curved valley with steep sides."""
    a, b = x.unbind(1)
    return ((1 - a) ** 2 + 100 * (b - a * a) ** 2).sum()


def flat_rosenbrock(x: Tensor) -> Tensor:
    """Rosenbrock's function with a curvature of about 1 at most, as a parabola's."""
    return rosenbrock(x) / 1000


STARTS: dict[Callable[[Tensor], Tensor], Tensor] = {
    parabola: torch.tensor([[1.5, -0.8], [0.6, -0.4]]),
    rosenbrock: torch.tensor([[0.5, 0.0], [0.7, 0.6]]),
    flat_rosenbrock: torch.tensor([[0.5, 0.0], [0.7, 0.6]]),
}
# Their steps are as large as the gradient, so that lr has to be below 2 / curvature.
PROPORTIONAL = ("asgd", "schedule_free_sgd", "sgd")


def least_loss(name: str, loss: Any, dtype: torch.dtype, storage: Any) -> float:
    """Return the part of the loss that is left at the best of STEPS steps, or LEFT."""
    value, p = Case(name).functional(recommended_lr(name)), STARTS[loss].to(dtype)
    state, wide = value.init(p, storage=storage), torch.float64
    first = least = loss(p.to(wide)).item()
    for _ in range(STEPS):
        at = p.to(wide).requires_grad_()
        (g,) = torch.autograd.grad(loss(at), at)
        p, state = value.step(p, g.to(dtype), state)
        least = min(least, loss(value.eval_params(p, state).to(wide)).item())
        if least <= LEFT * first:
            break
    return least / first


def rows() -> list[Any]:
    found = [
        row(name, parabola, torch.float32, None, id=f"{name}-parabola") for name in NAMES
    ]
    for name in NAMES:
        hard = flat_rosenbrock if name in PROPORTIONAL else rosenbrock
        found.append(row(name, hard, torch.float32, None, id=f"{name}-rosenbrock"))
        stored = [(f"{name}-parabola-{x}", x) for x in ("exact", "compact")]
        found += [row(name, parabola, BF16, x, id=i, tier="full") for i, x in stored]
    return found


@pytest.mark.parametrize(("name", "loss", "dtype", "storage"), rows())
def test_the_loss_falls(name: str, loss: Any, dtype: torch.dtype, storage: Any) -> None:
    assert least_loss(name, loss, dtype, storage) <= LEFT
