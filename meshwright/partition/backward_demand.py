"""What backward asks for of what forward made, and what it makes again to have it.

Backward is lazy (`runtime/recompute.py`): it makes a value again when an operator's own backward reads it, or when
something else that it makes again does. What nobody asks for is not made: the last product of a layer, and the sum of
it over the ranks, where what comes after is kept. In a pipeline each stage asks for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.core.graph import MOVES, RESHARD, Graph, Node
from meshwright.ops.saved import saved
from meshwright.partition.insert_reshards import Resharded
from meshwright.partition.recompute import VIEWS

DROPOUT = "meshwright.dropout"
# The nodes whose backward is the first to ask: one of each stage that does, the last one first.
Askers = tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """Who asks first: for a value, and for an operator or reshard that is made again. What is not in it is not asked
    for."""

    values: Mapping[str, Askers] = field(default_factory=dict)
    again: Mapping[str, Askers] = field(default_factory=dict)


def asked_of(
    resharded: Resharded,
    again: Collection[str],
    where: Mapping[str, frozenset[int]] | None = None,
) -> Asked:
    """Who asks for what. `again`: operators that are computed again from what they read; `where`: node → the stages
    of a pipeline that run it."""
    nodes = resharded.graph.nodes
    stages: dict[int, list[int]] = {} if where is not None else {0: list(range(len(nodes)))}
    for place, node in enumerate(nodes if where is not None else ()):
        for stage in where[node.name] if where is not None else ():
            stages.setdefault(stage, []).append(place)
    walks = [_Walk(resharded, again, places) for _, places in sorted(stages.items(), reverse=True)]
    return Asked(*(_joined(nodes, found) for found in ([w.values for w in walks], [w.again for w in walks])))


def _joined(nodes: Sequence[Node], found: Sequence[Mapping[str, int]]) -> dict[str, Askers]:
    places: dict[str, set[int]] = {}
    for one in found:
        for name, place in one.items():
            places.setdefault(name, set()).add(place)
    return {name: tuple(nodes[p].name for p in sorted(at, reverse=True)) for name, at in places.items()}


class _Walk:
    """The nodes of one stage (or of all) from the last to the first: the places of those that ask first."""

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
        """Where a reshard's or transfer's argument is asked for through its result."""
        at = self._first(node)
        if node.kwarg("again"):
            self.again |= {} if at is None else {node.name: at}
            return at
        steps = self.resharded.pairs[node.name].forward if node.op == RESHARD else None
        inside = steps is not None and {s.kind for s in steps} <= {"slice", "mask"}
        return at if inside else None

    def _computed(self, node: Node, place: int) -> int | None:
        """Where an operator's arguments are asked for through its results. What it saves of its own is asked for by
        its own backward."""
        graph, graded = self.resharded.graph, any(node.needs_grad)
        kept = saved(node, graph.types, [u in graph.needs_grad for u in node.uses])
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


def asked_within(asked: Mapping[str, Askers], graph: Graph) -> dict[str, str]:
    """Name → the node whose backward asks for it first, in a local program that may be one stage of a pipeline. What
    the program does not have, or nobody in it asks for, is not in it."""
    here = {node.name for node in graph.nodes} if asked else set[str]()
    found: dict[str, str] = {}
    for name, nodes in asked.items():
        if name in here or name in graph.producers:
            first = next((n for n in nodes if n in here), None)
            if first is not None:
                found[name] = first
    return found


__all__ = ["Asked", "Askers", "asked_of", "asked_within"]
