"""Forward passes over real processes: evaluation between the steps of a pipeline, and a plan's own forward step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.test_pipeline_processes import train

pytestmark = pytest.mark.procs

EVALUATES = """
import copy, torch
import meshwright as mw
from meshwright.examples import gpt

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def logits(model, batch):
    return {"logits": model(batch["ids"])}

model, batch, loss = gpt.build(batch=8)
model = model.double()
twin = copy.deepcopy(model)
optimizer = sgd(twin.parameters())
step = mw.train_step(model, sgd, batch, loss=loss, OPTIONS)
held = sum(p.numel() for p in step.parameters.values())
evaluate = step.forward_step(model.eval(), {"ids": batch["ids"]}, logits)
model.train()
for _ in range(3):
    step(batch)
    loss(twin, batch).backward()
    optimizer.step(), optimizer.zero_grad()
    with torch.no_grad():
        expected = twin(batch["ids"])
    found = evaluate({"ids": batch["ids"]})["logits"]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12), (found - expected).abs().max()
part = evaluate({"ids": batch["ids"]}, gather=False)["logits"]
print("part", None if part is None else tuple(part.shape))
mw.shutdown()
print("equal")
"""

SERVES = """
import torch
import meshwright as mw
from meshwright.examples import gpt

model, batch, loss = gpt.build(batch=8)
pins = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}
if not __import__("os").path.exists("plan.json") and __import__("os").environ["RANK"] == "0":
    options = {"mesh": {"dp": 2, "tp": 2}, "mode": "sharding_propagation", "pins": pins}
    mw.plan(model, batch, loss=loss, optimizer_parallel=3, threshold_kb=0, **options).save("made.json")
    __import__("os").rename("made.json", "plan.json")
while not __import__("os").path.exists("plan.json"):
    __import__("time").sleep(0.05)
model.eval()
ids = batch["ids"]
with torch.no_grad():
    expected = model(ids)
found = mw.forward(model, {"ids": ids}, outputs=lambda model, batch: model(batch["ids"]), plan="plan.json")
assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
mw.shutdown()
print("served")
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param('mesh={"dp": 2}, pipeline=2, micro_batches=4', marks=pytest.mark.full),
        'mesh={"dp": 2, "tp": 2}, mode="sharding_propagation", pins={"*.up": {"n": "tp"}}, optimizer_parallel=3',
    ],
)
def test_a_training_script_evaluates_on_the_weights_it_trains(tmp_path: Path, options: str) -> None:
    assert "equal" in train(tmp_path, 4, EVALUATES.replace("OPTIONS", options))


@pytest.mark.full  # tests/verify/test_forward.py carries such a plan
def test_the_plan_file_of_a_training_step_serves(tmp_path: Path) -> None:
    assert "served" in train(tmp_path, 4, SERVES)
