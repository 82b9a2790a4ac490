"""Lightning: automatic and manual optimization, and a resumed checkpoint.

The same module trains three times: with Lightning calling the optimizer, with the module
calling it, and automatically again in two halves with a checkpoint between them. All three
end with the same weights.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from optimi_func import AdamW

EPOCHS, BATCHES = 4, 25


class Regression(lightning.LightningModule):
    """Learns a sine of a sum."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.net = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.named_parameters(), lr=1e-2, compile=False)
        schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * BATCHES + 1)
        every_step = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every_step}

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        return None


def data() -> DataLoader:
    x = torch.rand(32 * BATCHES, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=32)


def fit(
    out: Path, automatic: bool, epochs: int = EPOCHS, checkpoint: Path | None = None
) -> lightning.Trainer:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(Regression(automatic), data(), ckpt_path=checkpoint)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/lightning"))
    out = parser.parse_args().out
    runs = {"automatic": fit(out, True), "manual": fit(out, False)}
    half = out / "half.ckpt"
    fit(out, True, EPOCHS // 2).save_checkpoint(half)
    runs["resumed"] = fit(out, True, checkpoint=half)
    weights = {name: list(run.lightning_module.parameters()) for name, run in runs.items()}
    for name, found in weights.items():
        same = all(map(torch.equal, found, weights["automatic"]))
        loss = runs[name].callback_metrics["loss"].item()
        print(f"{name:9} loss {loss:.1e}, the weights of the automatic run: {same}")


if __name__ == "__main__":
    main()
