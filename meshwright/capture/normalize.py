"""Give each operation a single form: views, creations, splits, attention and dropout; remove no-ops.

The table at the end maps operators to their forms. Dims are never negative, shapes never contain -1, slices are
clamped, and nothing names a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from meshwright.capture.rewrite import ARANGE, Rewriter, Rule, rewrite
from meshwright.capture.warnings import SPARSE, is_sparse
from meshwright.core.graph import Device, Dtype, Graph, Node, Ref
from meshwright.errors import CaptureError

Values = Ref | tuple[Ref, ...] | None

ATTENTION = "aten.scaled_dot_product_attention.default"
DROPOUT = "meshwright.dropout"


def normalize(graph: Graph) -> Graph:
    """Return the same program in our own vocabulary."""
    return rewrite(graph, TABLE, _other)


# ---------------------------------------------------------------- forms


def _arguments(n: Node, *defaults: Any) -> tuple[Any, ...]:
    """Return the arguments of a node, each that is left out by its default."""
    return (*n.args, *defaults[len(n.args) :])


def _first(b: Rewriter, n: Node) -> Values:
    return n.args[0]


def _view(b: Rewriter, n: Node) -> Values:
    return b.view(n.args[0], n.outputs[0].shape)


def _permute(b: Rewriter, n: Node) -> Values:
    return b.permute(n.args[0], n.args[1])


def _transpose(b: Rewriter, n: Node) -> Values:
    x = n.args[0]
    rank = len(b.shape(x))
    order = list(range(rank))
    if rank >= 2:
        i, j = (n.args[1] % rank, n.args[2] % rank) if len(n.args) > 2 else (0, 1)
        order[i], order[j] = order[j], order[i]
    return b.permute(x, order)


def _expand(b: Rewriter, n: Node) -> Values:
    return b.expand(n.args[0], n.outputs[0].shape)


def _broadcast(b: Rewriter, n: Node) -> Values:
    return tuple(b.expand(x, out.shape) for x, out in zip(n.args[0], n.outputs, strict=True))


def _cast(b: Rewriter, n: Node) -> Values:
    return b.cast(n.args[0], n.outputs[0].dtype)


def _full(value_at: int | float | bool) -> Rule:
    """Return a rule for a creation; `value_at` is the position of the value, or with `_constant` the value itself."""

    def rule(b: Rewriter, n: Node) -> Values:
        value = n.args[int(value_at)]
        return None if isinstance(value, Ref) else b.full(n.outputs[0].shape, value, n.outputs[0].dtype)

    return rule


def _constant(value: int) -> Rule:
    return lambda b, n: b.full(n.outputs[0].shape, value, n.outputs[0].dtype)


def _arange(b: Rewriter, n: Node) -> Values:
    start, end, step = {1: lambda e: (0, e, 1), 2: lambda s, e: (s, e, 1), 3: lambda s, e, t: (s, e, t)}[
        len(n.args)
    ](*n.args)
    return b.emit(ARANGE, (start, end, step), n.outputs[0], dtype=Dtype(n.outputs[0].dtype), device=Device())


def _slice(b: Rewriter, n: Node) -> Values:
    x, dim, start, end, step = _arguments(n, None, 0, None, None, 1)
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
    shape = (1,) * (len(times) - len(b.shape(x))) + b.shape(x)
    if 0 in times:
        return None
    apart = tuple(s for t, size in zip(times, shape, strict=True) for s in ((1, size) if t > 1 else (size,)))
    wide = tuple(s for t, size in zip(times, shape, strict=True) for s in ((t, size) if t > 1 else (size,)))
    return b.view(b.expand(b.view(x, apart), wide), n.outputs[0].shape)


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
    x, times, dim, before, after = _arguments(n, None, 1, -1, None, None)
    if times != 1 or b.type(x).dtype == "b8":
        return None
    dim %= len(b.shape(x))
    whole = b.cat([p for p in (before, x, after) if p is not None], dim)
    size = b.shape(whole)[dim]
    high, low = b.slice(whole, dim, 1, size), b.slice(whole, dim, 0, size - 1)
    return b.emit("aten.sub.Tensor", (high, low), n.outputs[0])


def _slice_scatter(b: Rewriter, n: Node) -> Values:
    x, source, dim, start, end, step = _arguments(n, None, None, 0, None, None, 1)
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


def _copy(b: Rewriter, n: Node) -> Values:
    return b.like(n.args[1], n.outputs[0])


def _fill(b: Rewriter, n: Node) -> Values:
    value = n.args[1]
    return (
        b.like(value, n.outputs[0])
        if isinstance(value, Ref)
        else b.full(n.outputs[0].shape, value, n.outputs[0].dtype)
    )


def _where(b: Rewriter, n: Node) -> Values:
    """Branches are tensors; a condition known to be true picks its branch."""
    condition, first, second = n.args
    out = n.outputs[0]
    if (known := b.full_value(condition)) is not None:
        branch = first if known else second
        return b.like(branch, out) if isinstance(branch, Ref) else b.full(out.shape, branch, out.dtype)
    first, second = (v if isinstance(v, Ref) else b.full((), v, out.dtype) for v in (first, second))
    return b.emit("aten.where.self", (condition, first, second), out)


def _and(b: Rewriter, n: Node) -> Values:
    return _boolean(b, n, "aten.bitwise_and.Tensor", neutral=True)


def _or(b: Rewriter, n: Node) -> Values:
    return _boolean(b, n, "aten.bitwise_or.Tensor", neutral=False)


def _boolean(b: Rewriter, n: Node, op: str, neutral: bool) -> Values:
    x, y, *_ = n.args
    out = n.outputs[0]
    if (
        isinstance(x, Ref)
        and isinstance(y, Ref)
        and out.dtype == "b8"
        and b.type(x).dtype == b.type(y).dtype == "b8"
    ):
        for known, other in ((x, y), (y, x)):
            value = b.full_value(known)
            if value is not None:
                return (
                    b.expand(other, out.shape) if value is neutral else b.full(out.shape, not neutral, "b8")
                )
        return b.emit(op, (x, y), out)
    return None


def _neutral(value: int, floats: bool) -> Rule:
    """`x + 0` on integers, `x * 1` on any dtype: nothing."""

    def rule(b: Rewriter, n: Node) -> Values:
        x, y, *_ = n.args
        same = isinstance(x, Ref) and b.type(x) == n.outputs[0]
        if (
            same
            and isinstance(y, bool | int | float)
            and y == value
            and (floats or not n.outputs[0].is_float)
        ):
            return x
        return _other(b, n)

    return rule


def _dropout(b: Rewriter, n: Node) -> Values:
    """One operator with a seed slot; slots are numbered when the graph is final."""
    x, p, train = n.args
    if not train or p == 0:
        return (x, b.full(b.shape(x), True, "b8")) if len(n.outputs) == 2 else x
    result = b.emit(DROPOUT, (x, float(p), 0), n.outputs[0])
    return (
        (result, b.emit("meshwright.dropout_mask", (result,), n.outputs[1]))
        if len(n.outputs) == 2
        else result
    )


def _attention(b: Rewriter, n: Node) -> Values:
    q, k, v, mask, p, causal = _arguments(n, None, None, None, None, 0.0, False)
    extra: dict[str, Any] = {"scale": n.kwarg("scale"), "enable_gqa": bool(n.kwarg("enable_gqa", False))}
    if p > 0:
        extra["seed"] = 0
    return b.emit(ATTENTION, (q, k, v, mask, float(p), bool(causal)), n.outputs[0], **extra)


def _cross_entropy(b: Rewriter, n: Node) -> Values:
    args = _arguments(n, None, None, None, 1, -100, 0.0)
    return b.emit("aten.cross_entropy_loss.default", args, n.outputs[0])


def _dense(b: Rewriter, n: Node) -> Values:
    """Drop ``sparse``: gradients are reduced over ranks, and a sum of sparse ones is soon dense."""
    if not is_sparse(n):
        return None
    args = (*n.args[: SPARSE[n.op]], False, *n.args[SPARSE[n.op] + 1 :])
    return b.emit_many(n.op, args, n.outputs, **dict(n.kwargs))


def _layer_norm(b: Rewriter, n: Node) -> Values:
    args = _arguments(n, None, None, None, None, 1e-05)[:5]
    return b.emit("aten.layer_norm.default", args, n.outputs[0])


def _unscalar(op: str) -> Rule:
    """The same operator under its tensor name."""
    return lambda b, n: b.emit(op, n.args, n.outputs[0], **dict(n.kwargs))


# ---------------------------------------------------------------- everything else: dims and devices

DIMS: dict[str, int] = {  # where an operator takes a dim or dims
    "softmax.int": 1, "_softmax.default": 1, "log_softmax.int": 1, "_log_softmax.default": 1, "cumsum.default": 1,
    "cumprod.default": 1, "logcumsumexp.default": 1, "cummax.default": 1, "cummin.default": 1, "mean.dim": 1,
    "sum.dim_IntList": 1, "amax.default": 1, "amin.default": 1, "var.correction": 1, "std.correction": 1, "var.dim": 1,
    "std.dim": 1, "var_mean.correction": 1, "max.dim": 1, "min.dim": 1, "argmax.default": 1, "argmin.default": 1,
    "topk.default": 2, "sort.default": 1, "argsort.default": 1, "gather.default": 1, "index_select.default": 1,
    "scatter.src": 1, "scatter.value": 1, "scatter_add.default": 1, "scatter_reduce.two": 1, "index_add.default": 1,
    "index_copy.default": 1, "index_fill.int_Scalar": 1, "flip.default": 1, "roll.default": 2, "logsumexp.default": 1,
    "linalg_vector_norm.default": 2, "norm.ScalarOpt_dim": 2, "any.dim": 1, "all.dim": 1, "prod.dim_int": 1,
    "glu.default": 1, "unfold.default": 1, "kthvalue.default": 2, "median.dim": 1, "nansum.default": 1,
    "count_nonzero.dim_IntList": 1, "renorm.default": 2,
}  # fmt: skip
DEFAULT_DIM: dict[str, int] = {
    "topk.default": -1,
    "sort.default": -1,
    "argsort.default": -1,
    "glu.default": -1,
}
REDUCES_ALL = (
    "mean.dim",
    "sum.dim_IntList",
    "amax.default",
    "amin.default",
    "var.correction",
    "std.correction",
    "var.dim",
    "std.dim",
)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
RANDOM = frozenset(
    "rand randn rand_like randn_like randint randint_like randperm bernoulli normal normal_functional uniform "
    "exponential geometric multinomial poisson log_normal cauchy".split()
)


def _other(b: Rewriter, n: Node) -> Values:
    kwargs = {
        k: v for k, v in n.kwargs if not (k == "dtype" and v is None) and not (k == "device" and v is None)
    }
    name = n.op.removeprefix("aten.")
    args = n.args
    if name in DIMS:
        at, rank = DIMS[name], max(len(b.shape(args[0])), 1)
        if len(args) <= at and "dim" not in kwargs and name in DEFAULT_DIM:
            args = (*args, DEFAULT_DIM[name])
        if len(args) > at:
            args = (*args[:at], _positive(args[at], rank, name in REDUCES_ALL), *args[at + 1 :])
        if kwargs.get("dim") is not None:
            kwargs["dim"] = _positive(kwargs["dim"], rank, False)
    if name.split(".")[0] in RANDOM or _draws_inside(name, args, kwargs):
        kwargs["seed"] = 0
    if args == n.args and kwargs == dict(n.kwargs):
        return None
    return b.emit_many(n.op, args, n.outputs, **kwargs)


def _draws_inside(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws from torch's generator in its own code: as recurrent dropout, `rrelu`."""
    stem, _, form = name.partition(".")
    if stem in RECURRENT:
        dropout, train = args[6:8] if form == "data" else args[5:7]
        return bool(train) and dropout > 0
    return stem == "rrelu" and bool(args[3] if len(args) > 3 else kwargs.get("training"))


