"""A wide and deep recommender: embedding tables of several sizes, dense features, one click probability."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Any], Callable[[Any, Any], torch.Tensor]]


class Recommender(nn.Module):
    """The wide half adds one weight a category; the deep half joins the embeddings and the dense features."""

    def __init__(
        self, rows: Sequence[int], width: int, dense: int, hidden: Sequence[int], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.deep_tables = nn.ModuleList(nn.Embedding(n, width) for n in rows)
        self.wide_tables = nn.ModuleList(nn.Embedding(n, 1) for n in rows)
        self.wide_dense = nn.Linear(dense, 1)
        sizes = [len(rows) * width + dense, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(sizes[-1], 1)

    def forward(self, categories_bc: torch.Tensor, dense_bf: torch.Tensor) -> torch.Tensor:
        """Category ids [batch, tables] and features [batch, dense] → logits [batch]."""
        columns = categories_bc.unbind(1)
        wide_b1 = self.wide_dense(dense_bf)
        for table, ids_b in zip(self.wide_tables, columns, strict=True):
            wide_b1 = wide_b1 + table(ids_b)
        h_bd = torch.cat(
            [*(table(ids_b) for table, ids_b in zip(self.deep_tables, columns, strict=True)), dense_bf],
            dim=-1,
        )
        for layer in self.layers:
            h_bd = self.dropout(F.relu(layer(h_bd)))
        return (self.out(h_bd) + wide_b1).squeeze(-1)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean binary cross entropy of the clicks."""
    return F.binary_cross_entropy_with_logits(model(batch["categories"], batch["dense"]), batch["clicked"])


def build(
    *,
    batch: int = 12,
    rows: Sequence[int] = (48, 24, 36, 50),
    width: int = 8,
    dense: int = 12,
    hidden: Sequence[int] = (48, 24),
    dropout: float = 0.0,
    seed: int = 0,
) -> Built:
    """A model in training mode, an example batch, and the loss. One table, of 50 rows, does not divide by 4."""
    torch.manual_seed(seed)
    model = Recommender(rows, width, dense, hidden, dropout).train()
    categories = torch.stack([torch.randint(0, n, (batch,)) for n in rows], dim=1)
    clicked = torch.randint(0, 2, (batch,)).float()
    return model, {"categories": categories, "dense": torch.randn(batch, dense), "clicked": clicked}, loss
