"""Train the GPT of train_gpt.py with AdamW, and with Muon for its hidden matrices.

    python examples/muon_gpt.py

The second optimizer is ``MuonAdamW``: Muon for the weights of attention and MLPs, AdamW for
embeddings, norms and the output layer, all at one learning rate. Both optimizers are tried
at five learning rates on one seed; each one's best then trains on further seeds, which draw
other weights and other batches. Within a seed all runs share weights, batches and schedule,
in float32.

What to expect: on models of this size and at so few steps, Muon needs fewer steps for the
same loss, and each of its steps costs more: five times three matrix products for every
weight. Which counts, and by how much, is printed as measured; the seconds are those of
this model on this machine, where a step learns from few tokens, which is when Muon's share
of the time is largest.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev

import matplotlib

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from train_gpt import GPT, Config, Run, learning_rate_factor, load_text, train

import optimi_func

COLORS = {"AdamW": "tab:gray", "Muon + AdamW": "tab:blue"}


@dataclass(frozen=True)
class Comparison:
    """The settings of the comparison."""

    model: Config = field(default_factory=Config)
    lrs: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    seeds: int = 3
    out: Path = Path("outputs/muon_gpt.png")


def make_optimizer(name: str, model: GPT, config: Config) -> Optimizer:
    """One of the two, with the same numbers but for what one alone has."""
    if name == "AdamW":
        return optimi_func.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            compile=config.compile,
        )
    return optimi_func.MuonAdamW(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        adamw_weight_decay=config.weight_decay,  # of everything, as the other optimizer
        betas=config.betas,
        eps=config.eps,
        compile=config.compile,
    )


def runs_of(config: Config, chosen: list[tuple[str, float]]) -> list[Run]:
    """A run for each optimizer and learning rate, all from the same weights."""
    torch.manual_seed(config.seed)
    initial = GPT(config).state_dict()
    runs: list[Run] = []
    for name, lr in chosen:
        model = GPT(config)
        model.load_state_dict(initial)
        optimizer = make_optimizer(name, model, replace(config, lr=lr))
        schedule = LambdaLR(optimizer, learning_rate_factor(config))
        runs.append(Run(f"{name} {lr:g}", COLORS[name], model, optimizer, schedule))
    return runs


def compare(given: Comparison, text: Tensor) -> dict[str, dict[str, list[Run]]]:
    """Return each optimizer's runs of the sweep, and of its best lr on every seed."""
    chosen = [(name, lr) for lr in given.lrs for name in COLORS]
    print(f"seed {given.model.seed}: {len(chosen)} runs")
    swept = runs_of(given.model, chosen)
    train(given.model, swept, text)
    found: dict[str, dict[str, list[Run]]] = {}
    best: list[tuple[str, float]] = []
    for name in COLORS:
        own = [run for run, (other, _) in zip(swept, chosen) if other == name]
        i = min(range(len(own)), key=lambda i: own[i].final())
        best.append((name, given.lrs[i]))
        found[name] = {"sweep": own, "seeds": [own[i]]}
        if i in (0, len(own) - 1) and len(own) > 1:
            print(f"{name}: its best lr, {given.lrs[i]:g}, is at the end of those tried")
    for seed in range(given.model.seed + 1, given.model.seed + given.seeds):
        print(f"seed {seed}: {len(best)} runs")
        config = replace(given.model, seed=seed)
        more = runs_of(config, best)
        train(config, more, text)
        for (name, _), run in zip(best, more):
            found[name]["seeds"].append(run)
    return found


def steps_to(run: Run, loss: float) -> float:
    """The step at which a run's validation first was so low, between two evaluations."""
    before, last = 0, float("inf")
    for step, now in run.validation.items():
        if now <= loss:
            share = (last - loss) / (last - now) if last < float("inf") else 1.0
            return before + share * (step - before)
        before, last = step, now
    return float("inf")


