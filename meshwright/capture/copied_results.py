"""Results beside the loss that are tensors of the model or of the batch as they are, or parts of them.

Copies are dropped at capture, and a result that is an input would be the tensor that the next update writes into, on
the ranks that have it in full; and in a pipeline, one that no stage makes. So each is copied where it is computed: it
has the values of forward, under any plan.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.graph import LOSS, Graph, Node, Ref
from meshwright.cost.operator_tables import root_of


def copy_results(graph: Graph) -> Graph:
    """Return the graph with a copy of each result, but the loss, that has the memory of an input."""
    given, copies = {i.name for i in graph.inputs}, dict[str, Node]()
    for label, value in graph.outputs:
        if label != LOSS and root_of(graph, value) in given:
            name = f"{value.replace('.', '_')}_result"
            copies[value] = Node(
                name, "aten.clone.default", (Ref(value),), (), (graph.types[value],), (False,)
            )
    if not copies:
        return graph
    outputs = tuple(
        (label, copies[value].name if value in copies and label != LOSS else value)
        for label, value in graph.outputs
    )
    return replace(graph, nodes=(*graph.nodes, *copies.values()), outputs=outputs)


__all__ = ["copy_results"]
