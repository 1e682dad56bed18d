"""What a user does between steps with `step.optimizer`'s parameters: the same under every plan, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.habits.plans import NAMES, run

pytestmark = pytest.mark.procs

CHANGES = """
def of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]

@torch.no_grad()
def clamp(ps):
    for p in ps: p.clamp_(-0.1, 0.1)

def clamp_data(ps):
    for p in ps: p.data.clamp_(-0.1, 0.1)

def replace_data(ps):
    for p in ps: p.data = p.data * 0.9

@torch.no_grad()
def decay(ps):
    torch._foreach_mul_(ps, 0.9)

for change in (clamp, clamp_data, replace_data, decay):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer = adamw(twin.parameters())
    step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
    held = None
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        expected = loss(twin, batch)
        expected.backward()
        optimizer.step()
        assert close(step(batch), expected.detach()), (change.__name__, number)
        held = held or of(step.optimizer)  # kept from the first step on
        change(of(optimizer))
        change(held if number % 2 else list(step.parameters.values()))
    evaluate = step.forward_step(twin, batch, outputs=lambda model, batch: model(batch["x"]))
    assert close(evaluate(batch), twin(batch["x"]).detach())
    found = step.full_state()
    assert all(close(found[name], value) for name, value in twin.state_dict().items()), change.__name__
mw.shutdown()
"""

NORMS = """
torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
for batch in batches(2):
    optimizer.zero_grad()
    loss(twin, batch).backward()
    optimizer.step()
    step(batch)
grads = {name: p.grad for name, p in twin.named_parameters()}
found = step.gradient_norms()
assert found.keys() == grads.keys()
assert all(close(found[name], gradient.norm()) for name, gradient in grads.items())

LOOKS = {
    "norm": lambda p: p.norm(),
    "of the gradient": lambda p: p.grad.norm(),
    "of data": lambda p: p.data.square().sum().sqrt(),
    "largest": lambda p: p.detach().abs().max(),
    "linalg": lambda p: torch.linalg.vector_norm(p),
    "clip": lambda p: torch.nn.utils.clip_grad_norm_([p], 1e9),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]).sum(),
}
refused = 0
for name, p in step.parameters.items():
    for what, look in LOOKS.items():
        try:
            value = look(p)
        except mw.RunError as error:
            assert name in str(error) and "step.gradient_norms()" in str(error)
            refused += 1
        else:
            assert close(value, look(twin.get_parameter(name)).detach()), (name, what)
print("refused", refused)
import io
shard = step.parameters["up.weight"]

file = io.BytesIO()
torch.save({"mine": shard, "grad": shard.grad, "optimizer": step.optimizer.state_dict()}, file)
file.seek(0)
read = torch.load(file, weights_only=True)
assert type(read["mine"]) is torch.nn.Parameter and type(read["grad"]) is torch.Tensor
mw.shutdown()
"""


@pytest.mark.parametrize("plan", [*NAMES, "zero1", "zero2", "host"])
@quick(lambda plan: plan in ("zero2", "host"))
def test_changes_of_shards_between_steps_count(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, CHANGES)


@pytest.mark.parametrize("plan", [*NAMES, "zero1"])
@quick(lambda plan: plan in ("tp", "zero1"))
def test_norms_of_shards_are_refused_or_right(tmp_path: Path, plan: str) -> None:
    refused = int(run(tmp_path, plan, NORMS).split()[-1])
    assert (refused > 0) == (plan != "dp") or plan == "auto"
