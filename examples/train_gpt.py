"""Train a small GPT five ways at the same time and compare the optimizers.

    python examples/train_gpt.py                # about 4 minutes on two cores
    python examples/train_gpt.py --seeds 5      # mean and standard error over five seeds
    python examples/train_gpt.py --compute float32 bfloat16

A byte-level GPT with 468,224 parameters learns English text: the Python language
reference that is part of Python, or a text file that you pass with ``--text``. Five runs
are compared:

* ``float32``: ``torch.optim.AdamW`` with float32 parameters, the reference;
* ``bfloat16``: ``torch.optim.AdamW`` with bfloat16 parameters;
* ``bfloat16 + Kahan``: ``optimi_func.AdamW`` with bfloat16 parameters;
* ``bfloat16 stochastic``: ``optimi_func.AdamW`` with ``storage=Storage("stochastic")``,
  which rounds the weights up or down at random and stores no compensation;
* ``bfloat16 compact``: ``optimi_func.AdamW`` with ``storage="compact"``, which stores the
  moments in 8 bits and the compensation in 8 bits.

All runs have the same initial weights, batches, hyperparameters and learning rate
schedule, and each batch is given to one run after the other. By default forward and
backward compute in float32 from the stored parameters, so the runs differ only in the
optimizer and in the dtype of the parameters. ``--compute float32 bfloat16`` adds four runs
that also compute in bfloat16, as most training does.

What to expect: bfloat16 has 8 significant bits, so an update smaller than about 1/512 of a
weight is rounded away. Plain bfloat16 therefore follows float32 at first and falls behind
later, when the learning rate is small. Kahan summation stores the part of each update that
was rounded away and adds it at the next step. The third run should therefore end close to
float32, with 10 bytes per parameter for weight, gradient and state in place of 16, and the
last run with 7.1. Rounding at random loses no update on average, but adds noise. The
results are printed at the end and drawn to ``--out``.
"""

import argparse
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # Only a file is drawn: no display is needed.

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

import optimi_func

VOCABULARY = 256  # One token per byte.
HELD_OUT = 1 / 16  # Fraction of the text, at its end, kept for validation.
ROWS = (
    "float32",
    "bfloat16",
    "bfloat16 + Kahan",
    "bfloat16 stochastic",
    "bfloat16 compact",
)


def multiplies_bfloat16() -> bool:
    """Return True if this CPU has instructions for products of bfloat16 matrices."""
    # torch has it from 2.12 on.
    able = getattr(torch.cpu, "get_capabilities", dict)()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@dataclass(frozen=True)
class Config:
    """The settings of the runs."""

    steps: int = 600
    batch: int = 32
    context: int = 64
    layers: int = 2
    heads: int = 2
    width: int = 128
    # The best of 1e-3, 2e-3, 4e-3 and 8e-3 for the float32 run; the others follow it.
    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-6
    weight_decay: float = 0.1
    warmup: int = 100
    evaluations: int = 6
    sample_bytes: int = 400
    seed: int = 0
    seeds: int = 1
    threads: int = field(default_factory=torch.get_num_threads)
    compute: tuple[str, ...] = ("float32",)
    rows: tuple[str, ...] = ROWS
    compile: bool | None = None
    text: Path | None = None
    out: Path = Path("outputs/train_gpt.png")

    def quick(self) -> "Config":
        """Shrink to a few seconds: this shows that all works, not who is better."""
        return replace(
            self,
            steps=min(self.steps, 12),
            batch=min(self.batch, 4),
            context=32,
            layers=1,
            heads=2,
            width=64,  # Less would have nothing large enough for codes.
            warmup=4,
            evaluations=3,
            sample_bytes=40,
        )


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a small MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, time, width))
        # Squared ReLU, as GELU took a fifth of the training time on a CPU.
        return x + self.contract(F.relu(self.expand(self.norm2(x))).square())


