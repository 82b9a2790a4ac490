"""How long does a new process wait for its optimizer and the first step?

Whole processes in turn, beyond their imports of torch and the package: with empty caches,
and with those that another process has filled. Beside torch's fused step and
torch.compile around torch.optim's.
"""

import tempfile
from dataclasses import dataclass
from statistics import median

import harness
from harness import Found, option
from matplotlib.axes import Axes
from tqdm import tqdm

WAYS = ("optimi_func", "torch fused", "torch.compile(step)")
# Its graph has the operations of each tensor.
MOST_COMPILED = 100

FIRST = """
import sys, time
import torch
way, tensors, threads, device = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
if way == "optimi_func":
    import optimi_func
torch.set_num_threads(threads)
params = [torch.randn(16, device=device).requires_grad_() for _ in range(tensors)]
for p in params:
    p.grad = torch.randn_like(p)
start = time.perf_counter()
if way == "optimi_func":
    optimi_func.AdamW(params, lr=1e-3).step()
elif way == "torch fused":
    torch.optim.AdamW(params, lr=1e-3, fused=True).step()
else:
    torch.compile(torch.optim.AdamW(params, lr=1e-3).step)()
if device == "cuda":
    torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Config(harness.Options):
    tensors: tuple[int, ...] = option((10, 10_000), "of 16 elements")
    starts: int = option(3, "new processes of each kind")
    device: str = option(harness.OnDevice.device, "to run on", ("cpu", "cuda"))


QUICK: Found = {"tensors": (10,), "starts": 1}


def measure(config: Config) -> Found:
    """Seconds by number of tensors and way, with empty caches and with full ones."""
    first: dict[str, dict[str, dict[str, list[float]]]] = {}
    pairs = [(n, way) for n in config.tensors for way in WAYS]
    pairs = [x for x in pairs if x[0] <= MOST_COMPILED or x[1] != WAYS[2]]
    for n, way in tqdm(pairs * config.starts, "first steps", unit="pair", disable=None):
        found = first.setdefault(str(n), {}).setdefault(way, {"cold": [], "warm": []})
        with tempfile.TemporaryDirectory() as cache:
            for seconds in found.values():
                arguments = [way, n, config.threads, config.device]
                seconds.append(harness.in_new_process(FIRST, arguments, cache))
    return {"first": first}


def report(found: Found) -> str:
    """A line per number of tensors and way."""
    rows = [
        ["tensors of 16", "way", "empty caches, s (min-max)", "full caches, s (min-max)"]
    ]
    for n, by_way in found["first"].items():
        for way, kinds in by_way.items():
            rows.append([f"{int(n):,}", way, *map(harness.text, kinds.values())])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """A pair of bars per number of tensors and way."""
    title = "Constructor and first step in a new process, beyond imports"
    (axes,) = harness.axes_of(title, figsize=(9, 4.5))
    groups = {
        f"{way}\n{int(n):,} tensors": {f"{k} caches": s for k, s in kinds.items()}
        for n, by_way in found["first"].items()
        for way, kinds in by_way.items()
    }
    harness.bars(axes, groups, ("cold caches", "warm caches"))
    top = max(median(s) for kinds in groups.values() for s in kinds.values())
    axes.set(ylabel="seconds (median, min to max)", ylim=(0, 1.4 * top))
    axes.legend(frameon=False)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
