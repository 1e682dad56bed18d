"""Embeddings on servers, of all kinds: the numbers of plain PyTorch, or an error by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from tests.servers.habits import Batch, Habit, Net, batches, bounded, loss, nothing, refused, sgd


def on_its_device(model: Any, batch: Batch) -> torch.Tensor:
    device = next(model.parameters()).device
    return loss(model, (batch[0].to(device), batch[1].to(device)))


def with_positions(model: Any, batch: Batch) -> torch.Tensor:
    return loss(model, batch) + model.rare(torch.arange(3, device=model.rare.weight.device)).square().mean()


def with_norm(model: Any, batch: Batch) -> torch.Tensor:
    return loss(model, batch) + 0.01 * model.table.weight.square().sum()


def tied(model: Any) -> None:
    mw.on_server(model.table.to("meta"), uniform=(-1.0, 1.0))
    model.again = nn.Linear(6, 50, bias=False, device="meta")
    model.again.weight = model.table.weight


class Table(nn.Embedding):
    """Pulled in full: its forward may do anything."""


SAME: dict[str, Habit] = {
    "a table frozen later": Habit(after=lambda m, _, n: m.table.weight.requires_grad_(n == 3)),
    "a subclass": Habit(build=lambda: Net(Table(50, 6))),
}

REFUSED: dict[str, tuple[Habit, str]] = {
    "a hook on a table": (
        Habit(before=lambda m: m.table.weight.register_hook(lambda g: g.clamp(-1, 1))),
        r"table\.weight has a hook on its gradient",
    ),
    "rows that are set": (Habit(after=bounded(lambda m: m.table.weight.detach()[3].zero_())), "detach was called"),
    **{
        f"initialised again by {init.__name__}": (
            Habit(after=lambda m, *_, init=init: init(m.table.weight)),
            r"table\.weight is on parameter servers",
        )
        for init in (nn.init.ones_, nn.init.trunc_normal_, nn.init.orthogonal_)
    },
    "a norm of a table": (Habit(loss=with_norm), r"table\.weight is on parameter servers"),
    "a table as a layer": (
        Habit(loss=lambda m, b: F.linear(m.table(b[0]).mean(1), m.table.weight).square().mean()),
        "linear was called on it",
    ),
    "a table that forward changes": (Habit(build=lambda: Net(Table(50, 6, max_norm=0.1))), "changed within a step"),
    "sparse gradients in full": (Habit(build=lambda: Net(Table(50, 6, sparse=True))), "has a sparse gradient"),
    "a frozen table without values": (
        Habit(marked=lambda m: setattr(m, "more", nn.Embedding(3, 2, device="meta").requires_grad_(False))),
        r"more\.weight is on the meta device",
    ),
    "a batch on the device of a table": (
        Habit(loss=on_its_device),
        r"(?s)table\.weight is looked up .* on the meta device.*next\(model\.parameters\(\)\)",
    ),
    "ids on the device of a table": (
        Habit(loss=with_positions),
        r"(?s)rare\.weight is looked up .* on the meta.*table\.weight\.device.*torch\.arange\(n, device=ids\.device\)",
    ),
    "offsets on the device of a table": (
        Habit(
            build=lambda: nn.EmbeddingBag(50, 2),
            loss=lambda m, b: m(b[0][0], torch.zeros(1, dtype=torch.long, device=m.weight.device)).mean(),
        ),
        "weight is looked up with a tensor on the meta device",
    ),
    "a table without values that servers could fill": (
        Habit(marked=lambda m: mw.on_server(m.table.to("meta"))),
        r"(?s)table\.weight is on the meta device.*mw\.on_server\(…, normal=",
    ),
    "layers that servers shall fill": (
        Habit(marked=lambda m: mw.on_server(m.mix.to("meta"), normal=(0.0, 1.0))),
        r"(?s)mix\.weight is on the meta.*nn\.EmbeddingBag whose weight is used nowhere else.*on the CPU",
    ),
    "a tied table that servers shall fill": (Habit(marked=tied), "(?s)meta device.*used nowhere else"),
    "a table that has values again": (
        Habit(marked=lambda m: mw.on_server(m.table.to("meta"), normal=(0.0, 1.0)).to_empty(device="cpu")),
        "normal=, and table.weight has values",
    ),
    "gradients of before, of a table": (
        Habit(after=bounded(lambda m: m.table(torch.arange(3)).sum().backward())),
        r"reaches rows of table\.weight outside of a step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_numbers_are_those_of_plain_pytorch(name: str) -> None:
    SAME[name].compare()


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_something_else_is_refused(name: str) -> None:
    refused(*REFUSED[name])


class Weighted(nn.Module):
    """A bag with weights of its samples, which are trained too."""

    def __init__(self, mode: str, padding: int | None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 6, mode=mode, padding_idx=padding)
        self.weights, self.out = nn.Parameter(torch.rand(3)), nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weights = self.weights.expand(ids.shape) if self.bag.mode == "sum" else None
        return self.out(self.bag(ids, per_sample_weights=weights)).squeeze(-1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 7, -2])
@pytest.mark.parametrize("marked", [nothing, lambda m: mw.on_server(m.bag)], ids=["all", "table"])
def test_bags(mode: str, padding: int | None, marked: Any) -> None:
    Habit(build=lambda: Weighted(mode, padding), marked=marked).compare()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("padding", [3, -1])
def test_the_padding_row_of_a_table_that_servers_fill_is_zero(together, kind: Any, padding: int) -> None:
    table = kind(9, 2, padding_idx=padding, device="meta")
    mw.on_server(table, normal=(0.0, 1.0), seed=3)

    def work(_: int) -> torch.Tensor:
        step = mw.parameter_server(copy.deepcopy(table), sgd, loss=lambda m, ids: m(ids).mean())
        return step.full_state()["weight"]

    one, (several,) = together(1, 1, work)[0], together(1, 3, work)
    assert torch.equal(one, several)
    assert [i for i, row in enumerate(one) if not row.any()] == [padding % 9]


def test_batches_that_do_not_say_how_many_examples_they_have(together) -> None:
    bag = nn.EmbeddingBag(50, 2)
    flat = {"ids": torch.arange(7), "offsets": torch.tensor([0, 3])}
    of_bags = lambda model, batch: model(batch["ids"], batch["offsets"]).mean()  # noqa: E731

    def work(_: int, **more: Any) -> torch.Tensor:
        return mw.parameter_server(copy.deepcopy(bag), sgd, loss=of_bags, **more)(flat)

    for error in together(2, 1, work):
        assert isinstance(error, mw.BatchError)
        assert "The first dim of ids is 7, that of offsets 2" in str(error)
    counted = together(2, 1, lambda rank: work(rank, weight=lambda batch: batch["offsets"].numel()))
    assert all(isinstance(value, torch.Tensor) for value in counted)
    (error,) = together(1, 1, lambda rank: work(rank, weight=lambda batch: float("nan")))
    assert "counts as nan examples" in str(error)
    for given in ("x", None, torch.ones(2), batches(1)):
        (error,) = together(1, 1, lambda rank, given=given: work(rank, weight=lambda batch: given))
        assert isinstance(error, mw.BatchError) and "which is no number" in str(error)
    (error,) = together(1, 1, lambda rank: work(rank, weight=3))
    assert isinstance(error, mw.ServerError) and "weight=3 is not a function" in str(error)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_that_is_too_large(seed: int) -> None:
    with pytest.raises(mw.ServerError, match=f"seed={seed}"):
        mw.on_server(nn.Embedding(3, 2, device="meta"), normal=(0.0, 1.0), seed=seed)


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
def test_the_largest_seeds(seed: int) -> None:
    table = nn.Sequential(mw.on_server(nn.Embedding(3, 2, device="meta"), uniform=(0.0, 1.0), seed=seed))
    mw.parameter_server(table, sgd, loss=lambda m, x: m(x).mean())(torch.arange(3))
