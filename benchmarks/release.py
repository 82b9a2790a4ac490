"""What does gradient release save, and what does it cost?

Two answers, each about backward and the update together, on residual MLP blocks:

* memory: the most bytes allocated during it, less those allocated when it began
  (parameters, state and activations), as a share of the bytes of all gradients; a step
  after backward is a little below 1, as activations are freed while gradients come;
* time: the ratio to ``torch.optim.AdamW(fused=True)`` stepped after backward.

The ways that are compared:

* ``standard``: ``torch.optim.AdamW(fused=True)``, stepped after backward;
* ``recipe``: PyTorch's tutorial: a dictionary with a ``torch.optim.AdamW(foreach=False)``
  for every parameter, stepped in a hook;
* ``recipe, fused``: the same dictionary with ``fused=True``, which the tutorial has not;
* ``torch hooks, fused``: torch's own ``_apply_optimizer_in_backward``, with ``fused=True``;
* ``release``: ``optimi_func.AdamW`` with gradient release.

On a CPU the allocator is kept warm where it is glibc's: what is freed stays with the
process. Otherwise it is chance which temporaries the system has to map page by page, and
all times move with it. Repeat it nevertheless on a shared machine.
"""

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import harness
import torch
import torch.nn.functional as F
from harness import NUMBERS, Found, Step, option
from matplotlib.axes import Axes
from torch import Tensor, nn
from tqdm import tqdm

import optimi_func


@dataclass(frozen=True)
class Config(harness.OnDevice):
    blocks: int = option(8, "residual ones")
    width: int = option(512, "of a block")
    hidden: int = option(2048, "units of a block")
    memory_batch: int = option(32, "to measure memory with")
    batches: tuple[int, ...] = option((8, 32, 256), "to measure time with")
    rounds: int = option(60, "measured rounds, at most")
    seconds: float = option(120.0, "to measure a batch for; no fewer than 5 rounds")
    warmup: int = option(5, "rounds before those that are measured, at most")


QUICK: Found = {
    **{"blocks": 2, "width": 64, "hidden": 128, "batches": (4,)},
    **{"rounds": 3, "warmup": 2},
}


class Block(nn.Module):
    """Residual MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(F.gelu(self.expand(x)))


def nothing() -> None:
    """Left to do after backward."""


def standard(model: nn.Module, config: Config) -> Step:
    """One optimizer for all, after backward."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **NUMBERS)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def recipe(model: nn.Module, config: Config, **how: bool) -> Step:
    """An optimizer for each parameter, as soon as its gradient is complete."""
    optimizers = {p: torch.optim.AdamW([p], **how, **NUMBERS) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return nothing


def torch_hooks(model: nn.Module, config: Config) -> Step:
    """The same in torch's own words."""
    apply = harness.load("torch.distributed.optim")._apply_optimizer_in_backward
    apply(torch.optim.AdamW, model.parameters(), NUMBERS | {"fused": True})
    return nothing


def release(model: nn.Module, config: Config) -> Step:
    """This library's."""
    optimizer = optimi_func.AdamW(
        model.parameters(), gradient_release=True, compile=config.compile, **NUMBERS
    )
    optimi_func.prepare_for_gradient_release(model, optimizer)
    return nothing


WAYS: dict[str, Callable[[nn.Module, Config], Step]] = {
    "standard": standard,
    "recipe": partial(recipe, foreach=False),
    "recipe, fused": partial(recipe, fused=True),
    "torch hooks, fused": torch_hooks,
    "release": release,
}


def training(name: str, config: Config, batch: int) -> tuple[Step, Step]:
    """Forward, and backward and update; all ways have the same weights and inputs."""
    torch.manual_seed(config.seed)
    blocks = [Block(config.width, config.hidden) for _ in range(config.blocks)]
    model = nn.Sequential(*blocks).to(config.device)
    x = torch.randn(batch, config.width).to(config.device)
    update = WAYS[name](model, config)
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(model(x).square().mean())

    def backward() -> None:
        losses.pop().backward()
        update()

    return forward, backward


def peak(name: str, config: Config) -> Found:
    """Return the peak of backward and update, and the bytes of all gradients."""
    # Kernels are compiled before, on a model of their own.
    for step in training(name, config, config.memory_batch):
        step()
    make = partial(training, name, config, config.memory_batch)
    most = harness.peak_bytes(make, config.warmup + 1, config.device)
    # Weights and biases of both layers of a block, in float32.
    elements = 2 * config.width * config.hidden + config.width + config.hidden
    gradients = 4 * config.blocks * elements
    return {"bytes": most, "gradient bytes": gradients, "share": most / gradients}


def keep_warm() -> bool:
    """Have malloc keep what is freed: no mappings by themselves, no trimming, one arena."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False  # Not glibc.
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    settings = {trim_threshold: 2**31 - 1, mmap_max: 0, arena_max: 1}
    return all([mallopt(name, value) for name, value in settings.items()])


def measure(config: Config) -> Found:
    """Memory and time."""
    peaks = {name: peak(name, config) for name in tqdm(WAYS, "peaks", disable=None)}
    warm, times = keep_warm(), {}
    for batch in config.batches:
        pairs = {name: training(name, config, batch) for name in WAYS}
        seconds = harness.interleave(
            {name: step for name, (_, step) in pairs.items()},
            config,
            f"batch {batch}",
            before={name: forward for name, (forward, _) in pairs.items()},
        )
        ratios = harness.ratios(seconds, "standard")
        times[f"batch {batch}"] = {name: asdict(ratio) for name, ratio in ratios.items()}
    return {"allocator kept warm": warm, "peak": peaks, "time": times}


def report(found: Found) -> str:
    """One line per way."""
    config, warm = found["config"], found["allocator kept warm"]
    rows = [["backward + update", "peak MB", "share"]]
    rows[0] += [x for batch in found["time"] for x in (f"{batch}: ms", "ratio (quartiles)")]
    for name, cell in found["peak"].items():
        row = [name, f"{cell['bytes'] / 1e6:.2f}", f"{cell['share']:.3f}"]
        for by_way in found["time"].values():
            row += [harness.milliseconds(by_way[name]), harness.text(by_way[name])]
        rows.append(row)
    return (
        f"{config['blocks']} blocks of {config['width']} x {config['hidden']}, gradients "
        f"of {found['peak']['standard']['gradient bytes'] / 1e6:.1f} MB, peaks at batch "
        f"{config['memory_batch']}, allocator {'kept warm' if warm else 'as it is'}\n\n"
        f"{harness.table(rows)}"
    )


def draw(found: Found) -> Axes:
    """Bars of the peaks and of the times."""
    title = "Backward and update, beside torch's fused step after backward"
    time, memory = harness.axes_of(title, 1, 2, figsize=(12, 5), width_ratios=(3, 1))
    harness.bars(time, found["time"], list(WAYS), base=1)
    time.set_ylabel("ratio of times; less is faster")
    peaks = {name: cell["share"] for name, cell in found["peak"].items()}
    harness.bars(memory, {f"batch {found['config']['memory_batch']}": peaks}, list(WAYS))
    memory.set_ylabel("peak, share of the gradients' bytes")
    harness.legend(time)
    return time


if __name__ == "__main__":
    harness.main(__file__, __doc__, Config, QUICK, measure, report, draw)
