"""Evaluate a population of models, select the best, and perturb their hyperparameters.

Use it to search a schedule of learning rates while the models train. Population-based
training (arXiv:1711.09846) now and then replaces the worst members by copies of the best,
and multiplies the hyperparameters of the copies by random factors.

    python examples/recipes/evolve_population.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from optimi_func import adamw, population
from optimi_func.population import Population


def evaluate(metric: Callable[..., Any], members: Population, *data: Any) -> Any:
    """Return the metric of each member, with the members along the first axis.

    Args:
        metric: `(params, *data) -> tree of tensors`, for one member.
        members: The population.
        *data: What all members are evaluated on.
    """
    with torch.no_grad():
        return torch.vmap(lambda params: metric(params, *data))(members.params)


def perturb(
    members: Population,
    factors: Mapping[str, Sequence[float]],
    index: Tensor,
    generator: torch.Generator | None = None,
) -> Population:
    """Multiply hyperparameters of some members by random factors.

    If a name contains "beta" or "momentum", the factor multiplies the distance from 1, so
    that a beta stays below 1.

    Args:
        members: The population.
        factors: For each hyperparameter the factors to draw from, all equally likely.
        index: The members to perturb.
        generator: Source of the random numbers.
    """

    def scaled(name: str, x: Tensor) -> Tensor:
        choices = torch.tensor(factors[name], dtype=torch.float64)
        f = choices[torch.randint(len(choices), (len(index),), generator=generator)]
        old = x[index].double()
        distance = "beta" in name or "momentum" in name
        new = (1.0 - (1.0 - old) * f).clamp_min(0.0) if distance else old * f
        x = x if x.is_floating_point() else x.double()
        return x.index_copy(0, index, new.to(x.dtype))

    hyper = dict(members.hyper)
    for name in factors:
        hyper[name] = pytree.tree_map(lambda x, name=name: scaled(name, x), hyper[name])
    return replace(members, hyper=hyper)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(256, 8)
    y = x.sin().sum(1, keepdim=True)

    def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(functional_call(model, params, x), y)

    members = population.init(adamw, model, {"lr": torch.logspace(-4, -1, 8)}, n=8)
    for _ in range(4):
        for _ in range(25):
            _, grads = population.loss_and_grad(loss_fn, members, x, y)
            members = population.step(adamw, members, grads)
        order = evaluate(loss_fn, members, x, y).argsort()
        best, worst = order[:2], order[-2:]
        members = population.clone(members, source=best, into=worst)
        members = perturb(members, {"lr": (0.8, 1.25)}, worst)
    losses = evaluate(loss_fn, members, x, y)
    best = int(losses.argmin())
    print(f"loss {losses[best]:.4f} with lr {members.hyper['lr'][best]:.2g}")


if __name__ == "__main__":
    main()
