"""The values that backward needs, and what it recomputes to get them.

Backward is lazy (`runtime/recompute.py`): it recomputes a value when the backward of an operator, or another
recomputation, reads it. A value that nothing needs is not recomputed: for example the last product of a layer and its
all-reduce, if the result is saved. In a pipeline each stage has its own needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.core.graph import MOVES, RESHARD, Graph, Node
from meshwright.ops.saved import saved_in
from meshwright.partition.insert_reshards import Resharded
from meshwright.partition.recompute import VIEWS

DROPOUT = "meshwright.dropout"
# The nodes whose backward needs something first: one of each stage that does, the last one first.
FirstReaders = tuple[str, ...]


@dataclass(frozen=True)
class BackwardDemand:
    """The nodes that first need each value, and each recomputed operator or reshard."""

    values: Mapping[str, FirstReaders] = field(default_factory=dict)
    again: Mapping[str, FirstReaders] = field(default_factory=dict)


def demand_of(
    resharded: Resharded,
    again: Collection[str],
    where: Mapping[str, frozenset[int]] | None = None,
) -> BackwardDemand:
    """Return which nodes need what. `again`: recomputed operators; `where`: the pipeline stages of each node."""
    nodes = resharded.graph.nodes
    stages: dict[int, list[int]] = {} if where is not None else {0: list(range(len(nodes)))}
    for place, node in enumerate(nodes if where is not None else ()):
        for stage in where[node.name] if where is not None else ():
            stages.setdefault(stage, []).append(place)
    walks = [_Walk(resharded, again, places) for _, places in sorted(stages.items(), reverse=True)]
    return BackwardDemand(
        *(_joined(nodes, found) for found in ([w.values for w in walks], [w.again for w in walks]))
    )


def _joined(nodes: Sequence[Node], found: Sequence[Mapping[str, int]]) -> dict[str, FirstReaders]:
    places: dict[str, set[int]] = {}
    for one in found:
        for name, place in one.items():
            places.setdefault(name, set()).add(place)
    return {name: tuple(nodes[p].name for p in sorted(at, reverse=True)) for name, at in places.items()}


class _Walk:
    """A walk over the nodes of a stage from last to first, which records those that need a value first."""

    def __init__(self, resharded: Resharded, again: Collection[str], places: Sequence[int]) -> None:
        self.resharded, self.remade = resharded, again
        self.values: dict[str, int] = {}
        self.again: dict[str, int] = {}
        for place in reversed(places):
            node = resharded.graph.nodes[place]
            at = self._moved(node) if node.op in MOVES else self._computed(node, place)
            if at is not None:
                self._ask(node.uses, at)

    def _ask(self, values: Sequence[str], place: int) -> None:
        for value in values:
            self.values[value] = max(self.values.get(value, -1), place)

    def _first(self, node: Node) -> int | None:
        return max((self.values[v] for v in node.values if v in self.values), default=None)

    def _moved(self, node: Node) -> int | None:
        """Return where the argument of a reshard or transfer is needed because of its result."""
        at = self._first(node)
        if node.kwarg("again"):
            self.again |= {} if at is None else {node.name: at}
            return at
        steps = self.resharded.pairs[node.name].forward if node.op == RESHARD else None
        inside = steps is not None and {s.kind for s in steps} <= {"slice", "mask"}
        return at if inside else None

    def _computed(self, node: Node, place: int) -> int | None:
        """Return where the arguments of an operator are needed because of its results or of its own backward."""
        graph, graded = self.resharded.graph, any(node.needs_grad)
        kept = saved_in(graph)[node.name]
        if graded:
            self._ask([node.uses[p] for p in kept.inputs], place)
            self._ask([node.values[n] for n in kept.outputs], place)
        at = self._first(node)
        if node.name not in self.remade:
            return at if node.op in VIEWS else None
        own = place if graded and (kept.outputs or kept.extra_bytes) else None
        made = own if at is None else at if own is None else max(at, own)
        if made is not None:
            self.again[node.name] = made
        return at if node.op == DROPOUT else made  # a mask is drawn from nothing


def demand_within(asked: Mapping[str, FirstReaders], graph: Graph) -> dict[str, str]:
    """Return, by name, the node whose backward needs a value first, in a local program or stage.

    Values that the program does not have, or does not need, are left out.
    """
    here = {node.name for node in graph.nodes} if asked else set[str]()
    found: dict[str, str] = {}
    for name, nodes in asked.items():
        if name in here or name in graph.producers:
            first = next((n for n in nodes if n in here), None)
            if first is not None:
                found[name] = first
    return found


__all__ = ["BackwardDemand", "FirstReaders", "demand_of", "demand_within"]
