"""Transfers between a device and its host if the host runs some operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from meshwright.core.graph import PIN, Graph
from meshwright.core.placement import hosted_values, leaving_values
from meshwright.search.space.wiring import Wiring


@dataclass(frozen=True)
class Crossing:
    """A value that a node takes to the host, or makes there for others on the device, in the layout of one of the
    node's ports (inputs, then outputs), so often in a step. Copies of layers go by the name of the first."""

    node: str
    port: int
    value: str
    times: int


def crossings(graph: Graph, wiring: Wiring, hosts: Collection[str]) -> Iterator[Crossing]:
    """All of a graph; `hosts` are the nodes that the host runs."""
    hosted = hosted_values(graph, hosts)
    leaving = leaving_values(graph, hosts, hosted)
    ties = wiring.ties
    for node in graph.nodes if hosts else ():
        there = node.name in hosts or (node.op == PIN and node.uses[0] in hosted)
        # The hub of what leaves the host is on the device, for all.
        back = {u for u in node.uses if u in leaving and ties.first(u) in wiring.hubs}
        read = [(p, u) for p, u in enumerate(node.uses) if there and (u not in hosted or u in back)]
        given = [(p, v) for p, v in enumerate(node.values, len(node.uses)) if v in leaving]
        for port, value in (*read, *given):
            times = ties.times(node.name) * (2 if value in graph.needs_grad else 1)
            yield Crossing(ties.first(node.name), port, ties.first(value), times)
