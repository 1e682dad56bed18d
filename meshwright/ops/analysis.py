"""The factors of a graph, computed once and shared by planning, partitioning and explaining."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from meshwright.core.graph import Graph
from meshwright.ops.factors import Factors, analyze
from meshwright.ops.table import rules_of, user_rules

# The graph, the user's rules then, and the factors or a function that computes them.
Known = tuple[weakref.ref[Graph], object, Factors | Callable[[Graph], Factors]]

_known: dict[int, Known] = {}


def factors_of(graph: Graph) -> Factors:
    """Return the factors of a graph under the rules registered now, and cache them as long as the graph lives.

    Raises RuleError.
    """
    known = _known.get(id(graph))
    if known is not None and known[0]() is graph and known[1] == user_rules():
        return known[2] if isinstance(known[2], Factors) else keep_factors(graph, known[2](graph))
    return keep_factors(graph, analyze(graph, rules_of(graph)))


def _forget(key: int) -> Callable[[object], object]:
    """Return a callback that drops a cache entry. It also works at interpreter shutdown, when this module is empty."""
    known = _known
    return lambda _: known.pop(key, None)


def keep_factors(graph: Graph, factors: Factors) -> Factors:
    """Cache the factors of a graph and return them."""
    key = id(graph)
    _known[key] = (weakref.ref(graph, _forget(key)), user_rules(), factors)
    return factors


def expect_factors(graph: Graph, make: Callable[[Graph], Factors]) -> None:
    """Compute the factors of a graph with `make` (from those of two layers) at the first call of `factors_of`.

    `make` receives the graph and must not keep a reference to it.
    """
    key = id(graph)
    _known[key] = (weakref.ref(graph, _forget(key)), user_rules(), make)
