"""Run the trainings for some of the pictures and tables, and store their results in data/.

`python docs/pictures/measure.py loss` takes about 40 minutes: it trains the runs of `make
train` with five seeds, computing in float32 and in bfloat16. `muon` takes several minutes
(it runs examples/muon_gpt.py and also draws the picture of this example). `population`
takes one minute (the sweep of examples/lr_sweep.py), and `plan_llama` takes two minutes
(examples/plan_llama.py). The files in data/ are committed, so you can draw the pictures
without training.
"""

import json
import sys
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import harness  # noqa: E402
import lr_sweep  # noqa: E402
import muon_gpt  # noqa: E402
import plan_llama  # noqa: E402
import train_gpt  # noqa: E402


def about(command: str) -> dict[str, object]:
    """Return the machine, the date and the command of a measurement."""
    found = harness.machine(__file__, harness.Options(threads=torch.get_num_threads()))
    return {**found, "command": command}


def loss() -> dict[str, object]:
    """Train five seeds of `make train`; return their validation losses in bits per byte.

    After each seed, the results so far are written to outputs/loss.json, so that nothing is
    lost if a long measurement is stopped.
    """
    options = ["--seeds", "5", "--compute", "float32", "bfloat16", "--threads", "1"]
    config = train_gpt.parse_arguments(options)
    torch.set_num_threads(config.threads)
    command = f"python examples/train_gpt.py {' '.join(options)}"
    rows: dict[str, dict[str, dict[str, Any]]] = {c: {} for c in config.compute}
    found = {"machine": about(command), "steps": config.steps, "runs": rows}
    partial = ROOT / "outputs/loss.json"
    partial.parent.mkdir(exist_ok=True)
    for runs in train_gpt.train_seeds(config, train_gpt.load_text(config.text)):
        for run in runs:
            row = rows[run.compute].setdefault(run.name, {"validation": {}})
            row["bytes"] = run.bytes()
            for step, value in run.validation.items():
                row["validation"].setdefault(str(step), []).append(round(value, 6))
        partial.write_text(json.dumps(found, indent=1) + "\n")
    return found


def population() -> dict[str, object]:
    """Return the validation accuracies of 64 networks, with a row per weight decay."""
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


def plans() -> dict[str, object]:
    """Return the planned peak of each recipe in bytes, by model and machine."""
    rows = {
        model: {
            machine: {recipe.name: [recipe.peak, recipe.fits] for recipe in plan.recipes}
            for machine, plan in plan_llama.plans(sizes, context=2048).items()
        }
        for model, sizes in plan_llama.MODELS.items()
    }
    return {"machine": about("python examples/plan_llama.py"), "plans": rows}


def muon() -> dict[str, object]:
    """Return validation losses of AdamW and Muon with AdamW, by learning rate and seed."""
    options = ["--steps", "200", "--evaluations", "4", "--out"]
    given, _ = muon_gpt.parse([*options, str(DATA.parent / "muon_gpt.png")])
    found = muon_gpt.compare(given, train_gpt.load_text(given.model.text))
    print(muon_gpt.report(given, found))
    muon_gpt.plot(given, found)
    rows: dict[str, object] = {}
    for name, runs in found.items():
        ends = [run.final() for run in runs["seeds"]]
        rows[name] = {
            "sweep": [round(run.final(), 4) for run in runs["sweep"]],
            "seeds": {"mean": round(mean(ends), 4), "deviation": round(stdev(ends), 4)},
            "step": median(t for run in runs["seeds"] for t in run.step_seconds),
        }
    command = "python examples/muon_gpt.py --steps 200 --evaluations 4"
    return {"machine": about(command), "lrs": given.lrs, "runs": rows}


MEASURES = {
    "loss": loss,
    "muon": muon,
    "population": population,
    "plan_llama": plans,
}

if __name__ == "__main__":
    # Written at the end: until then the commit is as it was.
    for name, done in [(name, MEASURES[name]()) for name in sys.argv[1:]]:
        (DATA / f"{name}.json").write_text(json.dumps(done, indent=1) + "\n")
