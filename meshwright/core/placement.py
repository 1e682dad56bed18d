"""Placement of values: in the memory of a rank's device or of its host.

A plan names the operators that run on the host (`Plan.hosts`). Their results are in host memory, and so is an input
that only they read: for example a table with its gradient and optimizer state. Everything else is on the device. On a
machine whose processor is the device both are one memory, and a transfer copies nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.core.graph import PIN, Graph, Node
from meshwright.core.techniques import Techniques


def hosted_values(graph: Graph, hosts: Collection[str]) -> frozenset[str]:
    """Return the values of a graph that are in host memory when the nodes `hosts` run there."""
    if not hosts:
        return frozenset()
    found = {i.name for i in graph.inputs if _read_by(graph, i.name, hosts)}
    for node in graph.nodes:
        if node.name in hosts or (node.op == PIN and node.uses[0] in found):
            found.update(node.values)
    return frozenset(found)


def offloaded_parameters(graph: Graph, hosts: Collection[str], asked: Techniques) -> frozenset[str]:
    """Return the parameters that are offloaded to host memory between their uses on the device.

    These are the parameters that the techniques name, that no operator on the host reads, and whose full size is not
    below the threshold.
    """
    if not asked.offloads_parameters:
        return frozenset()
    least_bytes = 1024 * asked.threshold_kb
    found: set[str] = set()
    results = {v for _, v in (*graph.outputs, *graph.mutations)}
    for entry in graph.input_of("parameter"):
        users = [node.name for node, _ in readers(graph, entry.name)]
        if not asked.offloads_parameter(entry.target, *entry.ties):
            continue
        if users and entry.name not in results and entry.type.size_bytes >= least_bytes:
            found |= {entry.name} if not set(hosts).intersection(users) else set()
    return frozenset(found)


def leaving_values(graph: Graph, hosts: Collection[str], hosted: Collection[str]) -> frozenset[str]:
    """Return the values in host memory that the device reads: for an operator, the caller, or a buffer there."""
    if not hosted:
        return frozenset()
    buffers = {i.target: i.name for i in graph.input_of("buffer")}
    asked = {v for _, v in graph.outputs} | {
        v for target, v in graph.mutations if buffers[target] not in hosted
    }
    for node in graph.nodes:
        if node.name not in hosts and node.op != PIN:
            asked.update(node.uses)
    return frozenset(asked.intersection(hosted))


def readers(graph: Graph, value: str) -> Iterator[tuple[Node, int]]:
    """Yield the operators that read a value, with the port; annotations are skipped."""
    for node, port in graph.consumers[value]:
        if node.op == PIN:
            yield from readers(graph, node.name)
        else:
            yield node, port


def _read_by(graph: Graph, value: str, hosts: Collection[str]) -> bool:
    """Return whether a value is read, and only by these nodes."""
    results = {v for _, v in (*graph.outputs, *graph.mutations)}
    found = [node.name in hosts for node, _ in readers(graph, value)]
    return bool(found) and all(found) and value not in results


__all__ = ["hosted_values", "leaving_values", "offloaded_parameters", "readers"]
