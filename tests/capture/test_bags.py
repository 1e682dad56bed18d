"""Bags of ids are rows of a matrix again, whose examples are independent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.capture import capture
from tests.capture.run_graph import bind, interpret

BAG = "meshwright.embedding_bag"


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.weighted = options.pop("weighted", False)
        self.bag = nn.EmbeddingBag(12, 8, **options)
        self.head = nn.Linear(8, 4)

    def forward(self, ids, weights):
        return self.head(self.bag(ids, per_sample_weights=weights if self.weighted else None))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["ids"], batch["weights"]), batch["labels"])


def batch_of(rows=8):
    torch.manual_seed(3)
    return {
        "ids": torch.randint(0, 12, (rows, 5)),
        "weights": torch.rand(rows, 5),
        "labels": torch.randint(0, 4, (rows,)),
    }


OPTIONS = [
    {"mode": "sum", "weighted": True},
    {"mode": "mean"},
    {"mode": "mean", "padding_idx": 3},
    {"mode": "max", "padding_idx": -1},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_bags_are_what_torch_computes_and_micro_batches_split_them(options):
    model, batch = Net(**options), batch_of()
    captured = capture(model, batch, loss)
    assert [n.op for n in captured.graph.nodes].count(BAG) == 1
    ours = interpret(captured.graph, bind(captured.graph, captured.constants, model, batch))["loss"]
    assert torch.allclose(ours, loss(model, batch), rtol=1e-6)
    mw.verify(model, batch, loss=loss, mesh={"dp": 2}, micro_batches=2)


def test_the_columns_of_a_table_of_bags_are_sharded():
    model, batch = Net(mode="sum", weighted=True), batch_of()
    mw.verify(model, batch, loss=loss, mesh={"tp": 2}, mode="semi_auto", pins={"bag": {"h": "tp"}})


def test_bags_of_other_lengths_and_gradients_by_frequency_stay_as_they_are():
    scaled = Net(mode="sum", scale_grad_by_freq=True)
    assert BAG not in {n.op for n in capture(scaled, batch_of(), loss).graph.nodes}

    class Uneven(Net):
        def forward(self, ids, weights):
            return self.head(self.bag(ids.flatten(), torch.arange(0, 32, 4)))

    assert BAG not in {n.op for n in capture(Uneven(), batch_of(), loss).graph.nodes}