def _normal(b: Rewriter, n: Node) -> Values:
    """`torch.normal`: numbers of mean 0 and deviation 1, scaled and moved. Means and deviations get no gradient."""
    out = n.outputs[0]
    mean, deviation = (
        n.arg(at, name, other) for at, (name, other) in enumerate((("mean", 0.0), ("std", 1.0)))
    )
    drawn = b.emit("aten.randn.default", (out.shape,), out, dtype=Dtype(out.dtype), device=Device(), seed=0)
    for op, by in (("aten.mul.Tensor", deviation), ("aten.add.Tensor", mean)):
        by = b.emit("aten.detach.default", (by,), b.type(by)) if isinstance(by, Ref) else by
        drawn = b.emit(op, (drawn, by), out)
    return drawn


def _positive(dims: Any, rank: int, none_is_all: bool) -> Any:
    if isinstance(dims, tuple):
        return tuple(range(rank)) if not dims and none_is_all else tuple(d % rank for d in dims)
    if dims is None:
        return tuple(range(rank)) if none_is_all else None
    return dims % rank


def _refused(what: str, hint: str) -> Rule:
    def rule(b: Rewriter, n: Node) -> Values:
        raise CaptureError(f"{n.op} {what}", where=n.where, hint=hint)

    return rule


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


