"""What is done around a gradient: its norm, accumulation over calls, a scaled loss, steps that are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.habits.plans import NAMES, run

pytestmark = pytest.mark.procs
EACH = [*NAMES, "zero1", "zero2", "pipeline"]

ACCUMULATED = """
import math
torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, clip_norm=0.1, **PLAN)
first, second, third, last = batches(4)
for group, limit in (([first], 0.1), ([second, third, last], 0.02), ([second, first], math.inf)):
    step.clip_norm = limit
    optimizer.zero_grad()
    for batch in group:
        expected = loss(twin, batch)
        expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), limit)
    optimizer.step()
    *before, end = group
    for batch in before[1:]:
        step(batch, update=False)
    with step.no_sync():
        for batch in before[:1]:
            step(batch)
    if before:
        try:
            step.gradients(end)
            raise SystemExit("gradients() replaced those that wait")
        except mw.RunError as error:
            assert "wait for an update" in str(error)
        try:
            step({"x": end["x"]})
            raise SystemExit("took a batch without labels")
        except mw.MeshwrightError:
            pass
    assert close(step(end), expected.detach()), step.plan
    assert close(step.grad_norm, norm), (step.grad_norm, norm)
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
assert step.steps == 3

before = {n: x.clone() for n, x in step.full_state().items()}
step.clip_norm = 0.1
step(first, update=False)
step.optimizer.zero_grad()
assert all(close(x, before[n]) for n, x in step.full_state().items())
optimizer.zero_grad()
loss(twin, last).backward()
torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
optimizer.step()
step(last)
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters()), "dropped gradients were added"
mw.shutdown()
"""


@pytest.mark.parametrize("plan", EACH)
@quick(lambda plan: plan in ("tp", "zero2", "pipeline"))
def test_gradients_add_up_over_calls_and_their_norm_is_known(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, ACCUMULATED)


SCALED = """
import math
torch.manual_seed(0)
made = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
mine, theirs = made
step = mw.train_step(model, adamw, batches()[0], loss=loss, clip_norm=0.1, scaler=mine, **PLAN)
for number, batch in enumerate(batches(6)):
    if number in (1, 4):
        batch["x"][7] = math.inf  # the examples of the last rank alone
    optimizer.zero_grad()
    theirs.scale(loss(twin, batch)).backward()
    theirs.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    theirs.step(optimizer)
    theirs.update()
    step(batch)
    assert mine.get_scale() == theirs.get_scale(), number
    assert mine.state_dict() == theirs.state_dict()
    assert close(step.grad_norm, norm) or not norm.isfinite()
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
assert step.skipped == 2 and step.steps == 6

torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, skip_nonfinite=True, **PLAN)
for number, batch in enumerate(batches(3)):
    if number == 1:
        batch["x"][0] = math.nan
    else:
        optimizer.zero_grad()
        loss(twin, batch).backward()
        optimizer.step()
    step(batch)
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
assert step.skipped == 1
try:
    step.grad_norm
    raise SystemExit("a norm that nobody computed")
except mw.RunError as error:
    assert "clip_norm=" in str(error)
mw.shutdown()
"""


@pytest.mark.parametrize("plan", EACH)
@quick(lambda plan: plan in ("tp", "zero2"))
def test_a_scaled_loss_and_steps_left_out_are_those_of_plain_pytorch(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, SCALED)


KEPT = """
import io, logging, math
heard = io.StringIO()
logging.getLogger("meshwright").addHandler(logging.StreamHandler(heard))
torch.manual_seed(0)
step = mw.train_step(Net(), adamw, batches()[0], loss=loss, **PLAN)
autosave = mw.Autosave(step, "ckpt", every=1, keep=1)
assert step.optimizer.param_groups[0]["lr"] > 0 and step.parameters  # as a schedule does
first, second, *_ = batches()
step(first)
autosave()
kept = {n: x.clone() for n, x in step.full_state().items()}
second["x"][-1] = math.nan
step(second)
autosave()
autosave.close()
assert ("not finite after step 2" in heard.getvalue()) == (step.rank == 0), heard.getvalue()
assert step.resume("ckpt").step == 1
assert all(torch.equal(x, kept[n]) for n, x in step.full_state().items())
mw.shutdown()
"""


@pytest.mark.parametrize("plan", ["tp", "zero1", "pipeline"])
@quick(lambda plan: plan == "zero1")
def test_autosave_keeps_the_last_finite_checkpoint(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, KEPT)


HALF = """
torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)

def of(model, batch):
    with torch.autocast("cpu", torch.float16):
        out = model(batch["x"])
    return F.cross_entropy(out.float(), batch["y"]) * batch["weight"]

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)

def scaler():
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

# The second overflows float16.
every = [{**b, "weight": torch.tensor(1e6 if n == 1 else 1.0)} for n, b in enumerate(batches(6))]
optimizer, theirs, mine = sgd(twin.parameters()), scaler(), scaler()
step = mw.train_step(model, sgd, every[0], loss=of, scaler=mine, **PLAN)
for batch in every:
    expected = of(twin, batch)
    optimizer.zero_grad()
    theirs.scale(expected).backward()
    theirs.step(optimizer)
    theirs.update()
    assert close(step(batch), expected.detach(), 1e-4)
    assert mine.get_scale() == theirs.get_scale()
assert step.skipped == 1 and theirs.get_scale() == 256.0
for name, value in step.full_state().items():
    assert close(value, twin.state_dict()[name], 1e-4), name
mw.shutdown()
"""


@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan == "tp")
def test_float16_with_a_scaler_skips_what_overflows_on_all_ranks(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, HALF)
