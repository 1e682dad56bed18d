"""A script without any habit: the base that the others of this folder vary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.habits.plans import NAMES, run

pytestmark = pytest.mark.procs

TRAIN = """
torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
for batch in batches():
    expected = loss(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach()), step.plan
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
mw.shutdown()
"""


@pytest.mark.parametrize("plan", [*NAMES, "zero1", "zero2", "pipeline"])
def test_training_equals_plain_pytorch(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, TRAIN)
