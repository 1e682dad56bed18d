"""Results that spaces of one graph on one mesh share, so that a second space is built in a fraction of the first's
time.

Nodes are of one *kind* if all that their states depend on is equal: operator, literals, types, sub-dims, options. Their
states are computed once for each set of rows; parameters of one type with equal readers share theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from meshwright.core.graph import Graph, map_refs
from meshwright.redistribute.price_matrix import Value
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.layouts import Port
from meshwright.search.space.nodes import NodeStates
from meshwright.search.space.parameters import ParameterStates

T = TypeVar("T")


class SharedResults:
    """Found once for a graph, a mesh and a cluster; what has been priced is added as spaces are made."""

    def __init__(
        self,
        graph: Graph,
        values: Mapping[str, Value],
        codes: Mapping[str, NodeCodes],
        hosts: Collection[str] = (),
        kinds: Mapping[str, int] | None = None,
    ) -> None:
        """`hosts`: the nodes that the host runs; `kinds`: those of the nodes, where they are known."""
        self.graph, self.values, self.codes, self.hosts = graph, values, codes, hosts
        self._kinds = _kinds(graph, codes, hosts) if kinds is None else kinds
        self._states: dict[Hashable, NodeStates] = {}
        self._parameters: dict[Hashable, ParameterStates] = {}
        self.prices: dict[tuple[Value, bytes], np.ndarray] = {}  # of layouts met, see `layouts.Prices`
        self._of_graph: dict[Hashable, Any] = {}

    def again(self) -> SharedResults:
        """For the same graph on another mesh or cluster: without what has been priced."""
        return SharedResults(self.graph, self.values, self.codes, self.hosts, self._kinds)

    def states(self, codes: NodeCodes, rows: np.ndarray, make: Callable[[], NodeStates]) -> NodeStates:
        """The states of a node with these rows of options, `make` for those of a kind not met so far."""
        key = (self._kinds[codes.node.name], rows.shape, rows.tobytes())
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = make()
        if found.codes is codes:
            return found
        return replace(found, codes=codes)

    def parameter(
        self, wants: Iterable[Port], more: Hashable, make: Callable[[], ParameterStates]
    ) -> ParameterStates:
        """The states of a parameter; `more` is what they depend on beside what its readers want."""
        asked = frozenset((p.forward.shape, p.forward.tobytes(), p.grad.tobytes()) for p in wants)
        found = self._parameters.get((asked, more))
        if found is None:
            found = self._parameters[asked, more] = make()
        return found

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return a result that depends only on the graph, and on `what`. Computed once."""
        if what not in self._of_graph:
            self._of_graph[what] = make()
        return self._of_graph[what]


def _kinds(graph: Graph, codes: Mapping[str, NodeCodes], hosts: Collection[str]) -> dict[str, int]:
    """Return a number for each node: nodes of one kind have the same."""
    known: dict[Hashable, int] = {}
    return {
        name: known.setdefault((kind_of(found, graph), name in hosts), len(known))
        for name, found in codes.items()
    }


def kind_of(codes: NodeCodes, graph: Graph) -> Hashable:
    """All of a node that its states and their seconds depend on."""
    node, rule = codes.node, codes.site.rule
    return (
        node.op,
        map_refs(node.args, lambda _: None),
        tuple((k, map_refs(v, lambda _: None)) for k, v in node.kwargs),
        tuple((graph.types[u], u in graph.needs_grad) for u in node.uses),
        node.outputs,
        node.needs_grad,
        (rule.inputs, rule.outputs, rule.terms, rule.replicated, rule.reduced_inside),
        (tuple(rule.sizes.items()), tuple(codes.site.trees.items())),
        (codes.options, codes.spill, codes.starts),
        (codes.forward.tobytes(), codes.grad.tobytes(), codes.splits.tobytes()),
    )


def owners_of(graph: Graph, first: Callable[[str], str], times: Callable[[str], int]) -> dict[str, int]:
    """Parameter of the graph → how many of the model it stands for."""
    found: dict[str, int] = defaultdict(int)
    for entry in graph.input_of("parameter"):
        found[first(entry.name)] += max((times(n.name) for n, _ in graph.consumers[entry.name]), default=1)
    return dict(found)
