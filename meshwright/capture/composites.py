"""Operators that torch itself composes of others: stacks, tiles, flips, rotations, chains of products.

Each becomes the same composition, of operators that have rules.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.capture.rewrite import Rewriter, Rule, Values, arguments, named
from meshwright.capture.slices_and_joins import repeated
from meshwright.core.graph import Node, Ref


def _at_least(b: Rewriter, x: Ref, rank: int) -> Ref:
    """Return a view of so many dims: one dim becomes a row, and two dims get a third one of size 1 at the end."""
    shape = b.shape(x)
    if len(shape) >= rank:
        return x
    match rank, len(shape):
        case 3, 2:
            return b.view(x, (*shape, 1))
        case 3, 1:
            return b.view(x, (1, *shape, 1))
    return b.view(x, (1,) * (rank - len(shape)) + shape)


def _views(rank: int) -> Rule:
    """`atleast_1d` and its like."""

    def rule(b: Rewriter, n: Node) -> Values:
        x = n.args[0]
        return _at_least(b, x, rank) if isinstance(x, Ref) else tuple(_at_least(b, y, rank) for y in x)

    return rule


def _joined(rank: int, dim: int) -> Rule:
    """`vstack` and its like: views of at least so many dims, joined along one. `hstack` joins vectors along their only
    dim."""

    def rule(b: Rewriter, n: Node) -> Values:
        out = n.outputs[0]
        parts = [_at_least(b, x, rank) for x in n.args[0]]
        parts = [b.cast(x, out.dtype) for x in parts if len(b.shape(x)) == len(out.shape)]
        return b.cat(parts, min(dim, len(out.shape) - 1))

    return rule


def _columns(b: Rewriter, n: Node) -> Values:
    """Join columns: a vector is one."""
    shapes = [b.shape(x) for x in n.args[0]]
    columns = [
        b.view(x, (s[0] if s else 1, 1)) if len(s) < 2 else x for x, s in zip(n.args[0], shapes, strict=True)
    ]
    return b.cat([b.cast(x, n.outputs[0].dtype) for x in columns], 1)


def _tile(b: Rewriter, n: Node) -> Values:
    """A repeat with a number for each dim."""
    x, times = n.args
    if 0 in times:
        return None
    return repeated(b, x, (1,) * (len(b.shape(x)) - len(times)) + times)


def _flip(dim: int) -> Rule:
    return lambda b, n: _flipped(b, n.args[0], dim)


def _flipped(b: Rewriter, x: Ref, *dims: int) -> Ref:
    return b.emit("aten.flip.default", (x, dims), b.type(x))


def _rot90(b: Rewriter, n: Node) -> Values:
    """Turns by 90 degrees in the plane of two dims."""
    x, turns, dims = arguments(n, None, 1, (0, 1))
    rank = len(b.shape(x))
    i, j = (d % rank for d in dims)
    order = list(range(rank))
    order[i], order[j] = order[j], order[i]
    match turns % 4:
        case 1:
            return b.permute(_flipped(b, x, j), order)
        case 2:
            return _flipped(b, x, i, j)
        case 3:
            return b.permute(_flipped(b, x, i), order)
    return x


def _take_along_dim(b: Rewriter, n: Node) -> Values:
    """A gather of operands that are broadcast against each other in all other dims."""
    x, index, dim = n.args[0], n.args[1], n.arg(2, "dim")
    if dim is None:
        x, index = (b.view(v, (math.prod(b.shape(v)),)) for v in (x, index))
        return b.emit("aten.gather.default", (x, 0, index), n.outputs[0])
    dim %= len(b.shape(x))
    out = n.outputs[0].shape
    wide = (*out[:dim], b.shape(x)[dim], *out[dim + 1 :])
    return b.emit("aten.gather.default", (b.expand(x, wide), dim, b.expand(index, out)), n.outputs[0])


def _channel_shuffle(b: Rewriter, n: Node) -> Values:
    """Channels of g groups, from ``(g c)`` to ``(c g)``."""
    x, groups = n.args
    shape = b.shape(x)
    apart = b.view(x, (shape[0], groups, shape[1] // groups, *shape[2:]))
    return b.view(b.permute(apart, (0, 2, 1, *range(3, len(shape) + 1))), shape)


def _cross(b: Rewriter, n: Node) -> Values:
    """Name the dim. By default it is the first of size 3, and a shard may have another one of that size."""
    x, y, dim = arguments(n, None, None, None)
    dim = b.shape(x).index(3) if dim is None else dim % len(b.shape(x))
    return b.emit("aten.linalg_cross.default", (x, y), n.outputs[0], dim=dim)


def _kron(b: Rewriter, n: Node) -> Values:
    """The product of each element of one with all of the other: ``a0 1 a1 1`` times ``1 b0 1 b1``."""
    rank = len(n.outputs[0].shape)
    x, y = ((1,) * (rank - len(s)) + s for s in map(b.shape, n.args))
    apart = tuple(size for pair in zip(x, y, strict=True) for size in pair)
    left = b.view(n.args[0], tuple(size for a in x for size in (a, 1)))
    right = b.view(n.args[1], tuple(size for c in y for size in (1, c)))
    product = b.emit("aten.mul.Tensor", (left, right), replace(n.outputs[0], shape=apart))
    return b.view(product, n.outputs[0].shape)


def _diag(b: Rewriter, n: Node) -> Values:
    """A vector on the diagonal of a matrix, or the diagonal of a matrix."""
    x, offset = arguments(n, None, 0)
    if len(b.shape(x)) == 1:
        return b.emit("aten.diag_embed.default", (x, offset, 0, 1), n.outputs[0])
    return b.emit("aten.diagonal.default", (x, offset, 0, 1), n.outputs[0])


def _round(b: Rewriter, n: Node) -> Values:
    """Without decimals, plain rounding."""
    decimals = n.kwarg("decimals", 0)
    if not decimals:
        return b.emit("aten.round.default", n.args, n.outputs[0])
    return b.emit("aten.round.decimals", n.args, n.outputs[0], decimals=decimals)


def _trapezoid(b: Rewriter, n: Node) -> Values:
    """The area under samples at equal distances: their sum, without half of the first and of the last, times the
    distance."""
    y, out, shape = n.args[0], n.outputs[0], b.shape(n.args[0])
    dim = n.kwarg("dim", -1) % max(len(shape), 1)
    if not shape or not shape[dim] or b.type(y).dtype != out.dtype:
        return None
    total = b.emit("aten.sum.dim_IntList", (y, (dim,), False), out)
    first, last = (b.view(b.slice(y, dim, at, at + 1), out.shape) for at in (0, shape[dim] - 1))
    ends = b.emit("aten.add.Tensor", (first, last), out)
    inner = b.emit("aten.sub.Tensor", (total, b.emit("aten.mul.Tensor", (ends, 0.5), out)), out)
    return b.emit("aten.mul.Tensor", (inner, n.kwarg("dx", 1)), out)


# ---------------------------------------------------------------- chains of products


def _chain(b: Rewriter, n: Node) -> Values:
    """Products of two at a time, in the order of the fewest multiplications. A vector at an end is a row or column."""
    parts: list[Ref] = list(n.args[0])
    for at in (0, -1):
        shape = b.shape(parts[at])
        if len(shape) == 1:
            parts[at] = b.view(parts[at], (1, *shape) if at == 0 else (*shape, 1))
    sizes = [b.shape(parts[0])[0], *(b.shape(x)[1] for x in parts)]
    return b.view(_product(b, parts, _splits(sizes), 0, len(parts) - 1), n.outputs[0].shape)


def _product(b: Rewriter, parts: list[Ref], splits: dict[tuple[int, int], int], first: int, last: int) -> Ref:
    """Return the product of the matrices from first to last."""
    if first == last:
        return parts[first]
    at = splits[first, last]
    left, right = _product(b, parts, splits, first, at), _product(b, parts, splits, at + 1, last)
    kind = replace(b.type(left), shape=(b.shape(left)[0], b.shape(right)[1]))
    return b.emit("aten.mm.default", (left, right), kind)


def _splits(sizes: list[int]) -> dict[tuple[int, int], int]:
    """Return after which matrix to split each run of a chain, matrix i being ``sizes[i] x sizes[i + 1]``."""
    count = len(sizes) - 1
    cost = {(i, i): 0 for i in range(count)}
    splits: dict[tuple[int, int], int] = {}
    for length in range(1, count):
        for first in range(count - length):
            last = first + length
            cost[first, last], splits[first, last] = min(
                (cost[first, k] + cost[k + 1, last] + sizes[first] * sizes[k + 1] * sizes[last + 1], k)
                for k in range(first, last)
            )
    return splits


COMPOSITES: dict[str, Rule] = {
    **named("atleast_1d.default atleast_1d.Sequence", _views(1)),
    **named("atleast_2d.default atleast_2d.Sequence", _views(2)),
    **named("atleast_3d.default atleast_3d.Sequence", _views(3)),
    **named("hstack.default", _joined(1, 1)),
    **named("vstack.default", _joined(2, 0)),
    **named("dstack.default", _joined(3, 2)),
    **named("column_stack.default", _columns),
    **named("tile.default", _tile),
    **named("fliplr.default", _flip(1)),
    **named("flipud.default", _flip(0)),
    **named("rot90.default", _rot90),
    **named("take_along_dim.default", _take_along_dim),
    **named("channel_shuffle.default", _channel_shuffle),
    **named("cross.default", _cross),
    **named("kron.default", _kron),
    **named("diag.default", _diag),
    **named("special_round.default", _round),
    **named("trapezoid.dx trapz.dx", _trapezoid),
    **named("linalg_multi_dot.default", _chain),
}


__all__ = ["COMPOSITES"]
