"""Local sizes for operators that name sizes: views, slices and splits, creations, groups."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.core.graph import Device, Dtype, Node, TensorType
from meshwright.core.layout import Cat, TensorLayout, dim_axes, dim_size, local_size
from meshwright.ops.local.sharded_node import ShardedNode, ref, text, with_arg
from meshwright.ops.special.shape import slice_bounds

INT = "i64"


def view(sharded: ShardedNode) -> tuple[Node, ...]:
    """Use the local shape. A view copies where the local strides need it."""
    return (sharded.last("aten.reshape.default", (sharded.node.args[0], sharded.outputs[0].shape)),)


def sized(at: int) -> Callable[[ShardedNode], tuple[Node, ...]]:
    """Return a localizer for operators whose argument `at` is the shape of the result."""

    def localizer(sharded: ShardedNode) -> tuple[Node, ...]:
        return (sharded.last(args=with_arg(sharded.node.args, at, sharded.outputs[0].shape)),)

    return localizer


def split_with_sizes(sharded: ShardedNode) -> tuple[Node, ...]:
    """Use the local sizes of the pieces."""
    x, _, *rest = sharded.node.args
    dim = int(sharded.node.arg(2, "dim", 0)) % len(sharded.node.outputs[0].shape)
    return (sharded.last(args=(x, tuple(t.shape[dim] for t in sharded.outputs), *rest)),)


def slice_(sharded: ShardedNode) -> tuple[Node, ...]:
    """Move the bounds: what precedes the slice is shorter on a rank."""
    source = tuple(sharded.ports.inputs[0].shape)
    start, end, step, dim = slice_bounds(sharded.node, source)
    local = sharded.input_shape(0)
    if local[dim] == source[dim] and not dim_axes(sharded.ports.inputs[0].dims[dim]):
        pass
    elif (start, end) == (0, source[dim]):
        start, end = 0, local[dim]
    else:
        (whole,) = sharded.ports.inputs[0].dims[dim]
        assert isinstance(whole, Cat)
        before = local_size(whole.parts[0], sharded.mesh, sharded.at) if start else 0
        start, end = before, before + sharded.outputs[0].shape[dim]
    return (sharded.last(args=(sharded.node.args[0], dim, start, end, step), kwargs={}),)


def arange(sharded: ShardedNode) -> tuple[Node, ...]:
    """Return the numbers at this rank's global positions."""
    node = sharded.node
    dim = sharded.ports.outputs[0].dims[0]
    if not dim_axes(dim):
        return (sharded.last(),)
    first, _, step = (0, *node.args, 1) if len(node.args) == 1 else (*node.args, 1)[:3]
    place = sharded.start(dim)
    if place is not None and all(isinstance(v, int) for v in (first, step)):
        begin, length = first + place * step, sharded.outputs[0].shape[0]
        return (sharded.last("aten.arange.start_step", (begin, begin + length * step, step)),)
    dtype = node.kwarg("dtype") or Dtype(node.outputs[0].dtype)
    return (
        sharded.last(
            "meshwright.take_iota", (text(sharded.ports.outputs[0]), 0, first, step), {"dtype": dtype}
        ),
    )


def places(sharded: ShardedNode, number: int, global_layout: TensorLayout) -> Node:
    """Return a helper that holds the global indices of this rank's elements along the only dim of a layout."""
    start = sharded.start(global_layout.dims[0])
    length = local_size(global_layout.dims[0], sharded.mesh, sharded.at)
    kind = TensorType(INT, (length,))
    if start is not None:
        return sharded.helper(
            number,
            "aten.arange.start_step",
            (start, start + length, 1),
            kind,
            {"dtype": Dtype(INT), "device": Device()},
        )
    return sharded.helper(
        number, "meshwright.take_iota", (text(global_layout), 0, 0, 1), kind, {"dtype": Dtype(INT)}
    )


def groups(at: int) -> Callable[[ShardedNode], tuple[Node, ...]]:
    """Return a localizer for operators whose argument `at` counts groups, letter ``g``. A rank may hold none."""

    def localizer(sharded: ShardedNode) -> tuple[Node, ...]:
        if not all(sharded.size(x) for x in ("g", "i", "o") if x in sharded.letters):
            return (sharded.nothing(),)
        if not sharded.axes(["g"]):
            return (sharded.last(),)
        return (sharded.last(args=with_arg(sharded.node.args, at, sharded.size("g"))),)

    return localizer


def _by_column(sharded: ShardedNode) -> tuple[Node, ...]:
    """Shift indices whose columns each read their own rows: this rank's rows begin at 0."""
    if not sharded.axes(["c"]):
        return (sharded.last(),)
    weight, ids = sharded.node.args[:2]
    if 0 in sharded.outputs[0].shape or 0 in sharded.input_shape(0):
        return (sharded.nothing(),)
    start = sharded.start(sharded.ports.inputs[0].dims[0])
    assert start is not None, "groups of rows are split into contiguous blocks"
    column = sharded.start(sharded.ports.inputs[1].dims[-1])
    assert column is not None, "columns are split into contiguous blocks"
    _, counts = sharded.site.rule.follows["v"]
    rows = sharded.input_shape(0)[0]
    local = sharded.helper(
        0,
        "meshwright.column_rows",
        (ids, start, rows, column, tuple(counts), sharded.node.where),
        TensorType(INT, sharded.input_shape(1)),
    )
    padding = int(sharded.node.arg(2, "padding_idx", -1))
    inside = 0 <= padding - start < rows
    return (local, sharded.last(args=(weight, ref(local), padding - start if inside else -1), kwargs={}))


def embedding(sharded: ShardedNode) -> tuple[Node, ...]:
    """Give zeros for rows of other ranks, so that the result is partial on the axes that shard the table."""
    weight, ids = sharded.node.args[:2]
    if sharded.site.rule.follows:
        return _by_column(sharded)
    if "v" not in sharded.letters or not sharded.axes(["v"]):
        return (sharded.last(),)
    padding = int(sharded.node.arg(2, "padding_idx", -1))
    rows = sharded.ports.inputs[0].dims[0]
    start = sharded.start(rows)
    if start is not None:
        there = padding - start if padding >= 0 else -1
        return (sharded.last("meshwright.embedding_rows", (weight, ids, start, there, dim_size(rows)), {}),)
    kind = TensorType(INT, sharded.input_shape(1))
    local = sharded.helper(0, "meshwright.local_places", (ids, text(sharded.ports.inputs[0]), 0), kind)
    where = [int(i) for i in (sharded.places(rows) == padding).nonzero()[0]]
    return (
        local,
        sharded.last("meshwright.embedding_rows", (weight, ref(local), 0, where[0] if where else -1), {}),
    )
