"""What a loss computes or writes under `no_grad`, or through `detach()`, has the gradient of eager, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture import capture
from tests.habits.plans import Doing, batches, loss

BATCH = batches()[0]


def past_detach(model: Any, out: torch.Tensor) -> None:
    out.detach()[0].add_(1.0)


def past_no_grad(model: Any, out: torch.Tensor) -> None:
    with torch.no_grad():
        out[:, 0] = 1.0


def past_a_view(model: Any, out: torch.Tensor) -> None:
    with torch.no_grad():
        out.view(-1).clamp_(-0.5, 0.5)


def past_one_of_several(model: Any, out: torch.Tensor) -> None:
    out.detach().split(4, -1)[0].mul_(2)


def with_a_gradient_of_its_own(model: Any, out: torch.Tensor) -> Any:
    apart = out.detach()
    apart *= model.down.bias
    return apart


PAST = [past_detach, past_no_grad, past_a_view, past_one_of_several, with_a_gradient_of_its_own]


@pytest.mark.parametrize("what", PAST, ids=lambda what: what.__name__)
def test_a_write_past_autograd_to_what_is_read_with_a_gradient_is_refused(what: Callable[..., Any]) -> None:
    """`no_grad` leaves a gradient as it was; that of a captured program once was the gradient of what was written."""
    with pytest.raises(mw.CaptureError, match="written in place without one") as raised:
        capture(Doing(what), BATCH, loss)
    assert "test_past_autograd.py:" in raised.value.where and "torch.where" in raised.value.hint


def past_the_making(model: Any, out: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        twice = out * 2
    twice[:, 0] = out[:, 0]
    return twice


def test_a_gradient_that_is_written_into_what_has_none_is_refused() -> None:
    with pytest.raises(mw.CaptureError, match="computed without one") as raised:
        capture(Doing(past_the_making), BATCH, loss)
    assert ".clone()" in raised.value.hint


def test_writes_past_autograd_to_what_is_read_without_a_gradient_stay() -> None:
    def several(model: Any, out: torch.Tensor) -> torch.Tensor:
        weights = out.softmax(-1).detach()
        weights[weights < 0.1] = 0
        with torch.no_grad():
            copied = out.clone()
            copied[0] = 0.0
            filled = torch.zeros_like(out)
            filled.add_(weights)
        filled[:, :4] = out[:, :4]
        return weights * copied.mul_(2) * filled

    mw.verify(Doing(several), BATCH, loss=loss, mesh={"dp": 2}).raise_if_different()


@pytest.mark.parametrize("how", ["detach_", "requires_grad_", "requires_grad ="])
def test_a_gradient_that_ends_in_place_is_refused(how: str) -> None:
    def ended(model: Any, out: torch.Tensor) -> torch.Tensor:
        if how == "detach_":
            return out.clone().detach_()
        if how == "requires_grad_":
            model.down.weight.requires_grad_(False)
        else:
            model.down.weight.requires_grad = False
        return model.down(torch.relu(model.norm(model.up(BATCH["x"] * 0 + 1))))

    with pytest.raises(mw.CaptureError, match="cannot be captured") as raised:
        capture(Doing(ended), BATCH, loss)
    assert "y.detach()" in raised.value.hint


WITHOUT = {
    "1 - y": lambda y: 1 - y,
    "a slice": lambda y: y[:, :1],
    "an attribute": lambda y: y.T.T,
    "a power": lambda y: 2**y,
    "one of several": lambda y: y.max(-1, keepdim=True)[0],
    "by name": lambda y: y.sort(-1).values,
    "in a tuple": lambda y: y.split(4, -1)[0].repeat(1, 2),
    # These are the tensor itself, which keeps its gradient.
    "contiguous": lambda y: y.contiguous(),
    "its own dtype": lambda y: y.to(y.dtype),
    "real": lambda y: y.real,
}


@pytest.mark.parametrize("what", WITHOUT)
def test_what_no_grad_computes_has_the_gradient_of_eager(what: str) -> None:
    def without(model: Any, out: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return WITHOUT[what](out)

    mw.verify(Doing(without), BATCH, loss=loss, mesh={"dp": 2}).raise_if_different()


def added(y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(y)
    z += y
    return z


WRITTEN = {
    "added": added,
    "copied": lambda y: y.new_empty(y.shape).copy_(y),
    "by name": lambda y: torch.zeros_like(y).add_(other=y, alpha=2),
    "out=": lambda y: torch.exp(y, out=torch.zeros_like(y)),
    "out= of a list": lambda y: torch.cat([y, y], out=y.new_zeros(16, 8))[:8],
    "complex": lambda y: torch.complex(y, y * 2),
    # These have no derivative, so that whatever reads them would fail, too.
    "a quotient": lambda y: y // 1,
    "a histogram": lambda y: torch.histc(y, 8, -3, 3),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_what_no_grad_writes_has_no_gradient(what: str) -> None:
    def without(model: Any, out: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = WRITTEN[what](out)
        found = found.real + found.imag if found.is_complex() else found
        return found * model.norm.weight[:8]

    mw.verify(Doing(without), BATCH, loss=loss, mesh={"dp": 2}).raise_if_different()
