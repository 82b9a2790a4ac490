"""Apply a chain of pure gradient transforms before each step of a class.

Use it for what happens to gradients before the optimizer sees them: clipping of each
parameter, centralization, noise, filters such as Grokfast. The transforms are those of
`optimi_func.transforms`, or your own `GradientTransform`, and may have state.

    python examples/recipes/gradient_transforms.py

Do not combine it with gradient release, whose updates happen before `step()`; the release
handle has its own clipping.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimi_func import AdamW
from optimi_func.transforms import GradientTransform, centralize, chain, clip_param_norm


class Identity:
    """The end of the chain: its state is the gradient that arrives there."""

    def init(self, params: Any) -> Any:
        return params

    def step(self, params: Any, grads: Any, state: Any) -> Any:
        leaves, spec = pytree.tree_flatten(params)
        new = pytree.tree_leaves(grads, is_leaf=lambda x: x is None)
        pairs = zip(leaves, new)  # a state has no None: the parameter takes its place
        return params, spec.unflatten([p if g is None else g for p, g in pairs])


class TransformedGradients:
    """Rewrite the gradients of a class before each of its steps.

    Args:
        optimizer: Any torch.optim.Optimizer.
        params: Its parameters by name, `dict(model.named_parameters())`.
        *transforms: Gradient transforms, in order.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: dict[str, Tensor],
        *transforms: GradientTransform,
    ) -> None:
        self.params = {name: p for name, p in params.items() if p.requires_grad}
        self.chain: Any = chain(*transforms, Identity())
        self.state = self.chain.init({k: p.detach() for k, p in self.params.items()})
        optimizer.register_step_pre_hook(self.before_step)

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        values = {name: p.detach() for name, p in self.params.items()}
        grads = {name: p.grad for name, p in self.params.items()}
        _, state = self.chain.step(values, grads, self.state)
        for name, g in state.inner.items():
            if self.params[name].grad is not None:
                self.params[name].grad.copy_(g)
        self.state = state._replace(inner=values)  # the gradients need not be stored

    def state_dict(self) -> dict[str, Any]:
        """Return the step count of the chain and the state of its transforms."""
        return {"step": self.state.step, "transforms": self.state.transforms}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = self.state._replace(**pytree.tree_map(torch.clone, saved))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2, compile=False)
    named = dict(model.named_parameters())
    TransformedGradients(optimizer, named, centralize(), clip_param_norm(0.1))
    (100 * model(torch.randn(64, 8)).square().mean()).backward()
    optimizer.step()
    norms = {name: round(p.grad.norm().item(), 3) for name, p in named.items()}
    print("norms of the gradients that the step used:", norms)


if __name__ == "__main__":
    main()
