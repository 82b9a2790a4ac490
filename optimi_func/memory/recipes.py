"""Recipes for training a model, in order of fidelity, with their bytes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from optimi_func.classes.base import BaseOptimizer
from optimi_func.core.codes import remainder_dtype
from optimi_func.core.lists import table
from optimi_func.core.rule import Storage, StorageLike
from optimi_func.core.storage import storage_of
from optimi_func.gradient_release import GradientRelease, prepare_for_gradient_release
from optimi_func.memory.counting import Factory, cast_dtype, takes_model

# Storages of parameters and moments; those that lose least in a step come first.
WAYS: list[tuple[str, torch.dtype, StorageLike | None]] = [
    ("float32", torch.float32, None),
    ("bfloat16 exact", torch.bfloat16, "exact"),
    ("float32 + 8bit", torch.float32, Storage(moments="8bit")),
    ("bfloat16 exact + 8bit", torch.bfloat16, Storage("exact", "8bit")),
    ("bfloat16 kahan", torch.bfloat16, Storage("kahan")),
    ("bfloat16 kahan + 8bit", torch.bfloat16, Storage("kahan", "8bit")),
    ("bfloat16 compact", torch.bfloat16, "compact"),
    ("bfloat16 plain", torch.bfloat16, Storage("plain")),
]
PARTS = ("parameters", "gradients", "state", "activations", "scratch")


_UNITS = {
    **{"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")
# A smaller number was meant in a larger unit: no model trains in so few bytes.
_LEAST = 10**6


def parse_size(name: str, size: object) -> int:
    """Convert "24GB" (10^9), "16GiB" (2^30) or a number of bytes to bytes, or raise."""
    allowed = 'allowed are sizes such as "24GB" and "16GiB", and numbers of bytes'
    if isinstance(size, bool) or not isinstance(size, str | Real):
        raise TypeError(f"{name}={size!r}: {allowed}")
    number = 0.0
    if not isinstance(size, str):
        number = float(size)
        if 0 < number < _LEAST:
            raise ValueError(
                f"{name}={size!r} is a number of bytes, less than a megabyte: write the "
                f'unit, as in "{size:g}GB" or "{size:g}B"'
            )
    elif match := _SIZE.fullmatch(size):
        number = float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if not 1 <= number < float("inf"):
        raise ValueError(f"{name}={size!r}: {allowed}")
    return int(number)


def slower_by(
    dtype: torch.dtype, storage: StorageLike | None, release: bool, device: str
) -> str:
    """Return what makes a training step of a recipe slower, and "-" for nothing."""
    reasons: list[str] = []
    if (dtype == torch.float32) == (device == "cuda"):
        reasons.append(f"{str(dtype).removeprefix('torch.')} products")
    chosen = storage_of(storage)
    if chosen.coded:
        reasons.append("codes")
    if remainder_dtype(torch.empty(0, dtype=dtype, device="cpu"), chosen.param) is not None:
        reasons.append("compensation")
    return ", ".join([*reasons, *["hooks"] * release]) or "-"


def check_undecided(options: Mapping[str, object]) -> None:
    """Raise an error if an option is one that the recipes decide."""
    for name in ("storage", "gradient_release", "kahan_sum", "state_dtype"):
        if name in options:
            raise ValueError(
                f"{name}={options[name]!r}: recipes decide it. To fix it, make the "
                "optimizer yourself"
            )


class Applied(NamedTuple):
    """The optimizer and the gradient release handle that a recipe created for a model."""

    optimizer: BaseOptimizer
    release: GradientRelease | None  # the handle, if the recipe releases gradients


@dataclass(frozen=True)
class Recipe:
    """A way to train a model, and the bytes it needs at the worst moment of a step.

    Attributes:
        name: A name that consists of the dtype, the storage and the treatment of gradients.
        dtype: The dtype to which the model is cast.
        storage: The `storage` argument that is passed to the optimizer.
        gradient_release: True if parameters are updated during the backward pass.
        accumulation_steps: The number of backward passes per step.
        buffer_dtype: The dtype in which gradient release accumulates gradients, or None.
        parameters: Bytes of parameters and buffers.
        gradients: Bytes of gradients, of sums of gradients, and of gradients that wait for
            an update.
        state: Bytes of the optimizer's state.
        activations: Bytes of all other tensors in the forward and backward pass, including
            the batch. None if no loss_fn and batch were passed.
        scratch: Bytes of the temporaries of an update, and of parameters that fully_shard
            gathers.
        slower: The reasons why a training step is slower than that of the fastest recipe:
            matrix products in float32 on a GPU, or in bfloat16 on a CPU (unless the CPU has
            instructions for them), the 8-bit codes of moments, compensations, and the hooks
            of gradient release. "-" means that there is no such reason.
        phase: The phase in which the worst moment of a step occurs, "backward" or "step".
        fits: True if the peak is within the budget.
        estimated: The names of the sizes that are estimates: "activations" if loss_fn and
            batch were passed, and "scratch" if fully_shard gathers parameters.
    """

    name: str
    dtype: torch.dtype
    storage: StorageLike | None
    gradient_release: bool
    accumulation_steps: int
    buffer_dtype: torch.dtype | None
    parameters: int
    gradients: int
    state: int
    activations: int | None
    scratch: int
    phase: str
    slower: str
    fits: bool = False
    estimated: tuple[str, ...] = ()
    optimizer: Factory = field(repr=False, kw_only=True)
    options: Mapping[str, object] = field(repr=False, kw_only=True)

    @property
    def peak(self) -> int:
        """The bytes of parameters, gradients, state, activations and scratch together."""
        return sum(getattr(self, part) or 0 for part in PARTS)

    @property
    def keywords(self) -> dict[str, object]:
        """The keyword arguments with which the optimizer's constructor is called."""
        own = {"storage": self.storage, "gradient_release": self.gradient_release}
        return {**self.options, **{name: x for name, x in own.items() if x}}

    def apply(self, model: nn.Module, **options: object) -> Applied:
        """Cast a model, create its optimizer, and prepare gradient release if it is used.

        Args:
            model: The model, which is cast in place.
            options: More options of the optimizer's constructor, such as lr. They replace
                the options that were passed to `plan`.

        Raises:
            ValueError: The model is on "meta", or an option is one that the recipe decides.
        """
        check_undecided(options)
        if any(p.is_meta for p in model.parameters()):
            raise ValueError(
                "the model is on meta, where an optimizer has nothing to update: call "
                'model.to_empty(device="cuda") and load its weights first'
            )
        codes = [p for p in model.parameters() if cast_dtype(p, self.dtype) == p.dtype]
        tensors = [p.data for p in codes]
        model.to(self.dtype)
        for p, x in zip(codes, tensors):
            p.data = x  # float8 means nothing without its scales
        pairs = list(model.named_parameters())
        first = model if takes_model(self.optimizer) else pairs
        optimizer = self.optimizer(first, **{**self.keywords, **options})
        if not self.gradient_release:
            return Applied(optimizer, None)
        sums: dict[str, Any] = {}
        if self.accumulation_steps > 1:
            sums = {"accumulation": "buffer", "accumulation_steps": self.accumulation_steps}
            sums["buffer_dtype"] = self.buffer_dtype
        return Applied(optimizer, prepare_for_gradient_release(model, optimizer, **sums))


