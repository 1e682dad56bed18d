"""What a candidate takes by simulations of those that nearly are it, under any policy of recompute.

Candidates of one kind that gather as long differ in a few operators: what one waits for, another waits for, too. And
what is waited for with a policy of recompute is not waited for less with one that computes less again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from meshwright.core.techniques import Techniques
from meshwright.search.budget import TECHNIQUES
from meshwright.search.joint.candidates import Candidate
from meshwright.search.joint.dimensions import has_no_less_on_host
from meshwright.search.joint.prefetch import waits
from meshwright.search.memory_limit import fits_in_both, step_of
from meshwright.search.planner import Planner, SearchResult


def sibling_seconds(
    planner: Planner,
    seen: Mapping[tuple[Candidate, Techniques], SearchResult],
    must_take: Callable[[Candidate, Techniques], tuple[float, ...]],
    candidate: Candidate,
    techniques: Techniques,
) -> float:
    """The most seconds of what was `seen` of siblings, with no more slices and no more on the host, each less what it
    `must_take` longer; 0 without any. One that had no room to gather weights further ahead says nothing of others."""
    most, mine = 0.0, must_take(candidate, techniques)
    for (other, asked), found in seen.items():
        if other.name != candidate.name or not _gathers_as_long(other, candidate):
            continue
        if not _is_plainer(asked, techniques) or found.evaluation is None or not found.evaluation.timed:
            continue
        if not fits_in_both(planner, found) or (found.techniques.prefetch == 1 and waits(found)):
            continue
        longer = zip(must_take(other, asked), mine, strict=True)
        most = max(most, step_of(found) - sum(max(0.0, its - own) for its, own in longer))
    return (1 - TECHNIQUES.sibling_doubt) * most


def _gathers_as_long(one: Candidate, other: Candidate) -> bool:
    return abs(one.gathers - other.gathers) <= TECHNIQUES.worth * other.gathers


def _is_plainer(one: Techniques, other: Techniques) -> bool:
    """True if a step under one has no more slices and no more on the host than under another, and else the same but for
    its policy of recompute, and for how far ahead weights are gathered."""
    words, sliced = one.offload, one.slice_activation
    here = replace(
        other, offload=words, slice_activation=sliced, recompute=one.recompute, prefetch=one.prefetch
    )
    return one == here and sliced <= other.slice_activation and has_no_less_on_host(other.offload, words)


__all__ = ["sibling_seconds"]
