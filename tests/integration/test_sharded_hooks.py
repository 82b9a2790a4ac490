"""Hooks on shards: the step of one process, and checkpoints that contain the hooks."""

from typing import Any, NamedTuple

import pytest
import torch
from shards import (
    EAGER,
    assert_close,
    batch,
    flat_mesh,
    mine,
    snapshot,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
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

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(4, 1)
        self.stack = nn.Parameter(torch.randn(3, 7, 4))
        self.double()
        for part in () if mesh is None else (self.first, self.last, self):
            fully_shard(part, mesh=mesh)

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


def moved(mesh: Any, data: Any, cls: Any, hooks: Any, how: Any) -> list[Tensor]:
    model = Net(mesh)
    params = [p for p in model.parameters() if cls is AdamW or p.dim() > 1]
    optimizer = cls(params, lr=0.05, weight_decay=0.0, hooks=hooks, **how)
    train(model, optimizer, range(4), data)
    return snapshot(model)


def compare(how: Any, cases: Any) -> None:
    mesh, start = flat_mesh(), snapshot(Net())
    for cls, hooks in cases:
        with in_turn():  # what it compiles, shards take
            alone = moved(None, batch, cls, hooks, how)
        assert_close(moved(mesh, mine, cls, hooks, how), alone, start, 1e-10)


@world(2, full=[4])
def test_shards_move_as_one_process() -> None:
    compare(EAGER, CASES)


@world(full=[2])
def test_compiled_steps_of_shards() -> None:
    compare({"compile": True}, CASES)


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
