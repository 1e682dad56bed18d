"""How much longer the slowest rank of a pipeline computes than their mean.

A stage has complete layers, or parts of a layer between which little is sent.
"""

from __future__ import annotations

import numpy as np

from meshwright.core.graph import Graph
from meshwright.search.compute_bound import Least
from meshwright.search.layer_groups import Folded

BISECTIONS = 20  # of the seconds of the slowest rank: to a millionth of the model's
WIDE = 2  # times what is sent between layers: a split there costs more than it evens out


class Uneven:
    """The operators of a model in their order, in parts for ranks that follow one another, as even as they can be."""

    def __init__(self, folds: Folded, least: Least) -> None:
        row = {name: number for number, name in enumerate(least.names)}
        rows = [row.get(least.ties.first(folds.nodes[n.name]), -1) for n in folds.full.nodes]
        self.least = least
        self.order = np.array([r for r in rows if r >= 0], dtype=np.int64)
        before = np.cumsum(np.array(rows) >= 0)  # operators that compute, up to each node
        self.ends = np.unique(before[split_places(folds.full)])
        self._known: dict[tuple[int, int], float] = {}

    def share(self, ranks: int, pieces: int) -> float:
        """Return the seconds of the slowest of `ranks` over their mean; each computes `pieces` shares of an
        operator."""
        key = ranks, pieces
        if key not in self._known:
            ends = np.concatenate([[0.0], np.cumsum(self.least.each(pieces)[self.order])])
            self._known[key] = slowest(ends[self.ends], ranks)
        return self._known[key]


def split_places(graph: Graph) -> np.ndarray:
    """Return the nodes after which stages may be split, the last among them: where not much more is sent than between
    layers."""
    place = {value: number for number, node in enumerate(graph.nodes) for value in node.values}
    number = {node.name: k for k, node in enumerate(graph.nodes)}
    sent = np.zeros(len(graph.nodes) + 1)
    for value, made in place.items():
        if value in graph.needs_grad:
            last = max((number[n.name] for n, _ in graph.consumers.get(value, ())), default=made)
            sent[made] += graph.types[value].size_bytes
            sent[last] -= graph.types[value].size_bytes
    crossing = np.cumsum(sent)[:-1]
    middle = crossing[len(crossing) // 4 : -(len(crossing) // 4) or None]
    middle = middle[middle > 0]
    few = crossing <= WIDE * middle.min() if len(middle) else np.ones(len(crossing), dtype=bool)
    return np.flatnonzero(few | (np.arange(len(crossing)) == len(crossing) - 1))


def slowest(ends: np.ndarray, ranks: int) -> float:
    """Return the seconds of the slowest of `ranks` over their mean, if parts may end where `ends` says, in seconds from
    the beginning."""
    total = float(ends[-1]) if len(ends) else 0.0
    if total <= 0:
        return 1.0
    low, high = max(float(np.diff(ends, prepend=0.0).max()), total / ranks), total
    for _ in range(BISECTIONS):
        most = (low + high) / 2
        if _fits(ends, ranks, most):
            high = most
        else:
            low = most
    return high * ranks / total


def _fits(ends: np.ndarray, ranks: int, most: float) -> bool:
    """Return whether so many parts, none of more than `most` seconds, have all operators."""
    taken, total = 0.0, float(ends[-1])
    for _ in range(ranks):
        place = int(np.searchsorted(ends, taken + most * (1 + 1e-9), side="right")) - 1
        if place < 0 or ends[place] <= taken:
            return False
        taken = float(ends[place])
        if taken >= total:
            return True
    return False


__all__ = ["Uneven"]
