"""Local sizes for operators that name sizes: views, slices and splits, creations, groups."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.core.graph import Device, Dtype, Node, TensorType
from meshwright.core.layout import Cat, TensorLayout, dim_axes, dim_size, local_size
from meshwright.ops.local.cut import Cut, ref, text, with_arg
from meshwright.ops.special.shape import slice_bounds

INT = "i64"


def view(cut: Cut) -> tuple[Node, ...]:
    """Use the local shape. A view copies where the local strides need it."""
    return (cut.last("aten.reshape.default", (cut.node.args[0], cut.outputs[0].shape)),)


def sized(at: int) -> Callable[[Cut], tuple[Node, ...]]:
    """Return a localizer for operators whose argument `at` is the shape of the result."""

    def localizer(cut: Cut) -> tuple[Node, ...]:
        return (cut.last(args=with_arg(cut.node.args, at, cut.outputs[0].shape)),)

    return localizer


def split_with_sizes(cut: Cut) -> tuple[Node, ...]:
    """Use the local sizes of the pieces."""
    x, _, *rest = cut.node.args
    dim = int(cut.node.arg(2, "dim", 0)) % len(cut.node.outputs[0].shape)
    return (cut.last(args=(x, tuple(t.shape[dim] for t in cut.outputs), *rest)),)


def slice_(cut: Cut) -> tuple[Node, ...]:
    """Move the bounds: what precedes the slice is shorter on a rank."""
    source = tuple(cut.ports.inputs[0].shape)
    start, end, step, dim = slice_bounds(cut.node, source)
    local = cut.input_shape(0)
    if local[dim] == source[dim] and not dim_axes(cut.ports.inputs[0].dims[dim]):
        pass
    elif (start, end) == (0, source[dim]):
        start, end = 0, local[dim]
    else:
        (whole,) = cut.ports.inputs[0].dims[dim]
        assert isinstance(whole, Cat)
        before = local_size(whole.parts[0], cut.mesh, cut.at) if start else 0
        start, end = before, before + cut.outputs[0].shape[dim]
    return (cut.last(args=(cut.node.args[0], dim, start, end, step), kwargs={}),)


def arange(cut: Cut) -> tuple[Node, ...]:
    """Return the numbers at this rank's global positions."""
    node = cut.node
    dim = cut.ports.outputs[0].dims[0]
    if not dim_axes(dim):
        return (cut.last(),)
    first, _, step = (0, *node.args, 1) if len(node.args) == 1 else (*node.args, 1)[:3]
    place = cut.start(dim)
    if place is not None and all(isinstance(v, int) for v in (first, step)):
        begin, length = first + place * step, cut.outputs[0].shape[0]
        return (cut.last("aten.arange.start_step", (begin, begin + length * step, step)),)
    dtype = node.kwarg("dtype") or Dtype(node.outputs[0].dtype)
    return (cut.last("meshwright.take_iota", (text(cut.ports.outputs[0]), 0, first, step), {"dtype": dtype}),)


def places(cut: Cut, number: int, global_layout: TensorLayout) -> Node:
    """Return a helper that holds the global indices of this rank's elements along the only dim of a layout."""
    start = cut.start(global_layout.dims[0])
    length = local_size(global_layout.dims[0], cut.mesh, cut.at)
    kind = TensorType(INT, (length,))
    if start is not None:
        return cut.helper(
            number,
            "aten.arange.start_step",
            (start, start + length, 1),
            kind,
            {"dtype": Dtype(INT), "device": Device()},
        )
    return cut.helper(
        number, "meshwright.take_iota", (text(global_layout), 0, 0, 1), kind, {"dtype": Dtype(INT)}
    )


def groups(at: int) -> Callable[[Cut], tuple[Node, ...]]:
    """Return a localizer for operators whose argument `at` counts groups, letter ``g``. A rank may hold none."""

    def localizer(cut: Cut) -> tuple[Node, ...]:
        if not all(cut.size(x) for x in ("g", "i", "o") if x in cut.letters):
            return (cut.nothing(),)
        if not cut.axes(["g"]):
            return (cut.last(),)
        return (cut.last(args=with_arg(cut.node.args, at, cut.size("g"))),)

    return localizer


def _by_column(cut: Cut) -> tuple[Node, ...]:
    """Shift indices whose columns each read their own rows: this rank's rows begin at 0."""
    if not cut.axes(["c"]):
        return (cut.last(),)
    weight, ids = cut.node.args[:2]
    if 0 in cut.outputs[0].shape or 0 in cut.input_shape(0):
        return (cut.nothing(),)
    start = cut.start(cut.ports.inputs[0].dims[0])
    assert start is not None, "groups of rows are split into contiguous blocks"
    column = cut.start(cut.ports.inputs[1].dims[-1])
    assert column is not None, "columns are split into contiguous blocks"
    _, counts = cut.site.rule.follows["v"]
    rows = cut.input_shape(0)[0]
    local = cut.helper(
        0,
        "meshwright.column_rows",
        (ids, start, rows, column, tuple(counts), cut.node.where),
        TensorType(INT, cut.input_shape(1)),
    )
    padding = int(cut.node.arg(2, "padding_idx", -1))
    inside = 0 <= padding - start < rows
    return (local, cut.last(args=(weight, ref(local), padding - start if inside else -1), kwargs={}))


def embedding(cut: Cut) -> tuple[Node, ...]:
    """Give zeros for rows of other ranks, so that the result is partial on the axes that shard the table."""
    weight, ids = cut.node.args[:2]
    if cut.site.rule.follows:
        return _by_column(cut)
    if "v" not in cut.letters or not cut.axes(["v"]):
        return (cut.last(),)
    padding = int(cut.node.arg(2, "padding_idx", -1))
    rows = cut.ports.inputs[0].dims[0]
    start = cut.start(rows)
    if start is not None:
        there = padding - start if padding >= 0 else -1
        return (cut.last("meshwright.embedding_rows", (weight, ids, start, there, dim_size(rows)), {}),)
    kind = TensorType(INT, cut.input_shape(1))
    local = cut.helper(0, "meshwright.local_places", (ids, text(cut.ports.inputs[0]), 0), kind)
    where = [int(i) for i in (cut.places(rows) == padding).nonzero()[0]]
    return (
        local,
        cut.last("meshwright.embedding_rows", (weight, ref(local), 0, where[0] if where else -1), {}),
    )
