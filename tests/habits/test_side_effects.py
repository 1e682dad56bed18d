"""What a loss or a model does beside computing is refused when it is captured, with its line, and put back."""

from __future__ import annotations

import functools
import os
import random
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.capture import capture
from tests.breadth import quick
from tests.habits.plans import NAMES, Doing, Net, batches, loss, run

BATCH = batches()[0]
COUNT = 0
HISTORY: list[Any] = []
FILE = Path()
RNG = np.random.default_rng(0)
NOW, PICK = datetime.now, secrets.SystemRandom().choice


class Busy(Doing):
    """A net whose forward does something else, too."""

    def __init__(self, what: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(what)
        self.calls, self.log, self.seen = 0, [], {"last": 0}
        self.cache: torch.Tensor | None = None
        self.mask = torch.ones(8)
        self.clock, self.rng = time.time, random.Random(0)
        self.register_buffer("mean", torch.zeros(8))


def count(model: Any, out: torch.Tensor) -> None:
    model.calls += 1


def note(model: Any, out: torch.Tensor) -> None:
    model.log.append(1)


def remember(model: Any, out: torch.Tensor) -> None:
    model.seen["last"] = 1


def keep(model: Any, out: torch.Tensor) -> None:
    model.cache = out if model.cache is None else model.cache + out


def reassign(model: Any, out: torch.Tensor) -> None:
    model.mean = 0.9 * model.mean + 0.1 * out.detach().mean(0)


def add(model: Any, out: torch.Tensor) -> None:
    model.mask.add_(1)


def count_globally(model: Any, out: torch.Tensor) -> None:
    global COUNT
    COUNT += 1


def note_globally(model: Any, out: torch.Tensor) -> None:
    HISTORY.append(out)


def draw(model: Any, out: torch.Tensor) -> float:
    return random.random()


def draw_of_numpy(model: Any, out: torch.Tensor) -> float:
    return float(np.random.rand())


def draw_of_a_generator(model: Any, out: torch.Tensor) -> float:
    return float(RNG.random())


def draw_unseeded(model: Any, out: torch.Tensor) -> float:
    return float(np.random.default_rng().random())


def read_clock(model: Any, out: torch.Tensor) -> float:
    return time.time() % 1


def import_a_clock(model: Any, out: torch.Tensor) -> float:
    from time import perf_counter as now

    return now() % 1


def read_a_kept_clock(model: Any, out: torch.Tensor) -> float:
    return model.clock() % 1


def read_the_date(model: Any, out: torch.Tensor) -> float:
    return NOW().second / 60


def draw_of_a_kept_generator(model: Any, out: torch.Tensor) -> float:
    return model.rng.gauss(0, 1)


def draw_of_the_system(model: Any, out: torch.Tensor) -> float:
    return PICK([1.0, 2.0]) * uuid.uuid4().int % 7


def read_a_file(model: Any, out: torch.Tensor) -> float:
    return float(len(Path(__file__).read_text()))


def load_a_file(model: Any, out: torch.Tensor) -> float:
    return float(np.load(FILE)[0])


def read_the_process(model: Any, out: torch.Tensor) -> float:
    return float(os.getpid())


def ask_the_network(model: Any, out: torch.Tensor) -> None:
    with socket.socket() as found:
        found.setblocking(False)


def import_random(model: Any, out: torch.Tensor) -> float:
    import secrets

    return float(secrets.randbelow(5))


def read_a_built_name(model: Any, out: torch.Tensor) -> float:
    return float(os.environ.get("SCALE_" + str(model.calls), "1"))


def seed(model: Any, out: torch.Tensor) -> None:
    torch.manual_seed(3)


def hook(model: Any, out: torch.Tensor) -> None:
    out.register_hook(lambda g: g * 2)


def grad(model: Any, out: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(out.sum(), out, create_graph=True)[0]


def backward(model: Any, out: torch.Tensor) -> None:
    out.sum().backward(retain_graph=True)


def read_data(model: Any, out: torch.Tensor) -> torch.Tensor:
    return out.data.mean()


def set_data(model: Any, out: torch.Tensor) -> None:
    out.data = out * 2


CASES = {
    count: ("model.calls: 0 → 1", "model.calls += 1"),
    note: ("model.log: [] → [1]", "model.log.append(1)"),
    remember: ("model.seen['last']: 0 → 1", 'model.seen["last"] = 1'),
    keep: ("model.cache: None → a tensor", "model.cache = out"),
    reassign: ("model.mean: another tensor", "model.mean = 0.9"),
    add: ("model.mask: values were changed in place", "model.mask.add_(1)"),
    count_globally: ("COUNT", "COUNT += 1"),
    note_globally: ("HISTORY", "HISTORY.append(out)"),
    draw: ("random numbers", "random.random()"),
    draw_of_numpy: ("random numbers", "np.random.rand()"),
    draw_of_a_generator: ("random numbers", "RNG.random()"),
    draw_unseeded: ("random numbers", "np.random.default_rng()"),
    read_clock: ("a clock is read", "time.time()"),
    import_a_clock: ("a clock is read", "now() % 1"),
    read_a_kept_clock: ("a clock is read", "model.clock() % 1"),
    read_the_date: ("a clock is read", "NOW().second"),
    draw_of_a_kept_generator: ("random numbers", "model.rng.gauss(0, 1)"),
    draw_of_the_system: ("random numbers", "PICK([1.0, 2.0])"),
    read_a_file: ("a file is opened", "read_text()"),
    load_a_file: ("a file is opened", "np.load(FILE)"),
    read_the_process: ("number of the process", "os.getpid()"),
    ask_the_network: ("the network is used", "setblocking(False)"),
    import_random: ("random numbers", "secrets.randbelow(5)"),
    read_a_built_name: ("the environment is read", 'os.environ.get("SCALE_"'),
    seed: ("a seed is set", "torch.manual_seed(3)"),
    hook: (r"register_hook() inside the loss", "test_side_effects.py:"),
    grad: (r"grad() inside the loss", "test_side_effects.py:"),
    read_data: (".data inside the loss", "test_side_effects.py:"),
    set_data: (".data inside the loss", "test_side_effects.py:"),
    backward: (r"backward() inside the loss", "test_side_effects.py:"),
}


@pytest.fixture(autouse=True)
def a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FILE", tmp_path / "table.npy")
    np.save(FILE, np.ones(2))


@pytest.mark.parametrize("what", CASES, ids=lambda what: what.__name__)
def test_a_side_effect_is_refused_with_its_line(what: Callable[..., Any]) -> None:
    model = Busy(what)
    held = [(m, dict(vars(m)), dict(vars(m)["_buffers"])) for m in model.modules()]
    states = random.getstate(), torch.get_rng_state(), RNG.bit_generator.state
    numpy = np.random.get_state()[1].copy()
    said, line = CASES[what]
    with pytest.raises(mw.CaptureError) as raised:
        capture(model, BATCH, loss)
    assert said in raised.value.what
    assert line in raised.value.where and "test_side_effects.py:" in raised.value.where
    assert raised.value.hint
    for module, attributes, buffers in held:
        assert list(vars(module).items()) == list(attributes.items())
        assert all(vars(module)["_buffers"][n] is x for n, x in buffers.items())
    assert (model.calls, model.log, model.seen, COUNT, HISTORY) == (0, [], {"last": 0}, 0, [])
    assert random.getstate() == states[0] and np.array_equal(np.random.get_state()[1], numpy)
    assert torch.equal(torch.get_rng_state(), states[1])


def test_of_the_loss() -> None:
    losses: list[Any] = []
    steps = 0

    def noted(model: Any, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        losses.append(value.detach())
        return value

    def counted(model: Any, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return loss(model, batch)

    with pytest.raises(mw.CaptureError, match=r"(?s)losses \(in the closure.*losses.append"):
        capture(Net(), BATCH, noted)
    with pytest.raises(mw.CaptureError, match=r"(?s)steps \(in the closure of counted\): 0 → 1.*steps \+= 1"):
        capture(Net(), BATCH, counted)
    with pytest.raises(mw.CaptureError, match="losses"):
        capture(Net(), BATCH, functools.partial(lambda m, b, f: f(m, b), f=noted))
    assert losses == [] and steps == 0


def test_the_line_that_changes_is_named_not_the_first_that_reads() -> None:
    def read_and_note(model: Any, out: torch.Tensor) -> None:
        if len(model.log) > 3:
            out = out * len(model.log)
        held = model.log.copy()
        model.log.append(len(held))

    def read_and_count(model: Any, out: torch.Tensor) -> Any:
        scale = model.seen["last"] + model.calls
        count(model, out)
        return scale

    for what, line in ((read_and_note, "model.log.append(len(held))"), (read_and_count, "model.calls += 1")):
        with pytest.raises(mw.CaptureError) as raised:
            capture(Busy(what), BATCH, loss)
        assert line in raised.value.where


def test_a_tensor_left_on_the_module_is_to_be_returned() -> None:
    with pytest.raises(mw.CaptureError) as raised:
        capture(Busy(keep), BATCH, lambda m, b: loss(m, b) + m.cache.mean())
    assert "return out, aux" in raised.value.hint


LEFT = """
class Leaving(Net):
    def __init__(self):
        super().__init__()
        self.attention, self.losses = None, []

    def forward(self, x):
        self.losses = []
        inner = torch.relu(self.norm(self.up(x)))
        self.losses.append(inner.square().mean())
        self.attention = inner.detach()
        self.aux_loss = inner.abs().mean()
        self.losses.append(self.aux_loss * 2)
        return self.down(inner)

def with_aux(model, batch):
    return loss(model, batch) + 0.1 * model.aux_loss + sum(model.losses) + model.attention.mean()

torch.manual_seed(0)
model = Leaving()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=with_aux, **PLAN)
for batch in batches() + [{name: x[:4] for name, x in batches()[0].items()}]:
    expected = with_aux(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach())
    assert not hasattr(model, "aux_loss") and model.attention is None and model.losses == []
assert any("model.aux_loss" in note and "(loss, outputs)" in note for note in step.plan.notes), step.plan.notes
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan == "tp")
def test_what_forward_leaves_for_the_loss_of_the_same_pass(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, LEFT)


def test_what_a_pass_reads_before_it_writes_is_refused() -> None:
    def old(model: Any, out: torch.Tensor) -> None:
        if not hasattr(model, "last"):
            model.last = out

    def listed(model: Any, out: torch.Tensor) -> None:
        model.log = [*model.log, out]

    def stale(model: Any, out: torch.Tensor) -> None:
        model.mask = out

    for what in (old, listed, stale):
        with pytest.raises(mw.CaptureError, match="changes a Python value"):
            capture(Busy(what), BATCH, loss)
        assert not hasattr(Busy, "last") and "mask" not in vars(Busy)


def test_what_changes_nothing_is_captured() -> None:
    """Branches that are not taken, local lists, buffers in place, and a capture that leaves lists as they were."""

    def harmless(model: Any, out: torch.Tensor) -> Any:
        if not model.training:
            model.calls += random.randint(1, 2)
        parts = []
        parts.append(out)
        generator = random.Random(3)
        with torch.no_grad():
            model.mean.lerp_(out.mean(0), 0.1)
        model.calls = 0
        return parts[0].mean() * generator.random()

    model = Busy(harmless).train()
    log = model.log
    captured = capture(model, BATCH, loss)
    assert [name for name, _ in captured.graph.mutations] == ["mean"]
    assert model.log is log


CALLS = """
class Counting(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

try:
    mw.train_step(Counting(), adamw, batches()[0], loss=loss, **PLAN)
    raise AssertionError
except mw.MeshwrightError as error:
    assert "model.calls: 0 → 1" in str(error) and "self.calls += 1" in str(error), error
assert not torch.distributed.is_initialized()
"""


@pytest.mark.procs
def test_it_is_refused_before_a_process_group_is_made(tmp_path: Path) -> None:
    run(tmp_path, "tp", CALLS)
