"""How long does a new process wait for its first step?

Beyond the import of torch and of its compiler, with empty caches and with warm ones, by
number of tensors.
"""

import tempfile
from dataclasses import dataclass
from statistics import median

import harness
from harness import Found, option
from matplotlib.axes import Axes
from tqdm import tqdm

FIRST = """
import sys, time
import torch, torch._dynamo, torch._inductor.compile_fx
tensors, threads, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
params = [torch.randn(16, device=device).requires_grad_() for _ in range(tensors)]
for p in params:
    p.grad = torch.randn_like(p)
start = time.perf_counter()
import optimi_func
optimi_func.AdamW(params, lr=1e-3).step()
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
    """Seconds by number of tensors, with empty caches and with warm ones."""
    first = {str(n): {"cold": [], "warm": []} for n in config.tensors}
    jobs = [n for _ in range(config.starts) for n in config.tensors]
    for n in tqdm(jobs, "first steps", unit="pair", disable=None):
        with tempfile.TemporaryDirectory() as cache:
            for seconds in first[str(n)].values():
                arguments = [n, config.threads, config.device]
                seconds.append(harness.in_new_process(FIRST, arguments, cache))
    return {"first": first}


def report(found: Found) -> str:
    """A line per number of tensors."""
    rows = [["first step, tensors of 16", "cold, s (min-max)", "warm, s (min-max)"]]
    for n, by_kind in found["first"].items():
        rows.append([f"{int(n):,}", *map(harness.text, by_kind.values())])
    return harness.table(rows)


def draw(found: Found) -> Axes:
    """A pair of bars per number of tensors."""
    title = "First step in a new process, beyond torch's import"
    (axes,) = harness.axes_of(title, figsize=(7, 4.5))
    groups = {
        f"{int(n):,} tensors of 16": {f"{k} caches": s for k, s in by_kind.items()}
        for n, by_kind in found["first"].items()
    }
    harness.bars(axes, groups, ("cold caches", "warm caches"))
    top = max(median(s) for by_kind in found["first"].values() for s in by_kind.values())
    axes.set(ylabel="seconds (median, min to max)", ylim=(0, 1.4 * top))
    axes.legend(frameon=False)
    return axes


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
