"""How long is a step that is never the same as the one before?

Adam beside `torch.optim.Adam`, as the for-loop that is its default on a CPU and fused, on
small tensors: parameters that take turns in having gradients, lists of them that never come
again, a constructor, a step after `load_state_dict` or `state.clear()`, a deep copy with a
constructor and three steps (Reptile), and the eager pure step of an own rule beside a plain
loop.
"""

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import harness
import torch
from harness import NUMBERS, OURS, Found, Step, option
from matplotlib.axes import Axes
from torch import Tensor, nn

import optimi_func
from optimi_func.rules import Float, Moment, Optimizer, functions

LOOP, FUSED = "torch for-loop", "torch fused"
ADAM: dict[str, Any] = NUMBERS | {"weight_decay": 0.0}
Make = Callable[[Any], Any]


@dataclass(frozen=True)
class Config(harness.Timed):
    tensors: int = option(20, "that there are")
    size: int = option(100, "of each")
    calls: int = option(30, "in a round")
    seconds: float = option(5.0, "to measure a row for; no fewer than 5 rounds")
    compile: bool | None = option(None, "ours; by default if possible")


QUICK: Found = {"rounds": 5, "seconds": 0.1, "warmup": 1, "calls": 3}


class Averaged(Optimizer):
    """Step along the mean of the gradients."""

    lr: Float = Float(1e-3)
    beta: Float = Float(0.9, "beta", below=1.0)

    class State(NamedTuple):
        mean: Moment

    def direction(self, g: Tensor, s: Any) -> Any:
        m = self.beta * s.mean + (1 - self.beta) * g
        return m, s._replace(mean=m)


def parameters(config: Config) -> list[Any]:
    """Return parameters with gradients, which are kept beside them."""
    made = [nn.Parameter(torch.randn(config.size)) for _ in range(config.tensors)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def turns(ps: list[Any], make: Make, orders: Iterator[list[int]]) -> Step:
    """Return a step of those whose turn it is."""
    grads, optimizer = [p.grad for p in ps], make(ps)

    def step() -> None:
        now = {*next(orders)}
        for i, (p, g) in enumerate(zip(ps, grads)):
            p.grad = g if i in now else None
        optimizer.step()

    return step


def halves(n: int) -> Iterator[list[int]]:
    """Half of them always, and of the rest one half after the other."""
    rest = [range(n // 2, 3 * n // 4), range(3 * n // 4, n)]
    return itertools.cycle([[*range(n // 2), *some] for some in rest])


def cycle(n: int) -> Iterator[list[int]]:
    """Five lists."""
    return itertools.cycle([[i for i in range(n) if i % 5 == k or i < 5] for k in range(5)])


def never(n: int) -> Iterator[list[int]]:
    """Lists that hardly come again."""
    rng = random.Random(0)
    while True:
        yield [i for i in range(n) if rng.random() < 0.5] or [0]


def constructed(ps: list[Any], make: Make) -> Step:
    """Return the constructor."""
    return lambda: make(ps)


def loaded(ps: list[Any], make: Make) -> Step:
    """Return a step after `load_state_dict`."""
    optimizer = make(ps)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    return lambda: (optimizer.load_state_dict(state), optimizer.step())


def cleared(ps: list[Any], make: Make) -> Step:
    """Return a step without state."""
    optimizer = make(ps)
    return lambda: (optimizer.state.clear(), optimizer.step())


def reptile(make: Make) -> Step:
    """Return a task: a copy, its optimizer, and three steps."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])

    def task() -> None:
        own = copy.deepcopy(model)
        for p in own.parameters():
            p.grad = torch.ones_like(p)
        optimizer = make(own.parameters())
        for _ in range(3):
            optimizer.step()

    return task


def own_rule(config: Config, plain: bool) -> Step:
    """Return the eager pure step of a rule, or a loop without anything else."""
    tree = [torch.randn(config.size), torch.randn(8, 8)] * (config.tensors // 2)
    grads = [torch.randn_like(p) for p in tree]
    optimizer = functions(Averaged)[0](lr=1e-3)
    state = optimizer.init(tree)
    means = [torch.zeros_like(p) for p in tree]

    def loop() -> None:
        new = [0.9 * m + 0.1 * g for m, g in zip(means, grads)]
        _ = [p - 1e-3 * m for p, m in zip(tree, new)]

    return loop if plain else lambda: optimizer.step(tree, grads, state)


def measure(config: Config) -> Found:
    """Times of ours and torch's, for each row."""

    def ps() -> list[Any]:
        return parameters(config)

    def own(way: str, _: Make) -> Step:
        return own_rule(config, way == LOOP)

    makes: dict[str, Make] = {
        OURS: lambda ps: optimi_func.Adam(ps, compile=config.compile, **ADAM),
        LOOP: lambda ps: torch.optim.Adam(ps, foreach=False, **ADAM),
        FUSED: lambda ps: torch.optim.Adam(ps, fused=True, **ADAM),
    }
    rows: dict[str, Callable[[str, Make], Step]] = {
        "two lists in turn": lambda _, m: turns(ps(), m, halves(config.tensors)),
        "five lists in turn": lambda _, m: turns(ps(), m, cycle(config.tensors)),
        "lists that never come again": lambda _, m: turns(ps(), m, never(config.tensors)),
        "constructor": lambda _, m: constructed(ps(), m),
        "load_state_dict, a step": lambda _, m: loaded(ps(), m),
        "state.clear(), a step": lambda _, m: cleared(ps(), m),
        "copy, constructor, 3 steps": lambda _, m: reptile(m),
        "own rule, eager pure step": own,
    }

    def repeated(step: Step) -> Step:
        return lambda: [step() for _ in range(config.calls)]

    cells: Found = {}
    for name, row in rows.items():
        torch.manual_seed(config.seed)
        beside = [LOOP] if row is own else [LOOP, FUSED]
        steps = {way: repeated(row(way, makes[way])) for way in [OURS, *beside]}
        seconds = harness.interleave(steps, config, name)
        cells[name] = {way: asdict(harness.ratios(seconds, way)[OURS]) for way in beside}
    return {"turns": cells}


def report(found: Found) -> str:
    """A row each."""
    calls = found["config"]["calls"] if "config" in found else 1
    rows = [["", "us", f"of {LOOP}'s (quartiles)", f"of {FUSED}'s"]]
    for name, cell in found["turns"].items():
        own = f"{1e6 * cell[LOOP]['seconds'] / calls:.0f}"
        rows.append([name, own, harness.text(cell[LOOP]), harness.text(cell.get(FUSED))])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """The ratios."""
    (axes,) = harness.axes_of("Steps that are never the same: ratio", figsize=(10, 4))
    harness.bars(axes, found["turns"], [LOOP, FUSED])
    axes.tick_params(axis="x", rotation=60)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
