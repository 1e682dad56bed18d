"""Remarks about differences between a captured program and the user's code."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.graph import Graph, Node

# Operator → where its arguments say that the gradient of its table is a sparse tensor.
SPARSE = {"aten.embedding.default": 4, "aten.embedding_bag.padding_idx": 5, "aten.embedding_bag.default": 5}


def is_sparse(node: Node) -> bool:
    """Return whether the table that a node reads would have a sparse gradient."""
    place = SPARSE.get(node.op, 0)
    return 0 < place < len(node.args) and bool(node.args[place])


def noted(graph: Graph, outside: Iterable[str]) -> tuple[str, ...]:
    """Return remarks on a traced graph.

    `outside`: lines that read tensors which require a gradient and are not the model's.
    """
    sparse = (n.module or n.name for n in graph.nodes if is_sparse(n))
    tables = [
        f"the gradient of {table} is a dense tensor, as with sparse=False: it is added up over ranks, and an "
        "optimizer for sparse gradients does not accept it"
        for table in dict.fromkeys(sparse)
    ]
    strangers = [
        f"a tensor that {line} reads requires a gradient and is not a parameter of the model: it keeps the value "
        "that it "
        "had; to train it, make it a parameter of the model"
        for line in outside
    ]
    return (*tables, *strangers)
