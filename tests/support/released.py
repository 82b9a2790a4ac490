"""A small network, its optimizer and its training, with and without gradient release."""

from typing import Any

import torch
from cases import taken
from torch import nn

from optimi_func import AdamW, prepare_for_gradient_release

EAGER = {"compile": False}


class Net(nn.Module):
    """Large and small parameters, and one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 128)
        self.middle = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128)
        self.last = nn.Linear(128, 4, bias=False)

    def forward(self, x):
        x = self.first(x).relu()
        x = self.middle(self.middle(x).relu())
        return self.last(self.norm(x))


def of(model: nn.Module, cls: Any = AdamW, release: bool = True, **options: Any) -> Any:
    """A model and an optimizer of it."""
    options = {**EAGER, "lr": 1e-2, **options}
    return model, cls(taken(cls, model), gradient_release=release, **options)


def make(cls=AdamW, dtype=torch.float32, release=True, **options):
    torch.manual_seed(0)
    return of(Net().to(dtype), cls, release, **options)


def prepared(made: Any = None, **how: Any) -> Any:
    """A model, its optimizer, and the handle of its release."""
    model, optimizer = made or make()
    return model, optimizer, prepare_for_gradient_release(model, optimizer, **how)


def both(run: Any, made: Any = make, **how: Any) -> Any:
    """Run with the ordinary step and under release: they end the same."""
    ends = []
    for release in (False, True):
        ends.append(made(release=release))
        if release:
            prepared(ends[-1], **how)
        run(*ends[-1])
    assert_same(*ends)
    return ends[1]


def batch(i: int, dtype=torch.float32):
    torch.manual_seed(100 + i)
    return torch.randn(8, 16).to(dtype)


def train(model, optimizer, steps, start=0, scheduler=None):
    for i in range(start, start + steps):
        x = batch(i, next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def assert_same(one, two) -> None:
    (model, optimizer), (twin, other) = one, two
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, x in optimizer.state.get(p, {}).items():
            assert torch.equal(x, other.state[q][name]), name
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()
