"""Predicted peaks against the allocator's own events over real ranks: what is sent lives no longer than is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import first

pytestmark = pytest.mark.procs

ROOT = Path(__file__).parents[2]
SCRIPT = """
import meshwright as mw, torch
from bench.memory import peak_bytes
from bench.ranks import on_ranks
from meshwright.examples import gpt
from meshwright.search.evaluate import peak_on

def step(techniques):
    model, batch, loss = gpt.build(gpt.GPTConfig(512, 128, 4, 4, 64), batch=8)
    adamw = lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)
    made = mw.train_step(model, adamw, batch, loss=loss, **HOW, **techniques)
    return (lambda: made(batch)), peak_on(made.parts, mw.Cluster.local(2), 2).bytes

def measure():
    found = []
    for techniques in TECHNIQUES:
        predicted = step(techniques)[1]
        found.append((str(techniques), peak_bytes(lambda: step(techniques)[0], steps=3), predicted))
    return found

if __name__ == "__main__":
    for name, measured, predicted in on_ranks(2, 1, measure):
        print(name, measured, predicted)
        assert abs(predicted / measured - 1) < 0.02, f"{name}: {measured} measured, {predicted} predicted"
"""
SHARED = {"micro_batches": 4, "gradient_accumulation_shard": True}
SPLIT = {"optimizer_parallel": 2, **SHARED}


@pytest.mark.parametrize(
    ("how", "techniques"),
    first(
        1,
        [
            ({"mesh": {"dp": 2}, "mode": "data_parallel"}, [{"optimizer_parallel": 2}, SPLIT]),
            (
                {"mesh": {"dp": 2}, "mode": "data_parallel"},
                [
                    {"optimizer_parallel": 3},
                    {"optimizer_parallel": 3, "recompute": "full", **SHARED},
                ],
            ),
        ],
    ),
    ids=("gradients in parts", "weights in parts"),
)
@pytest.mark.full  # simulated ranks show it in tests/cost/test_memory.py
def test_peaks_between_processes(
    tmp_path: Path, how: dict[str, Any], techniques: list[dict[str, Any]]
) -> None:
    (tmp_path / "script.py").write_text(f"HOW, TECHNIQUES = {how!r}, {techniques!r}\n" + SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
