"""Lookahead around any optimizer: every k steps, go back a part of the way.

Use it where the fast weights oscillate. A second, slow copy of the weights follows them:

    every k steps:   slow <- slow + alpha * (p - slow),   p <- slow

Zhang et al., arXiv:1907.08610. The slow weights are float32, so they take 4 bytes a
parameter. `Ranger` is RAdam with Lookahead built in.

    python examples/recipes/lookahead.py

Do not combine it with optimizers that have `train()` and `eval()`, because the averages
that they evaluate would not follow the slow weights.
"""

from typing import Any

import torch
from torch import Tensor, nn

from optimi_func import AdamW


class Lookahead:
    """Slow weights, which follow the weights of an optimizer after every k-th step.

    Args:
        optimizer: Any torch.optim.Optimizer. Make the wrapper after the optimizer, and call
            `optimizer.step()` as before.
        k: Number of steps between two updates of the slow weights, at least 1.
        alpha: How far the slow weights go towards the weights, in (0, 1].
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, k: int = 5, alpha: float = 0.5
    ) -> None:
        self.optimizer, self.k, self.alpha, self.steps = optimizer, k, alpha, 0
        self.slow = {p: self.weight(p) for p in self.params()}
        optimizer.register_step_post_hook(self.after_step)

    def params(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def weight(self, p: Tensor) -> Tensor:
        """Return a weight in float32, with what Kahan summation remembers of it."""
        comp = self.optimizer.state.get(p, {}).get("kahan_comp")
        if comp is not None and not comp.is_floating_point():
            raise TypeError(
                "Lookahead cannot write 8-bit compensations: use storage='kahan'"
            )
        x = p.detach().to(torch.float32, copy=True)
        return x if comp is None else x + comp

    @torch.no_grad()
    def after_step(self, *_: Any) -> None:
        self.steps += 1
        for p in self.params() if self.steps % self.k == 0 else ():
            if p not in self.slow:  # a parameter that was added later
                self.slow[p] = self.weight(p)
            slow = self.slow[p].lerp_(self.weight(p), self.alpha)
            p.copy_(slow)
            comp = self.optimizer.state.get(p, {}).get("kahan_comp")
            if comp is not None:  # what rounding to 16 bits took from the slow weight
                comp.copy_(slow - p)

    def state_dict(self) -> dict[str, Any]:
        """Return the slow weights in the order of the parameters, and the step count."""
        return {"slow": [self.slow[p] for p in self.params()], "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = {p: x.clone() for p, x in zip(self.params(), state["slow"])}
        self.steps = state["steps"]


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1).to(torch.bfloat16)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    optimizer = AdamW(model.parameters(), lr=3e-2, compile=False)
    Lookahead(optimizer, k=5, alpha=0.5)
    for _ in range(101):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
