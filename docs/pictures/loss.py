"""Draw how far the losses of `make train` are from float32, by dtype of the computation."""

import json
from math import sqrt
from statistics import mean, stdev

from draw import BLUE, DATA, GREEN, GREY, HERE, ORANGE, PURPLE, chart, machine, save

LINES = {
    "bfloat16": ("torch AdamW in bfloat16", ORANGE, ":", "s"),
    "bfloat16 + Kahan": ("AdamW, Kahan summation", BLUE, "-", "^"),
    "bfloat16 stochastic": ("AdamW, stochastic rounding", PURPLE, "-.", "v"),
    "bfloat16 compact": ("AdamW, compact", GREEN, "--", "D"),
}
COUNTS = {1: "one seed", 5: "mean and standard error of five seeds"}


def draw(folder=HERE) -> None:
    """Draw a panel for each dtype in which the runs compute."""
    found = json.loads((DATA / "loss.json").read_text())
    wide = found["runs"]["float32"]["float32"]["validation"]
    seeds = len(next(iter(wide.values())))
    how_many = COUNTS.get(seeds, f"mean and standard error of {seeds} seeds")
    figure, panels = chart(
        "Validation loss: bfloat16 with Kahan summation follows float32",
        f"A byte-level GPT with 468,224 parameters, {found['steps']} steps, {how_many}. "
        f"Lower is better.\n{machine(found['machine'])}",
        9.2,
        4.6,
        columns=len(found["runs"]),
    )
    for axes, (compute, runs) in zip(panels, found["runs"].items()):
        axes.axhline(0, color=GREY, linewidth=3, label="torch AdamW in float32")
        for name, (label, color, style, mark) in LINES.items():
            if name not in runs:
                continue
            middle, error = {}, {}
            for step, values in runs[name]["validation"].items():
                apart = [x - y for x, y in zip(values, wide[step])]
                middle[int(step)] = mean(apart)
                error[int(step)] = stdev(apart) / sqrt(seeds) if seeds > 1 else 0.0
            steps = list(middle)
            how = {"color": color, "linestyle": style, "marker": mark, "linewidth": 2}
            axes.plot(steps, list(middle.values()), markersize=7, label=label, **how)
            axes.fill_between(
                steps,
                [middle[x] - error[x] for x in steps],
                [middle[x] + error[x] for x in steps],
                color=color,
                alpha=0.25,
                linewidth=0,
            )
        axes.set_title(f"computed in {compute}", fontsize=13)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    low, high = zip(*(axes.get_ylim() for axes in panels))
    panels[0].set_ylabel("bits per byte above float32")
    # Below the points, where there is room for it.
    for axes in panels:
        axes.set_ylim(min(low) - 0.5 * (max(high) - min(low)), max(high))
    panels[0].legend(frameon=False, loc="lower left", fontsize=10)
    save(figure, "loss.svg", folder)


if __name__ == "__main__":
    draw()