def unit_of(recipes: Sequence[Recipe]) -> tuple[str, int]:
    """Return the name and the bytes of a unit, GB or MB, for the largest peak."""
    most = max(recipe.peak for recipe in recipes)
    return ("GB", 10**9) if most >= 10**8 else ("MB", 10**6)


@dataclass(frozen=True)
class MemoryPlan:
    """The recipes for a model and a budget; `print` shows them as a table.

    Attributes:
        title: The model, the optimizer and the device.
        budget: The budget in bytes.
        recipes: The recipes, in the order in which you would try them (see `plan`).
    """

    title: str
    budget: int
    recipes: tuple[Recipe, ...]

    @property
    def best(self) -> Recipe:
        """The first recipe that fits; raises ValueError if no recipe fits."""
        if fitting := [recipe for recipe in self.recipes if recipe.fits]:
            return fitting[0]
        least = min(self.recipes, key=lambda recipe: recipe.peak)
        raise ValueError(
            f"budget={self.budget}: no recipe fits. Allowed are {least.peak} bytes or "
            f"more, the peak of {least.name!r}"
        )

    def __str__(self) -> str:
        """Return the table of recipes and the name of the best recipe."""
        name, unit = unit_of(self.recipes)
        rows: list[list[str]] = [["recipe", *PARTS, "peak", "in", "fits", "slower by"]]
        for r in self.recipes:
            sizes = [getattr(r, part) for part in (*PARTS, "peak")]
            cells = ["-" if x is None else f"{x / unit:.2f}" for x in sizes]
            for part in r.estimated:
                cells[PARTS.index(part)] = "~" + cells[PARTS.index(part)]
            cells[-1] = ("~" if r.estimated else "") + cells[-1]
            rows.append([r.name, *cells, r.phase, "yes" if r.fits else "no", r.slower])
        title = f"{self.title}; budget {self.budget / unit:.2f} {name}, sizes in {name}"
        return "\n".join([title, table(rows, left=(0, len(rows[0]) - 1)), *self._notes()])

    def _notes(self) -> list[str]:
        names = [recipe.name for recipe in self.recipes if recipe.fits]
        notes = [f"best: {[*names, 'none fits'][0]}"]
        if any(r.activations is None for r in self.recipes):
            notes.append(
                "activations are not counted: give loss_fn and batch, or leave room for "
                "them"
            )
        estimated = {part for r in self.recipes for part in r.estimated}
        if "activations" in estimated:
            notes.append("~ activations are an estimate, from what one forward saves")
        if "scratch" in estimated:
            notes.append(
                "~ what fully_shard gathers is an estimate: two blocks and the parameters "
                "in no block, with their gradients"
            )
        return notes

    def within(self, budget: str | float) -> "MemoryPlan":
        """Return the plan for a different budget, without counting the bytes again."""
        limit = parse_size("budget", budget)
        recipes = [replace(recipe, fits=recipe.peak <= limit) for recipe in self.recipes]
        return MemoryPlan(self.title, limit, tuple(recipes))
