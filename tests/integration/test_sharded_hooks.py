"""Hooks on shards: the step of one process, and checkpoints that contain the hooks."""

from typing import Any, NamedTuple

import pytest
import torch
from one_process import Training, as_one_process, fully_sharded, of
from shards import (
    EAGER,
    batch,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from worlds import in_turn, world

from optimi_func import AdamW, Muon
from optimi_func.hooks import cautious, floor, hook, hyperball, radial_brake


@hook
class sized(NamedTuple):
    """Reads the number of elements of the whole tensor."""

    sized = True

    def scale(self, n: Any, lr: Any) -> Any:
        return 3.0 / n.numel


class Net(nn.Module):
    """Sizes that 2 processes divide unevenly: 7 rows, a stack of 3 matrices, and 1 row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(4, 1)
        self.stack = nn.Parameter(torch.randn(3, 7, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(torch.einsum("bi,kij->bj", x, self.stack).tanh())


# Rounds of means, and maps.
CASES: list[tuple[Any, list[Any]]] = [
    (AdamW, [cautious(), hyperball()]),
    (AdamW, [sized(), radial_brake(0.5)]),
    (AdamW, [floor(0.9, "row")]),
    (AdamW, [floor(0.9, "matrix"), radial_brake(0.5)]),
    (Muon, [hyperball("matrix")]),
]


def compare(**how: Any) -> None:
    for cls, hooks in CASES:
        training = Training(Net, of(cls, lr=0.05, weight_decay=0.0, hooks=hooks, **how))
        with in_turn():  # what it compiles, shards take
            assert training.alone
        as_one_process(training, fully_sharded(), tolerance=1e-10, about=(cls, hooks))


@world(2, full=[4])
def test_shards_move_as_one_process() -> None:
    compare()


@world(full=[2])
def test_compiled_steps_of_shards() -> None:
    compare(compile=True)


def pair(number: Any) -> tuple[Any, Any]:
    model, hooks = Net(), [cautious(), floor(number), radial_brake(0.3)]
    return model, AdamW(model.parameters(), lr=0.05, hooks=hooks, capturable=True, **EAGER)


CHOICES: list[Any] = [{}, {"flatten_optimizer_state_dict": True}]
CHOICES += [{"full_state_dict": True}, {"cpu_offload": True}]


@pytest.mark.parametrize("number", [0.9, torch.tensor(0.9)], ids=["float", "tensor"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_torchs_state_dicts_have_the_hooks(
    choice: Any, number: Any, one_process: None
) -> None:
    how = sd.StateDictOptions(**choice)
    (model, optimizer), (other, resumed) = pair(number), pair(0.1)
    train(model, optimizer, range(2), batch)
    kept = sd.get_optimizer_state_dict(model, optimizer, options=how)
    sd.set_optimizer_state_dict(other, resumed, kept, options=how)
    assert resumed.param_groups[0]["hooks"] == optimizer.param_groups[0]["hooks"]
