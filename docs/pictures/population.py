"""Draw the heat map of a sweep over 64 networks that were trained together."""

import json

from draw import DATA, HERE, INK, chart, machine, save


def short(x: float) -> str:
    """Format a number for a tick of an axis."""
    return f"{x:.0e}".replace("e-0", "e-").replace("e+00", "") if x < 0.01 else f"{x:.2g}"


def draw(folder=HERE) -> None:
    """Draw a square with a number for each pair of hyperparameters."""
    import matplotlib.pyplot as plt

    found = json.loads((DATA / "population.json").read_text())
    percent = [[100 * x for x in row] for row in found["accuracy"]]
    best = max(max(row) for row in percent)
    figure, (axes,) = chart(
        "The learning rate decides, until weight decay is too large",
        "python examples/lr_sweep.py: 64 networks on scikit-learn's digits, "
        f"{found['steps']} steps of one compiled graph;\nvalidation accuracy, %. "
        f"{machine(found['machine'])}",
        8.6,
        6.4,
    )
    low = best - 20
    # Lightness alone carries the value: readable without color, and turned around.
    axes.imshow(percent, origin="lower", cmap="Blues", vmin=low, vmax=best + 6, aspect=0.7)
    for i, row in enumerate(percent):
        for j, value in enumerate(row):
            dark = value > best - 6
            axes.text(
                j,
                i,
                f"{value:.1f}",
                ha="center",
                va="center",
                color="white" if dark else INK,
                fontweight="bold" if value == best else "normal",
            )
            if value == best:
                frame = plt.Rectangle(
                    (j - 0.47, i - 0.47),
                    0.94,
                    0.94,
                    fill=False,
                    edgecolor=INK,
                    linewidth=2.5,
                )
                axes.add_patch(frame)
    axes.set_xticks(range(len(found["lr"])), [short(x) for x in found["lr"]])
    decays = found["weight_decay"]
    axes.set_yticks(range(len(decays)), [short(x) for x in decays])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("weight decay")
    save(figure, "population.svg", folder)


if __name__ == "__main__":
    draw()
