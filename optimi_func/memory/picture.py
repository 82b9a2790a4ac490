"""The picture of a plan: the only file here that needs matplotlib."""

from typing import Any

from optimi_func.memory.recipes import PARTS, MemoryPlan
from optimi_func.memory.sizes import unit_of

_COLORS = dict(zip(PARTS, ("#4c78a8", "#e45756", "#9ecae9", "#f2b950", "#8c8c8c")))


def save(path: Any, plan: MemoryPlan) -> None:
    """Write the picture of a plan to a file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    size = (10, 1.8 + 0.28 * len(plan.recipes))
    figure: Any = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    bars(axes, plan)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)


def bars(axes: Any, plan: MemoryPlan) -> None:
    """Of each recipe its bytes by part; the budget as a line, the best one's peak bold."""
    name, unit = unit_of(max(r.peak for r in plan.recipes))
    places = list(range(len(plan.recipes)))
    ends = [0.0] * len(places)
    for part in PARTS:
        sizes = [(getattr(r, part) or 0) / unit for r in plan.recipes]
        alphas = [1.0 if r.fits else 0.35 for r in plan.recipes]
        found = axes.barh(places, sizes, left=ends, color=_COLORS[part], label=part)
        for bar, alpha in zip(found, alphas):
            bar.set_alpha(alpha)
        ends = [a + b for a, b in zip(ends, sizes)]
    for place, recipe, end in zip(places, plan.recipes, ends):
        axes.annotate(
            f"{'~' if recipe.estimated else ''}{recipe.peak / unit:.2f}",
            (end, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            fontweight="bold" if recipe is plan.best else None,
        )
    budget = plan.budget / unit
    axes.axvline(budget, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set_yticks(places, [recipe.name for recipe in plan.recipes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([budget, *ends]))
    axes.set_xlabel(f"{name} at the peak; pale: does not fit in {budget:g} {name}")
    axes.set_title(plan.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
