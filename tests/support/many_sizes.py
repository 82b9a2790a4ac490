"""Parameters of many sizes, and steps on gradients that are given."""

from typing import Any

import torch
from torch import Tensor

SHAPES = [(16,), (3, 4), (), (1,), (7,), (16,), (4, 4), (0,), (100, 100), (2, 3, 5)]


def params(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    return [p.to(dtype).requires_grad_() for p in made]


def fill(ps: list[Tensor], t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in ps:
        # They grow: StableAdamW's means count above 1 alone.
        g = 1.5**t * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = g.to(p.dtype)


def train(optimizer: Any, ps: list[Tensor], start: int, steps: int) -> None:
    for t in range(start, start + steps):
        fill(ps, t)
        optimizer.step()


def assert_alike(ps: list[Tensor], qs: list[Tensor], tolerance: float = 1e-12) -> None:
    for p, q in zip(ps, qs):
        assert p.dtype == q.dtype
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
