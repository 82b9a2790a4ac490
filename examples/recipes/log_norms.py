"""Log the norms of gradients, updates and weights, for every layer.

Use it to see which layers learn: a layer whose update is much smaller than that of the
others relative to its weights does not, and a gradient norm that jumps is the first sign of
a spike. A measured step stores a copy of the weights, so measure one step in fifty.

    python examples/recipes/log_norms.py
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from optimi_func import AdamW

Row = dict[str, float]


class NormLog:
    """Report the norms of every n-th step of an optimizer.

    Args:
        optimizer: Any torch.optim.Optimizer. Under gradient release, parameters change
            before `step()`: use `handle.grad_norm` there.
        named_parameters: `model.named_parameters()`.
        report: Called with the number of the step and a dict: for each parameter its
            `grad_norm`, `update_norm` and `param_norm`.
        every: Number of steps between two reports.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        report: Callable[[int, dict[str, Row]], None],
        every: int = 50,
    ) -> None:
        self.optimizer, self.names = optimizer, dict(named_parameters)
        self.report, self.every, self.steps = report, every, 0
        self.before: dict[str, tuple[Tensor, Tensor]] = {}
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)

    def weight(self, p: Tensor) -> Tensor:
        """Return a weight in float32, with what Kahan summation remembers of it."""
        comp = self.optimizer.state.get(p, {}).get("kahan_comp")
        x = p.detach().to(torch.float32, copy=True)
        return x + comp if comp is not None and comp.is_floating_point() else x

    def before_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.before = {
                name: (self.weight(p), norm(p.grad))
                for name, p in self.names.items()
                if p.grad is not None
            }

    def after_step(self, *_: Any) -> None:
        if not self.before:
            return
        rows: dict[str, Row] = {}
        for name, (old, grad_norm) in self.before.items():
            new = self.weight(self.names[name])
            norms = {"grad": grad_norm, "update": norm(new - old), "param": norm(new)}
            rows[name] = {f"{key}_norm": float(x) for key, x in norms.items()}
        self.before = {}
        self.report(self.steps, rows)


def norm(x: Tensor) -> Tensor:
    """Return the norm of a tensor, or of the whole tensor if x is a shard of it."""
    size = torch.linalg.vector_norm(x.detach().float())
    return size.full_tensor() if hasattr(size, "full_tensor") else size


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2, compile=False)

    def report(step: int, rows: dict[str, Row]) -> None:
        for name, row in rows.items():
            print(step, name, {key: round(x, 4) for key, x in row.items()})

    NormLog(optimizer, model.named_parameters(), report, every=10)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(64, 8)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