class GPT(nn.Module):
    """Decoder-only transformer over bytes with an untied output layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.context = config.context
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(
            *(Block(config.width, config.heads) for _ in range(config.layers))
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2, but wider for so narrow a model: what is added to the
                # residual stream starts smaller, so that the stream keeps its scale.
                added = name.endswith(("attended.weight", "contract.weight"))
                scale = math.sqrt(2 * config.layers) if added else 1.0
                nn.init.normal_(parameter, std=0.05 / scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class RoundedProducts(TorchFunctionMode):
    """Products of bfloat16 matrices that are summed in float32 and rounded at the end.

    So do bfloat16 instructions. Without them torch's own products are several times
    slower, and differ by the order of the sums.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, *_ = args  # Nothing here has a bias.
        return func(x.float(), weight.float()).to(x.dtype)


def logits(model: GPT, tokens: Tensor, compute: str = "float32") -> Tensor:
    """Apply the model, computing in float32 or in the dtype of its parameters.

    In float32 the optimizer alone works on bfloat16: on parameters, their gradients and
    its state. So what the runs differ in comes from the optimizer alone.
    """
    if compute == "bfloat16":
        with nullcontext() if multiplies_bfloat16() else RoundedProducts():
            return model(tokens).float()
    parameters = {name: p.float() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, parameters, (tokens,))


def bits_per_byte(model: GPT, windows: Tensor, compute: str = "float32") -> Tensor:
    """Mean loss of predicting each byte of the windows from those before it."""
    predicted = logits(model, windows[:, :-1], compute).flatten(0, 1)
    return F.cross_entropy(predicted, windows[:, 1:].flatten()) / math.log(2)


@dataclass
class Run:
    """One of the compared trainings and what was measured of it."""

    name: str
    color: str
    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    compute: str = "float32"
    train: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    def step(self, window: Tensor) -> None:
        """Take one training step; only the optimizer's part of it is timed."""
        loss = bits_per_byte(self.model, window, self.compute)
        # Here and not after the step, so that the last gradients are still there when
        # memory is measured.
        self.optimizer.zero_grad()
        loss.backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.step_seconds.append(time.perf_counter() - start)
        self.schedule.step()
        self.train.append(loss.item())

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> None:
        """Record the bits per byte of the held-out text at the current step."""
        losses = [
            bits_per_byte(self.model, chunk, self.compute) * len(chunk)
            for chunk in windows.split(32)
        ]
        self.validation[len(self.train)] = sum(map(float, losses)) / len(windows)

    def final(self) -> float:
        """Bits per byte of the held-out text at the last evaluation."""
        return self.validation[max(self.validation)]

    def bytes(self) -> int:
        """Memory of the parameters, their gradients and the optimizer's state."""
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [
            value
            for per_parameter in self.optimizer.state.values()
            for value in per_parameter.values()
            if isinstance(value, Tensor)
        ]
        return sum(t.nbytes for t in [*parameters, *gradients, *state])


