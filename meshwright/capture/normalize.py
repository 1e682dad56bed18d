"""Give each operation a single form: views, creations, splits, attention and dropout; remove no-ops.

The table at the end maps operators to their forms. Dims are never negative, shapes never contain -1, slices are
clamped, and nothing names a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.capture.composites import COMPOSITES
from meshwright.capture.rewrite import ARANGE, Rewriter, Rule, Values, arguments, named, rewrite
from meshwright.capture.slices_and_joins import SLICES_AND_JOINS
from meshwright.capture.strided import STRIDED
from meshwright.capture.warnings import SPARSE, is_sparse
from meshwright.core.graph import Device, Dtype, Graph, Node, Ref
from meshwright.errors import CaptureError
from meshwright.ops.aliases import first_names

ATTENTION = "aten.scaled_dot_product_attention.default"
DROPOUT = "meshwright.dropout"


def normalize(graph: Graph) -> Graph:
    """Return the same program in our own vocabulary."""
    return rewrite(first_names(graph), TABLE, _other)


# ---------------------------------------------------------------- forms


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
    q, k, v, mask, p, causal = arguments(n, None, None, None, None, 0.0, False)
    extra: dict[str, Any] = {"scale": n.kwarg("scale"), "enable_gqa": bool(n.kwarg("enable_gqa", False))}
    if p > 0:
        extra["seed"] = 0
    return b.emit(ATTENTION, (q, k, v, mask, float(p), bool(causal)), n.outputs[0], **extra)


def _cross_entropy(b: Rewriter, n: Node) -> Values:
    args = arguments(n, None, None, None, 1, -100, 0.0)
    return b.emit("aten.cross_entropy_loss.default", args, n.outputs[0])


def _dense(b: Rewriter, n: Node) -> Values:
    """Drop ``sparse``: gradients are reduced over ranks, and a sum of sparse ones is soon dense."""
    if not is_sparse(n):
        return None
    args = (*n.args[: SPARSE[n.op]], False, *n.args[SPARSE[n.op] + 1 :])
    return b.emit_many(n.op, args, n.outputs, **dict(n.kwargs))


def _layer_norm(b: Rewriter, n: Node) -> Values:
    args = arguments(n, None, None, None, None, 1e-05)[:5]
    return b.emit("aten.layer_norm.default", args, n.outputs[0])


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


_ITEM: Callable[[Rewriter, Node], Values] = _refused(
    "reads the value of a tensor",
    "keep it a tensor, or run the model as it is, data parallel: "
    "mw.manual_step(model, optimizer, loss=…, mesh=…)",
)

TABLE: dict[str, Rule] = {
    **named("view.default _unsafe_view.default reshape.default unsqueeze.default squeeze.default squeeze.dim "
             "squeeze.dims flatten.using_ints unflatten.int view_as.default reshape_as.default", _view),
    **named("permute.default", _permute),
    **named("transpose.int t.default numpy_T.default", _transpose),
    **named("expand.default expand_as.default broadcast_to.default", _expand),
    **named("broadcast_tensors.default", _broadcast),
    **named("clone.default contiguous.default alias.default lift_fresh_copy.default lift.default "
             "lift_fresh.default", _first),
    **named("_to_copy.default to.dtype to.dtype_layout to.device type_as.default", _cast),
    **named("full.default full_like.default scalar_tensor.default", _full(1)),
    "aten.scalar_tensor.default": _full(0),
    "aten.new_full.default": _full(2),
    **named("ones.default ones_like.default new_ones.default", _constant(1)),
    **named("zeros.default zeros_like.default new_zeros.default empty.memory_format empty_like.default "
             "new_empty.default empty_strided.default new_empty_strided.default empty_permuted.default", _constant(0)),
    **named("arange.default arange.start arange.start_step", _arange),
    **SLICES_AND_JOINS,
    **COMPOSITES,
    **STRIDED,
    **named("copy.default", _copy),
    **named("fill.Tensor fill.Scalar", _fill),
    **named("where.self where.ScalarOther where.ScalarSelf where.Scalar", _where),
    **named("__and__.Tensor bitwise_and.Tensor logical_and.default", _and),
    **named("__or__.Tensor bitwise_or.Tensor logical_or.default", _or),
    **named("add.Tensor add.Scalar sub.Tensor sub.Scalar", _neutral(0, floats=False)),
    **named("mul.Tensor mul.Scalar div.Tensor div.Scalar", _neutral(1, floats=True)),
    **named("native_dropout.default dropout.default", _dropout),
    **named("normal.float_float normal.float_Tensor normal.Tensor_float normal.Tensor_Tensor", _normal),
    ATTENTION: _attention,
    "aten.cross_entropy_loss.default": _cross_entropy,
    **dict.fromkeys(SPARSE, _dense),
    "aten.layer_norm.default": _layer_norm,
    **named("_assert_tensor_metadata.default _assert_async.msg _assert_scalar.default "
             "sym_constrain_range_for_size.default", lambda b, n: ()),
    **named("item.default _local_scalar_dense.default", _ITEM),
}  # fmt: skip
