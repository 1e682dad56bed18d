"""A byte-level GPT in plain PyTorch: about 5 million parameters at its default configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any, Any], torch.Tensor]]

IGNORED = -100


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the vocabulary is the bytes."""

    vocabulary: int = 256
    width: int = 256
    layers: int = 6
    heads: int = 8
    sequence: int = 128
    dropout: float = 0.0
    tied: bool = True


class Attention(nn.Module):
    """Causal self-attention with one fused projection to queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.drop = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_bsd: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] → the same."""
        b, s, d = x_bsd.shape
        q_bhse, k_bhse, v_bhse = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x_bsd).split(d, dim=2)
        )
        drop = self.drop if self.training else 0.0
        mixed_bhse = F.scaled_dot_product_attention(q_bhse, k_bhse, v_bhse, is_causal=True, dropout_p=drop)
        return self.out(mixed_bhse.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    """Pre-norm attention and perceptron, each with a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up, self.down = (
            nn.Linear(config.width, 4 * config.width),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_bsd: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] → the same."""
        x_bsd = x_bsd + self.dropout(self.attention(self.norm1(x_bsd)))
        return x_bsd + self.dropout(self.down(F.gelu(self.up(self.norm2(x_bsd)))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that may share the token embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.dropout = nn.Dropout(config.dropout)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        # what is added to the residual shrinks with depth (Radford et al. 2019, GPT-2)
        for block in blocks:
            for module in (block.attention.out, block.down):
                nn.init.normal_(module.weight, std=0.02 / (2 * config.layers) ** 0.5)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids_bs: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, sequence] → logits [batch, sequence, vocabulary]."""
        place_s = torch.arange(ids_bs.shape[1], device=ids_bs.device)
        x_bsd = self.dropout(self.tokens(ids_bs) + self.positions(place_s))
        for block in self.blocks:
            x_bsd = block(x_bsd)
        return self.head(self.norm(x_bsd))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the targets, ignoring those that are -100."""
    logits_bsv = model(batch["ids"])
    return F.cross_entropy(logits_bsv.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)


def build(
    config: GPTConfig | None = None, *, batch: int = 4, dropout: float | None = None, seed: int = 0
) -> Built:
    """A model in training mode, an example batch, and the loss; two small layers unless a configuration is given."""
    config = config or GPTConfig(
        vocabulary=96, width=48, layers=2, heads=4, sequence=24, dropout=dropout or 0.0
    )
    torch.manual_seed(seed)
    model = GPT(config).train()
    text = torch.randint(0, config.vocabulary, (batch, config.sequence + 1))
    targets = text[:, 1:].clone()
    targets[0, -3:] = IGNORED
    return model, {"ids": text[:, :-1].clone(), "targets": targets}, loss
