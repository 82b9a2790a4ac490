"""Moments in 8 bits of parameters whose shards cut groups, in distributed checkpoints."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shards import EAGER, full, passed_to
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import hand_over, raises

from optimi_func import AdamW, Muon
from optimi_func.core.distributed import distribute_like
from optimi_func.core.pairs import as_real
from optimi_func.core.rule import Storage

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2)]
# A bias of 8200 elements is cut at 4100, and columns of 192 at 96.
RULES: dict[str, tuple[Any, torch.dtype, dict[str, tuple[int, ...]]]] = {
    "adamw": (
        lambda named: AdamW(named, lr=0.01, storage="compact", **EAGER),
        torch.bfloat16,
        {"bias": (8200,), "weight": (64, 192), "even": (64, 256)},
    ),
    "muon": (
        lambda named: Muon(named, lr=0.01, storage=Storage(None, "8bit"), **EAGER),
        torch.float32,
        {"weight": (64, 192), "even": (64, 256)},
    ),
    "complex": (
        lambda named: AdamW(named, lr=0.01, storage=Storage(None, "8bit"), **EAGER),
        torch.complex64,
        {"weight": (64, 96)},
    ),
    "channels": (
        lambda named: AdamW(named, lr=0.01, storage=Storage(None, "8bit"), **EAGER),
        torch.float32,
        {"kernel": (16, 64, 3, 3)},
    ),
}


class Weights(nn.Module):
    """Parameters, plain ones or divided over all processes there are."""

    def __init__(self, name: str, divided: bool) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        _, dtype, shapes = RULES[name]
        for key, shape in shapes.items():
            x: Any = torch.randn(shape, generator=source).to(dtype)
            if key == "kernel":
                x = x.contiguous(memory_format=torch.channels_last)
            if divided:
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                cut = [Shard(0 if key == "bias" else 1)]
                x = distribute_tensor(x, mesh, cut, src_data_rank=None)
            self.register_parameter(key, nn.Parameter(x))


def made(name: str) -> tuple[Any, Any]:
    model = Weights(name, dist.is_initialized())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = RULES[name][0](model.named_parameters())
    said = [str(w.message) for w in found if "cut groups" in str(w.message)]
    assert len(said) == dist.is_initialized()
    return model, optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """By gradients with a common part, of which moments remember more than of noise."""
    for t in steps:
        for i, p in enumerate(model.parameters()):
            common, noise = (
                torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
                for seed in (i, 100 * t + i)
            )
            # Other signs later: without moments the steps would go elsewhere.
            sign = 1.0 if t < 4 else -0.1
            p.grad = distribute_like(p, (sign * common + 0.3 * noise).to(p.dtype))
        optimizer.step()


def values(model: nn.Module, optimizer: Any) -> list[Tensor]:
    masters = optimizer.master_state_dict(model).values()
    return [as_real(full(x)).double() for x in masters]


def check_goes_on(model: nn.Module, optimizer: Any, name: str) -> None:
    """As a run on plain tensors that was not interrupted, and not as without moments."""
    train(model, optimizer, range(4, 7))
    ends: list[list[Tensor]] = [values(model, optimizer)]
    for anew in (False, True):
        other = Weights(name, divided=False)
        its = RULES[name][0](other.named_parameters())
        train(other, its, range(4))
        middle = values(other, its)
        for entry in its.state.values() if anew else ():
            for key in {*entry} - {"step", "kahan_comp"}:
                entry[key].zero_()
        train(other, its, range(4, 7))
        ends.append(values(other, its))
    for start, got, want, forgotten in zip(middle, *ends):
        moved = (want - start).norm()
        # Where shards cut groups, moments are rounded to 8 bits once rather than each step.
        assert (got - want).norm() <= 0.04 * moved, (name, (got - want).norm() / moved)
        assert (forgotten - want).norm() > 0.3 * moved


def trained(name: str) -> tuple[Any, Any]:
    pair = made(name)
    train(*pair, range(4))
    return pair


def quiet(transfer: Any, state: Any, folder: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        transfer(state, checkpoint_id=folder, **options)


def saves(folder: Path) -> None:
    for name in RULES:
        model, optimizer = trained(name)
        before = [dict(optimizer.state[p]) for p in model.parameters()]
        passed_to(dcp.save, model, optimizer, folder / name)
        quiet(dcp.save, {"o": optimizer, "m": model}, folder / f"{name} by order")
        # The optimizer's own state is as it was.
        for p, entry in zip(model.parameters(), before):
            assert all(optimizer.state[p][k] is x for k, x in entry.items())
        state = {"o": optimizer.decoded_state_dict(), "m": model.state_dict()}
        quiet(dcp.save, state, folder / f"{name} decoded")


def goes_on(folder: Path) -> None:
    for name in RULES:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*have taken steps")
            model, optimizer = made(name)
            kept = passed_to(dcp.load, model, optimizer, folder / name)
            weights, state = kept["model"], kept["optimizer"]
            sd.set_state_dict(
                model, optimizer, model_state_dict=weights, optim_state_dict=state
            )
            check_goes_on(model, optimizer, name)

            model, optimizer = made(name)
            optimizer.init_state()
            quiet(dcp.load, {"o": optimizer, "m": model}, folder / f"{name} by order")
            check_goes_on(model, optimizer, name)

            model, optimizer = made(name)
            optimizer.init_state()
            saved = {"o": optimizer.decoded_state_dict(), "m": model.state_dict()}
            quiet(dcp.load, saved, folder / f"{name} decoded")
            model.load_state_dict(saved["m"])
            optimizer.load_state_dict(saved["o"])
            check_goes_on(model, optimizer, name)


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES)
def test_any_number_of_processes_goes_on(sizes: tuple[int, int], tmp_path: Path) -> None:
    hand_over(saves, goes_on, sizes, tmp_path)


def saves_its_own_form(folder: Path) -> None:
    _, optimizer = trained("adamw")
    quiet(dcp.save, {"o": optimizer.state_dict()}, folder)


def is_told(folder: Path) -> None:
    """In another form moments are missing, and those that are left out are no secret."""
    _, optimizer = made("adamw")
    optimizer.init_state()
    state = optimizer.state_dict()
    with raises(CheckpointException, "Missing key"):
        quiet(dcp.load, {"o": state}, folder)
    partial = DefaultLoadPlanner(allow_partial_load=True)
    quiet(dcp.load, {"o": state}, folder, planner=partial)
    with pytest.warns(UserWarning, match=r"2 parameters \(bias, .*allow_partial_load"):
        optimizer.load_state_dict(state)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_moments_that_a_checkpoint_lacks_are_reported(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    hand_over(saves_its_own_form, is_told, sizes, tmp_path)
