"""Train what two of the pictures show, and keep the numbers beside them.

`python docs/pictures/measure.py loss` takes minutes (the four runs of `make train`),
`python docs/pictures/measure.py population` one (the sweep of examples/lr_sweep.py). The
files under data/ are committed: to draw is not to train.
"""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import harness  # noqa: E402
import lr_sweep  # noqa: E402
import train_gpt  # noqa: E402


def about(command: str) -> dict[str, object]:
    """The machine, the day and the command."""
    found = harness.machine(__file__, harness.Options(threads=torch.get_num_threads()))
    return {**found, "command": command}


def loss() -> dict[str, object]:
    """Training and validation, in bits per byte, of the four runs of `make train`."""
    config = train_gpt.parse_arguments([])
    runs = train_gpt.make_runs(config)
    train_gpt.train(config, runs, train_gpt.load_text(config.text))
    rows = {
        run.name: {
            "train": [round(x, 4) for x in run.train],
            "validation": {str(k): round(v, 6) for k, v in run.validation.items()},
            "bytes": run.bytes(),
        }
        for run in runs
    }
    command = "python examples/train_gpt.py  # make train"
    return {"machine": about(command), "steps": config.steps, "runs": rows}


def population() -> dict[str, object]:
    """Validation accuracy of 64 networks, a row for each decay."""
    config = lr_sweep.parse_arguments([])
    torch.set_flush_denormal(True)
    module, data = lr_sweep.network(config), lr_sweep.Data(config.seed)
    found = lr_sweep.sweep(lr_sweep.Trainer(module, config), module, data, config)
    lrs, decays = lr_sweep.grid(config)
    return {
        "machine": about("python examples/lr_sweep.py"),
        "steps": config.steps,
        "lr": lrs.tolist(),
        "weight_decay": decays.tolist(),
        "accuracy": [[round(x, 4) for x in row] for row in found.tolist()],
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        done = {"loss": loss, "population": population}[name]()
        (DATA / f"{name}.json").write_text(json.dumps(done, indent=1) + "\n")
