"""Small networks of the kinds that people train, beside the paper's own (``pathcond.networks``).

>>> sum(p.numel() for p in resnet20().parameters())
1084586
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pathcond.networks import Residual


def resnet20(num_classes: int = 10, *, width: int = 32) -> nn.Sequential:
    """ResNet-20 for CIFAR (He et al. 2016), with learned shortcuts where the width changes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for stage in range(3):
        for block in range(3):
            outputs = width * 2**stage
            stride = 2 if stage and not block else 1
            body = nn.Sequential(
                nn.Conv2d(channels, outputs, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            shortcut: nn.Module = nn.Identity()
            if stride > 1:
                shortcut = nn.Sequential(
                    nn.Conv2d(channels, outputs, 1, stride=stride, bias=False),
                    nn.BatchNorm2d(outputs),
                )
            layers.append(Residual(body, shortcut))
            channels = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )


class Attention(nn.Module):
    """Several heads, written out so that stacked networks run it as batched products."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[-2:]
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, width // self.heads)).transpose(-3, -2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(-3, -2).flatten(-2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), as in most language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.act = nn.SiLU()
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP, each on the normalised stream and added to it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = GatedMLP(width) if causal else MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches of 4 × 4 pixels of CIFAR's images, their mean in front of the classifier."""

    def __init__(self, *, width: int = 96, depth: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))
        self.blocks = nn.Sequential(*[Block(width, heads, causal=False) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(-2).transpose(-2, -1) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(-2))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Decoder-only, on ASCII characters."""

    def __init__(
        self, *, width: int = 96, depth: int = 4, heads: int = 3, context: int = 64
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads, causal=True) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions[: x.shape[-1]]
        return self.head(self.norm(self.blocks(hidden)))  # type: ignore[no-any-return]
