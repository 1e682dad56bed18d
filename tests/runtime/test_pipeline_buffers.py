"""Buffers that a step changes, and tensors that evaluation reads in another stage than training, over the stages of a
pipeline: the numbers of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import first
from tests.ranks import run_warm

pytestmark = pytest.mark.procs

SCRIPT = """
import copy, torch
import meshwright as mw
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from tests.layers import Layers

class Scaled(Layers):
    '''Every layer reads a buffer, which the last one changes.'''

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x + self.scale))
        if self.training:
            self.scale.mul_(0.9).add_(x.detach().square().mean(0), alpha=0.1)
        return x

class Moved(Scaled):
    '''The first operator changes the buffer that every layer reads.'''

    def forward(self, x):
        if self.training:
            self.scale.mul_(1.5)
        for layer in self.layers:
            x = x + torch.tanh(layer(x + self.scale))
        return x

class Averaged(torch.nn.Module):
    '''Each layer has an average of its own, and a count.'''

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        out = x + h - self.mean
        if self.training:
            self.seen.add_(1)
            share = 1.0 / self.seen.to(h.dtype)
            self.mean.copy_(self.mean * (1 - share) + h.detach().mean(0) * share)
        return out

def averaged():
    return torch.nn.Sequential(*(Averaged() for _ in range(4)))

def normed():
    linears = (torch.nn.Linear(6, 6) for _ in range(4))
    return torch.nn.Sequential(*(f(x) for f, x in zip((weight_norm, spectral_norm) * 2, linears)))

def loss(model, x):
    return model(x).square().mean()

torch.manual_seed(0)
model = (MODEL)().double()
twin = copy.deepcopy(model)
batch = torch.randn(8, 6, dtype=torch.float64)
optimizer = torch.optim.SGD(twin.parameters(), 0.1)
step = mw.train_step(model, lambda p: torch.optim.SGD(p, 0.1), batch, loss=loss, mesh={"dp": 1}, OPTIONS)
for _ in range(3):
    optimizer.zero_grad()
    wanted = loss(twin, batch)
    wanted.backward()
    optimizer.step()
    found = step(batch)
    assert torch.allclose(found, wanted), (found, wanted)
state = step.full_state()
assert all(torch.allclose(state[n], x) for n, x in twin.state_dict().items())
evaluate = step.forward_step(model.eval(), batch, outputs=loss)
with torch.no_grad():
    assert torch.allclose(evaluate(batch), loss(twin.eval(), batch))
model.train(), twin.train()
step(batch)
twin.load_state_dict(step.full_state())
with torch.no_grad():  # what is lent is the newest
    assert torch.allclose(evaluate(batch), loss(twin.eval(), batch))
mw.shutdown()
"""
PLANS = (
    "pipeline=2, micro_batches=2",
    'pipeline=4, micro_batches=4, schedule="zero_bubble_v"',
    'pipeline=4, micro_batches=2, schedule="interleaved"',
)


@pytest.mark.parametrize("options", PLANS)
@pytest.mark.parametrize("model", first(2, ("Scaled", "averaged", "Moved", "normed")))
def test_buffers_of_stages_have_the_values_of_one_device(tmp_path: Path, model: str, options: str) -> None:
    done = run_warm(tmp_path, 2, SCRIPT.replace("MODEL", model).replace("OPTIONS", options))
    assert done.returncode == 0, done.stderr


AVERAGED = """
import copy, torch
import meshwright as mw

def loss(model, batch):
    return model(batch).square().sum(-1).mean()

torch.manual_seed(0)
norms = (torch.nn.BatchNorm1d(6, momentum=None) for _ in range(4))
model = torch.nn.Sequential(*(m for norm in norms for m in (torch.nn.Linear(6, 6), norm, torch.nn.Tanh()))).double()
twin = copy.deepcopy(model)
optimizer = torch.optim.SGD(twin.parameters(), 0.1)
batches = torch.randn(3, 8, 6, dtype=torch.float64)
step = mw.train_step(model, lambda p: torch.optim.SGD(p, 0.1), batches[0], loss=loss, OPTIONS)
count = step.plan.techniques.micro_batches
for batch in batches:
    optimizer.zero_grad()
    for part in batch.chunk(count):
        (loss(twin, part) / count).backward()
    optimizer.step()
    step(batch)
state = step.full_state()
assert all(torch.allclose(state[n], x) for n, x in twin.state_dict().items())
mw.shutdown()
"""


@pytest.mark.parametrize(
    "options", ["mesh=2", "mesh=2, micro_batches=2", *(f'mesh={{"dp": 1}}, {p}' for p in PLANS[::2])]
)
def test_averages_over_all_batches_are_those_of_accumulation(tmp_path: Path, options: str) -> None:
    done = run_warm(tmp_path, 2, AVERAGED.replace("OPTIONS", options))
    assert done.returncode == 0, done.stderr


MODES = """
import copy, torch
import meshwright as mw
nn = torch.nn

def block():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())

def loss(model, x):
    return model(x).square().mean()

torch.manual_seed(0)
model = nn.Sequential(*(block() for _ in range(4)), nn.Linear(6, 1)).double()
twin = copy.deepcopy(model)
batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(2)]
optimizer = torch.optim.SGD(twin.parameters(), 0.1)
step = mw.train_step(model, lambda p: torch.optim.SGD(p, 0.1), batches[0], loss=loss, mesh={"dp": 1}, OPTIONS)
for number in range(8):
    for one in (model, twin):
        one.train(number != 5)  # all norms
        for norm in (m for m in one.modules() if isinstance(m, nn.BatchNorm1d)):
            norm.train(number % 3 == 0)
    batch = batches[number % 2]
    optimizer.zero_grad()
    wanted = 0
    for piece in batch.chunk(step.plan.techniques.micro_batches):  # statistics are those of each
        part = loss(twin, piece) * len(piece) / len(batch)
        part.backward()
        wanted += part.detach()
    optimizer.step()
    found = step(batch)
    assert torch.allclose(found, wanted), (number, found, wanted)
state = step.full_state()
assert all(torch.allclose(state[n], x) for n, x in twin.state_dict().items())
mw.shutdown()
"""


@pytest.mark.parametrize("options", first(1, PLANS))
@pytest.mark.parametrize("momentum", (0.1, None))
def test_norms_change_their_mode_between_steps(tmp_path: Path, momentum: float | None, options: str) -> None:
    """The norm of another mode is another operator, of the same module and so of the same stage. It may not read the
    count of batches, which stays where it is."""
    script = MODES.replace("BatchNorm1d(6)", f"BatchNorm1d(6, momentum={momentum})")
    done = run_warm(tmp_path, 2, script.replace("OPTIONS", options))
    assert done.returncode == 0, done.stderr
