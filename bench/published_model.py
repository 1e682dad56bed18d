"""A plain decoder of published sizes on the meta device: gated or not, grouped heads, explicit or fused attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.published_rows import Decoder
from meshwright.examples.gpt import Built
from meshwright.examples.llama import turn


class Attention(nn.Module):
    """Causal attention; `fused` is one kernel (FlashAttention), otherwise scores are written to memory."""

    def __init__(self, sizes: Decoder, fused: bool) -> None:
        super().__init__()
        self.head_width, self.fused = int(sizes.head_dim), fused
        self.groups = sizes.heads // sizes.kv_heads
        wide, narrow = sizes.heads * self.head_width, sizes.kv_heads * self.head_width
        self.q = nn.Linear(sizes.hidden, wide, bias=False)
        self.k, self.v = (nn.Linear(sizes.hidden, narrow, bias=False) for _ in "kv")
        self.o = nn.Linear(wide, sizes.hidden, bias=False)

    def forward(
        self, x_bsd: torch.Tensor, turns: tuple[torch.Tensor, ...], mask_ss: torch.Tensor
    ) -> torch.Tensor:
        """[batch, sequence, width] → the same; `turns`: the tables of rotary positions, or none."""
        b, s, _ = x_bsd.shape
        q_bhse, k_bhse, v_bhse = (
            part(x_bsd).view(b, s, -1, self.head_width).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        if turns:
            q_bhse, k_bhse = turn(q_bhse, *turns), turn(k_bhse, *turns)
        if self.fused:
            mixed_bhse = F.scaled_dot_product_attention(
                q_bhse, k_bhse, v_bhse, is_causal=True, enable_gqa=self.groups > 1
            )
        else:
            scores_bhss = (q_bhse @ k_bhse.transpose(2, 3)).masked_fill(mask_ss, -1e4)
            mixed_bhse = torch.softmax(scores_bhss, -1) @ v_bhse
        return self.o(mixed_bhse.transpose(1, 2).reshape(b, s, -1))


class Perceptron(nn.Module):
    """silu(gate) · up, or gelu(up), then down."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=False) if sizes.glu else None
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x_bsd: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] → the same."""
        up_bsf = self.up(x_bsd)
        return self.down(F.gelu(up_bsf) if self.gate is None else F.silu(self.gate(x_bsd)) * up_bsf)


class Block(nn.Module):
    """Pre-norm attention and perceptron, each with a residual."""

    def __init__(self, sizes: Decoder, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(sizes), _norm(sizes)
        self.attention, self.mlp = Attention(sizes, fused), Perceptron(sizes)

    def forward(
        self, x_bsd: torch.Tensor, turns: tuple[torch.Tensor, ...], mask_ss: torch.Tensor
    ) -> torch.Tensor:
        """[batch, sequence, width] → the same."""
        x_bsd = x_bsd + self.attention(self.norm1(x_bsd), turns, mask_ss)
        return x_bsd + self.mlp(self.norm2(x_bsd))


class Transformer(nn.Module):
    """Embedding, blocks, norm and head. Gated models have rotary positions and RMS norms, others neither."""

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor

    def __init__(self, sizes: Decoder, sequence: int, fused: bool) -> None:
        super().__init__()
        self.rotary, width = sizes.glu, int(sizes.head_dim)
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes, fused) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied_embeddings:
            self.head.weight = self.tokens.weight
        for name, shape in {"cos": (sequence, width), "sin": (sequence, width)}.items():
            self.register_buffer(name, torch.empty(shape), persistent=False)
        square = (1, 1) if fused else (sequence, sequence)
        self.register_buffer("mask", torch.empty(square, dtype=torch.bool), persistent=False)

    def forward(self, ids_bs: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, sequence] → logits [batch, sequence, vocabulary] in float32."""
        x_bsd = self.tokens(ids_bs)
        turns = (self.cos, self.sin) if self.rotary else ()
        for block in self.blocks:
            x_bsd = block(x_bsd, turns, self.mask)
        return self.head(self.norm(x_bsd)).float()


def _norm(sizes: Decoder) -> nn.Module:
    return nn.RMSNorm(sizes.hidden) if sizes.glu else nn.LayerNorm(sizes.hidden, bias=False)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


def build(sizes: Decoder, rows: int, sequence: int, *, fused: bool = True) -> Built:
    """The model in bfloat16, an example batch of `rows` sequences, and the loss. Nothing is allocated."""
    with torch.device("meta"):
        model = Transformer(sizes, sequence, fused).bfloat16().train()
        ids, targets = (torch.empty(rows, sequence, dtype=torch.long) for _ in range(2))
    return model, {"ids": ids, "targets": targets}, loss
