"""Find the recipe that trains a Llama of 1, 8 or 70 billion parameters on given GPUs.

Each model is made on the meta device, where it has shapes and no memory, and is planned for

* one GPU of 24 GB and one of 80 GB;
* eight of 80 GB, among which fully_shard divides parameters, gradients and state: bytes
  are those of one of them, what it gathers is an estimate.

A step is one sequence, with its blocks' activations computed again in backward. Nothing is
trained and nothing of a model's size is allocated: it runs on a laptop in a minute or two.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optimi_func import AdamW, memory

# GPUs, and memory of each.
MACHINES = {"24 GB": (1, "24GB"), "80 GB": (1, "80GB"), "8 x 80 GB": (8, "80GB")}


@dataclass(frozen=True)
class Sizes:
    """A model's; all have heads of width / heads, and 8 of keys and values."""

    layers: int
    width: int
    heads: int
    hidden: int
    tied: bool
    vocabulary: int = 128256
    shared_heads: int = 8


MODELS = {
    "1B": Sizes(16, 2048, 32, 8192, tied=True),
    "8B": Sizes(32, 4096, 32, 14336, tied=False),
    "70B": Sizes(80, 8192, 64, 28672, tied=False),
}


class Attention(nn.Module):
    """Grouped queries, rotated by their positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        shared = sizes.shared_heads * self.head
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, shared, bias=False)
        self.v = nn.Linear(sizes.width, shared, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            one.view(batch, length, -1, self.head).transpose(1, 2)
            for one in (self.q(x), self.k(x), self.v(x))
        )
        q, k = (one * cos + half_turned(one) * sin for one in (q, k))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


def half_turned(x: Tensor) -> Tensor:
    """Pairs of numbers turned by a right angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class Block(nn.Module):
    """Attention, then a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(sizes.width) for _ in range(2)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama that recomputes the activations of its blocks in backward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        rates = torch.arange(0, self.head_width, 2, device=tokens.device)
        angles = torch.outer(places, 500000.0 ** (-rates / self.head_width)).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of the next tokens."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plans(sizes: Sizes, context: int) -> dict[str, memory.MemoryPlan]:
    """A model on each of the machines."""
    with torch.device("meta"):
        model = Llama(sizes)
        batch = torch.zeros(1, context + 1, dtype=torch.int64)
    found: dict[int, memory.MemoryPlan] = {}
    for ranks in dict.fromkeys(ranks for ranks, _ in MACHINES.values()):
        found[ranks] = memory.plan(
            model, AdamW, "80GB", loss_fn, batch, device="cuda", ranks=ranks
        )
    return {name: found[ranks].within(b) for name, (ranks, b) in MACHINES.items()}


def summary(found: dict[str, dict[str, memory.MemoryPlan]]) -> str:
    """Return the best recipe of each model on each machine."""
    lines = [f"{'model':<6}{'on':<12}{'best recipe':<34}{'peak GB':>8}"]
    for model, by_machine in found.items():
        for machine, plan in by_machine.items():
            fits = any(recipe.fits for recipe in plan.recipes)
            name = plan.best.name if fits else "none fits"
            peak = plan.best.peak if fits else min(r.peak for r in plan.recipes)
            least = "" if fits else " at least"
            lines.append(f"{model:<6}{machine:<12}{name:<34}{peak / 1e9:>8.1f}{least}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(
        description="Plan the memory of training a Llama of 1, 8 or 70 billion parameters.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--context", type=int, default=2048, help="tokens in a sequence")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--quick", action="store_true", help="two layers: does it work?")
    asked = parser.parse_args(arguments)
    found: dict[str, dict[str, memory.MemoryPlan]] = {}
    for name in asked.models:
        sizes = replace(MODELS[name], layers=2) if asked.quick else MODELS[name]
        began = time.perf_counter()
        found[name] = plans(sizes, 64 if asked.quick else asked.context)
        taken = time.perf_counter() - began
        for ranks in (1, 8):
            machine = "80 GB" if ranks == 1 else "8 x 80 GB"
            print(f"{found[name][machine]}\n")
        print(f"planned in {taken:.1f} s\n")
    print(summary(found))


if __name__ == "__main__":
    main()
