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

    def __init__(
        self, checkpointed: bool = False, dropout: float = 0.0, reentrant: bool = False
    ) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x


class GPT(nn.Module):
    """Attention, and a head that may be tied to the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.dropout = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        qkv = self.qkv(self.norm(x)).view(*tokens.shape, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, dropout_p=self.dropout, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class CNN(nn.Module):
    """Convolutions with batch normalization, and a layer on their means."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.features, self.out = nn.Sequential(*layers), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x).mean((2, 3)))


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
NEEDED = torch.randn(256, WIDTH, requires_grad=True)  # as reentrant checkpoints ask
IMAGES = torch.randn(8, 3, 32, 32)
FEW = MANY[:8]
TOKENS = torch.arange(256).view(4, 64)
