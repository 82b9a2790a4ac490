"""Small models whose memory is planned."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 128


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.contract(F.gelu(self.expand(self.norm(x))))
        return x + F.dropout(y, self.dropout)


class Net(nn.Module):
    """Residual blocks, perhaps checkpointed."""

    def __init__(self, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class GPT(nn.Module):
    """Attention, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        qkv = self.qkv(self.norm(x)).view(*tokens.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, dropout_p=self.dropout, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return model(x).float().square().mean()


def entropy(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def by_name(found: Any) -> dict[str, Any]:
    return {recipe.name: recipe for recipe in found.recipes}


MANY = torch.randn(256, WIDTH)
FEW = MANY[:8]
TOKENS = torch.arange(256).view(4, 64)
