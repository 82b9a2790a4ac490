"""The picture of a plan: the only file here that needs matplotlib."""

from typing import Any

from optimi_func.memory.recipes import PARTS, MemoryPlan
from optimi_func.memory.sizes import unit_of

_COLORS = dict(zip(PARTS, ("#4c78a8", "#e45756", "#9ecae9", "#f2b950", "#8c8c8c")))


def draw(plan: MemoryPlan, path: Any) -> None:
    """Bars by part, one for each recipe, and a line for the budget."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    name, unit = unit_of(max([plan.budget, *(r.peak for r in plan.recipes)]))
    figure = Figure(figsize=(10, 1.6 + 0.3 * len(plan.recipes)), layout="constrained")
    axes = figure.subplots()
    places = range(len(plan.recipes))
    left = [0.0] * len(plan.recipes)
    for part in PARTS:
        sizes = [(getattr(r, part) or 0) / unit for r in plan.recipes]
        axes.barh(places, sizes, left=left, color=_COLORS[part], label=part, height=0.75)
        left = [a + b for a, b in zip(left, sizes)]
    for place, recipe, end in zip(places, plan.recipes, left):
        text = f"{'~' if recipe.estimated else ''}{recipe.peak / unit:.2f}"
        weight = "bold" if recipe is plan.best else None
        axes.annotate(
            text,
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            fontweight=weight,
        )
    budget = plan.budget / unit
    axes.axvline(budget, color="black", linestyle="--", label=f"budget {budget:g} {name}")
    axes.set_yticks(places, [recipe.name for recipe in plan.recipes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max([budget, *left]))
    axes.set_xlabel(f"{name} at the peak")
    axes.set_title(plan.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
