"""The factors of a graph, found once: planning, cutting and explaining look at the same ones."""

from __future__ import annotations

import weakref

from meshwright.graph import Graph
from meshwright.ops.factors import Factors, analyze
from meshwright.ops.table import rules_of, user_rules

Known = tuple[weakref.ref[Graph], object, Factors]  # of which graph, under which rules of the user

_known: dict[int, Known] = {}


def factors_of(graph: Graph) -> Factors:
    """The factors of a graph under the rules known now; remembered as long as the graph object lives.

    Raises RuleError.
    """
    known = _known.get(id(graph))
    if known is not None and known[0]() is graph and known[1] == user_rules():
        return known[2]
    return keep_factors(graph, analyze(graph, rules_of(graph)))


def keep_factors(graph: Graph, factors: Factors) -> Factors:
    """Remember factors that were found otherwise (unfolded from those of two layers)."""
    key = id(graph)
    _known[key] = (weakref.ref(graph, lambda _: _known.pop(key, None)), user_rules(), factors)
    return factors
