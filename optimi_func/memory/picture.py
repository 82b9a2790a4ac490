"""The picture of a plan. Only this module imports matplotlib."""

from collections.abc import Sequence
from typing import Any

_COLORS = ("#4c78a8", "#e45756", "#9ecae9", "#f2b950", "#8c8c8c")


def save(path: Any, plan: Any, parts: Sequence[str], unit: tuple[str, int]) -> None:
    """Draw a plan into a file, or raise if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    size = (10, 1.8 + 0.28 * len(plan.recipes))
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots(), plan, parts, unit)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)


def draw(axes: Any, plan: Any, parts: Sequence[str], unit: tuple[str, int]) -> None:
    """Draw a bar of parts for each recipe, pale if it does not fit, and the budget."""
    name, size = unit
    places = list(range(len(plan.recipes)))
    ends = [0.0] * len(places)
    for part, color in zip(parts, _COLORS):
        sizes = [(getattr(r, part) or 0) / size for r in plan.recipes]
        bars = axes.barh(places, sizes, left=ends, color=color, label=part)
        for bar, r in zip(bars, plan.recipes):
            bar.set_alpha(1.0 if r.fits else 0.35)
        ends = [a + b for a, b in zip(ends, sizes)]
    best = next((r for r in plan.recipes if r.fits), None)
    for place, r, end in zip(places, plan.recipes, ends):
        text = f" {'~' if r.estimated else ''}{r.peak / size:.2f}"
        bold = "bold" if r is best else None
        axes.text(end, place, text, va="center", fontsize=7, fontweight=bold)
    budget = plan.budget / size
    axes.axvline(budget, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set_yticks(places, [r.name for r in plan.recipes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([budget, *ends]))
    axes.set_xlabel(f"{name} at the peak; pale: does not fit in {budget:g} {name}")
    axes.set_title(plan.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
