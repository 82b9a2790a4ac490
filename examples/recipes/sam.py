"""Sharpness-aware minimization (SAM) around any optimizer.

Use it to look for flat minima, which often generalize better, at the price of two forward
and backward passes a step. Each step first moves up the gradient to the worst point nearby,
takes the gradient there, moves back, and lets the optimizer step along that gradient:

    p' = p + rho * g / |g|,   p <- the optimizer's step from p along the gradient at p'

Foret et al., arXiv:2010.01412. With `adaptive=True` the distance is measured relative to
the size of each weight, and rho is about ten times as large (ASAM, arXiv:2102.11600).

    python examples/recipes/sam.py

A bfloat16 weight does not change if it is moved by less than 0.2 %, so keep the weights in
float32, or rho large. Do not combine this with gradient release, which updates the
parameters before the second pass, or with a GradScaler, whose step takes no closure.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optimi_func import AdamW
from optimi_func.transforms import ascent


def sam_step(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Tensor],
    rho: float = 0.05,
    adaptive: bool = False,
) -> Tensor:
    """Take one step of the optimizer along the gradient at the worst point nearby.

    Args:
        optimizer: Any torch.optim.Optimizer that minimizes.
        closure: Clears the gradients, computes the loss, calls backward and returns the
            loss. It is called twice.
        rho: The distance to that point, at least 0.
        adaptive: Measure the distance relative to the size of each weight.

    Returns:
        The loss at the parameters from which the step began.
    """
    loss = closure()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    params = [p for p in params if p.grad is not None]
    with torch.no_grad():
        before = [p.clone() for p in params]
        worst: Any = ascent(before, [p.grad for p in params], rho, adaptive)
    try:
        write(params, worst)
        closure()
    finally:  # If the closure fails, the weights are still those of before.
        write(params, before)
    optimizer.step()
    return loss


@torch.no_grad()
def write(params: list[Tensor], values: list[Tensor]) -> None:
    for p, x in zip(params, values):
        p.copy_(x)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    optimizer = AdamW(model.parameters(), lr=1e-2, compile=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    losses = [sam_step(optimizer, closure, rho=0.05).item() for _ in range(50)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
