"""Equal layers that do not follow one another: state-space layers around a few with attention, local attention around
global. They take the same strategies, so that a search has variables for each kind of layer once, wherever it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from meshwright.core.folding import signature
from meshwright.core.remembered import cached_on_first
from meshwright.ops.analysis import factors_of
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
    graph = folds.graph
    parameters = {entry.name for entry in graph.input_of("parameter")}
    kinds: dict[Hashable, list[Layer]] = defaultdict(list)
    for layer in layers_of(graph):
        kinds[_kind(layer, folds, parameters)].append(layer)
    equal = list(folds.same.items())
    for first, *others in kinds.values():
        mine = list(_names(first, parameters))
        for layer in others:
            equal += zip(mine, _names(layer, parameters), strict=True)
    names = dict.fromkeys([*graph.types, *(node.name for node in graph.nodes)])
    return Ties(_firsts(list(names), equal), folds.weight)


def _kind(layer: Layer, folds: Folded, parameters: Collection[str]) -> Hashable:
    """All that makes a layer equal to another."""
    graph, factors = folds.graph, factors_of(folds.graph)
    made = {value: (k, i) for k, node in enumerate(layer.nodes) for i, value in enumerate(node.values)}
    outside: dict[str, int] = {}

    def source(value: str) -> Hashable:
        return made.get(value) or ("outside", outside.setdefault(value, len(outside)), value in parameters)

    found: list[Hashable] = []
    for node in layer.nodes:
        name, site = node.name, factors.sites[node.name]
        reads = [(source(u), graph.types[u], u in graph.needs_grad) for u in node.uses]
        marks = [(factors.batch[name, x], factors.unsharded[name, x]) for x in site.trees]
        found.append((signature(node), site.signature, *reads, *marks, folds.kinds.get(name)))
    return tuple(found)


def _names(layer: Layer, parameters: Collection[str]) -> Iterator[str]:
    """The nodes of a layer, their results, and the parameters that they read, in an order that equal layers share."""
    for node in layer.nodes:
        yield node.name
        yield from node.values
        yield from (u for u in node.uses if u in parameters)


def _firsts(names: Sequence[str], equal: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Name → the first name that it equals, directly or through others, where that is another one."""
    place = {name: number for number, name in enumerate(names)}
    ends = np.array([(place[one], place[other]) for one, other in equal])
    pairs = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(names), len(names)))
    _, groups = connected_components(pairs, directed=False)
    first_of: list[int] = np.unique(groups, return_index=True)[1][groups].tolist()
    return {name: names[first] for name, first in zip(names, first_of, strict=True) if names[first] != name}
