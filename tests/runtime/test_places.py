"""An error of an operator names the line of the model that it comes from."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import BatchError
from tests.custom_ops import doubling
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
        assert note.startswith("where: test_places.py:23  return self.table(ids)")
        assert "  in table  (aten.embedding.default, %embedding" in note
        assert "eval_with_key" not in "".join(lines)
    assert "eval_with_key" not in capfd.readouterr().err  # nor does torch print what it made of the model


def test_forward_steps_too() -> None:
    forward = mw.forward_step(Tokens(), EXAMPLE, outputs=lambda model, batch: model(batch["ids"]), mesh=1)
    with pytest.raises(IndexError) as caught:
        forward({"ids": torch.full((8,), 7)})
    assert caught.value.__notes__[0].startswith("where: test_places.py:23")


twice = doubling("places::twice")


def _fails(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("no gradient of twice")


twice.register_autograd(_fails)
mw.rule("places::twice", "... -> ...")
X = {"x": torch.ones(8, 6)}


class Twice(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))  # fails in backward


SHARDINGS = [{"mesh": 1}, {"mesh": 2, "micro_batches": 2}, {"mesh": 2, "pipeline": 2}]


def errors(function: Any, how: dict[str, Any], error: type[Exception], hook: Any = None) -> list[list[str]]:
    def body(step: Any) -> list[str]:
        if hook is not None:
            next(iter(step.parameters.values())).register_hook(hook)
        try:
            step(X)
        except error as caught:
            return caught.__notes__
        except Exception:  # the other stage, which this one left alone
            return []
        return []

    def square(model: Any, batch: Any) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    model = Twice(function)
    found = t.on_ranks(t.parts_for(model, X, square, **how), model, X, square, body)
    return [notes for notes in found if notes]


@pytest.mark.parametrize("how", SHARDINGS, ids=str)
def test_backward_of_an_operator_of_the_users(how: dict[str, Any]) -> None:
    found = errors(twice, how, ArithmeticError)
    assert found
    for (note,) in found:
        assert note.startswith("where: test_places.py:") and "self.last(self.function(self.first(x)))" in note
        assert note.endswith("(backward of places.twice.default, %twice)")


def test_backward_in_which_torch_finds_an_anomaly() -> None:
    """The root's slope at 0 is infinite, and 0 times that is none."""
    model = Twice(lambda x: (x * 0).sqrt())
    step = mw.train_step(model, t.sgd, X, loss=lambda model, batch: model(batch["x"]).square().mean(), mesh=1)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="nan values") as caught:
        step(X)
    (note,) = caught.value.__notes__
    assert note.endswith("(backward of aten.mul.Tensor, %mul)"), note


def test_backward_of_which_torch_says_nothing() -> None:
    ((note,),) = errors(torch.relu, SHARDINGS[0], ArithmeticError, hook=lambda gradient: 1 // 0)
    assert note.startswith("in backward of %linear to %mean; with torch.autograd.set_detect_anomaly(True)")


def test_our_own_errors_know_their_place() -> None:
    step = mw.train_step(Tokens(), t.sgd, EXAMPLE, loss=loss, mesh=1)
    with pytest.raises(BatchError) as caught:
        step({"tokens": torch.zeros(8, dtype=torch.int64)})
    assert not hasattr(caught.value, "__notes__")
