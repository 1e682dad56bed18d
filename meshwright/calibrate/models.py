"""Small models whose full training steps are measured, chosen so that each class of operators matters in some.

They are none of the models in `meshwright.examples`, so predictions for those are of models left out of the fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]


class Block(nn.Module):
    """A transformer's block, pre-norm. `gated`: RMS norms and a gated perceptron, not layer norms and GELU."""

    def __init__(self, width: int, heads: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=not gated) for _ in range(4))
        self.up, self.down = (
            nn.Linear(width, 3 * width, bias=not gated),
            nn.Linear(3 * width, width, bias=not gated),
        )
        self.gate = nn.Linear(width, 3 * width, bias=False) if gated else None

    def forward(self, x_bsd: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] → the same."""
        b, s, d = x_bsd.shape
        h_bsd = self.norm1(x_bsd)
        q, k, v = (f(h_bsd).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bsd = x_bsd + self.o(mixed.transpose(1, 2).reshape(b, s, d))
        h_bsd = self.norm2(x_bsd)
        inner = F.silu(self.gate(h_bsd)) * self.up(h_bsd) if self.gate is not None else F.gelu(self.up(h_bsd))
        return x_bsd + self.down(inner)


def transformer(width: int, heads: int, layers: int, batch: int, sequence: int, *, gated: bool) -> Built:
    """A language model over 512 tokens."""
    model = nn.Sequential(
        nn.Embedding(512, width), *(Block(width, heads, gated) for _ in range(layers)), nn.Linear(width, 512)
    )
    ids = torch.randint(0, 512, (batch, sequence + 1))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return model, {"x": ids[:, :-1].clone(), "y": ids[:, 1:].clone()}, loss


def perceptron(width: int, layers: int, batch: int) -> Built:
    """Linear layers with ReLU between them: products and the update alone, if `width` is large."""
    inner = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, 10)), *_classes(batch, width)


def convolutions(channels: int, batch: int, size: int) -> Built:
    """Convolutions with batch norm, strided once, then a mean over places."""

    def stage(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    model = nn.Sequential(
        *stage(3, channels, 1), *stage(channels, 2 * channels, 2), *stage(2 * channels, 2 * channels, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, 10),
    )  # fmt: skip
    return model, *_classes(batch, 3, size, size)


def _classes(*shape: int) -> tuple[dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return {"x": torch.randn(*shape), "y": torch.randint(0, 10, shape[:1])}, loss


EMPTY = "step empty"  # what a step takes the host of an accelerator: next to no operators

# Batches are per rank. Sizes for a core of a processor: a step takes 5 to 100 ms. An accelerator takes the second of
# each pair.
MODELS: dict[str, tuple[Callable[[int], Built], Callable[[int], Built]]] = {
    "step perceptron": (lambda ranks: perceptron(512, 4, 64 * ranks), lambda ranks: perceptron(8192, 4, 4096 * ranks)),
    "step wide": (lambda ranks: perceptron(1024, 3, 8 * ranks), lambda ranks: perceptron(12288, 3, 128 * ranks)),
    "step gpt": (
        lambda ranks: transformer(192, 4, 2, 2 * ranks, 128, gated=False),
        lambda ranks: transformer(2048, 16, 4, 2 * ranks, 1024, gated=False),
    ),
    "step llama": (
        lambda ranks: transformer(256, 8, 2, ranks, 128, gated=True),
        lambda ranks: transformer(2048, 16, 4, 2 * ranks, 1024, gated=True),
    ),
    "step long": (
        lambda ranks: transformer(64, 2, 2, ranks, 512, gated=False),
        lambda ranks: transformer(512, 8, 4, ranks, 4096, gated=False),
    ),
    "step convolution": (
        lambda ranks: convolutions(24, 2 * ranks, 32), lambda ranks: convolutions(128, 256 * ranks, 64),
    ),
    "step broad": (
        lambda ranks: transformer(512, 8, 1, ranks, 256, gated=False),
        lambda ranks: transformer(8192, 64, 1, 2 * ranks, 2048, gated=False),
    ),
    "step small": (
        lambda ranks: transformer(32, 2, 6, ranks, 8, gated=False),
        lambda ranks: transformer(64, 2, 12, ranks, 32, gated=False),
    ),
    EMPTY: (lambda ranks: perceptron(8, 1, 8 * ranks), lambda ranks: perceptron(64, 1, 8 * ranks)),
}  # fmt: skip
