"""What does a step cost as a function, beside the same step of a class?

AdamW on small tensors, and on the shapes of models of ``step_time.py``: the compiled
functions in place and into new tensors, the eager function, that function in torch.compile,
a pure loop as one writes it by hand, torchopt's, optax's as a jitted function of arrays of
jax, and torch's fused class. The ratio is that to this library's class. A step into new
tensors also allocates its results: how long that takes is measured too ("allocate"), and
"pure less that" is the rest.

torch.compile and optax compile for the shapes they meet, so they are left out where there
are more tensors than ``--compile-limit``. On a busy machine ``--cpu-time`` counts the
processor's seconds, of all threads.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import harness
import step_time
import torch
from harness import NUMBERS, Found, Step, load, option, parameters
from matplotlib.axes import Axes
from torch import Tensor
from tqdm import tqdm

import optimi_func
from optimi_func import compiled

CLASS, IN_PLACE, PURE = "class", "compiled.adamw_step_", "compiled.adamw_step"
ALLOCATE, COMPILED = "allocate", "torch.compile(adamw_step)"
Tree = dict[str, Tensor]


def pure(function: Callable[..., Any]) -> Callable[[Tree, Tree], Step]:
    """Steps of a function, each of the results of the last one."""

    def make(params: Tree, grads: Tree) -> Step:
        trees = [params, optimi_func.adamw_init(params, kahan_sum=False)]

        def step() -> None:
            trees[:] = function(trees[0], grads, trees[1], **NUMBERS)

        return step

    return make


def by_class(params: Tree, grads: Tree, make: Any, **how: Any) -> Step:
    """Steps of a class."""
    tensors = parameters(list(params.values()), list(grads.values()))
    return make(tensors, **NUMBERS, **how).step


def by_hand(params: Tree, grads: Tree) -> Step:
    """A pure loop over a dict."""
    beta1, beta2 = NUMBERS["betas"]
    lr, eps, decay = (NUMBERS[name] for name in ("lr", "eps", "weight_decay"))
    zeros = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in params.items()}
    state: dict[str, Any] = {"params": params, "moments": zeros, "t": 0}

    def step() -> None:
        t = state["t"] = state["t"] + 1
        moved, moments = {}, {}
        for name, p in state["params"].items():
            g, (m, v) = grads[name], state["moments"][name]
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            root = (v / (1 - beta2**t)).sqrt() + eps
            moved[name] = p - lr * (m / (1 - beta1**t) / root + decay * p)
            moments[name] = m, v
        state["params"], state["moments"] = moved, moments

    return step


def by_torchopt(params: Tree, grads: Tree) -> Step:
    """torchopt's pure optimizer, out of place."""
    torchopt: Any = load("torchopt")
    optimizer = torchopt.adamw(**NUMBERS)
    trees: list[Any] = [params, optimizer.init(params)]

    def step() -> None:
        updates, state = optimizer.update(grads, trees[1], params=trees[0], inplace=False)
        moved = torchopt.apply_updates(trees[0], updates, inplace=False)
        trees[:] = moved, state

    return step


