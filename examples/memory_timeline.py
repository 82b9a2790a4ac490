"""Draw where the memory of a training step goes, with and without gradient release.

The model is the ViT-L/16 (304 million parameters) of PyTorch's tutorial "How to save
memory by fusing the optimizer step into the backward pass", with random weights and fake
images as there. It is trained for three steps in five ways:

* ``standard``: ``torch.optim.AdamW``, stepped after backward;
* ``recipe``: the tutorial's: an optimizer for every parameter, stepped in a hook as soon
  as that parameter's gradient is complete;
* ``release``: ``optimi_func.AdamW`` with gradient release;
* ``release, bfloat16``: the same on a bfloat16 model, with Kahan summation;
* ``release, compact``: on a bfloat16 model with ``storage="compact"``: moments in 8 bits.

Each runs in a process of its own, from the same seed. Every allocation and free is taken
from the profiler and counted as one of

* parameters;
* optimizer state;
* gradients of parameters;
* activations: what the forward allocates and its step frees;
* rest: everything else, such as gradients of activations, an optimizer's temporaries and
  the images.

What is a parameter, a gradient or state is not guessed: the tensors themselves say where
they lie, gradients from a hook at the moment they are complete. The sums are compared
with the allocator's own count at every event, and with the live tensors in every step.

What to expect: the standard run peaks when all gradients are there, the others at the
start of backward, when all activations are. So the gain is the gradients less the
activations: it is there with one image, as in the tutorial, and a large batch hides it.
"""

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

import optimi_func

COLORS = {
    "parameters": "#4c78a8",
    "optimizer state": "#9ecae9",
    "gradients": "#e45756",
    "activations": "#f2b950",
    "rest": "#8c8c8c",
}
CATEGORIES = tuple(COLORS)
SHADES = {"forward": "#c7e9c0", "backward": "#74c476", "step": "#006d2c"}
PICTURE = Path("outputs/memory_timeline.png")
TUTORIAL = """\
The tutorial's own figures, for comparison: about 6 GB standard and 4 GB with its recipe.
They are from another device (CUDA) and from torch.optim.Adam, whose default there holds
intermediates of the size of all parameters: 1.2 of the 6 GB, which foreach=False avoids."""


@dataclass(frozen=True)
class Config:
    """The model, the run and the device; the sizes are those of ViT-L/16."""

    steps: int = 3
    # The tutorial's. With more images the activations decide the peak in every run.
    batch: int = 1
    image: int = 224
    patch: int = 16
    layers: int = 24
    width: int = 1024
    heads: int = 16
    hidden: int = 4096
    classes: int = 1000
    lr: float = 1e-4
    weight_decay: float = 0.01
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    compile: bool | None = None
    processes: bool = True  # A fresh one for each run.
    out: Path = PICTURE
    json: Path | None = None

    def quick(self) -> "Config":
        """Shrink the model: this shows that all works, not what release is worth."""
        return replace(
            self,
            image=32,
            patch=8,
            layers=2,
            width=64,
            heads=2,
            hidden=256,
            classes=10,
            processes=False,  # Importing torch anew takes longer than the run.
        )


class Block(nn.Module):
    """Pre-norm transformer block: self-attention, then an MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attended = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.expand = nn.Linear(config.width, config.hidden)
        self.contract = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, patches, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, patches, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, patches, width))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class ViT(nn.Module):
    """Vision transformer as torchvision's, which is not needed for this."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        patches = (config.image // config.patch) ** 2
        self.patches = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, config.width))
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        return self.head(self.norm(self.blocks(x + self.positions))[:, 0])


Optimizers = list[torch.optim.Optimizer]


def standard(model: nn.Module, config: Config) -> Optimizers:
    """One optimizer, for a step after backward.

    Without foreach, torch's default on a GPU: it holds temporaries of the size of all
    parameters at once. So this run and the recipe differ only in when they step.
    """
    parameters = model.parameters()
    decay = config.weight_decay
    return [torch.optim.AdamW(parameters, lr=config.lr, weight_decay=decay, foreach=False)]


