"""The search context, and the options of one node on one mesh axis.

Strategies are built one prime axis at a time, slowest link first. On one axis a node is sharded in one unit of one
letter, lets a partial sum through, or is replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from meshwright.core.graph import Graph, Node
from meshwright.core.layout import TensorLayout, normalize
from meshwright.core.mesh import Mesh
from meshwright.ops.factors import Factors, Site
from meshwright.ops.strategy import (
    UNSHARDED,
    Ports,
    Strategy,
    fits,
    layouts,
    split_unit,
    splittable,
    through_ports,
    ways,
)
from meshwright.search.option_tables import OptionTables

Assignment = dict[str, Strategy]


@dataclass(frozen=True)
class SearchContext:
    """The context that every search shares: the graph, its factors and the mesh.

    `micro_batches`: those of which each rank keeps an example, in the modes that follow annotations.
    """

    graph: Graph
    factors: Factors
    mesh: Mesh
    micro_batches: int = 1

    def site(self, name: str) -> Site:
        """The site of a node."""
        return self.factors.sites[name]

    @functools.cached_property
    def option_tables(self) -> OptionTables:
        """The graph in numbers."""
        return OptionTables(self.graph, self.factors, self.mesh, self.micro_batches)

    @functools.cached_property
    def _normal(self) -> dict[int, tuple[TensorLayout, TensorLayout]]:
        return {}

    def normal(self, layout: TensorLayout) -> TensorLayout:
        """The normal form of a layout without its gradient half, found once for each object."""
        known = self._normal.get(id(layout))
        if known is None:
            known = self._normal[id(layout)] = (layout, normalize(layout.forward, self.mesh))
        return known[1]

    @functools.cached_property
    def _ports(self) -> dict[Hashable, tuple[Strategy, Ports]]:
        return {}

    def ports(self, node: Node, strategy: Strategy) -> Ports:
        """Port layouts of a node; nodes of one signature and strategy share them."""
        key = (self.site(node.name).signature, id(strategy))
        known = self._ports.get(key)
        if known is None:  # the strategy is kept with it, so that its identity stays its own
            known = self._ports[key] = (strategy, layouts(self.site(node.name), strategy))
        return known[1]


def options(context: SearchContext, node: Node, axis: str, fixed: Strategy) -> Iterator[Strategy]:
    """List the options of a node on an axis, given its strategy on other axes; single-axis strategies, replicated
    first."""
    yield UNSHARDED
    site, taken = context.site(node.name), dict(fixed.splits)
    for letter in splittable(site):
        tree = site.trees[letter]
        for unit in ways(site, letter):
            if fits(taken.get(letter, tree), unit, context.mesh, axis):
                yield Strategy(((letter, split_unit(tree, unit, axis)),))
    for ports in through_ports(site):
        yield Strategy(through=((axis, ports),))
