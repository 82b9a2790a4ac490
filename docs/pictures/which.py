"""Final losses of all optimizers by task, and their curves, from benchmarks/which.py."""

import sys
from statistics import mean

from draw import BLUE, FAINT, GREY, HERE, INK, ORANGE, chart, machine, save

sys.path.append(str(HERE.parent / "_build"))
import benchmark_tables

REFERENCE = "AdamW"
# Ratios beyond these are drawn at the edge, with an arrow.
LEAST, MOST = 0.5, 2.0


def draw(folder=HERE) -> None:
    """A panel for each task; a row for each optimizer, a mark for each seed."""
    found = benchmark_tables.load(benchmark_tables.WHICH)
    tasks, names = found["tasks"], benchmark_tables.contenders()
    figure, panels = chart(
        "Held-out loss beside AdamW's: better to the right",
        "python benchmarks/which.py: AdamW's mean final loss by the optimizer's, each at "
        "its best lr; a mark for each of "
        f"{len(tasks['language']['optimizers'][REFERENCE]['final'])} seeds, a bar for "
        f"their mean.\n{machine(found['machine'])}",
        13,
        6.4,
        columns=len(tasks),
    )
    for axes, (task, about) in zip(panels, tasks.items()):
        cells = about["optimizers"]
        reference = mean(cells[REFERENCE]["final"])
        shown: list[float] = []
        for row, name in enumerate(reversed(names)):
            values = [reference / loss for loss in cells[name]["final"]]
            middle = reference / mean(cells[name]["final"])
            color = BLUE if middle >= 1 else ORANGE
            color = GREY if name == REFERENCE else color
            inside = [min(max(x, LEAST), MOST) for x in values]
            axes.plot(inside, [row] * len(inside), "o", color=color, alpha=0.5, ms=5)
            axes.plot(min(max(middle, LEAST), MOST), row, "|", color=color, ms=15, mew=2.5)
            if not LEAST <= middle <= MOST:
                text, side = f"{middle:.0f} >", "right"
                if middle < LEAST:
                    text, side = f"< {middle:.1g}", "left"
                at = MOST if middle > MOST else LEAST
                axes.text(at, row + 0.25, text, ha=side, color=FAINT, fontsize=8)
            shown += inside
        axes.axvline(1, color=INK, linewidth=1.2)
        axes.set_xscale("log")
        axes.minorticks_off()
        low, high = min(*shown, 0.97) * 0.98, max(*shown, 1.03) * 1.02
        wide = high / low > 2
        marks = (0.5, 0.7, 1, 1.4, 2) if wide else (0.7, 0.8, 0.9, 1, 1.1, 1.2)
        if high / low < 1.15:
            marks = (0.96, 0.98, 1, 1.02, 1.04)
        ticks = [x for x in marks if low < x < high]
        axes.set_xlim(low, high)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        first = axes is panels[0]
        axes.set_yticks(
            range(len(names)), list(reversed(names)) if first else [""] * len(names)
        )
        axes.set_title(task, fontsize=12)
        axes.grid(alpha=0.25)
    save(figure, "which.svg", folder)
    curves(found, names, folder)


def curves(found: dict, names: list[str], folder=HERE) -> None:
    """Draw the held-out loss of seed 0 at the best lr over the steps."""
    tasks = found["tasks"]
    figure, panels = chart(
        "Held-out loss on the way: the best three of each task, and AdamW",
        "python benchmarks/which.py: means over the seeds at the best lr. Others in grey.\n"
        f"{machine(found['machine'])}",
        13,
        4.4,
        columns=len(tasks),
    )
    styles = [(BLUE, "-"), (ORANGE, "--"), ("#1d8a66", "-.")]
    for axes, (task, about) in zip(panels, tasks.items()):
        cells = about["optimizers"]
        best = sorted(names, key=lambda n: mean(cells[n]["final"]))[:3]
        for name in names:
            curve = [mean(x) for x in zip(*cells[name]["curves"])]
            steps = [about["steps"] * (i + 1) / len(curve) for i in range(len(curve))]
            color, style, width = GREY, "-", 0.6
            if name in best:
                (color, style), width = styles[best.index(name)], 1.8
            elif name == REFERENCE:
                color, style, width = INK, ":", 1.8
            label = name if width > 1 else None
            axes.plot(steps, curve, style, color=color, linewidth=width, label=label)
        if about["optimizers"][REFERENCE]["curves"][0][-1] < 1e-3:
            axes.set_yscale("log")
        top = mean(cells[REFERENCE]["curves"][0][:2])
        axes.set_ylim(0.95 * mean(cells[best[0]]["final"]), 1.1 * top)
        axes.set_title(task, fontsize=12)
        axes.set_xlabel("step")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
    save(figure, "which_curves.svg", folder)


if __name__ == "__main__":
    draw()