def recipe(model: nn.Module, config: Config) -> Optimizers:
    """The tutorial's: each parameter has an optimizer, stepped in its hook."""
    decay = config.weight_decay
    optimizers = {
        p: torch.optim.AdamW([p], lr=config.lr, weight_decay=decay, foreach=False)
        for p in model.parameters()
    }

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return list(optimizers.values())


def release(model: nn.Module, config: Config, storage: str | None = None) -> Optimizers:
    """This library's gradient release."""
    optimizer = optimi_func.AdamW(
        model.parameters(),
        lr=config.lr,
        weight_decay=config.weight_decay,
        gradient_release=True,
        compile=config.compile,
        storage=storage,
    )
    # The recorder has hooks of its own, which only look.
    optimi_func.prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)
    return [optimizer]


@dataclass(frozen=True)
class Way:
    """The way in which one of the runs updates its parameters."""

    title: str
    dtype: torch.dtype
    attach: Callable[[nn.Module, Config], Optimizers]


WAYS = {
    "standard": Way("step after backward", torch.float32, standard),
    "recipe": Way("an optimizer for every parameter", torch.float32, recipe),
    "release": Way("optimi_func, gradient release", torch.float32, release),
    "release, bfloat16": Way("the same in bfloat16 + Kahan", torch.bfloat16, release),
    "release, compact": Way(
        "bfloat16, 5.1 bytes a parameter",
        torch.bfloat16,
        partial(release, storage="compact"),
    ),
}


def storages(tensors: Iterable[Tensor | None], device: str) -> dict[int, int]:
    """Address and bytes of each distinct memory block behind the tensors."""
    blocks = (t.untyped_storage() for t in tensors if t is not None)
    return {s.data_ptr(): s.nbytes() for s in blocks if s.device.type == device}


def state_tensors(optimizers: Optimizers) -> list[Tensor]:
    """Every tensor of the optimizers' state."""
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    return [x for state in states for x in state.values() if isinstance(x, Tensor)]


class Recorder:
    """Profiles allocations, and writes notes on them into the same trace.

    The trace knows an allocation by its address, which others get later. So a note has
    to say when it was true: it is an empty annotation in the trace, with a name under
    which its content is kept here.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.notes: dict[str, tuple[str, Any]] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> "Recorder":
        self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.stop()

    def note(self, kind: str, content: Any) -> None:
        """Keep what is true now."""
        name = f"note {len(self.notes)}"
        self.notes[name] = (kind, content)
        with record_function(name):
            pass

    def mark(self, category: str, tensors: Iterable[Tensor | None]) -> None:
        """Keep that the memory behind these tensors is of this category."""
        self.note("category", (category, list(storages(tensors, self.device))))

    def check(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Keep how many bytes the live tensors have, to compare with."""
        parameters = list(model.parameters())
        tensors = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters],
            "optimizer state": state_tensors(optimizers),
        }
        blocks = {name: storages(ts, self.device) for name, ts in tensors.items()}
        self.note("check", {name: sum(b.values()) for name, b in blocks.items()})

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Keep that this part of a training step runs."""
        self.note("phase", name)
        yield
        self.note("phase", "between")

    def events(self) -> list[dict[str, Any]]:
        """Allocations, frees and notes, in the order of time."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())["traceEvents"]
        kind = {"cpu": 0, "cuda": 1}[self.device]
        events = [
            event
            for event in trace
            if event["name"] in self.notes
            or (event["name"] == "[memory]" and event["args"]["Device Type"] == kind)
        ]
        return sorted(events, key=lambda event: event["ts"])


@dataclass
class Allocation:
    """A block of memory, from its allocation to its free."""

    bytes: int
    phase: str
    step: int
    freed_in: int = -1
    noted: str | None = None

    def category(self) -> str:
        """Return the noted category, or one that follows from the block's lifetime."""
        if self.noted is not None:
            return self.noted
        # What outlives its step, such as a library's workspace, is no activation.
        saved = self.phase == "forward" and self.freed_in == self.step
        return "activations" if saved else "rest"


