"""Fronts of choices: what is estimated of one that was simulated is what the simulation said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.search.joint.pareto import front
from meshwright.search.planner import families_of
from tests.search.joint.test_stages import cluster, planner

ASKED = ({}, {"recompute": "full"}, {"offload": ("activations",)}, {"recompute": "full", "micro_batches": 2})


@pytest.mark.parametrize("order", [1, -1], ids=["plain first", "plain last"])
def test_a_peak_that_was_simulated_is_not_estimated_by_another(order: int) -> None:
    """What lives for a moment differs by what is kept at all: of each set of techniques it is known apart."""
    made_for = planner("wide gpt", 1e9, cluster())
    made = front(made_for, made_for.space(families_of(made_for)[0][1]))
    candidate = next(c for c in made.candidates if c.examples > 1)
    found = {
        asked: made.evaluated(candidate, asked)
        for asked in (replace(made_for.techniques, **change) for change in ASKED[::order])
    }
    # Sums may be a little over a simulation: they do not know in which order results go.
    seen = {asked: max(made_for.peak_bytes(one), made.sums(candidate, asked)) for asked, one in found.items()}
    assert {asked: made.peak_bytes(candidate, asked) for asked in found} == pytest.approx(seen)
    assert len({round(made._missed(candidate, asked)) for asked in found}) > 1
