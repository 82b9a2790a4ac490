"""Schedules drive these classes as they drive torch's: step by step the same numbers."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_moved_alike
from scheduled import STEPS, drive, start
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import optimi_func

# Every class, with what makes it change lr in a few steps, more than once.
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, [lambda i: 0.9**i, lambda i: 1 / (i + 1)]),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda i: 1 - i / 50),
    "StepLR": lambda o: schedules.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [3, 9], 0.5),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.25, 5),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, 1.0, 7),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 10, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, [0.2, 0.1], total_steps=STEPS + 1),
    "CyclicLR": lambda o: schedules.CyclicLR(o, [1e-3, 1e-2], [0.1, 0.2], step_size_up=3),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o,
        [schedules.LinearLR(o, 0.1, 1.0, 5), schedules.ExponentialLR(o, 0.9)],
        [5],
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 4), schedules.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: SWALR(o, [0.05, 0.2], anneal_epochs=6),
}
CYCLED = ("OneCycleLR", "CyclicLR")  # betas too


def test_every_schedule_of_torch_is_here() -> None:
    classes = {
        name: x for name, x in vars(schedules).items() if not name.startswith("_")
    } | {"SWALR": SWALR}
    base = schedules.LRScheduler
    known = {n for n, x in classes.items() if inspect.isclass(x) and issubclass(x, base)}
    assert known - {"LRScheduler"} == set(SCHEDULES)


LRS = {"float": 0.1, "0-d": torch.tensor(0.1), "1-d": torch.tensor([0.1])}


@pytest.mark.parametrize("lr", LRS.values(), ids=LRS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_numbers_as_torchs_adamw(name: str, lr: Any) -> None:
    # torch's own step takes a float or a 0-d tensor.
    theirs = float(lr) if torch.is_tensor(lr) and lr.dim() else lr
    seen, ends = drive(torch.optim.AdamW, SCHEDULES[name], theirs)
    ours, found = drive(optimi_func.AdamW, SCHEDULES[name], lr)
    assert len({step[0][0] for step in seen}) > 1
    assert (len({step[0][1] for step in seen}) > 1) == (name in CYCLED)
    tolerance = 1e-12 if isinstance(lr, float) else 1e-6
    for mine, other in zip(ours, seen):
        for pair in zip(mine, other):
            assert pair[0] == pytest.approx(pair[1], rel=tolerance, abs=1e-12)
    for s, p, q in zip(start(), found, ends):
        assert_moved_alike(s, p, q, max(tolerance, 1e-12))


@pytest.mark.parametrize("name", SCHEDULES)
def test_hooks_read_them_too(name: str) -> None:
    seen, ends = drive(optimi_func.AdamW, SCHEDULES[name], 0.1)
    ours, found = drive(optimi_func.AdamW, SCHEDULES[name], 0.1, release=True)
    assert ours == seen
    assert all(map(torch.equal, found, ends))


class LayerDecay:
    """A schedule as timm writes it: into the groups, scaled by an option of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.groups[0]["lr_scale"] = 0.25
        self.base = [group["lr"] for group in self.groups]
        self.taken = 0

    def step(self) -> None:
        self.taken += 1
        for base, group in zip(self.base, self.groups):
            value = base * (1 - self.taken / STEPS)
            if "lr_scale" in group:
                group["lr"] = value * group["lr_scale"]
            else:
                group["lr"] = value


@pytest.mark.parametrize("release", [False, True])
def test_numbers_written_into_the_groups(release: bool) -> None:
    seen, ends = drive(torch.optim.AdamW, LayerDecay, 0.1)
    ours, found = drive(optimi_func.AdamW, LayerDecay, 0.1, release)
    assert ours == seen
    assert seen[5][0][0] == pytest.approx(seen[5][1][0] / 4)
    for s, p, q in zip(start(), found, ends):
        assert_moved_alike(s, p, q, 1e-12)


def test_an_option_of_ones_own_is_saved_with_the_group() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = optimi_func.AdamW(model.parameters(), lr=0.1, compile=False)
    LayerDecay(optimizer).step()
    saved = optimizer.state_dict()
    twin = optimi_func.AdamW(model.parameters(), lr=0.5, compile=False)
    twin.load_state_dict(saved)
    assert twin.param_groups[0]["lr_scale"] == 0.25
    assert twin.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
