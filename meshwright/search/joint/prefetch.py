"""Gathers of sharded weights that start further ahead, where a step waits for them and memory has room."""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.errors import PlanError
from meshwright.search.budget import TECHNIQUES
from meshwright.search.memory_limit import fits_in_both, step_of, sure
from meshwright.search.planner import Planner, SearchResult


def further_ahead(planner: Planner, found: SearchResult, enough: float = math.inf) -> SearchResult:
    """Return the choice with its weights gathered further ahead, as long as that is quicker and fits; else itself.

    Nothing is tried if the step would stay above `enough` seconds, nor where memory has no room for it: weights that
    are there earlier never take less.
    """
    most_saved = math.inf  # by one group more
    while (
        "prefetch" not in found.techniques.given
        and found.evaluation is not None
        and found.techniques.prefetch < TECHNIQUES.prefetch
        and fits_in_both(planner, found)
        and waits(found, enough)
        and step_of(found) - (TECHNIQUES.prefetch - found.techniques.prefetch) * most_saved < enough
        and not planner.request.stop.now()
    ):
        under = planner.under(replace(found.techniques, prefetch=found.techniques.prefetch + 1))
        try:
            longer = under.found(found.space, found.states, {"chosen": found.claims.get("chosen", "")})
        except PlanError:
            return found
        if found.evaluation.timed_in_full:
            longer = under.settled(longer)
        elif found.evaluation.in_full:
            longer = sure(planner, longer)
        if not fits_in_both(planner, longer) or step_of(longer) >= (1 - TECHNIQUES.worth) * step_of(found):
            return found
        saved = step_of(found) - step_of(longer)
        most_saved = saved if math.isinf(most_saved) else max(saved, most_saved)
        kept = {k: v for k, v in found.claims.items() if k not in longer.claims}
        found = replace(longer, claims={**kept, **longer.claims})
    return found


def waits(found: SearchResult, enough: float = math.inf) -> bool:
    """Return whether a step may wait for gathered weights, and would be below `enough` if it waited for none."""
    assert found.evaluation is not None
    exposed = found.evaluation.exposed_seconds
    if exposed <= TECHNIQUES.exposed * step_of(found):
        return False
    gathers = found.techniques.micro_batches * found.space.least_gathers(found.states)
    return gathers > TECHNIQUES.worth * step_of(found) and step_of(found) - min(gathers, exposed) < enough


__all__ = ["further_ahead", "waits"]
