"""Lightning without a schedule: a callback has evaluations and checkpoints see the average.

The weights that `ModelCheckpoint` saves at the end of an epoch are the average of all
steps, and a run resumed from them ends as the uninterrupted one does.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from optimi_func import ScheduleFreeAdamW

EPOCHS, BATCHES = 4, 25


# [start:average]
class Average(lightning.Callback):
    """Evaluate and save the average of a Schedule-Free run."""

    def on_train_batch_start(
        self, trainer: lightning.Trainer, *_: Any
    ) -> None:
        for optimizer in trainer.optimizers:
            optimizer.train()

    def on_validation_start(
        self, trainer: lightning.Trainer, *_: Any
    ) -> None:
        for optimizer in trainer.optimizers:
            optimizer.eval()

    on_train_epoch_end = on_validation_start


# [end:average]


class Regression(lightning.LightningModule):
    """Learns a sine of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1)
        )

    def configure_optimizers(self) -> Any:
        return ScheduleFreeAdamW(
            self.named_parameters(), lr=1e-2, compile=False
        )

    def training_step(
        self, batch: tuple[Tensor, Tensor], index: int
    ) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(
        self, batch: tuple[Tensor, Tensor], index: int
    ) -> None:
        x, y = batch
        self.log("loss", F.mse_loss(self.net(x), y))


def data(seed: int) -> DataLoader:
    x = torch.rand(
        32 * BATCHES, 4, generator=torch.Generator().manual_seed(seed)
    )
    return DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=32
    )


def fit(out: Path, checkpoint: Path | None = None) -> lightning.Trainer:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        callbacks=[
            Average(),
            ModelCheckpoint(out, "{epoch}", save_top_k=-1),
        ],
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(Regression(), data(0), data(1), ckpt_path=checkpoint)
    return trainer


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Compare bit for bit."""
    return all(map(torch.equal, one, other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/lightning_schedule_free")
    )
    out = parser.parse_args().out
    trainer = fit(out / "straight")
    loss = trainer.callback_metrics["loss"].item()
    model, (optimizer,) = trainer.lightning_module, trainer.optimizers
    last = [p.detach().clone() for p in model.parameters()]
    path = out / "straight" / f"epoch={EPOCHS - 1}.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"]
    optimizer.train()
    trained = [p.detach().clone() for p in model.parameters()]
    print(f"loss of the average {loss:.1e}")
    print(
        f"the last checkpoint is the average: {same([*saved.values()], last)}"
    )
    print(f"the average is the trained weights: {same(trained, last)}")
    resumed = fit(
        out / "resumed", out / "straight" / f"epoch={EPOCHS // 2 - 1}.ckpt"
    )
    ends = list(resumed.lightning_module.parameters())
    print(f"resumed half way, the same end: {same(ends, last)}")


if __name__ == "__main__":
    main()
