"""Write views by strides, `as_strided` and what torch makes of `fill_diagonal_`, as reads and writes by row number.

Strides are those of memory, and clones are dropped at capture: whatever is read here is in memory in the order of its
dims. The backward of torch's `as_strided_scatter` gives a gradient to the elements that were replaced, and to no
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from meshwright.capture.export_errors import AS_IT_IS
from meshwright.capture.rewrite import ARANGE, Rewriter, Rule, Values, arguments
from meshwright.core.graph import Device, Dtype, Node, Ref, TensorType
from meshwright.errors import CaptureError

aten = torch.ops.aten
STRIDED_NODES = (aten.as_strided.default, aten.as_strided_scatter.default)


def check_strides(node: fx.Node) -> None:
    """Raise CaptureError for a view by strides of what is not in memory as its dims say."""
    source = node.args[0]
    if node.target not in STRIDED_NODES or not isinstance(source, fx.Node):
        return
    value = source.meta["val"]
    if not value.is_contiguous() or value.storage_offset():
        raise _refused("is of a tensor that is a view, or whose dims are not in the order of its memory")


def _refused(what: str) -> CaptureError:
    return CaptureError(
        f"as_strided(), or fill_diagonal_(), {what}",
        why="strides count in memory, which a captured program does not have",
        hint="take it of x.contiguous(), or of x.clone() for a part of x; x.unfold(dim, size, step) needs no strides, "
        f"and masked_fill(torch.eye(n, dtype=torch.bool), value) fills a diagonal; or {AS_IT_IS}",
    )


def _positions(
    b: Rewriter, n: Node, sizes: Sequence[int], strides: Sequence[int], start: int | None, count: int
) -> Ref:
    """The places in a flat tensor of so many elements that a view reads."""
    start, rank = start or 0, len(sizes)
    if start + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True)) >= count:
        raise _refused("reads past the end of a tensor").at(n.where)
    total = b.full((1,) * rank, start, "i64")
    for dim, (size, step) in enumerate(zip(sizes, strides, strict=True)):
        if not step or size == 1:
            continue
        kind = TensorType("i64", (size,))
        along = b.emit(ARANGE, (0, size * step, step), kind, dtype=Dtype("i64"), device=Device())
        shape = [1] * rank
        shape[dim] = size
        along = b.view(along, shape)
        if b.full_value(total) == 0:
            total = along
            continue
        shape = [max(pair) for pair in zip(b.shape(total), shape, strict=True)]
        total = b.emit("aten.add.Tensor", (total, along), TensorType("i64", tuple(shape)))
    return b.expand(total, sizes)


def _read(b: Rewriter, n: Node) -> Values:
    x, sizes, strides, start = arguments(n, None, None, None, None)
    count = math.prod(b.shape(x))
    if 0 in sizes:
        return None
    places = _positions(b, n, sizes, strides, start, count)
    return b.emit("aten.index.Tensor", (b.view(x, (count,)), (places,)), n.outputs[0])


def _written(b: Rewriter, n: Node) -> Values:
    x, part, sizes, strides, start = arguments(n, None, None, None, None, None)
    shape, count = b.shape(x), math.prod(b.shape(x))
    if 0 in sizes:
        return x
    places = _positions(b, n, sizes, strides, start, count)
    part = b.like(part, TensorType(n.outputs[0].dtype, tuple(sizes)))
    flat = TensorType(n.outputs[0].dtype, (count,))
    return b.view(b.emit("aten.index_put.default", (b.view(x, (count,)), (places,), part), flat), shape)


STRIDED: dict[str, Rule] = {"aten.as_strided.default": _read, "aten.as_strided_scatter.default": _written}

__all__ = ["STRIDED", "check_strides"]