def load_text(path: Path | None) -> Tensor:
    """Read the text as a tensor of bytes; Python's own documentation by default."""
    if path is None:
        text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
    else:
        text = path.read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def learning_rate_factor(config: Config) -> Callable[[int], float]:
    """Linear warmup, then a cosine to zero."""

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        done = (step - config.warmup) / max(1, config.steps - config.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def torch_adamw(
    parameters: Iterable[nn.Parameter], config: Config
) -> torch.optim.Optimizer:
    """PyTorch's AdamW in its fastest form, the fused one."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def optimi_adamw(
    parameters: Iterable[nn.Parameter],
    config: Config,
    storage: optimi_func.Storage | Literal["compact"] | None = None,
) -> torch.optim.Optimizer:
    """AdamW of this library: for bfloat16 parameters it uses Kahan summation."""
    return optimi_func.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        compile=config.compile,
        storage=storage,
    )


def make_runs(config: Config) -> list[Run]:
    """Return the runs of one seed, all with the same initial weights, float32 first."""
    torch.manual_seed(config.seed)
    initial = GPT(config).state_dict()

    def make(
        name: str,
        color: str,
        make_optimizer: Callable[[Iterable[nn.Parameter], Config], torch.optim.Optimizer],
        compute: str = "float32",
    ) -> Run:
        model = GPT(config)
        model.load_state_dict(initial)
        model.to(torch.float32 if name == "float32" else torch.bfloat16)
        optimizer = make_optimizer(model.parameters(), config)
        schedule = LambdaLR(optimizer, learning_rate_factor(config))
        return Run(name, color, model, optimizer, schedule, compute)

    stochastic = partial(optimi_adamw, storage=optimi_func.Storage("stochastic"))
    compact = partial(optimi_adamw, storage="compact")
    wide = [("float32", "tab:gray", torch_adamw)]
    narrow = [
        ("bfloat16", "tab:orange", torch_adamw),
        ("bfloat16 + Kahan", "tab:blue", optimi_adamw),
        ("bfloat16 stochastic", "tab:purple", stochastic),
        ("bfloat16 compact", "tab:green", compact),
    ]
    chosen = [(way, "float32") for way in wide]
    chosen += [(way, compute) for compute in config.compute for way in narrow]
    return [make(*way, compute) for way, compute in chosen if way[0] in config.rows]


def train(config: Config, runs: list[Run], text: Tensor) -> None:
    """Train all runs on the same batches, and evaluate them at regular intervals."""
    windows = text.unfold(0, config.context + 1, 1)
    split = len(text) - int(len(text) * HELD_OUT)
    # The held-out windows overlap by one byte, the last that one predicts and the first
    # that the next one is given, so that every byte is predicted once.
    held_out = windows[split :: config.context]
    # The training windows end before the held-out text starts.
    usable = split - config.context
    order = torch.Generator().manual_seed(config.seed)
    evaluate_at = {
        round(config.steps * i / config.evaluations) for i in range(config.evaluations + 1)
    }

    names = [f"{run.name} (computes in {run.compute})" for run in runs]
    print(f"losses are printed in this order: {', '.join(names)}", flush=True)
    start = shown = time.perf_counter()
    # The bar needs a terminal. Without one, the training losses are printed every 10 s.
    with tqdm(total=config.steps, unit="step", disable=None) as bar:
        for step in range(config.steps + 1):
            if step in evaluate_at:
                for run in runs:
                    run.evaluate(held_out)
                results = " ".join(f"{r.validation[step]:.4f}" for r in runs)
                seconds = time.perf_counter() - start
                bar.write(f"{seconds:4.0f} s  step {step:4d}  validation {results}")
                sys.stdout.flush()  # A log shows the progress when it is made.
            if step == config.steps:
                break
            batch = windows[torch.randint(usable, (config.batch,), generator=order)]
            for run in runs:
                run.step(batch)
            tokens = (step + 1) * len(runs) * config.batch * config.context
            bar.set_postfix(
                loss="/".join(f"{run.train[-1]:.2f}" for run in runs),
                tokens_per_s=round(tokens / (time.perf_counter() - start)),
                refresh=False,
            )
            bar.update()
            now = time.perf_counter()
            if bar.disable and (step == 0 or now - shown > 10):
                losses = " ".join(f"{run.train[-1]:.4f}" for run in runs)
                print(f"{now - start:4.0f} s  step {step + 1:4d}  training   {losses}")
                sys.stdout.flush()
                shown = now


def train_seeds(config: Config, text: Tensor) -> Iterator[list[Run]]:
    """Train the runs of each seed, and yield them when the seed is done."""
    for seed in range(config.seed, config.seed + config.seeds):
        if config.seeds > 1:
            print(f"seed {seed}, {seed - config.seed + 1} of {config.seeds}")
        own = replace(config, seed=seed)
        runs = make_runs(own)
        train(own, runs, text)
        yield runs


@torch.no_grad()
def sample(run: Run, prompt: str, length: int, seed: int) -> str:
    """Continue the prompt, byte by byte."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        last = logits(run.model, tokens[:, -run.model.context :], run.compute)[:, -1]
        # Temperature 0.8: the rarer bytes of so small a model are mostly typos.
        probabilities = (last / 0.8).softmax(-1)
        following = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def with_error(values: Sequence[float], sign: str = "") -> str:
    """Return the mean of some seeds, and its standard error if there are several."""
    shown = f"{mean(values):{sign}.4f}"
    if len(values) > 1:
        shown += f" ± {stdev(values) / math.sqrt(len(values)):.4f}"
    return shown


def results_table(seeds: list[list[Run]]) -> str:
    """Return a table with one line per run, with means over the seeds.

    "vs float32" compares runs of the same seed. The times are those of
    ``optimizer.step()``: the median, and the first call, in which optimi_func compiles.
    """
    lines = [
        f"{'run':<19} {'computes in':<11} {'optimizer':<25} {'val bits/byte':>15} "
        f"{'vs float32':>16} {'step ms':>8} {'first s':>8} {'memory':>10}"
    ]
    reference = [runs[0].final() for runs in seeds]
    for same in zip(*seeds):
        run = same[0]
        final = [x.final() for x in same]
        apart = [x - y for x, y in zip(final, reference)]
        seconds = [x for r in same for x in r.step_seconds]
        optimizer = type(run.optimizer)
        origin = optimizer.__module__.partition(".")[0]
        kind = f"{origin} {optimizer.__name__}"
        if run.optimizer.defaults.get("fused"):
            kind += " (fused)"
        lines.append(
            f"{run.name:<19} {run.compute:<11} {kind:<25} {with_error(final):>15} "
            f"{with_error(apart, '+'):>16} {1e3 * median(seconds):8.2f} "
            f"{run.step_seconds[0]:8.2f} {run.bytes() / 2**20:6.1f} MiB"
        )
    return "\n".join(lines)


def plot(seeds: list[list[Run]], path: Path) -> None:
    """Draw the losses and their distance from float32: means over the seeds.

    With several seeds, the band around each distance is one standard error wide.
    """
    steps_taken = len(seeds[0][0].train)
    window = max(1, steps_taken // 20)
    # Each mean is drawn at the middle of the steps that it covers.
    steps = [window / 2 + i for i in range(steps_taken - window + 1)]

    def smooth(values: Tensor) -> list[float]:
        return values.unfold(0, window, 1).mean(-1).tolist()

    figure, (losses, distances) = plt.subplots(
        1, 2, figsize=(12, 4.8), layout="constrained"
    )
    references = [runs[0] for runs in seeds]
    wide_train = torch.tensor([run.train for run in references])
    wide_validation = torch.tensor([[*run.validation.values()] for run in references])
    lowest = float("inf")
    for same in zip(*seeds):
        run = same[0]
        train = torch.tensor([x.train for x in same])
        validation = torch.tensor([[*x.validation.values()] for x in same])
        evaluated = list(run.validation)
        final = [x.final() for x in same]
        lowest = min(lowest, mean(final))
        # The curves nearly coincide: the reference goes beneath the other ones, wider.
        is_reference = run is references[0]
        line = {
            "color": run.color,
            "linewidth": 3.5 if is_reference else 1.2,
            "linestyle": ":" if run.compute == "bfloat16" else "-",
        }
        dots = {
            "color": run.color,
            "linestyle": "none",
            "marker": "s" if run.compute == "bfloat16" else "o",
            "markersize": 8 if is_reference else 4.5,
        }
        losses.plot(steps, smooth(train.mean(0)), **line)
        losses.plot(evaluated, validation.mean(0).tolist(), **dots)
        distances.plot(steps, smooth((train - wide_train).mean(0)), **line)
        difference = validation - wide_validation
        label = f"{run.name}, computes in {run.compute}: {with_error(final)}"
        middle = difference.mean(0)
        distances.plot(evaluated, middle.tolist(), label=label, **dots)
        if len(seeds) > 1:
            error = difference.std(0) / math.sqrt(len(seeds))
            low, high = (middle - error).tolist(), (middle + error).tolist()
            distances.fill_between(evaluated, low, high, color=run.color, alpha=0.2)

    # The fall from 8 bits per byte at the start would flatten all that follows.
    losses.set_ylim(
        bottom=0.95 * lowest, top=max(smooth(wide_train.mean(0))[len(steps) // 12 :])
    )
    losses.set_ylabel("bits per byte")
    losses.set_title("Loss")
    distances.set_ylabel("difference, bits per byte")
    distances.set_title(f"Loss minus the loss of {seeds[0][0].name} on the same bytes")
    for axes in losses, distances:
        axes.set_xlabel(f"step (dots: validation, lines: training, mean of {window})")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: Sequence[str] | None = None) -> Config:
    """Read the configuration from the command line."""
    default = Config()
    parser = argparse.ArgumentParser(
        description="Compare AdamW in float32, bfloat16, bfloat16 with Kahan summation "
        "and bfloat16 in compact storage on a small GPT.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, meaning in {
        "steps": "training steps of each run",
        "batch": "windows of text per step",
        "context": "bytes per window",
        "layers": "transformer blocks",
        "heads": "attention heads",
        "width": "size of the residual stream",
        "lr": "highest learning rate",
        "seed": "the first seed: of the initial weights, the batches and the sample",
        "seeds": "train every run with so many seeds, and report mean and standard error",
        "threads": "of the CPU",
    }.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=type(value), default=value, help=meaning)
    parser.add_argument(
        "--text",
        type=Path,
        help="text file to learn (default: the documentation inside Python)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--compute",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=default.compute,
        help="the dtype in which the runs with bfloat16 parameters compute",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=default.rows,
        help="the runs to train; the first of them is the one that others are compared to",
    )
    parser.add_argument("--out", type=Path, default=default.out, help="PNG to write")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="compile optimi_func's AdamW (default: if there is a compiler)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny run of seconds: does it work?"
    )
    options = vars(parser.parse_args(arguments))
    quick = options.pop("quick")
    options |= {name: tuple(options[name]) for name in ("compute", "rows")}
    config = replace(default, **options)
    if config.seeds < 1:
        parser.error(f"--seeds {config.seeds}: at least 1 is needed")
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then print and draw the comparison."""
    config = parse_arguments(arguments)
    text = load_text(config.text)
    if len(text) * HELD_OUT < config.context + 1:
        raise SystemExit(f"{len(text)} bytes of text are too few to hold out any")
    torch.set_num_threads(config.threads)
    parameters = sum(p.numel() for p in GPT(config).parameters())
    print(
        f"{parameters:,} parameters, {len(text):,} bytes of text, "
        f"{config.steps} steps of {config.batch * config.context:,} bytes, "
        f"{config.threads} threads",
        flush=True,
    )
    start = time.perf_counter()
    seeds = list(train_seeds(config, text))
    seconds = time.perf_counter() - start
    runs = seeds[0]
    tokens = len(seeds) * len(runs) * config.steps * config.batch * config.context
    print(f"trained in {seconds:.0f} s, {tokens / seconds:,.0f} bytes per second\n")
    print(results_table(seeds))
    if len(seeds) > 1:
        print(f"\nmean ± standard error of {len(seeds)} seeds")
    plot(seeds, config.out)
    print(f"\ncurves: {config.out}")
    print(f"\nsample of the {runs[-1].name} run:\n")
    print(sample(runs[-1], "The ", config.sample_bytes, config.seed))


if __name__ == "__main__":
    main()
