"""Which operator first made a value that is not finite is said with its line, under every plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import first, quick
from tests.habits.plans import run

BODY = """
class Odd(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0] * 7 + [float("-inf")]))

    def forward(self, x):
        # an infinity that is written here is none that an operator made
        weights = (x[:, :8].masked_fill(x[:, :8] > 1, float("-inf")) + self.mask).softmax(-1)
        hidden = self.norm(self.up(x))
        root = (hidden - hidden).sqrt() * x[:, 15:]  # its gradient is infinite, times what is not zero
        logged = x[:, :1].abs().log()
        return self.down(torch.relu(hidden) + logged * 0.1) + weights + root.sum(1, True)

class Fine(Odd):
    def forward(self, x):
        weights = (x[:, :8].masked_fill(x[:, :8] > 1, float("-inf")) + self.mask).softmax(-1)
        return self.down(torch.relu(self.norm(self.up(x))) + x[:, :1].abs().log()) + weights

first, second = batches(2)
torch.manual_seed(0)
step = mw.train_step(Fine(), adamw, first, loss=loss, **PLAN)
assert step.find_anomaly(first) is None

broken = {"x": second["x"].clone(), "y": second["y"]}
broken["x"][0, 0] = 0.0  # of rank 0's rows
before = step.full_state()
found = step.find_anomaly(broken)
assert (found.phase, found.kind, found.op) == ("forward", "inf", "aten.log.default"), found
assert ".abs().log()" in found.source and ".abs().log()" in str(found), found
assert found.ranks == ((0,) if sys.argv[1] in ("dp", "zero3") else (0, 1)), found
after = step.full_state()
assert all(torch.equal(before[name], after[name]) for name in before) and step.steps == 0
assert all(p.grad is None for p in step.parameters.values())
step(first)
assert step.find_anomaly(first) is None

broken["x"][0, 1] = float("nan")
found = step.find_anomaly(broken)
assert (found.op, found.name, found.kind) == ("batch", "x", "nan"), found

torch.manual_seed(0)
step = mw.train_step(Odd(), adamw, first, loss=loss, **PLAN)
found = step.find_anomaly(first)
assert (found.phase, found.op, found.ranks) == ("backward", "aten.sqrt.default", (0, 1)), found
assert ".sqrt()" in found.source, found
step(first)
found = step.find_anomaly(first)
assert (found.op, found.kind) == ("parameter", "nan") and found.name in before, found

torch.manual_seed(0)
if sys.argv[1] != "tp":
    step = mw.train_step(Odd(), adamw, first, loss=loss, **PLAN, micro_batches=2, recompute="full")
    found = step.find_anomaly(first)
    assert (found.phase, found.op, found.ranks) == ("backward", "aten.sqrt.default", (0, 1)), found
"""

PIPELINE = """
class Odd(Net):
    def forward(self, x):
        hidden = self.up(x)
        root = (hidden - hidden).sqrt() * x[:, 15:]
        return self.down(torch.relu(self.norm(hidden) + root))

class Late(Net):
    def forward(self, x):
        masked = x.masked_fill(x > 1, float("-inf"))  # crosses to the second stage, and is written
        hidden = self.norm(self.up(x))
        return self.down(torch.relu(hidden)) + masked.softmax(-1)[:, :8] + x[:, :1].abs().log() * 0.1

first, second = batches(2)
for schedule in ("1f1b", "zero_bubble"):
    pipeline = {"mesh": {"dp": 1}, "pipeline": 2, "schedule": schedule, "micro_batches": 2}
    step = mw.train_step(Late(), adamw, first, loss=loss, **pipeline)
    assert step.find_anomaly(first) is None
    broken = {"x": second["x"].clone(), "y": second["y"]}
    broken["x"][5, 0] = 0.0  # of the second micro-batch
    before = step.full_state()
    found = step.find_anomaly(broken)
    assert (found.phase, found.kind, found.op) == ("forward", "inf", "aten.log.default"), found
    assert len(found.ranks) == 1 and ".abs().log()" in found.source, found
    assert step.steps == 0 and all(p.grad is None for p in step.parameters.values())
    assert all(torch.equal(x, before[name]) for name, x in step.full_state().items())
    step(first)
    assert step.find_anomaly(first) is None

    step = mw.train_step(Odd(), adamw, first, loss=loss, **pipeline)
    found = step.find_anomaly(first)
    assert (found.phase, found.op) == ("backward", "aten.sqrt.default"), found
    step(first)
    found = step.find_anomaly(first)
    assert (found.op, found.kind) == ("parameter", "nan") and found.name in before, found
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", first(2, ("tp", "zero3", "dp")))
@quick(lambda plan: plan == "tp")
def test_the_operator_is_named(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, BODY)


@pytest.mark.full
@pytest.mark.procs
def test_the_operator_of_a_pipeline_is_named(tmp_path: Path) -> None:
    run(tmp_path, "pipeline", PIPELINE)
