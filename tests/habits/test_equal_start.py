"""Ranks that build their models without a seed start from equal values all the same, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.habits.plans import NAMES, run

pytestmark = pytest.mark.procs

UNSEEDED = """
import logging, os
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger("meshwright").addHandler(handler)
rank = int(os.environ["RANK"])

def built(seed):
    torch.manual_seed(seed)
    model = Net()
    model.register_buffer("scale", torch.full((3,), 2.0 + seed))
    return model

def of_all(model, x):
    return model(x) * model.scale.sum()

def scaled(model, batch):
    return F.cross_entropy(of_all(model, batch["x"]), batch["y"])
"""
BROADCAST = (
    UNSEEDED
    + """
twin = built(1)
step = mw.train_step(built(rank), adamw, batches()[0], loss=scaled, broadcast=1, **PLAN)
assert len([w for w in heard if "differed" in w]) == (rank == 0), heard
assert rank or any("5 of 7 parameters and buffers differed" in each for each in heard), heard
optimizer = adamw(twin.parameters())
for batch in batches():
    expected = scaled(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach())
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.state_dict().items())

heard.clear()
mw.train_step(built(5), adamw, batches()[0], loss=scaled, broadcast=False, **PLAN)
assert not [w for w in heard if "differed" in w], heard
try:
    mw.train_step(built(rank), adamw, batches()[0], loss=scaled, broadcast=False, **PLAN)
except mw.MeshwrightError as error:
    assert "up.weight differs from rank 0 on 1 of 2 ranks" in str(error), error
else:
    raise AssertionError("not refused")
mw.shutdown()
"""
)
OTHERS = (
    UNSEEDED
    + """
expected = of_all(built(0), batches()[0]["x"])
own = built(rank).eval()
given = mw.forward_step(own, batches()[0]["x"], outputs=of_all, mesh={"dp": 2})
assert close(given(batches()[0]["x"]), expected.detach())
assert len([w for w in heard if "differed" in w]) == (rank == 0), heard

step = mw.manual_step(built(rank), adamw, loss=scaled, mesh={"dp": 2}, local_parameters=["norm.*"])
twin, mine = built(0), built(rank)
for name, value in step.model.state_dict().items():
    assert torch.equal(value, (mine if name.startswith("norm.") else twin).state_dict()[name]), name
try:
    mw.manual_step(built(rank), adamw, loss=scaled, mesh={"dp": 2}, broadcast=False)
except mw.MeshwrightError as error:
    assert "differs from rank 0" in str(error), error
else:
    raise AssertionError("not refused")
mw.shutdown()
"""
)


@pytest.mark.parametrize("plan", [*NAMES, "pipeline"])
@quick(lambda plan: plan != "dp")
def test_models_without_a_seed_train_as_one(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, BROADCAST)


def test_other_steps_start_equal_too(tmp_path: Path) -> None:
    run(tmp_path, "dp", OTHERS)
