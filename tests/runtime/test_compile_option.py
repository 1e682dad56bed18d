"""`mw.train_step(…, compile=True)` trains as without it: random numbers, buffers, what is recomputed, what is sent.

The compiler traces as ever; its backend runs the operators one by one, so that numbers are equal and no C++ compiler is
needed. On ranks it differentiates what it has traced, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.examples import gpt, recommender, zoo
from meshwright.runtime import compiled
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import quick
from tests.runtime.test_processes import succeed

# The compiler looks at values between its pieces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt": (gpt.build, {}),
    "micro-batches": (lambda: gpt.build(batch=4), {"micro_batches": 2}),
    "recomputed": (gpt.build, {"recompute": "full"}),
    "offloaded": (gpt.build, {"offload": ("activations", "optimizer")}),
    "dropout": (lambda: zoo.hugging_face("bert", dropout=0.1), {}),
    "recomputed dropout": (lambda: zoo.hugging_face("bert", dropout=0.1), {"recompute": "selective"}),
    "batch norm": (lambda: zoo.hugging_face("resnet"), {}),
    "recommender": (recommender.build, {}),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of the compiler, by the operators of what it compiled."""
    sizes: list[int] = []

    def counted(module: Any, inputs: Any) -> Any:
        sizes.append(len(module.graph.nodes))
        return module.forward

    monkeypatch.setattr(compiled, "BACKEND", counted)
    return sizes


@pytest.mark.parametrize("name", CASES)
@quick(lambda name, **_: name in ("gpt", "dropout"))
def test_a_compiled_step_trains_as_one_that_is_not(name: str, backend: list[int]) -> None:
    build, asked = CASES[name]
    found = []
    for compiles in (False, True):
        model, batch, loss = build()
        step = mw.train_step(model, adamw, batch, loss=loss, mesh=1, compile=compiles, **asked)
        assert bool(backend) is False
        found.append(([step(batch).item() for _ in range(3)], step.full_state()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-6)
    assert sum(backend) > 5, "nothing was compiled"


def test_each_shape_is_compiled_once(backend: list[int]) -> None:
    model, batch, loss = gpt.build(batch=4)
    step = mw.train_step(model, adamw, batch, loss=loss, mesh=1, compile=True)
    for _ in range(3):
        step(batch)
    once = len(backend)
    half = {name: x[:2] for name, x in batch.items()}
    step(half)
    assert len(backend) == 2 * once
    step(batch)
    step(half)
    assert len(backend) == 2 * once


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_piece_ends_with_each_layer_where_gradients_are_reduced(ranks: int, backend: list[int]) -> None:
    model, batch, loss = gpt.build(gpt.GPTConfig(layers=3), batch=4)
    captured = captured_of(model, batch, loss)
    parts = lower(captured, plan_captured(captured, {"dp": ranks}, "data_parallel", None))
    rank = Rank(Counter(parts.plan.mesh, 0), torch.device("cpu"), compiles=True)
    LocalStep(parts, rank, values_of(model, captured), None).gradients(dict(leaves(batch)))
    assert sum(size > 10 for size in backend) == (1 if ranks == 1 else 3)


def test_anomalies_are_found_in_programs_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model, batch, loss = gpt.build()
    step = mw.train_step(model, adamw, batch, loss=loss, mesh=1, compile=True)
    step(batch)
    assert sum("compiling a program" in line for line in caplog.messages) == 1
    assert step.find_anomaly(batch) is None
    with step.full() as full, torch.no_grad():
        full.blocks[0].up.weight.fill_(3e38)
    found = step.find_anomaly(batch)
    assert found is not None and (found.phase, found.kind) == ("forward", "inf")
    assert found.op == "aten.linear.default" and "gpt.py" in found.source


BODY = """
from meshwright.runtime import compiled
compiled.BACKEND = "aot_eager"
model, batch, loss = gpt.build(batch=8)
model = model.double()
losses, expected = reference(model, batch, loss)
mode = "sharding_propagation" if PINS else "data_parallel"
step = mw.train_step(model, adamw, batch, loss=loss, mesh=MESH, mode=mode, pins=PINS, compile=True, **TECHNIQUES)
found = [step(batch).item() for _ in range(3)]
state = step.full_state()
worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses))
drift = max(((state[n] - p).abs().max() / p.abs().max()).item() for n, p in expected.items())
assert worst < 1e-12 and drift < 1e-11, (worst, drift)
print(f"loss {worst:.1e} parameters {drift:.1e}")
mw.shutdown()
"""
CUT = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}


@pytest.mark.full  # the first test has one rank, test_compile.py a program with collectives
@pytest.mark.procs
@pytest.mark.parametrize(
    ("mesh", "pins", "techniques"),
    [
        ({"dp": 2}, None, {}),
        ({"tp": 2}, CUT, {}),
        ({"dp": 2}, None, {"optimizer_parallel": 3, "threshold_kb": 0, "micro_batches": 2}),
        ({"dp": 2}, None, {"optimizer_parallel": 3, "threshold_kb": 0, "prefetch": 1}),
        ({"pp": 2}, None, {"pipeline": 2, "micro_batches": 4}),
        ({"pp": 2}, None, {"pipeline": 2, "micro_batches": 4, "schedule": "zero_bubble"}),
    ],
    ids=("dp", "tp", "zero 3", "prefetched", "pipeline", "zero bubble"),
)
def test_ranks_that_compile_train_as_one_device(
    tmp_path: Path, mesh: dict[str, int], pins: Any, techniques: dict[str, Any]
) -> None:
    settings = f"MESH, TECHNIQUES, PINS = {mesh!r}, {techniques!r}, {pins!r}\n"
    assert "loss" in succeed(tmp_path, 2, settings + BODY)
