"""The states of one node, and its own seconds in each: operators by roofline, what its kernels send, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.core.graph import Graph
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.host import place
from meshwright.cost.machine import seconds
from meshwright.cost.operators import work
from meshwright.ops.collectives import WITH_COLLECTIVES, KernelCollective, site_collectives
from meshwright.ops.strategy import Strategy, layouts, split_unit, units
from meshwright.redistribute.steps import wire_elements
from meshwright.search.space.codes import NodeCodes, Option
from meshwright.search.space.families import Family, Rows, letter_sizes
from meshwright.search.space.layouts import Port


@dataclass(frozen=True)
class NodeStates:
    """`rows[s]` are the options of state s on each prime axis; `ports` inputs, then outputs; seconds per state."""

    codes: NodeCodes
    rows: Rows
    ports: tuple[Port, ...]
    forward: np.ndarray  # float64[states]
    backward: np.ndarray  # float64[states]
    talk: np.ndarray  # float64[states]

    def inputs(self) -> tuple[Port, ...]:
        """The ports of what the node reads."""
        return self.ports[: self.codes.inputs]

    def outputs(self) -> tuple[Port, ...]:
        """The ports of its results."""
        return self.ports[self.codes.inputs :]

    def take(self, states: np.ndarray) -> NodeStates:
        """Some of the states."""
        ports = tuple(port.take(states) for port in self.ports)
        seconds = (self.forward[states], self.backward[states], self.talk[states])
        return NodeStates(self.codes, self.rows[states], ports, *seconds)


Known = Callable[[NodeCodes, Rows, Callable[[], "NodeStates"]], "NodeStates"]


def node_states(
    codes: NodeCodes,
    family: Family,
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    known: Known | None = None,
    *,
    host: bool = False,
) -> NodeStates:
    """The states of a node in a family, with their seconds; `known` returns those of nodes like it, or makes them.
    `host`: it runs there."""
    sizes = np.array([a.size for a in mesh.axes], dtype=np.float64)
    rows = family(codes, sizes)

    def make() -> NodeStates:
        return _made(codes, rows, sizes, graph, mesh, cluster, host)

    return known(codes, rows, make) if known else make()


def _made(
    codes: NodeCodes, rows: Rows, sizes: np.ndarray, graph: Graph, mesh: Mesh, cluster: Cluster, host: bool
) -> NodeStates:
    ports = tuple(
        Port(forward[rows], grad[rows]) for forward, grad in zip(codes.forward, codes.grad, strict=True)
    )
    local = letter_sizes(codes, rows, sizes)
    node = codes.node
    wanted = [u in graph.needs_grad for u in node.uses]
    where = "cpu" if host else cluster.device_type
    done = work(node, codes.site.rule, local, graph.types, wanted, device=where)
    forward, backward = (
        np.broadcast_to(np.asarray(half, dtype=np.float64), (len(rows),)).copy()
        for half in seconds(done, *place(cluster, host))
    )
    return NodeStates(codes, rows, ports, forward, backward, _talk(codes, rows, graph, mesh, cluster))


def strategy_of(codes: NodeCodes, row: np.ndarray, mesh: Mesh) -> Strategy:
    """A row of options as a strategy."""
    splits: dict[str, tuple] = {}
    through: list[tuple[str, tuple[int, ...]]] = []
    grad: list[str] = []
    for axis, number in zip(mesh.axes, row, strict=True):
        option: Option = codes.options[number]
        if option.letter:
            tree = codes.site.trees[option.letter]
            splits[option.letter] = split_unit(
                splits.get(option.letter, tree), units(tree)[option.unit], axis.name
            )
        elif option.through:
            through.append((axis.name, option.through))
        elif option.grad:
            grad.append(axis.name)
    return Strategy(tuple(splits.items()), tuple(through), tuple(grad))


def _talk(codes: NodeCodes, rows: Rows, graph: Graph, mesh: Mesh, cluster: Cluster) -> np.ndarray:
    if codes.node.op not in WITH_COLLECTIVES:
        return np.zeros(len(rows))
    found = []
    for row in rows:
        ports = layouts(codes.site, strategy_of(codes, row, mesh))
        talk = site_collectives(codes.site, ports, mesh, graph.types, graph.needs_grad)
        found.append(
            sum(cluster.prices.seconds(t.kind, mesh, t.axes, _sent(t, mesh.count(t.axes))) for t in talk)
        )
    return np.array(found, dtype=np.float64)


def _sent(talk: KernelCollective, members: int) -> float:
    return wire_elements(talk.kind, members, talk.payload_bytes, talk.payload_bytes)
