"""The peaks of stages beside techniques that keep, bring or add up elsewhere, against the allocator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline import test_predicted

ON_HOST = {"offload": ("activations", "parameters"), "recompute": "full", "threshold_kb": 0}
PARTS = {"optimizer_parallel": 3, "gradient_accumulation_shard": True, "threshold_kb": 0}


MIXES: list[dict[str, Any]] = [
    {"interleave": 2, "micro_batches": 2},
    {"offload": "activations"},
    {**ON_HOST, "schedule": "zero_bubble"},
    {**PARTS, "schedule": "zero_bubble"},
]
PLACES = [  # one rank of each pipeline in the fast tests, the other in the slow ones; the last two have all techniques
    pytest.param(
        options,
        place,
        id=f"{'-'.join(options)}-{place}",
        marks=pytest.mark.slow if (number + place) % 2 == 0 else pytest.mark.full if number < 2 else (),
    )
    for number, options in enumerate(MIXES)
    for place in (0, 1)
]


@pytest.mark.parametrize(("options", "place"), PLACES)
def test_the_peak_beside_techniques_is_the_allocators(options: dict[str, Any], place: int) -> None:
    compare(options, place)


def compare(options: dict[str, Any], place: int, within: float = 0.03) -> None:
    expected, measured = test_predicted.peaks(
        {"pipeline": 2, "micro_batches": 4, **options}, {"dp": 2}, place
    )
    assert -0.03 <= expected / measured - 1 <= within


SCATTERED = {"optimizer_parallel": 2, "threshold_kb": 0}
SEVERAL = {"schedule": "interleaved", "pipeline": 4}  # stages of a rank: its buckets are of both


def test_buckets_of_a_rank_wait_for_all_of_its_stages() -> None:
    compare({**SEVERAL, **SCATTERED}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("place", (0, 1))
@pytest.mark.parametrize(
    "options",
    [
        SEVERAL,
        {**SEVERAL, **SCATTERED, "recompute": "full"},
        {**SEVERAL, **SCATTERED, "gradient_accumulation_shard": True},
        {**SCATTERED, "recompute": "full"},
        {"schedule": "zero_bubble", "recompute": "full", "micro_batches": 8},
        {"schedule": "zero_bubble", **SCATTERED},
        {"schedule": "zero_bubble_v", "pipeline": 4},
        {"schedule": "zero_bubble_v", "pipeline": 4, **SCATTERED},
    ],
    ids=lambda options: "-".join(map(str, (*options, *options.values()))),
)
def test_the_peak_of_a_schedule_is_the_allocators(options: dict[str, Any], place: int) -> None:
    compare(options, place, within=0.05)
