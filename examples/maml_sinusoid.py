"""Meta-learn an initialization on sinusoids, by derivatives through fine-tuning (MAML).

A task is a sinusoid of random amplitude and phase, shown by ten points (Finn, Abbeel &
Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks",
arXiv:1703.03400). Three starting points for a small network are compared:

* ``MAML``: the loss after a few steps of SGD, averaged over tasks, is minimized over where
  these start: ``optimi_func.unroll`` under ``torch.func.grad``;
* ``joint pretraining``: the same network, trained on all tasks at once;
* ``scratch``: as initialized.

MAML and pretraining see the same number of tasks and use the same AdamW. Each of the three
is then fine-tuned on new tasks, with the learning rate that suits it best on others. The
picture has the error on points that fine-tuning did not see, and one task.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

try:
    import matplotlib
except ImportError:
    raise SystemExit("this example draws a picture: pip install '.[examples]'") from None

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from tqdm import tqdm

from optimi_func import adamw, sgd, unroll

Params = dict[str, Tensor]
COLORS = {"MAML": "#2a7f62", "joint pretraining": "#4c78a8", "scratch": "#8c8c8c"}


@dataclass(frozen=True)
class Config:
    """The settings of the run."""

    shots: int = 10  # points that a task shows
    width: int = 40
    inner_steps: int = 3
    inner_lr: float = 0.02
    meta_lr: float = 2e-3
    meta_steps: int = 5000
    tasks: int = 25  # a meta-step
    fine_tuning: int = 10  # steps in the picture
    tested: int = 500  # tasks
    compile: bool = True
    seed: int = 0
    out: Path = Path("outputs/maml_sinusoid.png")

    def quick(self) -> "Config":
        """Shrink to seconds: this shows that all works, and learns nothing."""
        return replace(self, width=8, meta_steps=10, tasks=4, fine_tuning=3, tested=10)


class Tasks(NamedTuple):
    """Sinusoids: points to fine-tune on and others to be judged by, a row a task."""

    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor


def draw_tasks(count: int, config: Config, random: torch.Generator) -> Tasks:
    """Random ones, as in the paper."""
    amplitude = 0.1 + 4.9 * torch.rand(count, 1, 1, generator=random)
    phase = math.pi * torch.rand(count, 1, 1, generator=random)
    x = 10 * torch.rand(count, 2 * config.shots, 1, generator=random) - 5
    y = amplitude * torch.sin(x - phase)
    (x, query_x), (y, query_y) = (z.split(config.shots, dim=1) for z in (x, y))
    return Tasks(x, y, query_x, query_y)


class Learner:
    """The network, and what is minimized."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.module = nn.Sequential(
            nn.Linear(1, config.width),
            nn.ReLU(),
            nn.Linear(config.width, config.width),
            nn.ReLU(),
            nn.Linear(config.width, 1),
        )

    def start(self) -> Params:
        """The parameters as initialized."""
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def loss(self, params: Params, points: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error."""
        x, y = points
        return F.mse_loss(functional_call(self.module, params, x), y)

    def maml(self, params: Params, tasks: Tasks) -> Tensor:
        """The error after fine-tuning, averaged over tasks."""
        inner = sgd(lr=self.config.inner_lr)

        def after(x: Tensor, y: Tensor, query_x: Tensor, query_y: Tensor) -> Tensor:
            shown = [(x, y)] * self.config.inner_steps
            tuned = unroll(inner, self.loss, params, None, shown).params
            return self.loss(tuned, (query_x, query_y))

        return vmap(after)(*tasks).mean()

    def joint(self, params: Params, tasks: Tasks) -> Tensor:
        """The error on all tasks at once."""
        shown = self.loss(params, (tasks.x, tasks.y))
        return (shown + self.loss(params, (tasks.query_x, tasks.query_y))) / 2


Objective = Callable[[Params, Tasks], Tensor]


def train(learner: Learner, objective: Objective, name: str) -> Params:
    """Minimize over the parameters."""
    config = learner.config
    random = torch.Generator().manual_seed(config.seed)
    steps = config.meta_steps
    # To 0 along a cosine.
    outer = adamw(lr=lambda t: config.meta_lr * 0.5 * (1 + torch.cos(math.pi * t / steps)))
    params = learner.start()
    state = outer.init(params)

    def step(params, state, tasks):
        grads, loss = grad_and_value(objective)(params, tasks)
        return *outer.step(params, grads, state), loss

    if config.compile:
        step = torch.compile(step, fullgraph=True)
    shown = 0.0
    # Without a terminal there is no bar.
    with tqdm(total=steps, desc=name, unit="step", disable=None) as bar:
        for i in range(steps):
            tasks = draw_tasks(config.tasks, config, random)
            params, state, loss = step(params, state, tasks)
            shown = loss if i == 0 else 0.99 * shown + 0.01 * loss
            bar.update()
            if i % 100 == 0:
                bar.set_postfix(loss=f"{shown.item():.3f}")
    return params


def fine_tune(learner: Learner, params: Params, tasks: Tasks, lr: float) -> Tensor:
    """The error on the query points after each number of steps: [tasks, 1 + steps]."""

    def one(x: Tensor, y: Tensor, query_x: Tensor, query_y: Tensor) -> Tensor:
        optimizer = sgd(lr=lr)
        p, state = params, optimizer.init(params)
        errors = [learner.loss(p, (query_x, query_y))]
        for _ in range(learner.config.fine_tuning):
            p, state, _ = unroll(optimizer, learner.loss, p, state, [(x, y)])
            errors.append(learner.loss(p, (query_x, query_y)))
        return torch.stack(errors)

    return vmap(one)(*tasks)


def best_lr(learner: Learner, params: Params, random: torch.Generator) -> float:
    """The learning rate after whose fine-tuning the error is smallest."""
    config = learner.config
    tasks = draw_tasks(config.tested, config, random)
    lrs = torch.logspace(-3, -1, 9).tolist()
    ends = [fine_tune(learner, params, tasks, lr)[:, -1].mean().item() for lr in lrs]
    finite = [end if math.isfinite(end) else math.inf for end in ends]
    return lrs[finite.index(min(finite))]


def predict(learner: Learner, params: Params, tasks: Tasks, lr: float, x: Tensor) -> Tensor:
    """The network's curve after fine-tuning on the first of some tasks."""
    shown = [(tasks.x[0], tasks.y[0])] * learner.config.fine_tuning
    tuned = unroll(sgd(lr=lr), learner.loss, params, None, shown).params
    return functional_call(learner.module, tuned, x[:, None])[:, 0].detach()


def plot(learner: Learner, starts: dict[str, Params], path: Path) -> None:
    """Fine-tune all, print and draw."""
    config = learner.config
    random = torch.Generator().manual_seed(config.seed + 1)
    lrs = {name: best_lr(learner, params, random) for name, params in starts.items()}
    tasks = draw_tasks(config.tested, config, random)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    steps = range(config.fine_tuning + 1)
    for name, params in starts.items():
        errors = fine_tune(learner, params, tasks, lrs[name])
        mean, half = errors.mean(0), 1.96 * errors.std(0) / len(errors) ** 0.5
        label = f"{name} (lr {lrs[name]:.2g})"
        left.plot(steps, mean.tolist(), color=COLORS[name], marker="o", label=label)
        low, high = (mean - half).tolist(), (mean + half).tolist()
        left.fill_between(steps, low, high, color=COLORS[name], alpha=0.2, linewidth=0)
        print(
            f"{name}: mean squared error {mean[0]:.3g} before fine-tuning, {mean[1]:.3g} "
            f"after 1 step, {mean[-1]:.3g} after {config.fine_tuning}; lr {lrs[name]:.2g}"
        )
    left.set_xlabel(f"fine-tuning steps on {config.shots} points")
    left.set_ylabel("mean squared error on other points")
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    left.set_title(f"{config.tested} new tasks, mean and its 95 % interval")
    left.grid(alpha=0.3, which="both")
    left.legend()
    x = torch.linspace(-5, 5, 200)
    # One of a large amplitude shows most.
    task = Tasks(*(z[tasks.y.abs().amax((1, 2)).argmax()][None] for z in tasks))
    for name, params in starts.items():
        curve = predict(learner, params, task, lrs[name], x)
        right.plot(x.tolist(), curve.tolist(), color=COLORS[name], label=name)
    amplitude, phase = fit(task)
    truth = amplitude * torch.sin(x - phase)
    right.plot(x.tolist(), truth.tolist(), color="black", linestyle=":", label="truth")
    points = task.x[0, :, 0].tolist(), task.y[0, :, 0].tolist()
    right.plot(*points, "k^", label="points shown", markersize=7)
    right.set_xlabel("x")
    right.set_ylabel("y")
    right.set_title(f"one of them, after {config.fine_tuning} steps")
    right.grid(alpha=0.3)
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"picture: {path}")


