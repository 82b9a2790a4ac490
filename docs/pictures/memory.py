"""Draw the bytes per parameter that AdamW needs in each recipe, by their purpose."""

import json

from draw import BLUE, FAINT, GREEN, HERE, ORANGE, chart, machine, save

RESULTS = HERE.parents[1] / "benchmarks/results/cpu-epyc-2-threads/storage.json"
# Name in the file, name here, bytes of the parameter and of its gradient.
RECIPES = [
    ("float32", "float32", 4),
    ("exact + float32 moments", 'bfloat16, storage="exact"', 2),
    ("float32 + 8bit", "float32, 8-bit moments", 4),
    ("kahan + bfloat16 moments", "bfloat16 (Kahan, the default)", 2),
    ("exact + 8bit", "bfloat16 exact, 8-bit moments", 2),
    ("compact", 'bfloat16, storage="compact"', 2),
]


def draw(folder=HERE) -> None:
    """Draw a bar for each recipe."""
    found = json.loads(RESULTS.read_text())
    figure, (axes,) = chart(
        "From 16 bytes per parameter to 7, and to 5 with gradient release",
        "python benchmarks/storage.py: AdamW on the shapes of GPT-2; activations are not "
        f"counted.\n{machine(found['machine'])}",
        9.5,
        4.8,
    )
    for row, (key, _, size) in enumerate(reversed(RECIPES)):
        cell = found["bytes"][key]
        kept, total = cell["kept"], cell["with gradients"]
        parts = [
            (0, size, {"color": BLUE}),
            (size, kept - size, {"color": GREEN, "hatch": "//"}),
            (kept, total - kept, {"color": "white", "hatch": "..", "linestyle": "--"}),
        ]
        for left, width, how in parts:
            edge = "white" if how["color"] != "white" else ORANGE
            axes.barh(row, width, 0.66, left, edgecolor=edge, linewidth=1.2, **how)
        axes.text(total + 0.15, row, f"{total:.1f}", va="center", fontweight="bold")
        axes.text(
            total + 1.6, row, f"{kept:.1f} released", va="center", color=FAINT, fontsize=11
        )
    from matplotlib.patches import Patch

    axes.legend(
        handles=[
            Patch(facecolor=BLUE, label="parameter"),
            Patch(facecolor=GREEN, edgecolor="white", hatch="//", label="optimizer state"),
            Patch(
                facecolor="white",
                edgecolor=ORANGE,
                hatch="..",
                linestyle="--",
                label="gradient: freed at once with gradient release",
            ),
        ],
        loc="upper center",
        bbox_to_anchor=(0.4, -0.16),
        ncols=3,
        frameon=False,
        fontsize=10.5,
    )
    axes.set_yticks(range(len(RECIPES)), [name for _, name, _ in reversed(RECIPES)])
    axes.set_xlim(0, 21)
    axes.set_xlabel("bytes per parameter")
    save(figure, "memory.svg", folder)


if __name__ == "__main__":
    draw()
