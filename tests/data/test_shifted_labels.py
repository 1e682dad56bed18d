"""A last batch of a language model is filled up where its labels, shifted within the loss, are sure to be ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.compile import default_loss
from meshwright.errors import BatchError
from tests.breadth import quick
from tests.data import train as t


class Texts:
    """Sequences whose labels are their tokens; some are left out of the loss."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(48, (count, 7), generator=generator)
        self.labels = self.ids.where(torch.rand(self.ids.shape, generator=generator) < 0.8, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[number], "labels": self.labels[number]}


EXAMPLE = {name: torch.zeros(8, 7, dtype=torch.int64) for name in ("input_ids", "labels")}


def agrees(model: torch.nn.Module, loss: Any, **how: Any) -> None:
    """Two epochs over 21 samples in batches of eight are those of plain PyTorch, whose last batch has five."""
    parts = t.parts_for(model, EXAMPLE, loss, **how)
    expected = t.on_one_device(model, loss, DataLoader(Texts(21), batch_size=8), 2)

    def body(step: Any) -> list[list[float]]:
        loader = mw.shard_loader(Texts(21), step, last="pad")
        return [t.losses_of(loader, step) for _ in range(2)]

    for found in t.on_ranks(parts, model, EXAMPLE, loss, body):
        for mine, plain in zip(found, expected, strict=True):
            assert mine == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "how"), [("gpt2", {"mesh": {"dp": 2}, "micro_batches": 2}), ("llama", {"mesh": 3})], ids=str
)
@quick(lambda kind, how: kind == "gpt2")
def test_models_of_hugging_face(kind: str, how: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": 48, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    if kind == "gpt2":
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, n_positions=16, **dropout))
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, intermediate_size=48, num_key_value_heads=2)
        )
    agrees(model, default_loss, **how)


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(48, 12), torch.nn.Linear(12, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).flatten(0, 1)


def masked(model: Any, batch: Any) -> torch.Tensor:
    labels = batch["labels"].where(batch["input_ids"] != 7, -100)
    return cross_entropy(model(batch["input_ids"]), labels.flatten())


def test_labels_that_a_mask_leaves_out() -> None:
    agrees(Tokens(), masked, mesh=2)


@pytest.mark.parametrize("put", [0, -100])
def test_a_label_that_counts_beside_them_is_refused(put: int) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        labels = pad(batch["labels"], (0, 1), value=put)[:, 1:]
        return cross_entropy(model(batch["input_ids"]), labels.flatten())

    model = Tokens()
    if put == -100:
        agrees(model, loss, mesh=2)
        return
    parts = t.parts_for(model, EXAMPLE, loss, 2)

    def body(step: Any) -> None:
        with pytest.raises(BatchError, match=r"it puts 0 among the labels, of which the loss ignores -100"):
            mw.shard_loader(Texts(21), step, last="pad")

    t.on_ranks(parts, model, EXAMPLE, loss, body)
