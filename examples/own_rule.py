"""Three optimizers of one's own, each beside its plain loop and beside AdamW.

Sign-SGD with momentum, AdaBelief, and a rule that maps whole matrices are class bodies.
A small network learns scikit-learn's digits (1797 real images of 8 x 8 pixels) with each:
in float32, by the plain loop of the same rule from the same weights, in bfloat16 with
compact storage and gradient release, and as a population over a hyperparameter of its own.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

from optimi_func import AdamW, population, prepare_for_gradient_release
from optimi_func.rules import Optimizer, SecondMoment


# [start:signsgd]
class SignSGD(Optimizer):
    """Step by the sign of the mean gradient (arXiv:1802.04434)."""

    momentum: float = 0.9

    class State(NamedTuple):
        exp_avg: Tensor

    def direction(self, g: Tensor, s: State):
        m = self.momentum * s.exp_avg + (1 - self.momentum) * g
        return m.sign(), self.State(m)


def signsgd_loop(
    p: Tensor, g: Tensor, memory: dict[str, Tensor], t: int, lr: float
):
    m = memory.setdefault("m", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=1 - 0.9)
    p.sub_(lr * m.sign())


# [end:signsgd]


# [start:adabelief]
class AdaBelief(Optimizer):
    """Adam with the variance of g around its mean (arXiv:2010.07468)."""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8

    class State(NamedTuple):
        exp_avg: Tensor
        exp_avg_var: SecondMoment

    def direction(self, g: Tensor, s: State, t: float):
        b1, b2 = self.betas
        m = b1 * s.exp_avg + (1 - b1) * g
        v = b2 * s.exp_avg_var + (1 - b2) * (g - m).square() + self.eps
        d = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + self.eps)
        return d, self.State(m, v)


def adabelief_loop(
    p: Tensor, g: Tensor, memory: dict[str, Tensor], t: int, lr: float
):
    m = memory.setdefault("m", torch.zeros_like(p))
    v = memory.setdefault("v", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=1 - 0.9)
    v.mul_(0.99).add_((g - m).square(), alpha=1 - 0.99).add_(1e-8)
    p.sub_(lr * m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-8))


# [end:adabelief]


# [start:orthogonal]
class Orthogonal(Optimizer):
    """Step by a momentum whose singular values are brought to about 1."""

    momentum: float = 0.9
    steps: int = 5

    class State(NamedTuple):
        buffer: Tensor

    def direction(self, g: Tensor, s: State):
        b = self.momentum * s.buffer + g
        return b, self.State(b)

    def whole(self, d: Tensor) -> Tensor:
        x = d / d.norm().clamp_min(1e-7)
        for _ in range(self.steps):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        return x

    def refuses(self, p: Tensor) -> str | None:
        return None if p.dim() == 2 else "Orthogonal takes matrices"


def orthogonal_loop(
    p: Tensor, g: Tensor, memory: dict[str, Tensor], t: int, lr: float
):
    b = memory.setdefault("b", torch.zeros_like(p)).mul_(0.9).add_(g)
    x = b / b.norm().clamp_min(1e-7)
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    p.sub_(lr * x)


# [end:orthogonal]


Loop = Callable[[Tensor, Tensor, dict[str, Tensor], int, float], Any]
IMAGES, LABELS = load_digits(return_X_y=True)
x, y = torch.tensor(IMAGES, dtype=torch.float32) / 16, torch.tensor(LABELS)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    first, last = (
        nn.Linear(64, 128, bias=False),
        nn.Linear(128, 10, bias=False),
    )
    return nn.Sequential(first, nn.Tanh(), last).to(dtype)


def batches(steps: int) -> Iterator[Tensor]:
    """Indices of training images; the last 400 are for validation."""
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randint(len(x) - 400, (64,), generator=random)


def loss_of(params: Any, model: nn.Module, i: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, params, x[i]), y[i])


def validated(model: nn.Module) -> float:
    with torch.no_grad():
        dtype = next(model.parameters()).dtype
        return F.cross_entropy(
            model(x[-400:].to(dtype)).float(), y[-400:]
        ).item()


def trained(
    make: Any, steps: int, dtype: torch.dtype = torch.float32, **how: Any
):
    """Return a model after steps of a class."""
    model = network(dtype)
    optimizer = make(model.parameters(), **how)
    if how.get("gradient_release"):
        prepare_for_gradient_release(model, optimizer)
    for i in batches(steps):
        F.cross_entropy(model(x[i].to(dtype)).float(), y[i]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def looped(loop: Loop, steps: int, lr: float) -> nn.Module:
    """Return a model after steps of a plain loop."""
    model = network()
    memories = [dict[str, Tensor]() for _ in model.parameters()]
    for t, i in enumerate(batches(steps), 1):
        params = list(model.parameters())
        grads = torch.autograd.grad(
            F.cross_entropy(model(x[i]), y[i]), params
        )
        with torch.no_grad():
            for p, g, memory in zip(params, grads, memories):
                loop(p, g, memory, t, lr)
    return model


def population_of(make: Any, steps: int, hyper: dict[str, Any]) -> Tensor:
    """Return the validation loss of a member for each hyperparameter."""
    model = network()
    members = population.init(make, model, hyper, n=4)
    for i in batches(steps):
        _, grads = population.loss_and_grad(loss_of, members, model, i)
        members = population.step(make, members, grads)
    last = torch.arange(len(x) - 400, len(x))
    losses, _ = population.loss_and_grad(loss_of, members, model, last)
    return losses


def report(
    make: type[Optimizer], loop: Loop, lr: float, own: Any, steps: int
) -> None:
    compiled = None if steps > 50 else False
    ours = trained(make, steps, lr=lr, compile=compiled)
    plain = looped(loop, steps, lr)
    pairs = zip(
        ours.parameters(), plain.parameters(), network().parameters()
    )
    apart = max(
        ((p - q).norm() / (q - w).norm()).item() for p, q, w in pairs
    )
    compact: Any = dict(
        storage="compact", gradient_release=True, compile=compiled
    )
    low = trained(make, steps, torch.bfloat16, lr=lr, **compact)
    adam = trained(
        AdamW, steps, lr=3e-3, weight_decay=0.0, compile=compiled
    )
    print(f"{make.__name__}, validation loss after {steps} steps")
    print(f"  float32                    {validated(ours):.4f}")
    loss = f"{validated(plain):.4f} (moves differ by {apart:.1e})"
    print(f"  plain loop                 {loss}")
    print(f"  bfloat16, compact, release {validated(low):.4f}")
    print(f"  AdamW in float32           {validated(adam):.4f}")
    for name, values in own.items():
        losses = population_of(
            make.pure, steps, {"lr": torch.full((4,), lr), name: values}
        )
        found = [f"{loss:.4f}" for loss in losses.tolist()]
        print(f"  {name}: {', '.join(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="10 steps, for tests"
    )
    torch.set_num_threads(1)  # faster for such small matrices
    steps = 10 if parser.parse_args().quick else 300
    momenta = {"momentum": torch.tensor([0.0, 0.5, 0.9, 0.98])}
    report(SignSGD, signsgd_loop, 1e-3, momenta, steps)
    eps = {"eps": torch.tensor([1e-10, 1e-8, 1e-6, 1e-4])}
    report(AdaBelief, adabelief_loop, 3e-3, eps, steps)
    report(Orthogonal, orthogonal_loop, 2e-2, momenta, steps)


if __name__ == "__main__":
    main()
