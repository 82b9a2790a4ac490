"""Recipes: how a model can be trained, the most faithful first, and what each one needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from optimi_func._rule import Storage
from optimi_func.gradient_release import GradientRelease, prepare_for_gradient_release
from optimi_func.memory.kept import Factory
from optimi_func.memory.sizes import parse_size, unit_of
from optimi_func.optimizers import BaseOptimizer

# How parameters and moments are kept, by what is lost for good in a step, least first.
WAYS: list[tuple[str, torch.dtype, Storage | str | None]] = [
    ("float32", torch.float32, None),
    ("bfloat16 exact", torch.bfloat16, "exact"),
    ("float32 + 8bit", torch.float32, Storage(moments="8bit")),
    ("bfloat16 exact + 8bit", torch.bfloat16, Storage("exact", "8bit")),
    ("bfloat16 kahan", torch.bfloat16, Storage("kahan")),
    ("bfloat16 kahan + 8bit", torch.bfloat16, Storage("kahan", "8bit")),
    ("bfloat16 compact", torch.bfloat16, "compact"),
    ("bfloat16 plain", torch.bfloat16, Storage("plain")),
]


class Applied(NamedTuple):
    """What a recipe made of a model."""

    optimizer: BaseOptimizer
    release: GradientRelease | None  # the handle, where gradients are released


@dataclass(frozen=True)
class Recipe:
    """One way to train a model, and the bytes where it needs most.

    Attributes:
        name: How parameters and moments are kept, and what becomes of gradients.
        dtype: What the model is cast to.
        storage: The optimizer's.
        gradient_release: Whether parameters are updated in backward.
        accumulation_steps: Backwards that make a step.
        buffer_dtype: Of the sum of gradients that a release then keeps; else None.
        parameters: Bytes of parameters and buffers.
        gradients: Bytes of gradients, of their sums, and of what waits to be updated.
        state: Bytes of the optimizer's state.
        activations: Bytes of whatever else forward and backward hold then, the batch
            too. None where no loss_fn and batch were given.
        scratch: Bytes of an update's temporaries, and of what fully_shard gathers.
        phase: Where that is: "forward", "backward" or "step".
        fits: Whether the peak is within the budget.
        estimated: What of these is no count: attention on CUDA, what is gathered.
    """

    name: str
    dtype: torch.dtype
    storage: Storage | str | None
    gradient_release: bool
    accumulation_steps: int
    buffer_dtype: torch.dtype | None
    parameters: int
    gradients: int
    state: int
    activations: int | None
    scratch: int
    phase: str
    fits: bool
    estimated: tuple[str, ...] = ()
    optimizer: Factory = field(repr=False, kw_only=True)
    options: Mapping[str, Any] = field(repr=False, kw_only=True)

    @property
    def peak(self) -> int:
        """Bytes of all together."""
        beside = self.gradients + (self.activations or 0) + self.scratch
        return self.parameters + self.state + beside

    @property
    def keywords(self) -> dict[str, Any]:
        """The constructor's keywords that this recipe is made of."""
        chosen: dict[str, Any] = {} if self.storage is None else {"storage": self.storage}
        if self.gradient_release:
            chosen["gradient_release"] = True
        return {**self.options, **chosen}

    def apply(self, model: nn.Module, **options: Any) -> Applied:
        """Cast a model, make its optimizer, and prepare the release if there is one.

        Args:
            model: Cast in place.
            options: Of the optimizer's constructor, beside those that were planned with,
                or in their place: lr, for one.

        Returns:
            The optimizer, and the release's handle or None.

        Raises:
            ValueError: A model on meta, or an option that the recipe decides.
        """
        decided = {"storage", "gradient_release", "kahan_sum", "state_dtype"} & {*options}
        if decided:
            raise ValueError(
                f"options={sorted(decided)}: this recipe decides them: {self.keywords}"
            )
        if any(p.is_meta for p in model.parameters()):
            raise ValueError(
                "the model is on meta, where an optimizer would step nothing: give it "
                'memory first, model.to_empty(device="cuda") and its weights, or apply '
                "the recipe to a model that is loaded"
            )
        model.to(self.dtype)
        named = list(model.named_parameters())
        optimizer = self.optimizer(named, **{**self.keywords, **options})
        if not self.gradient_release:
            return Applied(optimizer, None)
        if self.accumulation_steps == 1:
            return Applied(optimizer, prepare_for_gradient_release(model, optimizer))
        handle = prepare_for_gradient_release(
            model,
            optimizer,
            accumulation="buffer",
            accumulation_steps=self.accumulation_steps,
            buffer_dtype=self.buffer_dtype,
        )
        return Applied(optimizer, handle)


PARTS = ("parameters", "gradients", "state", "activations", "scratch")


@dataclass(frozen=True)
class MemoryPlan:
    """What `plan` found; `str()` of it is the table.

    Attributes:
        title: What was planned.
        budget: Bytes.
        recipes: The most faithful first.
    """

    title: str
    budget: int
    recipes: tuple[Recipe, ...]

    @property
    def best(self) -> Recipe | None:
        """The most faithful that fits; None where none does."""
        return next((recipe for recipe in self.recipes if recipe.fits), None)

    def __str__(self) -> str:
        """The table, and what the best recipe is."""
        name, unit = unit_of(max(recipe.peak for recipe in self.recipes))
        rows: list[list[str]] = [["recipe", *PARTS, "peak", "in", "fits"]]
        for r in self.recipes:
            sizes = [getattr(r, part) for part in PARTS]
            cells = ["-" if x is None else f"{x / unit:.2f}" for x in [*sizes, r.peak]]
            for part in r.estimated:
                cells[PARTS.index(part)] = "~" + cells[PARTS.index(part)]
            cells[-1] = ("~" if r.estimated else "") + cells[-1]
            rows.append([r.name, *cells, r.phase, "yes" if r.fits else "no"])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [f"{self.title}; budget {self.budget / unit:.2f} {name}, sizes in {name}"]
        for first, *rest in rows:
            padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:])]
            lines.append("  ".join([first.ljust(widths[0]), *padded]))
        return "\n".join([*lines, *self._notes()])

    def _notes(self) -> list[str]:
        best = self.best
        notes = [f"best: {'none fits' if best is None else best.name}"]
        if any(r.activations is None for r in self.recipes):
            notes.append(
                "activations are not counted: give loss_fn and batch, and leave room for "
                "them until then"
            )
        estimated = {part for r in self.recipes for part in r.estimated}
        if "activations" in estimated:
            notes.append("~ attention on CUDA is an estimate, from the CPU's fused kernel")
        if "scratch" in estimated:
            notes.append(
                "~ what fully_shard gathers is an estimate: two blocks and what is in "
                "none, with their gradients"
            )
        return notes

    def within(self, budget: str | float) -> "MemoryPlan":
        """The same recipes for another budget; nothing is counted again."""
        limit = parse_size("budget", budget)
        recipes = [replace(recipe, fits=recipe.peak <= limit) for recipe in self.recipes]
        return MemoryPlan(self.title, limit, tuple(recipes))

    def plot(self, path: Any) -> None:
        """Draw each recipe's bytes by part, and the budget.

        Args:
            path: The file to write, whose name's end says which kind; or matplotlib's axes
                to draw into.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from optimi_func.memory.picture import bars, save

        if hasattr(path, "barh"):
            bars(path, self)
        else:
            save(path, self)
