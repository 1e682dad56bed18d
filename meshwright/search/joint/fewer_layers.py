"""Recompute in as many layers as memory asks for, and no more: the later ones keep more for backward, or all of it."""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.core.techniques import RECOMPUTE, Techniques, ranges
from meshwright.errors import PlanError
from meshwright.search.budget import AUTO, TECHNIQUES
from meshwright.search.memory_limit import fits_in_both, step_of
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.techniques.layers import layers_of
from meshwright.search.techniques.recompute import again_of


def fewer_layers(planner: Planner, best: SearchResult) -> SearchResult:
    """The choice with its policy of recompute in the first layers only, as few as fit, and a lighter policy or none in
    the others; itself where that is all of them, or no quicker. Layers early in forward are taken: what they keep is
    held the longest."""
    policy = best.techniques.recompute
    limit = planner.request.memory_bytes
    if "recompute" in best.techniques.given or not isinstance(policy, str) or not policy:
        return best
    if limit is None or best.evaluation is None or planner.nodes > AUTO.full_nodes:
        return best
    names = list(dict.fromkeys(layer.name for layer in layers_of(planner.folds.full)))
    least = planner.peak_bytes(best)
    tried: list[tuple[float, float, str]] = []  # expected seconds, bytes under the lighter policy, its name
    for lighter in lighter_policies(planner, policy) if len(names) > 1 else ():
        found = planner.under(replace(best.techniques, recompute=lighter)).found(best.space, best.states, {})
        most = math.inf if found.evaluation is None else planner.peak_bytes(found)
        if least < limit < most < math.inf:  # else nothing stays, where its activations go to the host
            spared = (limit - least) / (most - least) * (step_of(best) - step_of(found))
            tried.append((step_of(best) - spared, most, lighter))
    if not tried:
        return best
    expected, most, lighter = min(tried)
    if step_of(best) - expected < TECHNIQUES.worth * step_of(best):
        return best
    return _as_few(planner, best, names, lighter, most)


def _as_few(
    planner: Planner, best: SearchResult, names: list[str], lighter: str, most: float
) -> SearchResult:
    """The choice with its policy in as few of the first layers as fit, and a lighter one, which takes `most` bytes for
    all layers, in the others. A few numbers of layers are tried, each where the last ones let expect the limit."""
    limit, every = planner.request.memory_bytes or math.inf, len(names)
    over, fitting = (0, most), (every, planner.peak_bytes(best))  # layers under the policy, and bytes
    taken, made = math.ceil((most - limit) * every / (most - fitting[1])), best
    for _ in range(TECHNIQUES.layer_tries):
        if not over[0] < taken < fitting[0] or planner.request.stop.now():
            break
        try:
            under = planner.under(_mixed(best.techniques, names, taken, lighter))
            found = under.settled(under.found(best.space, best.states, {}))
        except PlanError:
            break
        held = planner.peak_bytes(found)
        if fits_in_both(planner, found):
            if step_of(found) >= (1 - TECHNIQUES.worth) * step_of(made):
                return found if step_of(found) < step_of(made) else made
            # What lives for a moment under the lighter policy came with the first layer of it: others add less.
            each = (held - planner.peak_bytes(best)) / (every - taken)
            fitting, made = (taken, held), found
            taken -= int((limit - held) / each) if each > 0 else taken
        else:
            each, over = (most - held) / taken, (taken, held)
            taken += max(1, math.ceil((held - limit) / each)) if each > 0 else 1
    return made


def in_the_same_layers(planner: Planner, best: SearchResult, chosen: SearchResult) -> SearchResult | None:
    """The best with the policies by layers of what was chosen, where that fits and is about as quick."""
    policies = chosen.techniques.recompute
    if not isinstance(policies, tuple) or not isinstance(best.techniques.recompute, str):
        return None
    try:
        under = planner.under(replace(best.techniques, recompute=policies))
        found = under.settled(under.found(best.space, best.states, {}))
    except PlanError:
        return None
    quick = step_of(found) <= (1 + TECHNIQUES.as_quick) * step_of(chosen)
    return found if quick and fits_in_both(planner, found) else None


def lighter_policies(planner: Planner, policy: str) -> tuple[str, ...]:
    """Return the policies that compute less again than one: none at all first."""
    less, graph = RECOMPUTE[RECOMPUTE.index(policy) + 1 :], planner.context.graph
    all_of_it = again_of(graph, policy) if less else frozenset[str]()
    return ("", *(p for p in less if (again := again_of(graph, p)) and again != all_of_it))


def _mixed(asked: Techniques, names: list[str], taken: int, lighter: str) -> Techniques:
    """The policy of some techniques in the first layers, and a lighter one in the others."""
    first, others = (
        [(name, p) for name in ranges(part)]
        for part, p in ((names[:taken], asked.recompute), (names[taken:], lighter))
    )
    return replace(asked, recompute=(*first, *(others if lighter else ())))


__all__ = ["fewer_layers", "in_the_same_layers", "lighter_policies"]
