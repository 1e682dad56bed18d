"""What is kept in slices or on the host, and parked weights, on real ranks over gloo: the numbers of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_processes import TRAIN, succeed

pytestmark = pytest.mark.procs
PARKED = ("activations", "optimizer", "parameters")


@pytest.mark.parametrize(
    ("ranks", "mesh", "techniques"),
    (
        (4, {"dp": 2, "tp": 2}, {"slice_activation": True, "recompute": "full", "offload": "activations"}),
        (2, {"dp": 2}, {"offload": PARKED, "optimizer_parallel": 3, "threshold_kb": 0, "micro_batches": 2}),
    ),
    ids=("slices on the host", "parked parts"),
)
def test_what_lies_elsewhere_trains_as_one_device(
    tmp_path: Path, ranks: int, mesh: dict[str, int], techniques: dict[str, Any]
) -> None:
    mode = "sharding_propagation" if "tp" in mesh else "data_parallel"
    pins = {"*.qkv": {"n": "tp"}, "*.up": {"n": "tp"}} if "tp" in mesh else None
    settings = f"MESH, MODE, PINS, CLIP = {mesh!r}, {mode!r}, {pins!r}, 0.05\n"
    settings += "DTYPE, TOLERANCE, FLOOR = torch.float64, 1e-11, 0.0\n"
    body = TRAIN.replace("clip_norm=CLIP", f"clip_norm=CLIP, **{techniques!r}")
    assert "loss" in succeed(tmp_path, ranks, settings + body)
