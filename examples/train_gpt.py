"""Train a small GPT five ways side by side and compare the optimizers.

    python examples/train_gpt.py --compute float32 bfloat16

The same byte-level GPT learns real English text (the Python language reference that
ships with Python, or any text file) in five runs:

* ``float32``: ``torch.optim.AdamW`` on float32 parameters, the reference;
* ``bfloat16``: ``torch.optim.AdamW`` on bfloat16 parameters;
* ``bfloat16 + Kahan``: ``optimi_func.AdamW`` on bfloat16 parameters;
* ``bfloat16 stochastic``: the same with ``storage=Storage("stochastic")``: the weights are
  rounded at random, and nothing is kept beside them;
* ``bfloat16 compact``: the same with ``storage="compact"``: moments in 8 bits, and 8 bits
  of compensation.

The runs share the initial weights, the batches and their order, the hyperparameters
and the learning rate schedule, and they take turns on every batch. They compute in
float32, from the parameters as they are stored, so that the optimizer and the dtype of
the parameters are all that differs. ``--compute float32 bfloat16`` adds four runs that
compute in bfloat16 too, as most training does. Where the CPU has instructions for it, it
is the default.

What to expect: bfloat16 keeps 8 significant bits, so an update smaller than about 1/512
of a weight rounds to nothing. Plain bfloat16 therefore follows float32 at first and
falls behind, most of all late in training when the learning rate is small. Kahan
summation carries the lost part of each update over to the next step, so that the
third run should end close to float32 with 5/8 of its memory (10 bytes per parameter
against 16, activations not counted), and the last with less than half (7.1).
Rounding at random loses no update on average, at the price of noise. What was measured
is printed at the end and drawn to ``--out``.
"""

import argparse
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
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
    threads: int = field(default_factory=torch.get_num_threads)
    compute: tuple[str, ...] = ("float32", "bfloat16")[: 1 + multiplies_bfloat16()]
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
    """Build the runs from the same initial weights, that of float32 first."""
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
    narrow = [
        ("bfloat16", "tab:orange", torch_adamw),
        ("bfloat16 + Kahan", "tab:blue", optimi_adamw),
        ("bfloat16 stochastic", "tab:purple", stochastic),
        ("bfloat16 compact", "tab:green", compact),
    ]
    return [
        make("float32", "tab:gray", torch_adamw),
        *[make(*way, compute) for compute in config.compute for way in narrow],
    ]


def train(config: Config, runs: list[Run], text: Tensor) -> None:
    """Train the runs in turns on the same batches and evaluate them now and then."""
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
    print(f"in this order: {', '.join(names)}", flush=True)
    start = time.perf_counter()
    # Without a terminal there is no bar; the line per evaluation is shown all the same.
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


def results_table(runs: list[Run]) -> str:
    """Return a table of the results, one line per run.

    The times are those of ``optimizer.step()``: the median, and the first call, in
    which optimi_func compiles.
    """
    reference = runs[0]
    lines = [
        f"{'run':<19} {'computes in':<11} {'optimizer':<25} {'val bits/byte':>13} "
        f"{'vs float32':>10} {'step ms':>8} {'first s':>8} {'memory':>10}"
    ]
    for run in runs:
        final = run.final()
        difference = final - reference.final()
        optimizer = type(run.optimizer)
        origin = optimizer.__module__.partition(".")[0]
        kind = f"{origin} {optimizer.__name__}"
        if run.optimizer.defaults.get("fused"):
            kind += " (fused)"
        lines.append(
            f"{run.name:<19} {run.compute:<11} {kind:<25} {final:13.4f} "
            f"{difference:+10.4f} {1e3 * median(run.step_seconds):8.2f} "
            f"{run.step_seconds[0]:8.2f} {run.bytes() / 2**20:6.1f} MiB"
        )
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> None:
    """Draw the losses of the runs and their distance from float32."""
    reference = runs[0]
    window = max(1, len(reference.train) // 20)
    # Each mean is drawn at the middle of the steps it was taken over.
    steps = [window / 2 + i for i in range(len(reference.train) - window + 1)]

    def smooth(values: Tensor) -> list[float]:
        return values.unfold(0, window, 1).mean(-1).tolist()

    figure, (losses, distances) = plt.subplots(
        1, 2, figsize=(12, 4.8), layout="constrained"
    )
    reference_train = torch.tensor(reference.train)
    for run in runs:
        train = torch.tensor(run.train)
        evaluated = list(run.validation)
        validation = torch.tensor(list(run.validation.values()))
        reference_validation = torch.tensor(list(reference.validation.values()))
        # The curves nearly coincide: the reference goes beneath the others, wider.
        is_reference = run is reference
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
        losses.plot(steps, smooth(train), **line)
        losses.plot(evaluated, validation.tolist(), **dots)
        distances.plot(steps, smooth(train - reference_train), **line)
        difference = validation - reference_validation
        label = f"{run.name}, computes in {run.compute}: {run.final():.4f}"
        distances.plot(evaluated, difference.tolist(), label=label, **dots)

    # The fall from 8 bits per byte at the start would flatten all that follows.
    losses.set_ylim(
        bottom=0.95 * min(run.final() for run in runs),
        top=max(smooth(reference_train)[len(steps) // 12 :]),
    )
    losses.set_ylabel("bits per byte")
    losses.set_title("Loss")
    distances.set_ylabel("difference, bits per byte")
    distances.set_title("Loss minus that of float32 on the same bytes")
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
        "seed": "of the initial weights, the batches and the sample",
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
        help="in what the runs of bfloat16 parameters compute",
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
    config = replace(default, **{**options, "compute": tuple(options["compute"])})
    return config.quick() if quick else config


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then print and draw the comparison."""
    config = parse_arguments(arguments)
    text = load_text(config.text)
    if len(text) * HELD_OUT < config.context + 1:
        raise SystemExit(f"{len(text)} bytes of text are too few to hold out any")
    torch.set_num_threads(config.threads)
    runs = make_runs(config)
    parameters = sum(p.numel() for p in runs[0].model.parameters())
    print(
        f"{parameters:,} parameters, {len(text):,} bytes of text, "
        f"{config.steps} steps of {config.batch * config.context:,} bytes, "
        f"{config.threads} threads",
        flush=True,
    )
    start = time.perf_counter()
    train(config, runs, text)
    seconds = time.perf_counter() - start
    tokens = len(runs) * config.steps * config.batch * config.context
    print(f"trained in {seconds:.0f} s, {tokens / seconds:,.0f} bytes per second\n")
    print(results_table(runs))
    plot(runs, config.out)
    print(f"\ncurves: {config.out}")
    print(f"\nsample of the {runs[-1].name} run:\n")
    print(sample(runs[-1], "The ", config.sample_bytes, config.seed))


if __name__ == "__main__":
    main()
