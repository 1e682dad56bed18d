"""Operators that models rarely use, trained under tensor parallel pins: the numbers are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import meshwright as mw
from tests.breadth import first

Body = Callable[[torch.Tensor], torch.Tensor]


class Between(torch.nn.Module):
    """A function between two linear layers: of (batch, 6, 8) features."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.body = torch.nn.Linear(10, 48), body
        self.down = torch.nn.LazyLinear(4)

    def forward(self, x_bf: torch.Tensor) -> torch.Tensor:
        made = self.body(self.up(x_bf).unflatten(-1, (6, 8)))
        return self.down(made.flatten(1))


def regular(x: torch.Tensor) -> torch.Tensor:
    """Many matrices that are far from singular."""
    return x.view(-1, 12, 2, 2) + 4 * torch.eye(2)


def positive(x: torch.Tensor) -> torch.Tensor:
    """Many symmetric matrices with positive eigenvalues, which are apart."""
    m = x.view(-1, 12, 2, 2)
    return m @ m.mT + torch.diag(torch.tensor([1.0, 5.0]))


BODIES: dict[str, Body] = {
    "second names": lambda x: torch.concatenate([torch.absolute(x), x.subtract(x.arctan()).multiply(x)], -1),
    "clipped": lambda x: x.clip(-0.5, 0.5).divide(2) + torch.where(x.greater_equal(0), x.negative(), x),
    "special": lambda x: torch.special.expit(x) + torch.special.log_softmax(x, -1) + torch.special.i0e(x),
    "stacks": lambda x: torch.hstack([x, torch.tile(x, (1, 2, 1))]) * torch.dstack([x[..., :4], x[..., 4:]])[:, :1],
    "flips": lambda x: x.fliplr() * x + torch.rot90(x, 1, (1, 2)).mT,
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1)[:, :2], 1),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2) * x,
    "cross": lambda x: torch.cross(x[:, :3], x[:, 3:], dim=1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(1) + 1, dim=-1),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(1) + 1, keepdim=True) + x,
    "statistics": lambda x: torch.cat([*torch.var_mean(x, -1), *torch.aminmax(x, dim=-1)], 1),
    "quantile": lambda x: torch.quantile(x, 0.3, -1, keepdim=True) + torch.linalg.norm(x, dim=-1, keepdim=True) * x,
    "unfold": lambda x: x.unfold(-1, 4, 2),
    "diagonals": lambda x: torch.diag_embed(x) + x.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None, None],
    "inner": lambda x: torch.inner(x, x[0]) + torch.tensordot(x, x[0], ([2], [1])),
    "kron": lambda x: torch.kron(x, torch.tensor([[1.0, 2.0]])),
    "grid_sample": lambda x: F.grid_sample(x.view(-1, 6, 2, 4), torch.tanh(x.view(-1, 6, 4, 2)), align_corners=False),
    "solve": lambda x: torch.linalg.solve(regular(x), x.view(-1, 12, 2, 2)) + torch.linalg.inv(regular(x)),
    "triangular": lambda x: torch.linalg.solve_triangular(regular(x), x.view(-1, 12, 2, 2), upper=True),
    "cholesky": lambda x: torch.linalg.cholesky(positive(x)) + torch.linalg.qr(regular(x))[0],
    "determinants": lambda x: torch.linalg.det(regular(x)) + torch.linalg.slogdet(regular(x))[1],
    "eigenvalues": lambda x: torch.linalg.eigvalsh(positive(x)) + torch.linalg.svdvals(positive(x)),
    "powers": lambda x: torch.linalg.matrix_power(regular(x) / 4, 3) + torch.linalg.matrix_exp(x.view(-1, 12, 2, 2)),
    "pinv": lambda x: torch.linalg.pinv(regular(x)),
}  # fmt: skip


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


# One of each kind. tests/ops/test_proof.py proves the rules of all of them.
FEW = (
    "second names", "stacks", "take_along_dim", "cosine_similarity", "statistics", "unfold", "inner", "grid_sample",
    "solve",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(n, marks=pytest.mark.full) for n in BODIES if n not in FEW)]
)
@pytest.mark.parametrize("pins", first(1, ({"d0": "dp", "n": "tp"}, {"d0": "dp", "k": "tp"})), ids="-".join)
def test_what_lies_between_two_layers(
    name: str, pins: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its inputs are shards, or partial sums."""
    torch.manual_seed(0)
    model, batch = Between(BODIES[name]), (torch.randn(4, 10), torch.randn(4, 4))
    model(batch[0])
    caplog.set_level("INFO", logger="meshwright")
    plan = mw.plan(
        model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation", pins={"up": pins}
    )
    assert not [record.getMessage() for record in caplog.records if "no rule" in record.getMessage()]
    assert all(f"{letter}={axis}" in plan.explain().replace("batch", "d0") for letter, axis in pins.items())
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2}},
        {"mesh": {"dp": 2}, "optimizer_parallel": 3, "threshold_kb": 0},
        {"mesh": {"tp": 2}, "mode": "sharding_propagation", "pins": {"1": {"n": "tp"}}},
    ],
    ids=["dp", "zero", "tp"],
)
def test_a_loss_without_elements(options: dict[str, Any]) -> None:
    """A loss of the next token has none for a batch of sequences of one token."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch)
        pairs = logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        return F.cross_entropy(*pairs, reduction="sum") + logits.square().mean()

    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 12))
    batch = torch.randint(11, (5, 1))
    mw.verify(model, batch, loss=loss, **options).raise_if_different()
