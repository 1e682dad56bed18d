"""Options of an optimizer's groups in a pipeline, where a stage may have no parameters of a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_warm

pytestmark = pytest.mark.procs

SCRIPT = """
import torch
import meshwright as mw
from tests.layers import Layers

def grouped(parameters):
    named = list(parameters.named())
    halves = [[p for n, p in named if (n < "layers.2") == first] for first in (True, False)]
    groups = [{"params": halves[0], "lr": 0.2}, {"params": halves[1], "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1)

def built():
    torch.manual_seed(0)
    step = mw.train_step(Layers(), grouped, batch, loss=loss, pipeline=2, micro_batches=2, mesh={"dp": 1})
    return step, torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)

def loss(model, x):
    return model(x).square().mean()

batch = torch.ones(4, 6)
step, schedule = built()
for _ in range(2):
    step(batch)
    schedule.step()
step.save("ckpt")
wanted = [(group["lr"], group["momentum"]) for group in step.optimizer.param_groups]
assert wanted == [(0.05, 0.0), (0.025, 0.5)]
again, schedule = built()
again.load("ckpt")
found = [(group["lr"], group["momentum"]) for group in again.optimizer.param_groups]
assert found == wanted, found
mw.shutdown()
"""


def test_a_group_that_is_empty_on_a_stage_has_its_options_again(tmp_path: Path) -> None:
    done = run_warm(tmp_path, 2, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
