"""Where values live: on a rank's device, or in its host's memory beside the operators that run there.

A plan names the operators of a model that the host runs (`Plan.hosts`). Their results live in its memory, and so does
an input that only they read: a table and, with it, its gradient and its optimizer's state. Everything else lives on
the device. On a machine whose processor is the device both are one memory, and a transfer is no copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.core.graph import PIN, Graph, Node
from meshwright.core.techniques import Techniques


def hosted_values(graph: Graph, hosts: Collection[str]) -> frozenset[str]:
    """The values of a graph that live in the host's memory when these of its nodes run there."""
    if not hosts:
        return frozenset()
    found = {i.name for i in graph.inputs if _read_by(graph, i.name, hosts)}
    for node in graph.nodes:
        if node.name in hosts or (node.op == PIN and node.uses[0] in found):
            found.update(node.values)
    return frozenset(found)


def parked_parameters(graph: Graph, hosts: Collection[str], asked: Techniques) -> frozenset[str]:
    """The parameters that live in the host's memory between their uses on the device: those that are `asked` for, that
    no operator on the host reads, and that are not below the threshold as a whole."""
    if not asked.parks:
        return frozenset()
    least_bytes = 1024 * asked.threshold_kb
    found: set[str] = set()
    results = {v for _, v in (*graph.outputs, *graph.mutations)}
    for entry in graph.input_of("parameter"):
        users = [node.name for node, _ in readers(graph, entry.name)]
        if not asked.parks_parameter(entry.target, *entry.ties):
            continue
        if users and entry.name not in results and entry.type.size_bytes >= least_bytes:
            found |= {entry.name} if not set(hosts).intersection(users) else set()
    return frozenset(found)


def leaving_values(graph: Graph, hosts: Collection[str], hosted: Collection[str]) -> frozenset[str]:
    """Of the values in the host's memory those that something on the device reads: an operator, the caller, a buffer
    that lives there."""
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
    """The operators that read a value, with the port, marks looked through."""
    for node, port in graph.consumers[value]:
        if node.op == PIN:
            yield from readers(graph, node.name)
        else:
            yield node, port


def _read_by(graph: Graph, value: str, hosts: Collection[str]) -> bool:
    """Whether a value is read, and by these nodes alone."""
    results = {v for _, v in (*graph.outputs, *graph.mutations)}
    found = [node.name in hosts for node, _ in readers(graph, value)]
    return bool(found) and all(found) and value not in results


__all__ = ["hosted_values", "leaving_values", "parked_parameters", "readers"]
