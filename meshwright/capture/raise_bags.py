"""Restore bags of equal length: a matrix of ids, a bag a row, as the model had them.

Torch lays bags end to end beside the place where each starts. A rank with a shard of those cannot know which ids are
its own, while rows of a matrix are independent.
"""

from __future__ import annotations

from typing import Any

from meshwright.capture.rewrite import ARANGE, Rewriter, rewrite
from meshwright.core.graph import Graph, Node, Ref

BAGS = ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
DEFAULTS: tuple[Any, ...] = (False, 0, False, None, False, None)  # of all arguments after the starts
MODES = ("sum", "mean", "max")


def raise_bags(graph: Graph) -> Graph:
    """Replace a look-up of bags by `meshwright.embedding_bag` where their starts are proved to be evenly apart."""
    read = {u for n in graph.nodes for u in n.uses} | {name for _, name in (*graph.outputs, *graph.mutations)}

    def bags(b: Rewriter, n: Node) -> tuple[Ref, ...] | None:
        if not read.isdisjoint(n.values[1:]):  # numbers of bags and sizes, which only torch's backward reads
            return None
        args = (*n.args, *DEFAULTS[len(n.args) - 3 :])
        table, ids, starts, scaled, mode, _, weights, last, padding = args
        places, (count,), (total,) = b.producer(starts, ARANGE), b.shape(starts), b.shape(ids)
        length = total // max(count, 1)
        even = places is not None and length > 0 and places.args == (0, count * length, length)
        if (
            not even or total != count * length or scaled or last
        ):  # a gradient by frequency needs the full batch
            return None
        rows = [b.view(x, (count, length)) for x in (ids, weights) if x is not None]
        result = b.emit(
            "meshwright.embedding_bag",
            (rows[0], table, *rows[1:]),
            n.outputs[0],
            mode=MODES[mode],
            padding=padding,
        )
        return (result, *(b.full(t.shape, 0, t.dtype) for t in n.outputs[1:]))

    return rewrite(graph, dict.fromkeys(BAGS, bags))


__all__ = ["raise_bags"]
