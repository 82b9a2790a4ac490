"""Draw the final losses of all optimizers, by task and by lr, from benchmarks/which.py."""

import sys
from statistics import mean

from draw import BLUE, FAINT, GREEN, GREY, HERE, INK, ORANGE, chart, machine, save

sys.path.append(str(HERE.parent / "_build"))
import benchmark_tables

REFERENCE = "AdamW"
# Ratios beyond these are drawn at the edge, with an arrow.
LEAST, MOST = 0.5, 2.0
WIDTH = 9.4
# Of those with the same grid of lrs.
LINES = {
    "AdamW": (INK, "-", "o"),
    "AdamW beta2=0.95": (ORANGE, "--", "s"),
    "ScheduleFreeAdamW": (BLUE, "-", "^"),
    "MuonAdamW": (GREEN, "-.", "D"),
}


def said(found: dict) -> str:
    """Return the machines; a star marks the optimizers that the second machine trained."""
    added = [*found.get("added", {}).values()][:1]
    return "\n* ".join(machine(about) for about in (found["machine"], *added))


def draw(folder=HERE) -> None:
    """Draw a panel for each task, with a row per optimizer and a mark per seed."""
    found = benchmark_tables.load(benchmark_tables.WHICH)
    tasks, names = benchmark_tables.tasks(), benchmark_tables.contenders()
    added = found.get("added", {})
    labels = [f"{name} *" if name in added else name for name in reversed(names)]
    figure, panels = chart(
        "Held-out loss beside AdamW's: right of 1 is better",
        "python benchmarks/which.py: each at its best lr, a mark for a seed, a bar for the "
        f"mean\n{said(found)}",
        WIDTH,
        1.8 + 0.23 * len(names),
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
            axes.plot(inside, [row] * len(inside), "o", color=color, alpha=0.5, ms=4.5)
            axes.plot(min(max(middle, LEAST), MOST), row, "|", color=color, ms=13, mew=2.5)
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
        marks = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 2)
        if high / low > 1.5:
            marks = (0.5, 0.6, 0.8, 1, 1.2, 1.5, 2)
        if high / low < 1.15:
            marks = (0.96, 1, 1.04)
        ticks = [x for x in marks if low < x < high]
        axes.set_xlim(low, high)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_ylim(-0.6, len(names) - 0.4)
        first = axes is panels[0]
        axes.set_yticks(range(len(names)), labels if first else [""] * len(names))
        axes.set_title(task, fontsize=12)
        axes.set_xlabel("AdamW's loss / its own", fontsize=10)
        axes.grid(alpha=0.25)
    save(figure, "which.svg", folder)
    by_lr(found, folder)


def by_lr(found: dict, folder=HERE) -> None:
    """Draw the final loss of seed 0 over the lr, for the optimizers with the same lrs."""
    tasks = benchmark_tables.tasks()
    figure, panels = chart(
        "Held-out loss by the learning rate",
        f"python benchmarks/which.py: seed 0\n{said(found)}",
        WIDTH,
        4.3,
        columns=len(tasks),
    )
    for axes, (task, about) in zip(panels, tasks.items()):
        lowest = []
        for name, (color, style, marker) in LINES.items():
            if name not in about["optimizers"]:
                continue
            losses = about["optimizers"][name]["by lr"]
            at = sorted((float(lr), min(loss, 1e3)) for lr, loss in losses.items())
            look = {"color": color, "marker": marker, "ms": 4, "label": name}
            axes.plot(*zip(*at), style, **look)
            lowest.append(min(loss for _, loss in at))
        best = min(lowest)
        high = about["optimizers"][REFERENCE]["by lr"].values()
        axes.set_ylim(best * 0.98, min(max(high), 1.8 * best) * 1.02)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_title(task, fontsize=12)
        axes.set_xlabel("lr")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("held-out loss")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", ncols=4, frameon=False, fontsize=10)
    save(figure, "which_lr.svg", folder)


if __name__ == "__main__":
    draw()
