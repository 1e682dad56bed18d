"""Recompute in as many layers as memory asks for, and no more: the later ones keep what autograd keeps."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.techniques import ranges
from meshwright.errors import PlanError
from meshwright.search.budget import AUTO, TECHNIQUES
from meshwright.search.memory_limit import fits_in_both, step_of
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.techniques.layers import layers_of


def fewer_layers(planner: Planner, best: SearchResult) -> SearchResult:
    """The choice with its policy of recompute in the first layers only, as few as fit; itself where that is all of
    them. Layers early in forward are taken: what they keep is held the longest."""
    policy = best.techniques.recompute
    limit = planner.request.memory_bytes
    if "recompute" in best.techniques.given or not isinstance(policy, str) or not policy:
        return best
    if limit is None or best.evaluation is None or planner.nodes > AUTO.full_nodes:
        return best
    names = list(dict.fromkeys(layer.name for layer in layers_of(planner.folds.full)))
    if len(names) < 2:
        return best
    plain = planner.under(replace(best.techniques, recompute=""))
    none = plain.found(best.space, best.states, {})
    if none.evaluation is None or (more := planner.peak_bytes(none)) <= (least := planner.peak_bytes(best)):
        return best
    count = max(1, len(names) - int((limit - least) * len(names) / (more - least)))
    quicker = (step_of(best) - step_of(none)) * (len(names) - count) / len(names)
    if quicker < TECHNIQUES.worth * step_of(best):
        return best  # nothing where its activations go to the host instead
    for taken in range(count, min(count + TECHNIQUES.layer_tries, len(names))):
        asked = replace(best.techniques, recompute=tuple((name, policy) for name in ranges(names[:taken])))
        try:
            under = planner.under(asked)
            found = under.settled(under.found(best.space, best.states, {}))
        except PlanError:
            return best
        if fits_in_both(planner, found):
            return found if step_of(found) < step_of(best) else best
    return best
