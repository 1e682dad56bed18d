"""Groups that a script adds to the optimizer of a step, for parameters that it trains later."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import RunError
from tests.breadth import quick
from tests.habits.plans import NAMES, Net, batches, loss, run

ADDED = """
torch.manual_seed(0)
model = Net()
model.up.requires_grad_(False)
twin = copy.deepcopy(model)

def head(named):
    return torch.optim.AdamW([p for n, p in named if n.startswith("down")], lr=1e-2, eps=1e-3)

def of(part, named):
    return {"params": [p for n, p in named if n.startswith(part)], "lr": 1e-3}

step = mw.train_step(model, lambda p: head(p.named()), batches()[0], loss=loss, **PLAN)
optimizer = head(twin.named_parameters())
for number, batch in enumerate(batches(5)):
    if number == 1:  # trained from the start, and in no group
        step.optimizer.add_param_group(of("norm", step.parameters.items()))
        optimizer.add_param_group(of("norm", twin.named_parameters()))
    if number == 2:
        model.up.requires_grad_(True)
        twin.up.requires_grad_(True)
    if number == 3:  # the step has trained it by now
        step.optimizer.add_param_group(of("up", step.parameters.items()))
        optimizer.add_param_group(of("up", twin.named_parameters()))
    twin.zero_grad()
    expected = loss(twin, batch)
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach()), number
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", [*NAMES, "zero1", "zero2", "pipeline"])
@quick(lambda plan: plan in ("zero2", "pipeline"))
def test_a_group_that_is_added_trains_as_on_one_device(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, ADDED)


def head(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for n, p in parameters.named() if n.startswith("down")], lr=0.1)


def test_a_group_that_would_train_nothing_is_refused_or_remarked(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model.up.requires_grad_(False)
    step = mw.train_step(model, head, batches()[0], loss=loss, mesh=1)
    assert step.optimizer is not None
    model.up.requires_grad_(True)
    for wrong, what in (
        ([p for n, p in step.parameters.items() if n.startswith("up")], "a group without parameters"),
        (model.up.parameters(), "added with up.weight, which"),
        ([("up.weight", model.up.weight)], "added with up.weight, which"),
        (torch.nn.Parameter(torch.zeros(2)), "added with a tensor, which"),
    ):
        with pytest.raises(RunError, match=what) as caught:
            step.optimizer.add_param_group({"params": wrong})
        assert "optimizer(parameters) puts them into a group" in caught.value.hint
    with caplog.at_level(logging.WARNING, "meshwright"):
        step(batches()[0])
    assert "up.weight and 1 more: no longer frozen, but in no group of the optimizer" in caplog.text
    caplog.clear()
    step.optimizer.add_param_group({"params": [step.parameters["up.weight"], step.parameters["up.bias"]]})
    step(batches(rows=4)[0])  # another program, in which nothing is new
    assert "no group" not in caplog.text
    mw.shutdown()
