"""The strides of every value, as PyTorch would lay it out, and the views that copy.

A view of a transposed tensor may have no strides and become a copy. That costs time and memory, so both models use this
module. The rules are torch's: a view shares memory where every new dim lies within consecutive old dims
(`computeStride` of ATen). A pointwise result keeps the order of dims of its inputs. The result of a fused attention is
laid out as batch, query, head, width. Everything else is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.core.graph import Graph, Node
from meshwright.ops.special.pointwise import POINTWISE
from meshwright.ops.table import LINES

Strides = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Strides:
    """Return the strides, in elements, of a contiguous tensor."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def is_contiguous(shape: Sequence[int], strides: Strides) -> bool:
    """Return whether the elements lie in order, without gaps."""
    expected = contiguous(shape)
    return all(n == 1 or s == e for n, s, e in zip(shape, strides, expected, strict=True))


def view_strides(shape: Sequence[int], strides: Strides, target: Sequence[int]) -> Strides | None:
    """Return the strides of a view of another shape on the same memory; None if it must copy."""
    if math.prod(shape) == 0 or not shape:
        return contiguous(target)
    found = [0] * len(target)
    place = len(target) - 1
    inner = strides[-1]  # of the old dims that are being matched
    old = new = 1
    for dim in range(len(shape) - 1, -1, -1):
        old *= shape[dim]
        ends = dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != old * inner)
        if not ends:
            continue
        while place >= 0 and (new < old or target[place] == 1):
            found[place] = new * inner
            new *= target[place]
            place -= 1
        if new != old:
            return None
        if dim > 0:
            inner, old, new = strides[dim - 1], 1, 1
    return tuple(found) if place == -1 else None


def strides_of(graph: Graph) -> tuple[dict[str, Strides], frozenset[str]]:
    """Return the strides of every value, and the names of the views that copy."""
    known = {i.name: contiguous(i.type.shape) for i in graph.inputs}
    copying: set[str] = set()
    for node in graph.nodes:
        found = _results(node, graph, known)
        if found is None:
            copying.add(node.name)
            found = [contiguous(t.shape) for t in node.outputs]
        known.update(zip(node.values, found, strict=True))
    return known, frozenset(copying)


def copying_views(graph: Graph) -> frozenset[str]:
    """Return the names of the views that copy."""
    return strides_of(graph)[1]


def _results(node: Node, graph: Graph, known: Mapping[str, Strides]) -> list[Strides] | None:
    """Return the strides of a node's results; None for a view that copies."""
    if not node.uses:
        return [contiguous(t.shape) for t in node.outputs]
    name = node.uses[0]
    shape, own = graph.types[name].shape, known[name]
    rank = len(shape)
    match node.op.split(".")[1]:
        case "view" | "reshape":
            found = view_strides(shape, own, node.outputs[0].shape)
            return None if found is None else [found]
        case "permute":
            dims: tuple[int, ...] = node.args[1]
            return [tuple(own[d % rank] for d in dims)]
        case "transpose" | "t":
            one, other = (node.args[1] % rank, node.args[2] % rank) if len(node.args) > 2 else (0, 1)
            order = list(range(rank))
            if rank > 1:
                order[one], order[other] = order[other], order[one]
            return [tuple(own[d] for d in order)]
        case "expand":
            target = node.outputs[0].shape
            lead = len(target) - rank
            kept = (0 if n == 1 and t != 1 else s for n, t, s in zip(shape, target[lead:], own, strict=True))
            return [(*[0] * lead, *kept)]
        case "slice":
            step, dim = int(node.arg(4, "step", 1)), int(node.arg(1, "dim", 0)) % rank
            return [tuple(s * step if d == dim else s for d, s in enumerate(own))]
        case "unbind":
            dim = int(node.arg(1, "dim", 0)) % rank
            return [own[:dim] + own[dim + 1 :]] * len(node.outputs)
        case "split_with_sizes":
            return [own] * len(node.outputs)
        case "alias" | "detach" | "pin":
            return [own]
        case "scaled_dot_product_attention":
            return [_attention(node)]
        case _:
            pass
    if _is_pointwise(node.op):
        return [_as_inputs(node, graph, known)]
    return [contiguous(t.shape) for t in node.outputs]


def _attention(node: Node) -> Strides:
    shape = node.outputs[0].shape
    if len(shape) != 4:
        return contiguous(shape)
    _b, h, q, f = shape
    return (q * h * f, f, h * f, 1)


def _is_pointwise(op: str) -> bool:
    """Return whether an operator's rule has no dims of its own."""
    text = LINES.get(op)
    return op in POINTWISE or (text is not None and not any(c.isalnum() for c in text.replace("@_", "")))


def _as_inputs(node: Node, graph: Graph, known: Mapping[str, Strides]) -> Strides:
    """Return dense strides in the order of dims of the first non-contiguous input of full shape."""
    shape = node.outputs[0].shape
    for name in node.uses:
        if graph.types[name].shape == shape and not is_contiguous(shape, known[name]):
            order = sorted(range(len(shape)), key=lambda d: (-known[name][d], d))
            dense = contiguous([shape[d] for d in order])
            return tuple(dense[order.index(d)] for d in range(len(shape)))
        if graph.types[name].shape == shape:
            break
    return contiguous(shape)


__all__ = ["Strides", "contiguous", "copying_views", "is_contiguous", "strides_of", "view_strides"]
