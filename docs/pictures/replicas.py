"""Draw the bytes that five ways to train replicas need besides parameters and state."""

import json

from draw import BLUE, FAINT, GREEN, HERE, ORANGE, chart, machine, save

RESULTS = HERE.parents[1] / "benchmarks/results/cpu-xeon-processor-1-threads/replicas.json"
# The name in the file, and the name here.
WAYS = [
    ("DDP, step()", "DDP and step()"),
    ("DDP, step(), bucket views", "DDP with bucket views and step()"),
    ("DDP, torch in backward", "DDP and torch's optimizer in backward"),
    ("fully_shard, release", "fully_shard and release, two shards"),
    ("release on replicas", "release on replicas"),
]


def draw(folder=HERE) -> None:
    """Draw a bar for each way: the bytes after a step, and the peak during a step."""
    found = json.loads(RESULTS.read_text())
    figure, (axes,) = chart(
        "Release on replicas keeps a few buckets, DDP all gradients",
        "python benchmarks/replicas.py: a model of 16 MiB, buckets of 1 MiB, two "
        f"processes on gloo, counted in malloc.\n{machine(found['machine'])}",
        9.5,
        4.2,
    )
    for row, (key, _) in enumerate(reversed(WAYS)):
        cell = found["memory"][key]
        stays, peak = max(cell["stays"], 0.0), cell["peak"]
        axes.barh(row, stays, 0.62, color=BLUE)
        more = {"color": "white", "hatch": "//", "edgecolor": ORANGE, "linewidth": 1.2}
        axes.barh(row, peak - stays, 0.62, stays, **more)
        label = {"va": "center", "fontweight": "bold", "zorder": 3}
        label["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(peak + 0.03, row, f"{peak:.2f}", **label)
    from matplotlib.patches import Patch

    axes.axvline(1.0, color=GREEN, linewidth=1.2, linestyle="--")
    axes.text(1.01, len(WAYS) - 0.55, "all gradients", color=FAINT, fontsize=11)
    axes.legend(
        handles=[
            Patch(facecolor=BLUE, label="stays after the step"),
            Patch(facecolor="white", edgecolor=ORANGE, hatch="//", label="peak of a step"),
        ],
        loc="lower right",
        frameon=False,
        fontsize=10.5,
    )
    axes.set_yticks(range(len(WAYS)), [name for _, name in reversed(WAYS)])
    axes.set_xlim(0, 2.4)
    axes.set_xlabel("bytes beside parameters and state / bytes of all gradients")
    save(figure, "replicas.svg", folder)


if __name__ == "__main__":
    draw()
