"""Names that other libraries give a step, and evaluations that would be trained on."""

from __future__ import annotations

import logging

import pytest
import torch

import meshwright as mw


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def built() -> tuple[torch.nn.Module, dict[str, torch.Tensor], mw.TrainStep]:
    model, batch = torch.nn.Linear(4, 1), {"x": torch.randn(8, 4)}
    return (
        model,
        batch,
        mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), batch, loss=loss, mesh=1),
    )


def test_what_others_call_it_is_named_by_what_it_is_here() -> None:
    _, _, step = built()
    for name, hint in {
        "evaluate": "step.forward_step",
        "backward": "leave it out",
        "state_dict": "step.full_state",
        "forward_stpe": "forward_step",
    }.items():
        with pytest.raises(AttributeError, match=hint):
            getattr(step, name)
    assert not hasattr(step, "nothing_like_it")


def test_an_evaluation_without_update_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch, step = built()
    with caplog.at_level(logging.WARNING, "meshwright"):
        step(batch, update=False)
        assert "forward_step" not in caplog.text, "accumulation in train mode is what it looks like"
        model.eval()
        step(batch, update=False)
        step(batch, update=False)
    assert caplog.text.count("step.forward_step(model, batch)") == 1
