"""An error of an operator names the line of the model that it comes from."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import BatchError
from tests.data import train as t


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)  # out of range


def loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch["ids"]).square().mean()


EXAMPLE = {"ids": torch.zeros(8, dtype=torch.int64)}


@pytest.mark.parametrize(
    "how", [{"mesh": 1}, {"mesh": 2, "micro_batches": 2}, {"mesh": 1, "recompute": "full"}], ids=str
)
def test_an_operator_in_a_step(how: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    model = Tokens()

    def body(step: Any) -> list[str]:
        with pytest.raises(IndexError) as caught:
            step({"ids": torch.full((8,), 7)})
        return traceback.format_exception(caught.value)

    for lines in t.on_ranks(t.parts_for(model, EXAMPLE, loss, **how), model, EXAMPLE, loss, body):
        note = lines[-1]
        assert note.startswith("where: test_places.py:22  return self.table(ids)")
        assert "  in table  (aten.embedding.default, %embedding" in note
        assert "eval_with_key" not in "".join(lines)
    assert "eval_with_key" not in capfd.readouterr().err  # nor does torch print what it made of the model


def test_forward_steps_too() -> None:
    forward = mw.forward_step(Tokens(), EXAMPLE, outputs=lambda model, batch: model(batch["ids"]), mesh=1)
    with pytest.raises(IndexError) as caught:
        forward({"ids": torch.full((8,), 7)})
    assert caught.value.__notes__[0].startswith("where: test_places.py:22")


def test_our_own_errors_know_their_place() -> None:
    step = mw.train_step(Tokens(), t.sgd, EXAMPLE, loss=loss, mesh=1)
    with pytest.raises(BatchError) as caught:
        step({"ids": torch.zeros(3, dtype=torch.int64)})
    assert not hasattr(caught.value, "__notes__")
