"""Loss of the four runs of `make train`, and how far each is from float32."""

import json

from draw import BLUE, DATA, GREEN, GREY, HERE, ORANGE, chart, machine, save

LINES = {
    "float32": (GREY, "-", "o", 3.5),
    "bfloat16": (ORANGE, ":", "s", 1.8),
    "bfloat16 + Kahan": (BLUE, "-", "^", 1.5),
    "bfloat16 compact": (GREEN, "--", "D", 1.5),
}
WINDOW = 25
EVERY = 4  # steps a point


def smooth(values: list[float]) -> list[float]:
    """The mean of the last steps."""
    parts = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw(folder=HERE) -> None:
    """Two panels on the same steps."""
    found = json.loads((DATA / "loss.json").read_text())
    runs, steps = found["runs"], found["steps"]
    figure, (losses, distances) = chart(
        "bfloat16 with Kahan summation trains as float32 does; plain bfloat16 falls behind",
        f"make train: a byte-level GPT of 468,224 parameters, {steps} steps; lines: "
        f"training, mean of {WINDOW}; marks: validation.\n{machine(found['machine'])}",
        10,
        4.6,
        columns=2,
    )
    reference = runs["float32"]
    for name, run in runs.items():
        color, style, mark, width = LINES[name]
        line = {"color": color, "linestyle": style, "linewidth": width}
        dots = {"color": color, "marker": mark, "linestyle": "none", "markersize": 6}
        x = range(1, steps + 1, EVERY)
        at = [int(k) for k in run["validation"]]
        losses.plot(x, smooth(run["train"])[::EVERY], **line)
        losses.plot(at, run["validation"].values(), **dots)
        if run is reference:
            distances.axhline(0, color=color, linewidth=width)
            continue
        apart = [a - b for a, b in zip(run["train"], reference["train"])]
        ends = [v - reference["validation"][k] for k, v in run["validation"].items()]
        distances.plot(x, smooth(apart)[::EVERY], alpha=0.6, **{**line, "linewidth": 1})
        distances.plot(at, ends, **{**dots, "linestyle": style, "linewidth": width})
    last = max(int(k) for k in reference["validation"])
    losses.set_ylim(1.65, 3.2)
    losses.set_ylabel("bits per byte")
    losses.set_title("loss", fontsize=12)
    for (name, run), y in zip(runs.items(), (3.05, 2.93, 2.81, 2.69)):
        color, style, mark, width = LINES[name]
        end = run["validation"][str(last)]
        losses.plot([200, 240], [y, y], color=color, linestyle=style, linewidth=width)
        losses.plot([220], [y], color=color, marker=mark, markersize=6)
        mib = run["bytes"] / 2**20
        losses.text(250, y, f"{name}: {end:.4f}, {mib:.1f} MiB", va="center", size=10)
    distances.set_ylim(-0.012, 0.032)
    distances.set_title("distance from float32", fontsize=12)
    for axes in (losses, distances):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    save(figure, "loss.svg", folder)


if __name__ == "__main__":
    draw()