@dataclass
class Timeline:
    """Bytes of each category in the course of a run's steps."""

    # After every allocation and free, beginning with what the first step finds.
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    # How many sizes there were when each phase began, and what it is called.
    phases: list[tuple[int, str]] = field(default_factory=list)

    def totals(self) -> list[int]:
        """All categories together."""
        return [sum(sizes) for sizes in self.sizes]

    def peak(self, category: str) -> int:
        """The most bytes that a category ever had."""
        i = CATEGORIES.index(category)
        return max(sizes[i] for sizes in self.sizes)

    def peak_above(self) -> int:
        """The most bytes beyond parameters and optimizer state."""
        return max(sum(sizes[2:]) for sizes in self.sizes)

    def share(self) -> float:
        """The peak, as a share of what cannot be spared: all peaks but the rest's.

        Beside parameters, state and activations that is the gradients alive at once.
        """
        needed = sum(self.peak(name) for name in CATEGORIES if name != "rest")
        return max(self.totals()) / needed

    def peak_phase(self) -> str:
        """Return the phase in which the total was largest."""
        totals = self.totals()
        at = totals.index(max(totals))
        return [name for begin, name in self.phases if begin <= at][-1]


def read(recorder: Recorder) -> Timeline:
    """Follow every allocation through the trace.

    Raises:
        RuntimeError: What was counted is not what the allocator or the tensors say.
    """
    alive: dict[int, Allocation] = {}
    changes: list[tuple[int, Allocation]] = []
    phases: list[tuple[int, str]] = []
    phase, step, total = "setup", 0, 0
    before: int | None = None  # bytes from before the recording
    for event in recorder.events():
        if event["name"] == "[memory]":
            address, size = event["args"]["Addr"], event["args"]["Bytes"]
            allocated = event["args"]["Total Allocated"]
            before = allocated - size if before is None else before
            if size > 0:
                alive[address] = Allocation(size, phase, step)
                changes.append((size, alive[address]))
                total += size
            elif address in alive:
                alive[address].freed_in = step
                changes.append((size, alive.pop(address)))
                total += size
            else:
                before += size
            expect("the allocator's total", allocated - before, total, exact=True)
            continue
        kind, content = recorder.notes[event["name"]]
        if kind == "phase":
            phase = content
            step += phase == "forward"
            phases.append((len(changes), f"{phase} of step {step}"))
        elif kind == "category":
            category, addresses = content
            for address in addresses:
                known = alive[address].noted
                if known not in (None, category):
                    raise RuntimeError(f"{category} in the memory of {known}")
                alive[address].noted = category
        else:
            for category, size in content.items():
                counted = sum(a.bytes for a in alive.values() if a.noted == category)
                # A GPU's allocator rounds up to its block sizes.
                exact = recorder.device == "cpu"
                expect(f"{category} of step {step}", size, counted, exact)
    return accumulate(changes, phases)


def expect(what: str, true: int, counted: int, exact: bool) -> None:
    """Refuse to show a timeline that is wrong."""
    if counted != true if exact else not true <= counted <= 1.05 * true + (1 << 21):
        raise RuntimeError(f"{what}: {true:,} bytes, counted {counted:,}")


def accumulate(
    changes: list[tuple[int, Allocation]], phases: list[tuple[int, str]]
) -> Timeline:
    """Sum up the changes by category, from the first phase to the end of the last."""
    first, last = phases[0][0], phases[-1][0]
    sizes = dict.fromkeys(CATEGORIES, 0)
    for change, allocation in changes[:first]:
        sizes[allocation.category()] += change
    timeline = Timeline([tuple(sizes.values())])
    for change, allocation in changes[first:last]:
        sizes[allocation.category()] += change
        timeline.sizes.append(tuple(sizes.values()))
    # At sizes[i] the change before it has happened: a phase's own first is the next.
    timeline.phases = [(begin - first + 1, name) for begin, name in phases[:-1]]
    return timeline


