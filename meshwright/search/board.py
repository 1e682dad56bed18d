"""A graph in numbers, for searches that go from node to node: values, readers, and the menu of each node."""

from __future__ import annotations

from collections.abc import Hashable

from meshwright.graph import Graph
from meshwright.mesh import Mesh
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import Strategy
from meshwright.search.menus import Choices, Menu, Places, State, shape_of


class Board:
    """Nodes and values by number: `uses[n]` and `makes[n]` list values, `readers[v]` and `maker[v]` nodes (-1: none).

    `near[n]`: the nodes that read what n makes, then those that make what it reads, as often as they do.
    """

    def __init__(self, graph: Graph, factors: Factors, mesh: Mesh) -> None:
        self.mesh = mesh
        self.nodes = graph.nodes
        self.number = {n.name: k for k, n in enumerate(graph.nodes)}
        self.values = list(graph.types)
        value = {name: k for k, name in enumerate(self.values)}
        self.value = value
        self.size_bytes = [t.size_bytes for t in graph.types.values()]
        self.has_grad = [name in graph.needs_grad for name in self.values]
        self.uses = [tuple([value[u] for u in n.uses]) for n in graph.nodes]
        self.makes = [tuple([value[v] for v in n.values]) for n in graph.nodes]
        self.maker = [-1] * len(self.values)
        self.readers: list[list[int]] = [[] for _ in self.values]
        for number, (uses, makes) in enumerate(zip(self.uses, self.makes, strict=True)):
            for v in uses:
                self.readers[v].append(number)
            for v in makes:
                self.maker[v] = number
        self.near = [
            [*(r for v in makes for r in self.readers[v]), *(m for v in uses if (m := self.maker[v]) >= 0)]
            for uses, makes in zip(self.uses, self.makes, strict=True)
        ]
        self.menus = self._menus(factors)
        self.kinds = self._kinds()
        self.batch: list[tuple[int, ...]] | None = None  # per node, the options that cut its batch factor
        self.remembered: dict[Hashable, list[int]] = {}  # what a search found on an axis of the same kind

    def _menus(self, factors: Factors) -> list[Menu]:
        places: Places = {}
        known: dict[Hashable, Menu] = {}
        alike: dict[Hashable, Choices] = {}
        found: list[Menu] = []
        for node in self.nodes:
            site = factors.sites[node.name]
            key = site.signature
            menu = known.get(key)
            if menu is None:
                shape = shape_of(site)
                if (choices := alike.get(shape)) is None:
                    choices = alike[shape] = Choices(site, places)
                menu = known[key] = Menu(site, choices)
            found.append(menu)
        return found

    def start(self) -> list[State]:
        """Per node, that nothing is chosen yet."""
        return [menu.start for menu in self.menus]

    def strategies(self, states: list[State]) -> dict[str, Strategy]:
        """What was chosen, by the names of nodes."""
        return {node.name: state.strategy for node, state in zip(self.nodes, states, strict=True)}

    def _kinds(self) -> list[int]:
        """Nodes whose options compare alike where their neighbours do: one menu, equal bytes, gradients and repeats."""
        known: dict[Hashable, int] = {}
        found: list[int] = []
        for menu, uses, makes in zip(self.menus, self.uses, self.makes, strict=True):
            values = (*uses, *makes)
            repeats = tuple(map(uses.index, uses)) if len(set(uses)) < len(uses) else ()
            key = (id(menu), *[(self.size_bytes[v], self.has_grad[v]) for v in values], repeats)
            found.append(known.setdefault(key, len(known)))
        return found
