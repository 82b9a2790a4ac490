"""QK-clip: keep the logits of attention from growing (MuonClip).

Use it if the largest attention logits grow during training, which happens with Muon in
large models and can end in a loss spike. After a step, look at the largest logit of each
head. Where it is above tau, multiply the query and key weights of the head so that it
becomes tau:

    factor = sqrt(tau / largest),   query <- factor * query,   key <- factor * key

Kimi Team, arXiv:2507.20534. It writes to the weights and needs nothing from the optimizer.

    python examples/recipes/qk_clip.py

With several processes the largest logit is that over all of them:
`dist.all_reduce(largest, dist.ReduceOp.MAX)`. Under fully_shard multiply by a DTensor,
`distribute_tensor(rows[:, None], weight.device_mesh, weight.placements)`. Fused attention
does not return its logits, so compute them every few steps.
"""

import torch
from torch import Tensor, nn

from optimi_func import Muon


@torch.no_grad()
def qk_clip(query: Tensor, key: Tensor, largest: Tensor, tau: float) -> None:
    """Scale the rows of the heads whose largest logit is above tau.

    Args:
        query: The weight of the query projection, [heads * size, width].
        key: The weight of the key projection, of the same shape.
        largest: The largest logit of each head, [heads].
        tau: The largest logit that is allowed; the paper uses 100.
    """
    factor = torch.where(largest > tau, tau / largest, 1.0).sqrt()
    rows = factor.repeat_interleave(query.shape[0] // len(largest))
    query.mul_(rows[:, None])
    key.mul_(rows[:, None])


def largest_logits(query: Tensor, key: Tensor, x: Tensor, heads: int) -> Tensor:
    """Return the largest logit of each head, [heads].

    Args:
        query: As in `qk_clip`.
        key: As in `qk_clip`.
        x: The inputs of attention, [batch, time, width].
        heads: The number of heads.
    """
    q = (x @ query.mT).unflatten(-1, (heads, -1)).transpose(1, 2)
    k = (x @ key.mT).unflatten(-1, (heads, -1)).transpose(1, 2)
    return (q @ k.mT / q.shape[-1] ** 0.5).amax((0, 2, 3))


def main() -> None:
    torch.manual_seed(0)
    query, key = (nn.Parameter(torch.randn(32, 16)) for _ in range(2))
    optimizer = Muon([query, key], lr=1e-2, compile=False)
    x = torch.randn(8, 6, 16)
    for _ in range(3):
        loss = -largest_logits(query, key, x, heads=4).sum()  # grows without a bound
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    before = largest_logits(query, key, x, heads=4).detach()
    qk_clip(query, key, before, tau=5.0)
    after = largest_logits(query, key, x, heads=4)
    print("before", *[f"{logit:.2f}" for logit in before.tolist()])
    print("after ", *[f"{logit:.2f}" for logit in after.tolist()])


if __name__ == "__main__":
    main()
