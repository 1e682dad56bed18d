"""The variables of a space and the pairs that interact: all that depends on the graph alone.

Variables are the nodes, the *hubs* (a value that several consumers read has one layout to which it is brought once, for
all that need it so), and the parameters. Nodes that stand for each other (copies of a layer) are one variable.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.core.graph import Graph, Node
from meshwright.cost.operator_tables import VIEWS
from meshwright.ops.saved import saved_in
from meshwright.search.space.blocking import waited_edges
from meshwright.search.space.cache import owners_of

Variable = tuple[str, str]  # (kind, name): node, hub, parameter
Edge = tuple[Variable, int, Variable, int, str]
"""A reshard that may be: from variable, its port, to variable, its port, value."""
End = tuple[str, int]  # a node and its port: inputs, then outputs


@dataclass(frozen=True)
class Ties:
    """Copies of one layer: name (node, value or parameter) → the one it equals; and how often a node of the graph
    stands for nodes of the model."""

    same: Mapping[str, str] = field(default_factory=dict)
    weight: Mapping[str, int] = field(default_factory=dict)

    def first(self, name: str) -> str:
        """The one that a name equals; itself where there is none."""
        return self.same.get(name, name)

    def times(self, node: str) -> int:
        """How many nodes of the model a node stands for."""
        return self.weight.get(node, 1)


class Wiring:
    """The variables of a graph and the reshards that may be between them. `hubs` and `parameters`: name → the ports
    that share its layouts; `times`: node → how many of the model are planned as it; `fixed`: value → how many results
    of the program it is, which are replicated."""

    def __init__(self, graph: Graph, ties: Ties, nodes: Iterable[str]) -> None:
        """`nodes`: those that are no copies."""
        self.graph, self.ties = graph, ties
        self.times: dict[str, int] = defaultdict(int)
        for node in graph.nodes:
            self.times[ties.first(node.name)] += ties.times(node.name)
        self.fixed = _whole_readers(graph)
        self.hubs = self._hubs()
        self.parameters = self._parameters()
        self.variables: list[Variable] = [
            *(("node", name) for name in nodes),
            *(("hub", name) for name in self.hubs),
            *(("parameter", name) for name in self.parameters),
        ]

    def _hubs(self) -> dict[str, list[End]]:
        graph, first = self.graph, self.ties.first
        readers: dict[str, int] = defaultdict(int)
        for value in graph.producers:
            count = len(graph.consumers[value]) + self.fixed.get(value, 0)
            readers[first(value)] = max(readers[first(value)], count)
        found: dict[str, list[End]] = defaultdict(list)
        for value, node in graph.producers.items():
            if readers[first(value)] < 2:
                continue
            made = len(node.uses) + node.values.index(value)
            found[first(value)] += [
                (first(node.name), made),
                *((first(n.name), p) for n, p in graph.consumers[value]),
            ]
        return {value: list(dict.fromkeys(ends)) for value, ends in found.items()}

    def _parameters(self) -> dict[str, list[End]]:
        found: dict[str, list[End]] = defaultdict(list)
        for entry in self.graph.input_of("parameter"):
            found[self.ties.first(entry.name)] += [
                (self.ties.first(n.name), p) for n, p in self.graph.consumers[entry.name]
            ]
        return {name: list(dict.fromkeys(ends)) for name, ends in found.items() if ends}

    @functools.cached_property
    def owners(self) -> dict[str, int]:
        """Parameter of the graph → how many of the model it stands for."""
        return owners_of(self.graph, self.ties.first, self.ties.times)

    @functools.cached_property
    def waited(self) -> frozenset[tuple[Variable, Variable, str]]:
        """The edges (from variable, to variable, value) that nothing can hide."""
        return waited_edges(self.graph, self.ties.first, self.hubs)

    def sends_gradient(self, edge: Edge) -> bool:
        """Return whether a gradient comes back over an edge: not from readers that only compare a value."""
        *_, (kind, name), _, value = edge
        match kind:
            case "node":
                return value in self.graph.needs_grad and name in self._graded
            case "hub":
                return value in self._sent_back
        return value in self.graph.needs_grad and value == self.ties.first(self.graph.loss)

    @functools.cached_property
    def _graded(self) -> frozenset[str]:
        return frozenset(self.ties.first(n.name) for n in self.graph.nodes if any(n.needs_grad))

    @functools.cached_property
    def _sent_back(self) -> frozenset[str]:
        return frozenset(map(self.ties.first, self.graph.sent_back))

    @functools.cached_property
    def edges(self) -> dict[Edge, int]:
        """Every reshard that may be → how often."""
        return self.found_edges()

    def found_edges(self, start: int = 0, graded: bool = False) -> dict[Edge, int]:
        """`edges`, found; only those of values that node number `start` or a later one makes, and if `graded` only of
        those that need a gradient. Those of parameters are always among them."""
        found: dict[Edge, int] = defaultdict(int)
        first, times = self.ties.first, self.ties.times
        made = {node.name for node in self.graph.nodes[start:]}
        for value, node in self.graph.producers.items():
            if node.name not in made or (graded and value not in self.graph.needs_grad):
                continue
            name = first(value)
            source, port = ("node", first(node.name)), node.values.index(value)
            if name in self.hubs:
                hub = ("hub", name)
                found[source, port, hub, -1, name] += times(node.name)
                source, port = hub, -1
            for consumer, number in self.graph.consumers[value]:
                found[source, port, ("node", first(consumer.name)), number, name] += times(consumer.name)
            if self.fixed.get(value):
                found[source, port, ("whole", ""), -1, name] += self.fixed[value]
        for entry in self.graph.input_of("parameter"):
            name = first(entry.name)
            for consumer, number in self.graph.consumers[entry.name]:
                target = ("node", first(consumer.name))
                found[("parameter", name), -1, target, number, name] += times(consumer.name)
        return found


def is_kept(graph: Graph, name: str) -> bool:
    """True if autograd saves a value for some reader, also through views of it."""
    return any(keeps(graph, node, port) for node, port in graph.consumers[name])


def keeps(graph: Graph, node: Node, port: int) -> bool:
    """True if autograd saves the operand of an operator at a port, for itself or for a reader through a view."""
    if any(node.needs_grad) and port in saved_in(graph)[node.name].inputs:
        return True
    return node.op in VIEWS and any(is_kept(graph, value) for value in node.values)


def _whole_readers(graph: Graph) -> dict[str, int]:
    """Value → how many results of the program it is: those are replicated."""
    found: dict[str, int] = defaultdict(int)
    for _, value in (*graph.outputs, *graph.mutations):
        if value in graph.producers:
            found[value] += 1
    return found
