"""Draw AdamW step times relative to torch's fused step, from benchmarks/results."""

import json

from draw import BLUE, FAINT, GREEN, GREY, HERE, INK, ORANGE, chart, machine, save

RESULTS = HERE.parents[1] / "benchmarks/results/cpu-epyc-2-threads/step_time.json"
SHAPES = {
    "vit-b": "ViT-B/16",
    "gpt2": "GPT-2",
    "large": "4 x 4096 x 4096",
    "resnet50": "ResNet-50",
    "vit-tiny": "ViT-tiny/16",
    "odd": "120 odd shapes",
    "small": "1000 tensors of 16",
}
# dtype, who, label, color, mark
WAYS = [
    ("bfloat16", "optimi_func", "optimi_func, bfloat16", GREEN, "D"),
    ("float32", "optimi_func", "optimi_func, float32", BLUE, "o"),
    ("bfloat16 + Kahan", "optimi_func", "optimi_func, bfloat16 + Kahan", BLUE, "^"),
    ("float32", "optimi", "optimi 0.3.3, float32", ORANGE, "s"),
    ("float32", "torch foreach", "torch foreach, float32", GREY, "X"),
]


def draw(folder=HERE) -> None:
    """Draw a row for each set of shapes, with a mark for each way to run the step."""
    found = json.loads(RESULTS.read_text())
    figure, (axes,) = chart(
        "The compiled step takes less time than torch's fused step",
        "python benchmarks/step_time.py: AdamW, each beside torch.optim.AdamW(fused=True) "
        f"in the same dtype; medians.\n{machine(found['machine'])}",
        9.5,
        4.8,
    )
    for row, shapes in enumerate(reversed(SHAPES)):
        cells = found["steps"][shapes]
        for dtype, who, label, color, mark in WAYS:
            cell = cells[dtype][who]
            axes.plot(
                [cell["ratio"]],
                [row],
                color=color,
                marker=mark,
                markersize=8,
                linestyle="none",
                markerfacecolor="none" if mark == "^" else color,
                markeredgewidth=1.8,
                label=label if row == 0 else None,
            )
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.text(1.02, len(SHAPES) - 0.45, "torch fused = 1", color=FAINT, fontsize=11)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.minorticks_off()
    axes.set_yticks(range(len(SHAPES)), list(reversed(SHAPES.values())))
    axes.set_ylim(-0.5, len(SHAPES) - 0.2)
    axes.set_xlabel("time of a step beside torch's (logarithmic; left is faster)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=True, framealpha=1, fontsize=10.5)
    save(figure, "steps.svg", folder)


if __name__ == "__main__":
    draw()
