"""Wrappers of an optimizer of shards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shards import assert_close, batch, flat_mesh, loss_of, mine, plain, sharded, snapshot
from torch import Tensor, nn

from optimi_func import SAM, AdamW, Lookahead

WRAPS: list[Callable[[Any], Any]] = [
    lambda x: SAM(x, 0.5),
    lambda x: SAM(x, 0.5, adaptive=True),
    lambda x: Lookahead(x, 2),
]


def trained(model: nn.Module, wrap: Any, data: Callable[[int], Tensor]) -> list[Tensor]:
    optimizer = wrap(AdamW(model.parameters(), lr=0.05, compile=False))
    for x in map(data, range(4)):

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        optimizer.step(closure)
    return snapshot(model)


def shards(folder: Path) -> None:
    """The parameters are those of one process."""
    del folder
    for wrap in WRAPS:
        ours, theirs = (
            trained(sharded(flat_mesh()), wrap, mine),
            trained(plain(), wrap, batch),
        )
        assert_close(ours, theirs, snapshot(plain()), 1e-9)
