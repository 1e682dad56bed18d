"""The variables of a graph and their states, for one family of strategies, and the choice that states stand for.

Variables are the nodes, the *hubs* (a value that several consumers read has one layout in which it is brought once, for
all that want it so), and the parameters. Nodes that stand for each other (copies of a layer) are one variable.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.graph import Graph
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.core.placement import hosted_values
from meshwright.cost.cluster import Cluster
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import Strategy
from meshwright.redistribute.price_matrix import Table
from meshwright.search.space.cache import SharedResults
from meshwright.search.space.codes import NodeCodes, values_of
from meshwright.search.space.codes_shared import all_codes
from meshwright.search.space.families import Family
from meshwright.search.space.layouts import Port, union
from meshwright.search.space.nodes import NodeStates, node_states, strategy_of
from meshwright.search.space.parameters import (
    ParameterStates,
    Storage,
    layout_of,
    parameter_states,
    storage_layout,
)
from meshwright.search.space.wiring import Ties, Variable, Wiring, is_kept


@dataclass(frozen=True)
class Choice:
    """The choice of a search, by names of the graph that it searched."""

    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, TensorLayout]
    hubs: Mapping[str, TensorLayout]
    again: frozenset[str]


@dataclass(frozen=True)
class ArraySpace:
    """States and prices of a space that were found otherwise (as arrays): its nodes, hubs and parameters by name,
    `unary` and `pairs` by number as a space has them."""

    nodes: Mapping[str, NodeStates]
    hubs: Mapping[str, Port]
    parameters: Mapping[str, ParameterStates]
    unary: Sequence[np.ndarray]
    pairs: Mapping[tuple[int, int], np.ndarray]


class Variables:
    """The nodes, hubs and parameters of a graph on a mesh with their states."""

    def __init__(
        self,
        graph: Graph,
        factors: Factors,
        mesh: Mesh,
        cluster: Cluster,
        family: Family | ArraySpace,
        storage: Storage,
        *,
        ties: Ties | None,
        codes: Mapping[str, NodeCodes] | None,
        table: Table | None,
        kept: SharedResults | None,
        hosts: Collection[str],
    ) -> None:
        """As those of a `Space`."""
        self.graph, self.factors, self.mesh, self.cluster, self.ties = (
            graph,
            factors,
            mesh,
            cluster,
            ties or Ties(),
        )
        self.table = table or Table(mesh, cluster.prices)
        self.values = kept.values if kept else values_of(graph, factors)
        self.codes = dict(codes or all_codes(graph, factors, self.values, self.ties))
        self.hosts = frozenset(hosts) if cluster.host_bytes_per_s else frozenset()
        self.hosted = hosted_values(graph, self.hosts)
        self.kept = kept or SharedResults(graph, self.values, self.codes, self.hosts)
        self.wiring = self.kept.once("wiring", lambda: Wiring(graph, self.ties, self.codes))
        self.variable: dict[Variable, int] = {v: number for number, v in enumerate(self.wiring.variables)}
        self.known: dict[Hashable, object] = {}  # what functions have found out about it (`remembered.py`)
        if isinstance(family, ArraySpace):
            self.nodes, self.hubs = dict(family.nodes), dict(family.hubs)
            self.parameters = dict(family.parameters)
            return
        self.nodes: dict[str, NodeStates] = {
            name: node_states(found, family, graph, mesh, cluster, self.kept.states, host=name in self.hosts)
            for name, found in self.codes.items()
        }
        self.hubs: dict[str, Port] = {
            name: union([self._end(*end) for end in ends]) for name, ends in self.wiring.hubs.items()
        }
        self.parameters: dict[str, ParameterStates] = {
            name: self._parameter(name, [self._end(*end) for end in ends], storage)
            for name, ends in self.wiring.parameters.items()
        }

    def _end(self, node: str, port: int) -> Port:
        return self.nodes[node].ports[port]

    def _parameter(self, name: str, ports: list[Port], storage: Storage) -> ParameterStates:
        value, trained, whole = self.values[name], name in self.graph.needs_grad, is_kept(self.graph, name)

        def make() -> ParameterStates:
            return parameter_states(
                value, ports, trained, whole, self.mesh, self.cluster, self.table, storage, host
            )

        host = name in self.hosted
        return self.kept.parameter(ports, (value, trained, whole, storage, host), make)

    def owners(self, name: str) -> int:
        """How many parameters of the model a parameter of the graph stands for."""
        return self.wiring.owners[name]

    def want(self, node: str, port: int) -> Port:
        """The layouts that a node asks for at a port."""
        return self.nodes[self.ties.first(node)].inputs()[port]

    def port(self, variable: tuple[str, str], port: int, *, gives: bool) -> Port:
        """The layouts of a variable at one end of an edge."""
        kind, name = variable
        match kind:
            case "hub":
                return self.hubs[name]
            case "parameter":
                return self.parameters[name].use
            case "whole":
                axes = len(self.mesh.axes)
                return Port(np.zeros((1, axes), np.int8), np.zeros((1, axes), bool))
        states = self.nodes[name]
        return states.outputs()[port] if gives else states.inputs()[port]

    # ------------------------------------------------------------------------------------------------ the choice

    def strategy(self, node: str, states: Sequence[int]) -> Strategy:
        """The strategy of a node that is no copy of another."""
        found = self.nodes[node]
        return strategy_of(found.codes, found.rows[states[self.variable["node", node]]], self.mesh)

    def choice(self, states: Sequence[int]) -> Choice:
        """The strategies, storage and hubs that states stand for, for every name of the graph."""
        first = self.ties.first
        state = {variable: states[number] for variable, number in self.variable.items()}
        strategies: dict[str, Strategy] = {}
        made: dict[str, Strategy] = {}
        for node in self.graph.nodes:
            name = first(node.name)
            if name not in made:
                made[name] = self.strategy(name, states)
            strategies[node.name] = made[name]
        hubs: dict[str, TensorLayout] = {}
        for value in self.graph.producers:
            port = self.hubs.get(first(value))
            if port is not None:
                at = state["hub", first(value)]
                hubs[value] = self._layout(value, port, at)
        inputs: dict[str, TensorLayout] = {}
        again: set[str] = set()
        for entry in self.graph.inputs:
            found = self.parameters.get(first(entry.name)) if entry.role == "parameter" else None
            if found is None:
                inputs[entry.name] = self._entry(entry.name, state)
                continue
            at = state["parameter", first(entry.name)]
            stored, use = storage_layout(
                self.factors.dims[entry.name],
                self.values[entry.name],
                found,
                at,
                self.mesh,
                entry.name in self.graph.needs_grad,
            )
            inputs[entry.name] = stored
            if stored != use or len(self.graph.consumers[entry.name]) > 1:
                hubs[entry.name] = use
            if found.again[at]:
                again.add(entry.name)
        return Choice(strategies, inputs, hubs, frozenset(again))

    def _layout(self, value: str, port: Port, at: int) -> TensorLayout:
        return layout_of(
            self.factors.dims[value],
            self.values[value],
            port.forward[at],
            port.grad[at],
            self.mesh,
            value in self.graph.needs_grad,
        )

    def _entry(self, name: str, state: Mapping[tuple[str, str], int]) -> TensorLayout:
        """The layout of a batch tensor, buffer or constant: as all its readers want it, else replicated (a sharding is
        free)."""
        whole = TensorLayout(self.factors.dims[name])
        replaced = {target for target, _ in self.graph.mutations}
        entry = next(i for i in self.graph.inputs if i.name == name)
        if entry.target in replaced:
            return whole
        found = set()
        for node, port in self.graph.consumers[name]:
            at = state["node", self.ties.first(node.name)]
            found.add(self._layout(name, self.want(node.name, port), at).forward)
        return found.pop() if len(found) == 1 and not next(iter(found)).partial else whole