def report(given: Comparison, found: dict[str, dict[str, list[Run]]]) -> str:
    """Return tables of the sweep, and of each optimizer at its best lr."""
    lines = ["validation bits per byte, by learning rate"]
    lines.append(" ".join([" " * 14, *(f"{lr:>8g}" for lr in given.lrs)]))
    for name, runs in found.items():
        lines.append(
            " ".join([f"{name:<14}", *(f"{r.final():8.4f}" for r in runs["sweep"])])
        )
    lines += ["", f"each at its best, {given.seeds} seeds"]
    lines.append(
        f"{'':14} {'mean':>8} {'deviation':>9} {'step ms':>8} {'memory':>10} "
        f"{'steps to the other':>19}"
    )
    means = {name: mean(r.final() for r in x["seeds"]) for name, x in found.items()}
    for name, runs in found.items():
        own = runs["seeds"]
        spread = stdev(r.final() for r in own) if len(own) > 1 else 0.0
        seconds = median(t for r in own for t in r.step_seconds)
        others = next(x["seeds"] for other, x in found.items() if other != name)
        needed = [steps_to(a, b.final()) for a, b in zip(own, others)]
        reached = f"{mean(needed):.0f}" if max(needed) < float("inf") else "-"
        lines.append(
            f"{name:<14} {means[name]:8.4f} {spread:9.4f} {1e3 * seconds:8.2f} "
            f"{own[0].bytes() / 2**20:6.1f} MiB {reached:>19}"
        )
    one, two = found.values()
    gaps = [b.final() - a.final() for a, b in zip(one["seeds"], two["seeds"])]
    signs = sum(gap < 0 for gap in gaps)
    lines += [
        "",
        f"Muon + AdamW minus AdamW: {mean(gaps):+.4f} bits per byte, lower on {signs} of "
        f"{len(gaps)} seeds",
    ]
    return "\n".join(lines)


def plot(given: Comparison, found: dict[str, dict[str, list[Run]]]) -> None:
    """Draw the sweep, and each one's curves at its best."""
    figure, (sweep, curves) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for name, runs in found.items():
        color = COLORS[name]
        finals = [run.final() for run in runs["sweep"]]
        sweep.plot(given.lrs, finals, color=color, marker="o", label=name)
        for i, run in enumerate(runs["seeds"]):
            steps, losses = zip(*run.validation.items())
            label = f"{run.name}, {len(runs['seeds'])} seeds" if i == 0 else None
            curves.plot(steps[1:], losses[1:], color=color, linewidth=1.2, label=label)
    sweep.set_xscale("log")
    sweep.set_xlabel("learning rate")
    sweep.set_title(f"At the last step, seed {given.model.seed}")
    curves.set_xlabel("step")
    curves.set_title("Each at its best learning rate")
    for axes in sweep, curves:
        axes.set_ylabel("validation, bits per byte")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, dpi=120)
    plt.close(figure)


def parse(arguments: Sequence[str] | None) -> tuple[Comparison, Path | None]:
    """The command line: what to compare, and where to write the numbers."""
    usual = Comparison()
    parser = argparse.ArgumentParser(
        description="Compare AdamW, and Muon with AdamW, on a small GPT.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=usual.model.steps)
    parser.add_argument("--evaluations", type=int, default=usual.model.evaluations)
    parser.add_argument("--seeds", type=int, default=usual.seeds, help="how many")
    parser.add_argument("--lrs", type=float, nargs="+", default=usual.lrs)
    parser.add_argument("--out", type=Path, default=usual.out, help="PNG to write")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--no-compile", action="store_true", help="step eagerly")
    parser.add_argument("--quick", action="store_true", help="a few seconds: does it work?")
    options = parser.parse_args(arguments)
    model = replace(
        usual.model,
        steps=options.steps,
        warmup=max(1, options.steps // 6),
        evaluations=options.evaluations,
        compile=False if options.no_compile else None,
    )
    lrs = tuple(options.lrs)
    if options.quick:
        model, lrs = model.quick(), lrs[:2]
        model = replace(model, evaluations=options.evaluations)
    return Comparison(model, lrs, options.seeds, options.out), options.json


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then print and draw the comparison."""
    given, numbers = parse(arguments)
    found = compare(given, load_text(given.model.text))
    first = next(iter(found["Muon + AdamW"]["seeds"]))
    matrices = first.optimizer.param_groups[0]["params"]
    share = sum(p.numel() for p in matrices) / sum(
        p.numel() for p in first.model.parameters()
    )
    print(f"Muon has {len(matrices)} matrices, {100 * share:.0f} % of the parameters\n")
    print(report(given, found))
    sys.stdout.flush()
    plot(given, found)
    print(f"\ncurves: {given.out}")
    if numbers is not None:
        kept = {
            name: {kind: [run.validation for run in some] for kind, some in runs.items()}
            for name, runs in found.items()
        }
        numbers.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
