"""Is a memory plan true?

`optimi_func.memory.plan` says what a training step needs, without taking it. Here the steps
are taken: a ViT-L/16 and a GPT-2, whole, on CPU, by five recipes each. Each runs in a
process of its own; the peak is the profiler's, from before the model is made, in the last
of the steps, with state from the first on.

* ``predicted``: the plan's peak;
* ``measured``: the most bytes allocated at once;
* ``ratio``: predicted over measured.

What processes share (kernels, the table of codes' trial) is made on a small model before.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from harness import Found, Step, option
from matplotlib.axes import Axes
from torch import Tensor, nn
from tqdm import tqdm

import optimi_func
from optimi_func import memory

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import memory_timeline

RECIPES = (
    "float32",
    "float32, release",
    "bfloat16 kahan, release",
    "bfloat16 compact",
    "bfloat16 compact, release",
)
MODELS = ("ViT-L/16", "GPT-2")


@dataclass(frozen=True)
class Config(harness.Options):
    models: tuple[str, ...] = option(MODELS, "to train", MODELS)
    recipes: tuple[str, ...] = option(RECIPES, "to train by")
    steps: int = option(2, "of which the last is measured")
    images: int = option(1, "in a batch")
    pixels: int = option(224, "of an image's side; bfloat16 is slow without AVX-512")
    sequences: int = option(1, "in a batch")
    context: int = option(256, "tokens in a sequence")
    checkpoint: bool = option(False, "drop the blocks' activations, compute them again")
    compile: bool | None = option(None, "the steps; by default if possible")
    whole: bool = option(True, "models of their real sizes")
    processes: bool = option(True, "one for each recipe")


QUICK: Found = {
    **{"whole": False, "processes": False, "context": 64, "steps": 2},
    **{"recipes": ("float32, release", "bfloat16 compact")},
}


@dataclass(frozen=True)
class GPTSizes:
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257


class Block(nn.Module):
    """Pre-norm, causal."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.attended = nn.Linear(sizes.width, sizes.width)
        self.expand = nn.Linear(sizes.width, 4 * sizes.width)
        self.contract = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """With the head tied to the embedding."""

    def __init__(self, sizes: GPTSizes, context: int, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(context, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = checkpointed(block, x) if self.checkpoint else block(x)
        return self.head(self.norm(x))


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Call a block whose activations are computed again in backward."""
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


LossFn = Callable[[nn.Module, Any], Tensor]


def vit(config: Config) -> tuple[nn.Module, Any, LossFn]:
    """That of examples/memory_timeline.py."""
    sizes = memory_timeline.Config(image=config.pixels)
    if not config.whole:
        sizes = replace(sizes.quick(), width=256, heads=4, hidden=1024)
    images = torch.rand(config.images, 3, sizes.image, sizes.image)
    labels = torch.randint(sizes.classes, (config.images,))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return memory_timeline.ViT(sizes), (images, labels), loss_fn


def gpt2(config: Config) -> tuple[nn.Module, Any, LossFn]:
    """On tokens without meaning."""
    sizes = GPTSizes() if config.whole else GPTSizes(2, 256, 4, 1000)
    tokens = torch.randint(sizes.vocabulary, (config.sequences, config.context + 1))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return GPT2(sizes, config.context, config.checkpoint), tokens, loss_fn


MAKERS = dict(zip(MODELS, (vit, gpt2)))


def planned(name: str, config: Config) -> dict[str, memory.Recipe]:
    """Every recipe for a model, whose weights are never made."""
    with torch.device("meta"):
        model, batch, loss_fn = MAKERS[name](config)
    options = {"device": "cpu", "compile": config.compile}
    found = memory.plan(model, optimi_func.AdamW, "24GB", loss_fn, batch, **options)
    return {recipe.name: recipe for recipe in found.recipes}


def training(name: str, recipe: memory.Recipe, config: Config) -> tuple[Step, Step]:
    """A training step by a recipe."""
    torch.manual_seed(config.seed)
    model, batch, loss_fn = MAKERS[name](config)
    optimizer, _ = recipe.apply(model, lr=1e-4)
    optimizer.init_state()  # as after a first step
    if not isinstance(batch, Tensor):
        batch = (batch[0].to(recipe.dtype), batch[1])

    def step() -> None:
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return int, step


def measured(name: str, recipe_name: str, config: Config) -> Found:
    """Predicted and measured, in a process that does nothing else."""
    torch.set_num_threads(config.threads)
    small = replace(config, **(QUICK | {"steps": 2}))
    for size in (small, config):
        recipe = planned(name, size)[recipe_name]
        make = lambda size=size, recipe=recipe: training(name, recipe, size)  # noqa: E731
        found = harness.peak_bytes(make, size.steps, whole=True)
    parts = {part: getattr(recipe, part) for part in memory.recipes.PARTS}
    return {
        "predicted": recipe.peak,
        "measured": found,
        "ratio": recipe.peak / found,
        "phase": recipe.phase,
        **parts,
    }


def measure(config: Config) -> Found:
    """Every recipe of every model."""
    rows: Found = {name: {} for name in config.models}
    pairs = [(name, recipe) for name in config.models for recipe in config.recipes]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    context = multiprocessing.get_context("spawn")
    for name, recipe in tqdm(pairs, "recipes", disable=None):
        if config.processes:
            with ProcessPoolExecutor(1, mp_context=context) as process:
                cell = process.submit(measured, name, recipe, config).result()
        else:
            cell = measured(name, recipe, config)
        rows[name][recipe] = cell
        tqdm.write(f"{name}, {recipe}: {cell['ratio']:.4f}", file=sys.stderr)
    return {"plans": rows}


def report(found: Found) -> str:
    """One line a recipe."""
    head = ["model", "recipe", "predicted MB", "measured MB", "ratio", "peaks in"]
    rows = [head]
    for name, recipes in found["plans"].items():
        for recipe, cell in recipes.items():
            sizes = [f"{cell[key] / 1e6:.1f}" for key in ("predicted", "measured")]
            rows.append([name, recipe, *sizes, f"{cell['ratio']:.4f}", cell["phase"]])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """Predicted beside measured."""
    plans = found["plans"]
    axes = harness.axes_of("Peak of a training step, GB", len(plans), figsize=(11, 8))
    for one, (name, recipes) in zip(axes, plans.items()):
        groups = {
            recipe: {key: cell[key] / 1e9 for key in ("predicted", "measured")}
            for recipe, cell in recipes.items()
        }
        harness.bars(one, groups, ["predicted", "measured"])
        one.set_ylabel(name)
    harness.legend(axes[0])
    return axes[0]


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
