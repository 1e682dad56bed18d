"""Which operators backward computes again: of those that are not kept, the ones whose results, or what they save of
their own, somebody in backward asks for."""

from __future__ import annotations

from meshwright.cost.operators import PIECES, REPEATS, VIEWS
from meshwright.cost.saved import Saved, saved
from meshwright.graph import Graph, Node
from meshwright.partition.keeps import AGAIN
from meshwright.partition.reshards import Resharded

SHARING = VIEWS | REPEATS | PIECES


def computed_again(resharded: Resharded) -> frozenset[str]:
    """Names of these operators. A dropout of which only the mask is asked for counts, too: drawing it is the work."""
    graph, found = resharded.graph, set[str]()
    if not resharded.keeps:
        return frozenset()
    needed: set[str] = set()  # values that backward reads, or makes others from
    for node in reversed(graph.nodes):
        kept = _kept(node, graph)
        needed.update(node.uses[port] for port in kept.inputs)
        again = any(resharded.keeps.get(v) == AGAIN for v in node.values)
        asked = not needed.isdisjoint(node.values)
        if again and (asked or kept.outputs or kept.extra_bytes):
            found.add(node.name)
            if asked or node.op != "meshwright.dropout":  # a mask is drawn from nothing
                needed.update(node.uses)
        elif asked and (node.op in SHARING or node.kwarg("again")):
            needed.update(node.uses)
    return frozenset(found)


def _kept(node: Node, graph: Graph) -> Saved:
    return saved(node, graph.types, [u in graph.needs_grad for u in node.uses])
