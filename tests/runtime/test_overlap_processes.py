"""Real ranks over gloo: what starts early and goes together ends in the numbers of one device, without a deadlock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.runtime.test_processes import succeed

pytestmark = pytest.mark.procs

BODY = """
from meshwright.examples import llama
config = llama.LlamaConfig(48, 24, 48, 2, 4, 2, 8)
model, batch, loss = llama.build(config, batch=8)
model = model.double()
losses, expected = reference(model, batch, loss)
pins = {"*.attention.q": {"n": "tp"}, "*.up": {"n": "tp"}} if "tp" in MESH else None
mode = "sharding_propagation" if pins else "data_parallel"
step = mw.train_step(model, adamw, batch, loss=loss, mesh=MESH, mode=mode, pins=pins, **TECHNIQUES)
found = [step(batch).item() for _ in range(3)]
state = step.full_state()
worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses))
drift = max(((state[n] - p).abs().max() / p.abs().max()).item() for n, p in expected.items())
starts = sum(n.op == "meshwright.start" for n in step.local.graph.nodes)
assert starts > 1, starts
assert worst < 1e-12 and drift < 1e-11, (worst, drift)
print(f"loss {worst:.1e} parameters {drift:.1e}, {starts} starts")
mw.shutdown()
"""


@pytest.mark.parametrize(
    ("ranks", "mesh", "techniques"),
    [
        (2, {"dp": 2}, {"optimizer_parallel": 3, "threshold_kb": 0}),
        (2, {"dp": 2}, {"optimizer_parallel": 3, "threshold_kb": 0, "fusion": 0}),
        (2, {"tp": 2}, {"interleave": 2}),
        (4, {"dp": 2, "tp": 2}, {"optimizer_parallel": 3, "threshold_kb": 0, "interleave": 2}),
    ],
)
@quick(lambda ranks, techniques, **_: ranks == 2 and "interleave" in techniques)
def test_flights_between_processes(
    tmp_path: Path, ranks: int, mesh: dict[str, int], techniques: dict[str, int]
) -> None:
    settings = f"MESH, TECHNIQUES = {mesh!r}, {techniques!r}\n"
    assert "starts" in succeed(tmp_path, ranks, settings + BODY)
