"""Averages of the weights: SWA with its schedule, and an exponential moving average.

torch's AveragedModel reads the parameters after each step. With a large learning rate at
the end, the iterates go around the minimum and their average lies closer to it.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from tqdm import tqdm

from optimi_func import AdamW

STEPS, BEGIN = 600, 300


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(32, 4, generator=generator)
    noise = 0.3 * torch.randn(32, 1, generator=generator)
    return x, x.sum(1, keepdim=True).sin() + noise


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 1))
    optimizer = AdamW(model.named_parameters(), lr=1e-2, compile=False)
    schedule = SWALR(optimizer, swa_lr=2e-2, anneal_epochs=50)
    swa = AveragedModel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    generator = torch.Generator().manual_seed(1)
    for step in tqdm(range(STEPS)):
        x, y = batch(generator)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        if step >= BEGIN:
            swa.update_parameters(model)
            schedule.step()
    # The averages have not seen data: their BatchNorm statistics are those of nobody.
    x = torch.rand(4096, 4, generator=generator)
    for averaged in (swa, ema):
        update_bn([x], averaged)
    for name, found in (
        ("the last weights", model),
        ("their SWA", swa),
        ("their EMA", ema),
    ):
        found.eval()
        loss = F.mse_loss(found(x), x.sum(1, keepdim=True).sin()).item()
        print(f"{name:16} loss without the noise {loss:.1e}")


if __name__ == "__main__":
    main()