def fit(task: Tasks) -> tuple[float, float]:
    """Amplitude and phase of the sinusoid through a task's points."""
    x, y = task.x[0], task.y[0]
    a, b = torch.linalg.lstsq(torch.cat([x.sin(), x.cos()], dim=1), y).solution[:, 0]
    return torch.hypot(a, b).item(), torch.atan2(-b, a).item()


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Meta-learn an initialization on sinusoids.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "shots": "points that a task shows",
        "width": "of the network's two hidden layers",
        "inner-steps": "of SGD that MAML differentiates",
        "inner-lr": "of these steps",
        "meta-lr": "of AdamW, for MAML and joint pretraining",
        "meta-steps": "for MAML and joint pretraining",
        "tasks": "a meta-step",
        "fine-tuning": "steps in the picture",
        "tested": "new tasks",
        "seed": "of weights and tasks",
    }.items():
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(value), default=value, help=meaning)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=default.compile,
        help="compile the meta-step",
    )
    parser.add_argument("--out", type=Path, default=default.out, help="PNG to write")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, for seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and compare."""
    config = parse_arguments(arguments)
    torch.set_num_threads(1)  # Everything is tiny.
    begin = time.perf_counter()
    learner = Learner(config)
    starts = {
        "MAML": train(learner, learner.maml, "MAML"),
        "joint pretraining": train(learner, learner.joint, "joint pretraining"),
        "scratch": learner.start(),
    }
    plot(learner, starts, config.out)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
