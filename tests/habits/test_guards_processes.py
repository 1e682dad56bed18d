"""Guards of a program on real ranks: a change is another program, or refused, on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.habits.plans import NAMES, run

CALLS = """
scale = {"now": 1.0}

def scaled(model, batch):
    return loss(model, batch) * scale["now"] * batch["weight"]

torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
examples = [{**b, "weight": 0.5} for b in batches()]
step = mw.train_step(model, adamw, examples[0], loss=scaled, **PLAN)

def same(batch):
    expected = scaled(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach())

same(examples[0])
same({**examples[1], "weight": 0.25})
scale["now"] = 2.0
same(examples[1])
scale["now"] = 1.0
same(examples[2])
handle = model.down.register_forward_hook(lambda *_: None)
try:
    step(examples[1])
    raise AssertionError
except mw.RunError as error:
    assert "hooks of model.down" in str(error)
handle.remove()
same(examples[1])
outputs = mw.forward_step(Net(), examples[0], outputs=lambda m, b: m(b["x"]) * scale["now"], mesh={"dp": 2})
scale["now"] = 3.0
try:
    outputs(examples[0])
    raise AssertionError
except mw.RunError as error:
    assert "1.0 → 3.0" in str(error)
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan == "tp")
def test_a_change_is_another_program_under_each_plan_or_refused(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, CALLS)


ALIASES = """
model = Net()
before = {"up.weight": model.up.weight.detach()}
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
step(batches()[0])
with step.full() as full:
    copied = {"down.weight": full.down.weight.detach()}

for shared in (before, copied):
    (name,) = shared
    def anchored(model, batch):
        return loss(model, batch) + (model.get_parameter(name) - shared[name]).square().sum()

    try:
        mw.train_step(model, adamw, batches()[0], loss=anchored, **PLAN)
        raise AssertionError(name)
    except (mw.CaptureError, mw.RunError) as error:  # rank 0's own, and what the others hear of it
        assert f"shares the memory of {name}" in str(error), error
    shared[name] = shared[name].clone()
    mw.train_step(model, adamw, batches()[0], loss=anchored, **PLAN)(batches()[1])
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan == "tp")
def test_memory_that_a_weight_has_given_up_is_refused_too(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, ALIASES)
