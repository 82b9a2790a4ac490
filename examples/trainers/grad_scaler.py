"""torch.amp.GradScaler: float16 autocast, scaled losses, and steps that overflow skipped.

Losses this small have gradients that float16 rounds to zero. The scaler multiplies the
loss, divides the gradients, and leaves out steps whose gradients overflow: it begins with
a scale so large that the first ones do. bfloat16 has float32's range and needs no scaler.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from optimi_func import AdamW

STEPS = 200
SMALL = 1e-6  # on the loss, as a small weight in a sum of losses


def train(low: bool, scale: float | None) -> tuple[float, int]:
    """Float16 or float32, scaled or not: the last loss and the steps taken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = AdamW(model.named_parameters(), lr=1e-2, eps=1e-12, compile=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    generator = torch.Generator().manual_seed(1)
    for _ in tqdm(range(STEPS), desc=f"{'float16' if low else 'float32'}, scale {scale}"):
        x = torch.rand(32, 4, generator=generator)
        with torch.autocast("cpu", torch.float16, enabled=low):
            out = model(x)
        loss = SMALL * F.mse_loss(out.float(), x.sum(1, keepdim=True).sin())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    taken = int(optimizer.state[model[0].weight]["step"])
    return loss.item() / SMALL, taken


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    runs = {
        "float32": (False, None),
        "float16": (True, None),
        "float16, scaled": (True, 2.0**40),
    }
    for name, run in runs.items():
        loss, taken = train(*run)
        print(f"{name:15} {taken} of {STEPS} steps taken, loss {loss:.1e}")


if __name__ == "__main__":
    main()
