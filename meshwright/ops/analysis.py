"""The factors of a graph, found once: planning, cutting and explaining look at the same ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from meshwright.core.graph import Graph
from meshwright.ops.factors import Factors, analyze
from meshwright.ops.table import rules_of, user_rules

Known = tuple[  # of which graph, under which rules of the user, and they or what makes them
    weakref.ref[Graph], object, Factors | Callable[[Graph], Factors]
]

_known: dict[int, Known] = {}


def factors_of(graph: Graph) -> Factors:
    """The factors of a graph under the rules known now; remembered as long as the graph object lives.

    Raises RuleError.
    """
    known = _known.get(id(graph))
    if known is not None and known[0]() is graph and known[1] == user_rules():
        return known[2] if isinstance(known[2], Factors) else keep_factors(graph, known[2](graph))
    return keep_factors(graph, analyze(graph, rules_of(graph)))


def _forget(key: int) -> Callable[[object], object]:
    """Drops what is remembered, also where the interpreter goes down and this module is empty."""
    known = _known
    return lambda _: known.pop(key, None)


def keep_factors(graph: Graph, factors: Factors) -> Factors:
    """Remember the factors of a graph."""
    key = id(graph)
    _known[key] = (weakref.ref(graph, _forget(key)), user_rules(), factors)
    return factors


def expect_factors(graph: Graph, make: Callable[[Graph], Factors]) -> None:
    """Find the factors of a graph otherwise (unfolded from those of two layers), once somebody asks for them. `make`
    is given the graph, and must not hold it."""
    key = id(graph)
    _known[key] = (weakref.ref(graph, _forget(key)), user_rules(), make)
