"""A small network, its optimizer and its training, with and without gradient release."""

import torch
from cases import taken
from torch import nn

from optimi_func import AdamW

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


def make(cls=AdamW, dtype=torch.float32, release=True, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    options = {**EAGER, "lr": 1e-2, **options}
    return model, cls(taken(cls, model), gradient_release=release, **options)


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


def assert_same(one, two) -> None:
    (model, optimizer), (twin, other) = one, two
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)
        for name, x in optimizer.state.get(p, {}).items():
            assert torch.equal(x, other.state[q][name]), name
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()
