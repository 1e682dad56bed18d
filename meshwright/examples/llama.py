"""A Llama in plain PyTorch: RMS norms, rotary positions, grouped-query attention, gated perceptrons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.examples.gpt import Built, loss


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama. `kv_heads` divides `heads`."""

    vocabulary: int = 256
    width: int = 256
    inner: int = 704
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    sequence: int = 128
    rotary_base: float = 10_000.0

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width, kv_width = config.head_width, config.kv_heads * config.head_width
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k, self.v = (nn.Linear(config.width, kv_width, bias=False) for _ in "kv")
        self.o = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_bsd: torch.Tensor, cos_se: torch.Tensor, sin_se: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] → the same; the tables are [sequence, head width]."""
        b, s, _ = x_bsd.shape
        q_bhse, k_bhse, v_bhse = (
            part(x_bsd).view(b, s, -1, self.head_width).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q_bhse, k_bhse = turn(q_bhse, cos_se, sin_se), turn(k_bhse, cos_se, sin_se)
        mixed_bhse = F.scaled_dot_product_attention(q_bhse, k_bhse, v_bhse, is_causal=True, enable_gqa=True)
        return self.o(mixed_bhse.transpose(1, 2).reshape(b, s, -1))


def turn(x_bhse: torch.Tensor, cos_se: torch.Tensor, sin_se: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves as pairs (Su et al. 2021, "RoFormer")."""
    low, high = x_bhse.chunk(2, dim=-1)
    return x_bhse * cos_se + torch.cat((-high, low), dim=-1) * sin_se


class MLP(nn.Module):
    """silu(gate(x)) · up(x), brought back by down."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.width, config.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x_bsd: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] → the same."""
        return self.down(F.silu(self.gate(x_bsd)) * self.up(x_bsd))


class Block(nn.Module):
    """Pre-norm attention and perceptron, each with a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x_bsd: torch.Tensor, cos_se: torch.Tensor, sin_se: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] → the same."""
        x_bsd = x_bsd + self.attention(self.norm1(x_bsd), cos_se, sin_se)
        return x_bsd + self.mlp(self.norm2(x_bsd))


class Llama(nn.Module):
    """Token embedding, blocks, norm and head."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        half = torch.arange(0, config.head_width, 2) / config.head_width
        angle_se = torch.outer(torch.arange(config.sequence), config.rotary_base**-half).repeat(1, 2)
        self.register_buffer("cos", angle_se.cos(), persistent=False)
        self.register_buffer("sin", angle_se.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids_bs: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, sequence] → logits [batch, sequence, vocabulary]."""
        x_bsd = self.tokens(ids_bs)
        cos_se, sin_se = self.cos[: ids_bs.shape[1]], self.sin[: ids_bs.shape[1]]
        for block in self.blocks:
            x_bsd = block(x_bsd, cos_se, sin_se)
        return self.head(self.norm(x_bsd))


def build(config: LlamaConfig | None = None, *, batch: int = 4, seed: int = 0) -> Built:
    """A model in training mode, an example batch, and the loss; two small layers unless a configuration is given."""
    config = config or LlamaConfig(
        vocabulary=96, width=48, inner=96, layers=2, heads=4, kv_heads=2, sequence=24
    )
    torch.manual_seed(seed)
    model = Llama(config).train()
    text = torch.randint(0, config.vocabulary, (batch, config.sequence + 1))
    return model, {"ids": text[:, :-1].clone(), "targets": text[:, 1:].clone()}, loss
