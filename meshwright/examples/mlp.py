"""A multilayer perceptron: the smallest model worth cutting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]


class MLP(nn.Module):
    """`depth` hidden layers with a residual around each."""

    def __init__(self, features: int, hidden: int, classes: int, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(features, hidden)
        self.up = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * hidden, hidden) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.leave = nn.Linear(hidden, classes)

    def forward(self, x_bf: torch.Tensor) -> torch.Tensor:
        """[batch, features] → logits [batch, classes]."""
        h_bd = self.enter(x_bf)
        for up, down in zip(self.up, self.down, strict=True):
            h_bd = h_bd + self.dropout(down(F.relu(up(h_bd))))
        return self.leave(h_bd)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the labels."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def build(
    *,
    batch: int = 12,
    features: int = 16,
    hidden: int = 24,
    classes: int = 12,
    depth: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
) -> Built:
    """A model in training mode, an example batch, and the loss."""
    torch.manual_seed(seed)
    model = MLP(features, hidden, classes, depth, dropout).train()
    return model, {"x": torch.randn(batch, features), "y": torch.randint(0, classes, (batch,))}, loss