def by_optax(params: Tree, grads: Tree) -> Step:
    """optax's, which XLA compiles, out of place."""
    jax, optax = load("jax"), load("optax")
    beta1, beta2 = NUMBERS["betas"]
    rest = {name: NUMBERS[name] for name in ("eps", "weight_decay")}
    optimizer = optax.adamw(NUMBERS["lr"], b1=beta1, b2=beta2, **rest)
    own = {name: jax.numpy.asarray(x.numpy()) for name, x in params.items()}
    given = {name: jax.numpy.asarray(x.numpy()) for name, x in grads.items()}

    @jax.jit
    def update(params: Any, grads: Any, state: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    trees: list[Any] = [own, optimizer.init(own)]

    def step() -> None:
        trees[:] = jax.block_until_ready(update(trees[0], given, trees[1]))

    return step


def allocate(params: Tree, grads: Tree) -> Step:
    """New tensors for parameters and two moments, one element of each page written.

    Memory of large tensors is the system's until then.
    """

    def step() -> list[Tensor]:
        made = [torch.empty_like(p) for p in params.values() for _ in range(3)]
        for x in made:
            if x.nbytes > 1 << 17:
                x.as_strided((x.nbytes >> 12,), (4096 // x.element_size(),)).zero_()
        return made

    return step


WAYS: dict[str, Callable[[Tree, Tree], Step]] = {
    CLASS: lambda p, g: by_class(p, g, optimi_func.AdamW, kahan_sum=False),
    IN_PLACE: pure(compiled.adamw_step_),
    PURE: pure(compiled.adamw_step),
    ALLOCATE: allocate,
    "adamw_step": pure(optimi_func.adamw_step),
    COMPILED: lambda p, g: pure(torch.compile(optimi_func.adamw_step))(p, g),
    "by hand": by_hand,
    "torch fused": lambda p, g: by_class(p, g, torch.optim.AdamW, fused=True),
    "torchopt": by_torchopt,
    "optax": by_optax,
}
NEEDS = {"torchopt": "torchopt", "optax": "optax"}
COMPILING = (COMPILED, "optax")


@dataclass(frozen=True)
class Config(harness.Timed):
    tensors: tuple[int, ...] = option((2, 20, 100, 1000), "small ones")
    elements: int = option(64, "of a small tensor")
    sets: tuple[str, ...] = option(
        ("vit-tiny", "resnet50", "odd", "large"), "of shapes", tuple(step_time.SETS)
    )
    ways: tuple[str, ...] = option(tuple(WAYS), "to step", tuple(WAYS))
    rounds: int = option(60, "measured rounds, at most")
    turns: int = option(40, "tensors of 64 elements to step in a round, at least")
    threads: int = option(1, "of torch")
    compile_limit: int = option(20, "tensors that torch.compile and optax may have")
    cpu_time: bool = option(False, "time of the processor, not of the clock: where busy")


QUICK: Found = {"tensors": (2,), "sets": ("tiny",), "rounds": 5, "compile_limit": 0}


def repeated(step: Step, turns: int) -> Step:
    """Several steps as one."""

    def steps() -> None:
        for _ in range(turns):
            step()

    return steps


def measure_cell(title: str, tensors: list[Tensor], config: Config) -> Found:
    """All ways on one list of tensors."""
    torch.manual_seed(config.seed)
    names = [f"layer.{i}.weight" for i in range(len(tensors))]
    grads = {name: torch.randn_like(x) for name, x in zip(names, tensors)}
    steps: dict[str, Step] = {}
    # A step of few small tensors would otherwise find the caches of another way.
    turns = max(1, config.turns // sum(1 + x.nbytes // 512 for x in tensors))
    for way, make in WAYS.items():
        many = way in COMPILING and len(tensors) > config.compile_limit
        missing = way in NEEDS and harness.installed(NEEDS[way]) is None
        if way == CLASS or (way in config.ways and not (many or missing)):
            params = {name: x.clone() for name, x in zip(names, tensors)}
            steps[way] = repeated(make(params, grads), turns)
    clock = time.process_time if config.cpu_time else time.perf_counter
    seconds = harness.interleave(steps, config, title, clock=clock)
    seconds = {way: [taken / turns for taken in x] for way, x in seconds.items()}
    found = {way: asdict(x) for way, x in harness.ratios(seconds, CLASS).items()}
    torch.compiler.reset()
    return found


def measure(config: Config) -> Found:
    """By the name of a list of tensors."""
    small = {f"{n} x {config.elements}": [(config.elements,)] * n for n in config.tensors}
    sets = {step_time.SETS[key].title: step_time.SETS[key] for key in config.sets}
    lists = {title: step_time.Shapes(title, list(s)) for title, s in small.items()} | sets
    return {
        "functions": {
            title: measure_cell(title, shapes.tensors(torch.float32, "cpu"), config)
            for title, shapes in tqdm(lists.items(), "lists of tensors", disable=None)
        }
    }


def ways(found: Found) -> list[str]:
    """All that were measured beside the class."""
    cells = found["functions"].values()
    return [way for way in WAYS if way != CLASS and any(way in cell for cell in cells)]


def report(found: Found) -> str:
    """A line for each list of tensors, a column for each way."""
    rows = [["AdamW, ratio to the class", "class, ms", *ways(found), "pure less that"]]
    for title, cell in found["functions"].items():
        texts = [harness.text(cell.get(way)) for way in ways(found)]
        rest = "-"
        if PURE in cell and ALLOCATE in cell:
            rest = f"{cell[PURE]['ratio'] - cell[ALLOCATE]['ratio']:.2f}"
        rows.append([title, harness.milliseconds(cell[CLASS]), *texts, rest])
    left = [way for way, package in NEEDS.items() if harness.installed(package) is None]
    return "\n".join([harness.table(rows), *(f"left out: {way}" for way in left)])


def draw(found: Found) -> Axes:
    """Bars by list of tensors and way."""
    title = "AdamW as a function: time as a ratio to the class"
    (axes,) = harness.axes_of(title, 1, figsize=(13, 5))
    harness.bars(axes, found["functions"], ways(found), base=1)
    axes.set_ylabel("ratio; less is faster")
    harness.legend(axes)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
