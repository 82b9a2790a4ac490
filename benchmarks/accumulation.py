"""How far do gradient release's ways to accumulate end from true accumulation?

True accumulation sums the gradients of a step's micro-batches in p.grad and then makes
one ordinary step. Under gradient release the gradients are gone by then, and a policy has
to stand in for the sum:

* ``flag``: optimi's, ``optimizer.optimizer_accumulation = True`` for all micro-batches but
  the last: the state moves as in a step, the parameter does not;
* ``states``: ``accumulation="states"``: the state decays once and each gradient joins it;
* ``buffer``: ``accumulation="buffer"``: the gradients' sum is kept;
* ``bfloat16 buffer``: the same with ``buffer_dtype=torch.bfloat16``.

Two tasks, each with the same micro-batches for all policies, whose losses are divided by
their number as trainers do:

* a regression on a two-layer network with noisy targets: the distance between the weights
  at the end and those of true accumulation, as a share of the way that the latter went;
* gradients that are given, and do not depend on the weights: the distance between first
  moments as a share of the true one, the largest of all steps.

Both are medians over the seeds. How good a stand-in is depends on how much micro-batches
agree, which ``--noise`` and ``--batch`` change: with nothing but noise a sum of squares is
about the square of the sum, and where all are alike it is smaller by their number.
Bytes are those held between two backwards beside parameters and the optimizer's state.

Where the package optimi is installed, its own flag is measured too, against its own step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import harness
import torch
import torch.nn.functional as F
from harness import Found, option
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

import optimi_func

try:
    import optimi
except ImportError:
    optimi = None


@dataclass(frozen=True)
class Config(harness.Options):
    steps: int = option(20, "of the optimizer")
    micro: int = option(8, "micro-batches in each")
    batch: int = option(8, "size of a micro-batch of the regression")
    noise: float = option(1.0, "standard deviation, on targets and on given gradients")
    seeds: int = option(5, "to take the median of, from the first one on")
    threads: int = option(1, "of torch; everything is tiny")


QUICK: Found = {"steps": 3, "micro": 2, "seeds": 1}


@dataclass(frozen=True)
class Rule:
    """An optimizer, and how its library prepares a model for it."""

    make: Callable[..., Any]
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[..., Any] = optimi_func.prepare_for_gradient_release
    policies: tuple[str, ...] = ("flag", "states", "buffer", "bfloat16 buffer")


def ours(name: str, lr: float, **options: Any) -> Rule:
    """This library's, without the compiler: everything is tiny."""
    return Rule(getattr(optimi_func, name), lr, {"compile": False} | options)


RULES = {
    "SGD": ours("SGD", 0.1),
    "SGD, momentum": ours("SGD", 0.02, momentum=0.9),
    "SGD, Nesterov": ours("SGD", 0.02, momentum=0.9, nesterov=True),
    **{
        n: ours(n, 0.01)
        for n in ("Adam", "AdamW", "StableAdamW", "RAdam", "Ranger", "Adan")
    },
    "Lion": ours("Lion", 0.002),
}
if optimi is not None:
    ITS = {"prepare": optimi.prepare_for_gradient_release, "policies": ("flag",)}
    its = f"optimi {optimi.__version__}"
    RULES[f"SGD, momentum: {its}"] = Rule(optimi.SGD, 0.02, {"momentum": 0.9}, **ITS)
    RULES[f"AdamW: {its}"] = Rule(optimi.AdamW, 0.01, **ITS)

POLICIES: dict[str, dict[str, Any]] = {
    "flag": {},
    "states": {"accumulation": "states"},
    "buffer": {"accumulation": "buffer"},
    "bfloat16 buffer": {"accumulation": "buffer", "buffer_dtype": torch.bfloat16},
}

# What the rules call it; optimi's SGD has Adam's name for it.
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


class Regression(nn.Module):
    """A two-layer network that learns another one's outputs, with noise on them."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        teacher = torch.randn(16)
        x = torch.randn(config.steps, config.micro, config.batch, 16)
        self.x, y = x, torch.tanh(x @ teacher)
        self.y = y + config.noise * torch.randn(y.shape)

    def loss(self, step: int, i: int) -> Tensor:
        """Return the loss of one micro-batch."""
        return F.mse_loss(self.layers(self.x[step, i]).squeeze(-1), self.y[step, i])


class Given(nn.Module):
    """A parameter whose gradients are drawn beforehand."""

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.w = nn.Parameter(torch.randn(256))
        drift = torch.randn(256)
        noise = torch.randn(config.steps, config.micro, 256)
        self.g = drift + config.noise * noise

    def loss(self, step: int, i: int) -> Tensor:
        """Linear in the parameter."""
        return (self.w * self.g[step, i]).sum()


@dataclass(frozen=True)
class Run:
    """Weights after a training, the first moment of every step, and the bytes held."""

    start: Tensor
    end: Tensor
    moments: list[Tensor]
    held: int


def train(model: Regression | Given, rule: Rule, policy: str | None, config: Config) -> Run:
    """Train the model under a policy, or with true accumulation.

    Raises:
        ValueError: The rule refuses the policy.
    """
    release = policy is not None
    optimizer = rule.make(
        model.parameters(), lr=rule.lr, gradient_release=release, **rule.options
    )
    options = POLICIES[policy] if release else {}
    if "accumulation" in options:
        options = options | {"accumulation_steps": config.micro}
    handle = rule.prepare(model, optimizer, **options) if release else None
    start, moments, held = weights(model), [], 0
    for step in range(config.steps):
        for i in range(config.micro):
            last = i + 1 == config.micro
            if policy == "flag":
                optimizer.optimizer_accumulation = not last
            if last:
                carried = handle.state_dict()["buffer"] if options else {}
                held = held_bytes(optimizer, carried)
            (model.loss(step, i) / config.micro).backward()
        if not release:
            optimizer.step()
            optimizer.zero_grad()
        moments.append(first_moment(optimizer))
    return Run(start, weights(model), moments, held)


def weights(model: nn.Module) -> Tensor:
    """A copy of all of them, flat."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def first_moment(optimizer: Optimizer) -> Tensor:
    """A copy of all of it, flat; empty for a rule without."""
    found = [
        state[name].flatten()
        for state in optimizer.state.values()
        for name in FIRST_MOMENTS
        if state.get(name) is not None
    ]
    return torch.cat(found) if found else torch.empty(0)


