"""How far the runs of `make train` are from float32, by what they compute in."""

import json

from draw import BLUE, DATA, GREEN, GREY, HERE, ORANGE, PURPLE, chart, machine, save

LINES = {
    "bfloat16": ("plain", ORANGE, ":", "s"),
    "bfloat16 + Kahan": ("Kahan", BLUE, "-", "^"),
    "bfloat16 stochastic": ("stochastic", PURPLE, "-.", "v"),
    "bfloat16 compact": ("compact", GREEN, "--", "D"),
}
FILES = {"float32": "loss.json", "bfloat16": "loss_bfloat16.json"}


def draw(folder=HERE) -> None:
    """Draw a panel for each dtype in which the runs compute."""
    found = {c: json.loads((DATA / f).read_text()) for c, f in FILES.items()}
    steps = found["float32"]["steps"]
    figure, panels = chart(
        "bfloat16 weights: Kahan follows float32, plain falls behind",
        f"make train: a byte-level GPT of 468,224 parameters, {steps} steps, one seed. "
        f"Above 0: a higher validation loss.\n{machine(found['float32']['machine'])}",
        9.2,
        4.6,
        columns=len(FILES),
    )
    for axes, (compute, about) in zip(panels, found.items()):
        runs = about["runs"]
        reference = runs["float32"]["validation"]
        axes.axhline(0, color=GREY, linewidth=3)
        for name, (label, color, style, mark) in LINES.items():
            apart = {int(k): v - reference[k] for k, v in runs[name]["validation"].items()}
            how = {"color": color, "linestyle": style, "marker": mark, "linewidth": 2}
            axes.plot(*zip(*apart.items()), markersize=7, label=label, **how)
        axes.set_title(f"computed in {compute}", fontsize=13)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    low, high = zip(*(axes.get_ylim() for axes in panels))
    panels[0].set_ylabel("bits per byte above float32")
    # Below the points, where there is room for it.
    for axes in panels:
        axes.set_ylim(min(low) - 0.25 * (max(high) - min(low)), max(high))
    panels[0].legend(frameon=False, loc="lower left", ncols=2)
    save(figure, "loss.svg", folder)


if __name__ == "__main__":
    draw()