_ITEM: Callable[[Rewriter, Node], Values] = _refused(
    "reads the value of a tensor",
    "keep it a tensor, or run the model as it is, data parallel: "
    "mw.manual_step(model, optimizer, loss=…, mesh=…)",
)

TABLE: dict[str, Rule] = {
    **_named("view.default _unsafe_view.default reshape.default unsqueeze.default squeeze.default squeeze.dim "
             "squeeze.dims flatten.using_ints unflatten.int view_as.default reshape_as.default", _view),
    **_named("permute.default", _permute),
    **_named("transpose.int t.default numpy_T.default", _transpose),
    **_named("expand.default expand_as.default broadcast_to.default", _expand),
    **_named("broadcast_tensors.default", _broadcast),
    **_named("clone.default contiguous.default alias.default lift_fresh_copy.default lift.default "
             "lift_fresh.default", _first),
    **_named("_to_copy.default to.dtype to.dtype_layout to.device type_as.default", _cast),
    **_named("full.default full_like.default scalar_tensor.default", _full(1)),
    "aten.scalar_tensor.default": _full(0),
    "aten.new_full.default": _full(2),
    **_named("ones.default ones_like.default new_ones.default", _constant(1)),
    **_named("zeros.default zeros_like.default new_zeros.default empty.memory_format empty_like.default "
             "new_empty.default empty_strided.default new_empty_strided.default empty_permuted.default", _constant(0)),
    **_named("arange.default arange.start arange.start_step", _arange),
    **_named("slice.Tensor", _slice),
    **_named("select.int", _select),
    **_named("split.Tensor split_with_sizes.default chunk.default tensor_split.sections tensor_split.indices "
             "unsafe_split.Tensor unsafe_chunk.default split.sizes", _split),
    **_named("unbind.int", _unbind),
    **_named("cat.default concat.default", _cat),
    **_named("stack.default", _stack),
    **_named("repeat.default", _repeat),
    **_named("repeat_interleave.self_int", _repeat_interleave),
    **_named("pad.default constant_pad_nd.default", _pad),
    **_named("diff.default", _diff),
    **_named("slice_scatter.default", _slice_scatter),
    **_named("select_scatter.default", _select_scatter),
    **_named("copy.default", _copy),
    **_named("fill.Tensor fill.Scalar", _fill),
    **_named("where.self where.ScalarOther where.ScalarSelf where.Scalar", _where),
    **_named("__and__.Tensor bitwise_and.Tensor logical_and.default", _and),
    **_named("__or__.Tensor bitwise_or.Tensor logical_or.default", _or),
    **_named("add.Tensor add.Scalar sub.Tensor sub.Scalar", _neutral(0, floats=False)),
    **_named("mul.Tensor mul.Scalar div.Tensor div.Scalar", _neutral(1, floats=True)),
    **_named("native_dropout.default dropout.default", _dropout),
    **_named("normal.float_float normal.float_Tensor normal.Tensor_float normal.Tensor_Tensor", _normal),
    ATTENTION: _attention,
    "aten.cross_entropy_loss.default": _cross_entropy,
    **dict.fromkeys(SPARSE, _dense),
    "aten.layer_norm.default": _layer_norm,
    **_named("_assert_tensor_metadata.default _assert_async.msg _assert_scalar.default "
             "sym_constrain_range_for_size.default", lambda b, n: ()),
    **_named("item.default _local_scalar_dense.default", _ITEM),
}  # fmt: skip
