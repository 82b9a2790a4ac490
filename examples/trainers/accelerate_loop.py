"""Accelerate: prepare, gradient accumulation, and a state saved in between.

Four batches of 8 accumulate to a step, which moves the weights as one batch of 32 does.
Half way the state is saved; the run goes astray, loads it, and ends where it would have.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from optimi_func import AdamW

STEPS, PARTS = 40, 4


def batches(size: int, first: int, last: int) -> list[tuple[Tensor, Tensor]]:
    """The examples of some steps, in batches of a size."""
    x = torch.rand(STEPS, 32, 4, generator=torch.Generator().manual_seed(0))[first:last]
    x = x.reshape(-1, size, 4)
    return [(part, part.sum(1, keepdim=True).sin()) for part in x]


def make() -> tuple[nn.Module, AdamW, CosineAnnealingLR]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = AdamW(model.named_parameters(), lr=1e-2, compile=False)
    return model, optimizer, CosineAnnealingLR(optimizer, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/accelerate"))
    out = parser.parse_args().out

    whole, optimizer, schedule = make()
    for x, y in tqdm(batches(32, 0, STEPS), desc="whole batches"):
        F.mse_loss(whole(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=PARTS, step_scheduler_with_optimizer=False
    )
    model, optimizer, schedule = accelerator.prepare(*make())

    def train(first: int, last: int) -> float:
        for x, y in tqdm(batches(32 // PARTS, first, last), desc="accumulated"):
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
        return loss.item()

    train(0, STEPS // 2)
    accelerator.save_state(str(out))
    train(0, 5)  # astray
    accelerator.load_state(str(out))
    loss = train(STEPS // 2, STEPS)
    model = accelerator.unwrap_model(model)
    pairs = zip(whole.parameters(), model.parameters())
    apart = max((x - y).abs().max().item() for x, y in pairs)
    print(
        f"loss {loss:.1e}; {PARTS} parts a step or one batch: weights differ by {apart:.0e}"
    )


if __name__ == "__main__":
    main()
