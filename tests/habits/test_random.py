"""Random numbers in forward: with ``exact_random="torch"`` those of plain PyTorch after `torch.manual_seed`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.habits.plans import NAMES, run

pytestmark = pytest.mark.procs

MODELS = """
import os

class Coder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x):
        code = self.drop(torch.relu(self.up(x)))
        noise = torch.randn_like(code) + torch.rand(code.shape[0], 1) + torch.empty_like(code).normal_(1.0, 0.5)
        kept = torch.bernoulli(torch.sigmoid(code).detach()) * torch.empty_like(code).bernoulli_(0.7)
        order = torch.randperm(code.shape[1])
        return self.down((code + 0.1 * noise * kept)[:, order] * torch.randint(1, 4, code.shape))

def code_loss(model, batch):
    return F.mse_loss(F.dropout(model(batch["x"]), 0.1), batch["x"])
"""

TRAIN = (
    MODELS
    + """
torch.manual_seed(0)
model = Coder()
twin = copy.deepcopy(model)
before = torch.get_rng_state()
step = mw.train_step(model, adamw, batches()[0], loss=code_loss, exact_random="torch", **PLAN)
assert torch.equal(before, torch.get_rng_state()), "building a step draws nothing"
losses = [step(batch) for batch in batches()]
torch.set_rng_state(before)
optimizer = adamw(twin.parameters())
for batch, found in zip(batches(), losses, strict=True):
    expected = code_loss(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(found, expected.detach()), (found, expected)
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
torch.manual_seed(int(os.environ["RANK"]))
try:
    step(batches()[0])
except mw.errors.RunError as error:
    assert "random states of torch differ between ranks" in str(error)
else:
    raise AssertionError("ranks drew other numbers")
mw.shutdown()
"""
)


@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan == "tp")
def test_the_numbers_of_plain_pytorch(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, TRAIN)


SAVED = (
    MODELS
    + """
torch.manual_seed(0)
ranks = int(os.environ["WORLD_SIZE"])
model = Coder()
twin = copy.deepcopy(model)
before = torch.get_rng_state()
step = mw.train_step(model, adamw, batches()[0], loss=code_loss, exact_random="torch", mesh={"dp": ranks})
if ranks == 2:
    step.load("../alone/ckpt")
    found = [step(batch) for batch in batches()[2:]]
    torch.set_rng_state(before)
    optimizer = adamw(twin.parameters())
    for number, batch in enumerate(batches()):
        expected = code_loss(twin, batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert number < 2 or close(found[number - 2], expected.detach()), number
else:
    for batch in batches()[:2]:
        step(batch)
    step.save("ckpt")
mw.shutdown()
"""
)


def test_more_ranks_go_on_with_the_numbers_of_plain_pytorch(tmp_path: Path) -> None:
    for ranks, name in ((1, "alone"), (2, "two")):
        (tmp_path / name).mkdir()
        run(tmp_path / name, "dp", SAVED, ranks=ranks)


REFUSED = (
    MODELS
    + """
torch.manual_seed(0)
for more, word in (({"micro_batches": 2}, "micro_batches=2"), ({"pipeline": 2, "micro_batches": 2}, "pipeline=2")):
    try:
        mw.train_step(Coder(), adamw, batches()[0], loss=code_loss, exact_random="torch", mesh={"dp": 1}, **more)
    except mw.errors.RunError as error:
        assert word in str(error) and "exact_random=True" in str(error)
    else:
        raise AssertionError(word)
mw.shutdown()
"""
)


def test_draws_in_another_order_are_refused(tmp_path: Path) -> None:
    run(tmp_path, "dp", REFUSED)
