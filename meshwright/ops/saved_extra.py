"""Bytes that autograd keeps of an operator beside its inputs and results: statistics, indices, copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from meshwright.core.graph import DTYPES, Node, TensorType

Types = Mapping[str, TensorType]
Extra = Callable[[Node, Types, Sequence[bool]], int]


def first(node: Node, types: Types) -> TensorType:
    """Return the type of the first input."""
    return types[node.uses[0]]


def _copies(count: float, dtype: str = "") -> Extra:
    """Return a function that counts the bytes of `count` tensors of the shape of the first input."""

    def extra(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
        source = first(node, types)
        return round(count * math.prod(source.shape) * DTYPES[dtype or source.dtype])

    return extra


def _gates(count: int) -> Extra:
    """Return a function that counts the bytes of `count` tensors of the shape of the first result."""

    def extra(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
        return count * node.outputs[0].size_bytes

    return extra


def _pooled(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count the indices of the maxima."""
    return math.prod(node.outputs[0].shape) * DTYPES["i64"]


def rows_of(node: Node, types: Types) -> int:
    """Return how many rows a norm over the last dims has."""
    return math.prod(first(node, types).shape) // max(math.prod(node.args[1]), 1)


def _layer_norm(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count the mean and 1/deviation of each row, in f32 at least."""
    return 2 * rows_of(node, types) * max(itemsize(node, types), 4)


def _rms_norm(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count 1/deviation of each row if the input, and the normalised rows if the weight, needs a gradient."""
    source = first(node, types)
    rows = rows_of(node, types) * max(itemsize(node, types), 4) if needs_grad[0] else 0
    weighted = len(node.uses) > 1 and needs_grad[1]
    return rows + (source.size_bytes if weighted else 0)


def _group_norm(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    return 2 * first(node, types).shape[0] * int(node.args[1]) * max(itemsize(node, types), 4)


def _channels(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    return 2 * first(node, types).shape[1] * max(itemsize(node, types), 4)


def itemsize(node: Node, types: Types) -> int:
    """Return the bytes of an element of the first input."""
    return DTYPES[first(node, types).dtype]


def _instances(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count the mean and 1/deviation of each channel of each example, and a weight that is repeated for them."""
    rows, channels = first(node, types).shape[:2]
    return (3 if len(node.uses) > 1 else 2) * rows * channels * max(itemsize(node, types), 4)


def _order(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    return types[node.uses[2]].size_bytes


def _factors(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count the LU factors of each matrix, and its pivots."""
    source = first(node, types)
    return source.size_bytes + math.prod(source.shape[:-1]) * DTYPES["i32"]


def _singular_vectors(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count the vectors on both sides of each matrix."""
    *_, rows, columns = first(node, types).shape
    return node.outputs[0].size_bytes * (rows + columns)


def _compared(node: Node, types: Types) -> int:
    """Return the bytes of two tensors' difference."""
    shapes = [types[u].shape for u in node.uses]
    rank = max(map(len, shapes))
    wide = ((1,) * (rank - len(s)) + s for s in shapes)
    return math.prod(map(max, *wide)) * DTYPES[node.outputs[0].dtype]


def _cosine(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count, for each that needs a gradient: its directions, and two tensors of norms."""
    return sum(needs_grad) * (_compared(node, types) + 2 * node.outputs[0].size_bytes)


def _quantiles(node: Node, types: Types, needs_grad: Sequence[bool]) -> int:
    """Count the order of all elements, and about eight tensors like the result: the neighbours and their weights."""
    return math.prod(first(node, types).shape) * DTYPES["i64"] + 8 * node.outputs[0].size_bytes


EXTRA: dict[str, Extra] = {
    **{f"aten.{n}.default": _factors for n in ("linalg_det", "linalg_slogdet", "linalg_solve")},
    "aten.linalg_svdvals.default": _singular_vectors,
    **{f"aten.{n}.default": _copies(1) for n in ("linalg_eigvalsh", "linalg_matrix_power", "special_ndtr")},
    "aten.cosine_similarity.default": _cosine,
    "aten.pairwise_distance.default": lambda node, types, needs_grad: _compared(node, types),
    "aten.nanmean.default": _gates(1),
    **{f"aten.{n}": _quantiles for n in (
        "quantile.default", "quantile.scalar", "nanquantile.default", "nanquantile.scalar")},
    "meshwright.expert_linear": _order,
    **{f"aten.{n}.default": _pooled for n in ("max_pool1d", "max_pool2d", "max_pool3d")},
    "aten.log_sigmoid.default": _copies(1),
    "aten.l1_loss.default": _copies(1),
    "meshwright.dropout": _copies(1, "b8"),
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.instance_norm.default": _instances,
    "aten.gru_cell.default": _gates(6),
    "aten.lstm_cell.default": _gates(5),
    "aten.batch_norm.default": _channels,
    "meshwright.batch_norm_sync": _channels,
    "aten.cross_entropy_loss.default": _copies(1),
}  # fmt: skip

__all__ = ["EXTRA", "Types", "first", "itemsize", "rows_of"]
