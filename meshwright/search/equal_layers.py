"""Equal layers that do not follow one another: state-space layers around a few with attention, local attention around
global. They take the same strategies, so that a search has variables for each kind of layer once, wherever it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from meshwright.core.folding import signature
from meshwright.core.graph import Graph
from meshwright.core.remembered import cached_on_first
from meshwright.ops.analysis import factors_of
from meshwright.ops.factors import Factors
from meshwright.search.layer_groups import Folded
from meshwright.search.space.wiring import Ties
from meshwright.search.techniques.layers import Layer, layers_of


@cached_on_first
def ties_of(folds: Folded) -> Ties:
    """Return what is planned together in a folded graph: copies of a folded layer, and layers equal to them elsewhere.

    Layers are equal if their operators, literals, types, and the wiring inside are; if no pin tells them apart; and if
    their dims are analyzed in the same way. What they read from outside may come from different places.
    """
    if not folds.same:
        return Ties(folds.same, folds.weight)
    graph, factors = folds.graph, factors_of(folds.graph)
    kinds: dict[Hashable, list[Layer]] = defaultdict(list)
    for layer in layers_of(graph):
        kinds[_kind(layer, graph, folds, factors)].append(layer)
    groups = _Groups(graph)
    for name, first in folds.same.items():
        groups.join(first, name)
    for first, *others in kinds.values():
        for layer in others:
            for name, other in zip(_names(first, graph), _names(layer, graph), strict=True):
                groups.join(name, other)
    return Ties(groups.same, folds.weight)


class _Groups:
    """Names that are planned together; the first of a group, in the order of the graph, stands for it."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[str, str] = {}
        self._place = {name: number for number, name in enumerate(graph.types)}
        self._place |= {node.name: len(self._place) + k for k, node in enumerate(graph.nodes)}

    def first(self, name: str) -> str:
        while (above := self._parent.get(name, name)) != name:
            self._parent[name] = name = self._parent.get(above, above)
        return name

    def join(self, name: str, other: str) -> None:
        one, two = sorted((self.first(name), self.first(other)), key=self._place.__getitem__)
        if one != two:
            self._parent[two] = one

    @property
    def same(self) -> dict[str, str]:
        """Name → the first of its group, for all others."""
        return {name: self.first(name) for name in self._parent}


def _kind(layer: Layer, graph: Graph, folds: Folded, factors: Factors) -> Hashable:
    """All that makes a layer equal to another."""
    made = {value: (k, i) for k, node in enumerate(layer.nodes) for i, value in enumerate(node.values)}
    outside: dict[str, int] = {}
    parameters = {entry.name for entry in graph.input_of("parameter")}

    def source(value: str) -> Hashable:
        return made.get(value) or ("outside", outside.setdefault(value, len(outside)), value in parameters)

    found: list[Hashable] = []
    for node in layer.nodes:
        name, site = node.name, factors.sites[node.name]
        reads = [(source(u), graph.types[u], u in graph.needs_grad) for u in node.uses]
        marks = [(factors.batch[name, x], factors.unsharded[name, x]) for x in site.trees]
        found.append((signature(node), site.signature, *reads, *marks, folds.kinds.get(name)))
    return tuple(found)


def _names(layer: Layer, graph: Graph) -> Iterator[str]:
    """The nodes of a layer, their results, and the parameters that they read, in an order that equal layers share."""
    parameters = {entry.name for entry in graph.input_of("parameter")}
    for node in layer.nodes:
        yield node.name
        yield from node.values
        yield from (u for u in node.uses if u in parameters)
