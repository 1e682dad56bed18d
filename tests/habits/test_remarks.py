"""Remarks of a plan are seen: logged once, by rank 0, with what they say for the user."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import meshwright as mw
from tests.habits.plans import Net, batches, loss, run


class Added(Net):
    """A net with an operator that no rule is known for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumulative_trapezoid(super().forward(x))


def test_a_remark_is_logged_once_by_plan_and_the_step(caplog: pytest.LogCaptureFixture) -> None:
    model, asked = Added(inner=48), {"loss": loss, "mesh": 2}
    with caplog.at_level(logging.INFO, "meshwright"):
        plan = mw.plan(model, batches()[0], **asked)
        mw.plan(model, batches()[0], **asked)
    said = [r for r in caplog.records if r.name == "meshwright" and "cumulative_trapezoid" in r.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert said[0].getMessage() in plan.notes


STEP = """
import io, logging
heard = io.StringIO()
logging.getLogger("meshwright").addHandler(logging.StreamHandler(heard))

class Added(Net):
    def forward(self, x):
        return torch.cumulative_trapezoid(super().forward(x))

torch.manual_seed(0)
step = mw.train_step(Added(), adamw, batches()[0], loss=loss, **PLAN)
assert heard.getvalue().count("no rule is known") == (step.rank == 0), heard.getvalue()
mw.forward_step(Added(), batches()[0], outputs=lambda m, b: m(b["x"]).softmax(-1), **PLAN)
assert heard.getvalue().count("no rule is known") == 2 * (step.rank == 0), heard.getvalue()
mw.shutdown()
"""


@pytest.mark.procs
def test_rank_0_alone_logs_what_a_step_remarks(tmp_path: Path) -> None:
    run(tmp_path, "dp", STEP)