def held_bytes(optimizer: Optimizer, carried: dict[str, Tensor]) -> int:
    """Bytes of state, gradients and sums of them."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    states = [x for state in optimizer.state.values() for x in state.values()]
    held = [*grads, *states, *carried.values()]
    return sum(x.nbytes for x in held if isinstance(x, Tensor))


def measure_rule(rule: Rule, config: Config) -> Found:
    """By policy, medians over the seeds."""
    true = [train(task, rule, None, config) for task in tasks(config)]
    cells: Found = {}
    for policy in rule.policies:
        try:
            own = [train(task, rule, policy, config) for task in tasks(config)]
        except ValueError as refusal:
            nothing = {"error": None, "moment": None, "extra": None}
            cells[policy] = nothing | {"refusal": str(refusal)}
            continue
        pairs = list(zip(own, true))
        regression, given = pairs[: config.seeds], pairs[config.seeds :]
        moved = [distance(a.end, b.end, b.end - b.start) for a, b in regression]
        moments = [moment_distance(a, b) for a, b in given if b.moments[0].numel()]
        a, b = pairs[0]
        # What true accumulation holds is its state and a gradient for each parameter.
        extra = (a.held - b.held) / b.end.numel() + b.end.element_size()
        cells[policy] = {
            "error": median(moved),  # as a share of the way that the weights went
            "moment": median(moments) if moments else None,
            "extra": extra,  # bytes per parameter
            "refusal": None,
        }
    return cells


def tasks(config: Config) -> Iterator[Regression | Given]:
    """All of both kinds, first the regressions."""
    for kind in (Regression, Given):
        for seed in range(config.seed, config.seed + config.seeds):
            yield kind(config, seed)


def moment_distance(own: Run, true: Run) -> float:
    """The largest of all steps."""
    return max(distance(a, b, b) for a, b in zip(own.moments, true.moments))


def distance(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Between a and b, as a share of the norm of `scale`."""
    a, b, scale = a.double(), b.double(), scale.double()
    return ((a - b).norm() / scale.norm()).item()


def measure(config: Config) -> Found:
    """By rule."""
    rules = tqdm(RULES.items(), "rules", unit="rule", disable=None)
    return {"cells": {name: measure_rule(rule, config) for name, rule in rules}}


def rows(cells: Found, title: str, text: Callable[[Found], str]) -> str:
    """A line per rule and a column per policy."""
    return harness.table(
        [
            [title, *POLICIES],
            *(
                [name, *(text(row[p]) if p in row else "-" for p in POLICIES)]
                for name, row in cells.items()
            ),
        ]
    )


def percent(cell: Found, key: str) -> str:
    """Two digits of it."""
    if cell["refusal"] is not None:
        return "refused"
    return "-" if cell[key] is None else f"{100 * cell[key]:.2g}"


def report(found: Found) -> str:
    """All tables, and why what is refused is."""
    config, cells = found["config"], found["cells"]
    refusals = [
        f"{name}, {policy}: {cell['refusal']}"
        for name, row in cells.items()
        for policy, cell in row.items()
        if cell["refusal"] is not None
    ]
    parts = [
        f"{config['steps']} steps of {config['micro']} micro-batches of {config['batch']}, "
        f"noise {config['noise']:g}, median of {config['seeds']} seeds",
        rows(cells, "weights: error in %", lambda cell: percent(cell, "error")),
        rows(cells, "first moment: %", lambda cell: percent(cell, "moment")),
        # The same for all rules.
        rows({"extra bytes": cells["AdamW"]}, "per parameter", lambda c: f"{c['extra']:g}"),
        "\n".join(refusals),
    ]
    return "\n\n".join(parts)


def draw(found: Found) -> Axes:
    """A group of bars per rule."""
    title = "Distance from true accumulation, in % of the weights' movement"
    (axes,) = harness.axes_of(title, figsize=(12, 5))
    groups = {
        name.replace(": ", ", "): {
            policy: 100 * row[policy]["error"]
            for policy in POLICIES
            if policy in row and row[policy]["error"] is not None
        }
        for name, row in found["cells"].items()
    }
    harness.bars(axes, groups, list(POLICIES))
    axes.set_ylabel("%")
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