def train(name: str, config: Config, recorder: Recorder) -> None:
    """Train one way from the same weights and images as the others."""
    way = WAYS[name]
    torch.manual_seed(config.seed)
    model = ViT(config).to(config.device, way.dtype)
    recorder.mark("parameters", model.parameters())
    for p in model.parameters():
        # Before the hooks of the way, which free the gradient.
        p.register_post_accumulate_grad_hook(lambda p: recorder.mark("gradients", [p.grad]))
    optimizers = way.attach(model, config)
    random = torch.Generator().manual_seed(config.seed)
    shape = (config.batch, 3, config.image, config.image)
    # Without a terminal there is no bar.
    for _ in tqdm(range(config.steps), name, unit="step", disable=None):
        images = torch.rand(shape, generator=random).to(config.device, way.dtype)
        train_step(model, optimizers, images, recorder)


def train_step(
    model: nn.Module, optimizers: Optimizers, images: Tensor, recorder: Recorder
) -> None:
    """One step, the same for all: where backward has updated, step() finds no gradient."""
    with recorder.phase("forward"):
        loss = model(images).sum()
    with recorder.phase("backward"):
        loss.backward()
    recorder.mark("optimizer state", state_tensors(optimizers))
    recorder.check(model, optimizers)
    with recorder.phase("step"):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    recorder.mark("optimizer state", state_tensors(optimizers))
    recorder.check(model, optimizers)


def record(name: str, config: Config) -> Timeline:
    """Record the timeline of one way, in a process that does nothing else."""
    # A tiny model first: kernels are compiled now, for every length, and whatever else
    # is made once a process is not taken for the model's.
    with Recorder(config.device) as recorder:
        train(name, replace(config.quick(), steps=1), recorder)
    gc.collect()
    on_gpu = config.device == "cuda"
    if on_gpu:
        torch.cuda.memory._record_memory_history()
    # From before the model is made: the profiler reports no free of a CPU tensor whose
    # allocation it has not seen.
    with Recorder(config.device) as recorder:
        train(name, config, recorder)
    if on_gpu:
        torch.cuda.memory._dump_snapshot(str(snapshot(name, config)))
        torch.cuda.memory._record_memory_history(enabled=None)
    return read(recorder)


def snapshot(name: str, config: Config) -> Path:
    """Return the path of a GPU run's snapshot, for https://pytorch.org/memory_viz."""
    return config.out.with_name(f"{config.out.stem}_{name.replace(', ', '_')}.pickle")


def record_all(config: Config) -> dict[str, Timeline]:
    """Record every way, one after the other, each in a fresh process."""
    if not config.processes:
        return {name: record(name, config) for name in WAYS}
    # That it starts and stops is all that the profiler's log says.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    context = multiprocessing.get_context("spawn")
    timelines: dict[str, Timeline] = {}
    for name in WAYS:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            timelines[name] = process.submit(record, name, config).result()
    return timelines


