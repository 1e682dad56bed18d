"""Accumulation over micro-batches, and what the host keeps, on real ranks over gloo: the numbers of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.breadth import quick
from tests.runtime.test_processes import succeed

pytestmark = pytest.mark.procs

BODY = """
from meshwright.examples import recommender
model, batch, loss = {"gpt": gpt, "recommender": recommender}[MODEL].build(batch=12)
model = model.double()
if MODEL == "gpt":  # labels that count: none in one example, few in another
    batch["targets"][0] = -100
    batch["targets"][1, 2:] = -100
else:
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
losses, expected = reference(model, batch, loss)
for name in ON_HOST:
    mw.on_host(model.get_submodule(name))
mode = "sharding_propagation" if PINS else "data_parallel"
step = mw.train_step(model, adamw, batch, loss=loss, mesh=MESH, mode=mode, pins=PINS, **TECHNIQUES)
found = [step(batch).item() for _ in range(3)]
state = step.full_state()
worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses))
drift = max(((state[n] - p).abs().max() / p.abs().max()).item() for n, p in expected.items())
assert worst < 1e-12 and drift < 1e-11, (worst, drift)
assert bool(step.plan.hosts) == bool(ON_HOST)
print(f"loss {worst:.1e} parameters {drift:.1e}")
mw.shutdown()
"""
CUT = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}}


def train(
    folder: Path,
    mesh: dict[str, int],
    techniques: dict[str, Any],
    pins: dict[str, Any] | None = None,
    *,
    model: str = "gpt",
    on_host: tuple[str, ...] = (),
) -> None:
    settings = f"MESH, TECHNIQUES, PINS = {mesh!r}, {techniques!r}, {pins!r}\n"
    settings += f"MODEL, ON_HOST = {model!r}, {on_host!r}\n"
    ranks = 1
    for size in mesh.values():
        ranks *= size
    assert "loss" in succeed(folder, ranks, settings + BODY)


@pytest.mark.parametrize(
    ("mesh", "pins", "techniques"),
    [
        ({"dp": 2}, None, {"micro_batches": 3}),
        ({"dp": 2, "tp": 2}, CUT, {"micro_batches": 2}),
        ({"dp": 2}, None, {"micro_batches": 2, "optimizer_parallel": 2, "gradient_accumulation_shard": True}),
        ({"dp": 2}, None, {"micro_batches": 2, "optimizer_parallel": 3}),
    ],
    ids=("dp", "dp and tp", "sums in parts", "weights in parts"),
)
@quick(lambda mesh, techniques, **_: "tp" in mesh or "gradient_accumulation_shard" in techniques)
def test_micro_batches_train_as_one_device(
    tmp_path: Path, mesh: dict[str, int], pins: dict[str, Any] | None, techniques: dict[str, Any]
) -> None:
    sharded = {"threshold_kb": 0} if "optimizer_parallel" in techniques else {}
    train(tmp_path, mesh, {**techniques, **sharded}, pins)


def test_an_optimizer_on_the_host_trains_as_one_device(tmp_path: Path) -> None:
    train(tmp_path, {"dp": 2}, {"offload": "optimizer"})


def test_a_table_on_the_host_trains_as_one_device(tmp_path: Path) -> None:
    train(tmp_path, {"dp": 2}, {}, model="recommender", on_host=("deep_tables.0",))
