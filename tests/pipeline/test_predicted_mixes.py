"""The peaks of stages beside techniques that keep, bring or add up elsewhere, against the allocator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline import test_predicted

ON_HOST = {"offload": ("activations", "parameters"), "recompute": "full", "threshold_kb": 0}
PARTS = {"optimizer_parallel": 3, "gradient_accumulation_shard": True, "threshold_kb": 0}


@pytest.mark.parametrize("place", (0, 1))
@pytest.mark.parametrize(
    "options",
    [
        {"interleave": 2, "micro_batches": 2},
        {"offload": "activations"},
        {**ON_HOST, "schedule": "zero_bubble"},
        {**PARTS, "schedule": "zero_bubble"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_the_peak_beside_techniques_is_the_allocators(options: dict[str, Any], place: int) -> None:
    expected, measured = test_predicted.peaks(
        {"pipeline": 2, "micro_batches": 4, **options}, {"dp": 2}, place
    )
    assert expected == pytest.approx(measured, rel=0.03)