def gigabytes(size: float) -> str:
    """In the unit that suits the model."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def results_table(timelines: dict[str, Timeline]) -> str:
    """The peaks, one line per run; each column has its peak at another time.

    The share is the total's in all but the rest.
    """
    columns = ["total", *CATEGORIES, "above p + state", "share"]
    header = "".join(f" {column:>15}" for column in columns)
    lines = [f"{'peaks':<18}{header}  total peaks in"]
    for name, timeline in timelines.items():
        peaks = [max(timeline.totals())]
        peaks += [timeline.peak(category) for category in CATEGORIES]
        peaks.append(timeline.peak_above())
        numbers = "".join(f" {gigabytes(peak):>15}" for peak in peaks)
        numbers += f" {timeline.share():>15.3f}"
        lines.append(f"{name:<18}{numbers}  {timeline.peak_phase()}")
    return "\n".join(lines)


def numbers(timelines: dict[str, Timeline], config: Config) -> dict[str, Any]:
    """The same for a machine to read, in bytes."""
    runs = {
        name: {
            "total": max(timeline.totals()),
            **{category: timeline.peak(category) for category in CATEGORIES},
            "above parameters and state": timeline.peak_above(),
            "share of all but the rest": timeline.share(),
            "total peaks in": timeline.peak_phase(),
        }
        for name, timeline in timelines.items()
    }
    return {
        "torch": torch.__version__,
        "device": config.device,
        "batch": config.batch,
        "peak bytes": runs,
    }


def thinned(timeline: Timeline, points: int = 1200) -> list[int]:
    """Return the index of the largest total in each of many pieces of the timeline.

    A drawing has too few pixels for every event; this keeps every peak.
    """
    totals = timeline.totals()
    piece = max(1, len(totals) // points)
    return [
        max(range(i, min(i + piece, len(totals))), key=totals.__getitem__)
        for i in range(0, len(totals), piece)
    ]


def draw(axes: Axes, timeline: Timeline, title: str, unit: float) -> None:
    """One run's panel."""
    kept = thinned(timeline)
    layers = [
        [size / unit for size in layer] for layer in zip(*(timeline.sizes[i] for i in kept))
    ]
    axes.stackplot(kept, *layers, colors=COLORS.values(), labels=CATEGORIES, lw=0)
    totals = timeline.totals()
    peak = max(totals)
    axes.plot(totals.index(peak), peak / unit, "v", color="black", markersize=7)
    axes.set_title(f"{title}:\npeak {gigabytes(peak)}", fontsize=10)
    phases = [*timeline.phases, (len(totals), "")]
    for (begin, name), (end, _) in pairwise(phases):
        shade = SHADES.get(name.split()[0])
        if shade is not None:
            axes.axvspan(begin, end, 0.965, 1, color=shade, linewidth=0)
    begins = [i for i, name in timeline.phases if name.startswith("forward")]
    ends = [*begins[1:], len(totals)]
    for begin in begins[1:]:
        axes.axvline(begin, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, len(totals) - 1)
    axes.set_xticks(
        [(begin + end) / 2 for begin, end in zip(begins, ends)],
        [f"step {i + 1}" for i in range(len(begins))],
    )
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", alpha=0.3)


def plot(timelines: dict[str, Timeline], config: Config) -> None:
    """Draw all runs with one scale of memory."""
    highest = max(max(timeline.totals()) for timeline in timelines.values())
    unit, label = (1e9, "GB") if highest >= 1e8 else (1e6, "MB")
    figure, grid = plt.subplots(3, 2, figsize=(8.4, 10), sharey=True, layout="constrained")
    for axes, (name, timeline) in zip(grid.flat, timelines.items()):
        draw(axes, timeline, f"{name} ({WAYS[name].title})", unit)
        axes.axhline(highest / unit, color="black", linewidth=0.8, linestyle="--")
    for axes in grid.flat[len(timelines) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"allocated, {label}")
    for axes in grid[-1]:
        axes.set_xlabel("allocations and frees, in their order")
    grid[0, 0].set_ylim(0, 1.15 * highest / unit)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    for phase, shade in SHADES.items():
        handles.append(Patch(color=shade))
        labels.append(f"{phase} (top)")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.out, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Draw the memory of training ViT-L/16 with and without gradient "
        "release.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "steps": "training steps of each run",
        "batch": "images per step",
        "seed": "of the initial weights and the images",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=meaning)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=default.device, help="where to train"
    )
    parser.add_argument("--out", type=Path, default=default.out, help="PNG to write")
    parser.add_argument(
        "--json", type=Path, help="file for the numbers", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="compile optimi_func's AdamW (default: if there is a compiler)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, for seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    config = replace(default, **options)
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the runs, then print and draw them."""
    config = parse_arguments(arguments)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in ViT(config).parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {config.steps} steps of {config.batch} "
        f"images on {config.device}, {torch.get_num_threads()} threads",
        flush=True,
    )
    timelines = record_all(config)
    print(f"\n{results_table(timelines)}\n\n{TUTORIAL}")
    plot(timelines, config)
    print(f"\ntimelines: {config.out}")
    if config.json is not None:
        results = json.dumps(numbers(timelines, config), indent=2)
        config.json.write_text(f"{results}\n")
    if config.device == "cuda":
        for name in timelines:
            print(f"snapshot for https://pytorch.org/memory_viz: {snapshot(name, config)}")


if __name__ == "__main__":
    main()
