"""Slices, splits, concatenations, repeats, pads and differences in a single form; see `normalize.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.capture.rewrite import Rewriter, Rule, Values, arguments, named
from meshwright.core.graph import Node, Ref


def _slice(b: Rewriter, n: Node) -> Values:
    x, dim, start, end, step = arguments(n, None, 0, None, None, 1)
    dim %= len(b.shape(x))
    return b.slice(x, dim, start or 0, b.shape(x)[dim] if end is None else end, step)


def _select(b: Rewriter, n: Node) -> Values:
    x, dim, index = n.args
    dim %= len(b.shape(x))
    index %= b.shape(x)[dim]
    return b.view(b.slice(x, dim, index, index + 1), n.outputs[0].shape)


def _split(b: Rewriter, n: Node) -> Values:
    dim = n.arg(2, "dim", 0) % len(b.shape(n.args[0]))
    return b.split(n.args[0], [t.shape[dim] for t in n.outputs], dim)


def _unbind(b: Rewriter, n: Node) -> Values:
    dim = n.arg(1, "dim", 0) % len(b.shape(n.args[0]))
    parts = b.split(n.args[0], [1] * len(n.outputs), dim)
    return tuple(b.view(p, t.shape) for p, t in zip(parts, n.outputs, strict=True))


def _cat(b: Rewriter, n: Node) -> Values:
    dtype, rank = n.outputs[0].dtype, len(n.outputs[0].shape)
    # torch lets an empty 1-d tensor join
    parts = [b.cast(p, dtype) for p in n.args[0] if len(b.shape(p)) == rank]
    return b.cat(parts, n.arg(1, "dim", 0) % rank)


def _stack(b: Rewriter, n: Node) -> Values:
    shape = n.outputs[0].shape
    dim = n.arg(1, "dim", 0) % len(shape)
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    return b.cat([b.view(b.cast(p, n.outputs[0].dtype), one) for p in n.args[0]], dim)


def _repeat(b: Rewriter, n: Node) -> Values:
    x, times = n.args
    return None if 0 in times else repeated(b, x, times)


def repeated(b: Rewriter, x: Ref, times: Sequence[int]) -> Ref:
    """Return a tensor repeated so many times along each dim; new dims come first."""
    shape = (1,) * (len(times) - len(b.shape(x))) + b.shape(x)
    apart = tuple(s for t, size in zip(times, shape, strict=True) for s in ((1, size) if t > 1 else (size,)))
    wide = tuple(s for t, size in zip(times, shape, strict=True) for s in ((t, size) if t > 1 else (size,)))
    full = tuple(t * size for t, size in zip(times, shape, strict=True))
    return b.view(b.expand(b.view(x, apart), wide), full)


def _repeat_interleave(b: Rewriter, n: Node) -> Values:
    x, times, dim = n.args[0], n.args[1], n.arg(2, "dim")
    if isinstance(times, Ref):
        return None
    shape = b.shape(x) if dim is not None else (math.prod(b.shape(x)),)
    dim = 0 if dim is None else dim % len(shape)
    apart = (*shape[: dim + 1], 1, *shape[dim + 1 :])
    wide = (*shape[: dim + 1], times, *shape[dim + 1 :])
    return b.view(b.expand(b.view(x, apart), wide), n.outputs[0].shape)


def _pad(b: Rewriter, n: Node) -> Values:
    """A constant pad of one dim is a cat (how language models shift their labels)."""
    x, pads = n.args[0], n.args[1]
    mode, value = (
        (n.arg(2, "mode", "constant"), n.arg(3, "value"))
        if n.op == "aten.pad.default"
        else ("constant", n.arg(2, "value"))
    )
    touched = [i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    if mode != "constant" or len(touched) > 1:
        return None
    if not touched:
        return x
    dim = len(b.shape(x)) - 1 - touched[0]
    before, after = pads[2 * touched[0]], pads[2 * touched[0] + 1]
    size, dtype = b.shape(x)[dim], b.type(x).dtype
    core = b.slice(x, dim, max(-before, 0), size + min(after, 0))

    def edge(width: int) -> list[Ref]:
        shape = (*b.shape(x)[:dim], width, *b.shape(x)[dim + 1 :])
        return [b.full(shape, value or 0, dtype)] if width > 0 else []

    return b.cat([*edge(before), core, *edge(after)], dim)


def _diff(b: Rewriter, n: Node) -> Values:
    x, times, dim, before, after = arguments(n, None, 1, -1, None, None)
    if times != 1 or b.type(x).dtype == "b8":
        return None
    dim %= len(b.shape(x))
    whole = b.cat([p for p in (before, x, after) if p is not None], dim)
    size = b.shape(whole)[dim]
    high, low = b.slice(whole, dim, 1, size), b.slice(whole, dim, 0, size - 1)
    return b.emit("aten.sub.Tensor", (high, low), n.outputs[0])


def _slice_scatter(b: Rewriter, n: Node) -> Values:
    x, source, dim, start, end, step = arguments(n, None, None, 0, None, None, 1)
    if step != 1:
        return None
    dim %= len(b.shape(x))
    size = b.shape(x)[dim]
    start = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
    end = start + b.shape(source)[dim]
    return b.cat(
        [b.slice(x, dim, 0, start), b.cast(source, b.type(x).dtype), b.slice(x, dim, end, size)], dim
    )


def _select_scatter(b: Rewriter, n: Node) -> Values:
    x, source, dim, index = n.args
    shape = b.shape(x)
    dim %= len(shape)
    index %= shape[dim]
    row = b.view(b.cast(source, b.type(x).dtype), (*shape[:dim], 1, *shape[dim + 1 :]))
    return b.cat([b.slice(x, dim, 0, index), row, b.slice(x, dim, index + 1, shape[dim])], dim)


SLICES_AND_JOINS: dict[str, Rule] = {
    **named("slice.Tensor", _slice),
    **named("select.int", _select),
    **named("split.Tensor split_with_sizes.default chunk.default tensor_split.sections tensor_split.indices "
             "unsafe_split.Tensor unsafe_chunk.default split.sizes", _split),
    **named("unbind.int", _unbind),
    **named("cat.default", _cat),
    **named("stack.default", _stack),
    **named("repeat.default", _repeat),
    **named("repeat_interleave.self_int", _repeat_interleave),
    **named("pad.default constant_pad_nd.default", _pad),
    **named("diff.default", _diff),
    **named("slice_scatter.default", _slice_scatter),
    **named("select_scatter.default", _select_scatter),
}  # fmt: skip


__all__ = ["SLICES_AND_JOINS", "repeated"]
