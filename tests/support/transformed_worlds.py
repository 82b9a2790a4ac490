"""What two processes check of classes with transforms: shards, release."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from shards import EAGER, flat_mesh
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from optimi_func import AdamW, prepare_for_gradient_release
from optimi_func.transforms import (
    GradientTransform,
    add_noise,
    centralize,
    clip_global_norm,
    clip_param_norm,
)


def zeros(params: Any) -> Any:
    return pytree.tree_map(torch.zeros_like, params)


def _add_mean(grads: Any, mean: Any, step: Tensor) -> Any:
    new = 0.5 * mean + grads[0]
    return [new], new


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for i in steps:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(i))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def own() -> list[Any]:
    trace = GradientTransform(zeros, _add_mean, by_parameter=True)
    return [centralize(), clip_param_norm(0.5), trace]


def every() -> list[Any]:
    return [*own(), clip_global_norm(0.7), add_noise(0.1, seed=3)]


def made(model: nn.Module, parts: list[Any], **options: Any) -> Any:
    given = model.named_parameters()
    return AdamW(given, lr=0.05, transforms=parts, **options, **EAGER)


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def shards(folder: Path) -> None:
    """Each process has the gradient of the same batch, so that the mean is that of one."""
    one, model = net(), net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=flat_mesh())
    alone, optimizer = made(one, every()), made(model, every())
    train(one, alone, range(3))
    train(model, optimizer, range(3))
    dcp.save(sd.get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "dcp")
    again = made(model, every())
    into = sd.get_optimizer_state_dict(model, again)
    dcp.load(into, checkpoint_id=folder / "dcp")
    sd.set_optimizer_state_dict(model, again, into)
    train(one, alone, range(3, 5))
    train(model, again, range(3, 5))
    for p, q in zip(one.parameters(), model.parameters()):
        torch.testing.assert_close(p.detach(), whole(q.detach()), rtol=1e-5, atol=1e-6)
    kept = again.param_groups[0]["transforms"]
    assert kept["step"] == 5 and kept["4.step"] == 5, kept


def released(folder: Path) -> None:
    one, model = net(), net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=flat_mesh())
    alone, optimizer = made(one, own()), made(model, own(), gradient_release=True)
    handle = prepare_for_gradient_release(model, optimizer)
    train(one, alone, range(3))
    train(model, optimizer, range(3))
    handle.remove()
    for p, q in zip(one.parameters(), model.parameters()):
        torch.testing.assert_close(p.detach(), whole(q.detach()), rtol=1e-5, atol=1e-6)
