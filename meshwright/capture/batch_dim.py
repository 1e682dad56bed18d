"""Which dim of the batch counts examples: dim 0, where the graph shows that no operator mixes its rows before the loss.

A shape cannot tell: sequence-first data shares dim 0 as well. So the rows are followed through the graph, and an
operator that mixes them, cuts them or is not known here ends it with "unknown", never with a guess. (Batch norm does
mix its rows; that is what its batch is.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.capture.interpret import operator_named
from meshwright.graph import Graph, Node, Ref


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples within a dim: its size is ``outer * examples * inner``."""

    dim: int
    outer: int = 1
    inner: int = 1


class Mixed(Exception):
    """Rows meet in an operator, or it is not known whether they do."""


Place = Rows | None  # None: the same for all examples, or summed over them


def find_batch_dims(graph: Graph) -> Graph:
    """The graph with `batch_dim=0` on the inputs of the batch, if that is proved."""
    leaves = [i for i in graph.input_of("batch") if i.type.shape]
    sizes = {i.type.shape[0] for i in leaves}
    if len(sizes) != 1 or min(sizes) < 2:
        return graph
    follow = _Follow(graph, sizes.pop())
    try:
        for node in graph.nodes:
            follow.step(node)
    except Mixed:
        return graph
    used = {u for n in graph.nodes for u in n.uses}
    inputs = (replace(i, batch_dim=0) if i in leaves and i.name in used else i for i in graph.inputs)
    return replace(graph, inputs=tuple(inputs))


class _Follow:
    def __init__(self, graph: Graph, examples: int) -> None:
        self.types, self.examples = graph.types, examples
        self.at: dict[str, Place] = {i.name: Rows(0) for i in graph.input_of("batch") if i.type.shape}

    def step(self, node: Node) -> None:
        """Where the rows of a node's results are. Raises Mixed."""
        if not any(self.at.get(u) for u in node.uses):
            return
        rule = RULES.get(node.op) or (_pointwise if _is_pointwise(node.op) else None)
        if rule is None:
            raise Mixed(node.op)
        places = rule(self, node)
        places = places if isinstance(places, tuple) else (places,) * len(node.outputs)
        self.at.update(zip(node.values, places, strict=True))

    def rows(self, value: Any) -> Place:
        """Where the rows of an argument are."""
        return self.at.get(value.name) if isinstance(value, Ref) else None

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Shape of an argument."""
        return self.types[ref.name].shape

    def whole(self, *values: Any) -> None:
        """These arguments must be the same for all examples."""
        if any(self.rows(v) for v in values):
            raise Mixed


@functools.cache
def _is_pointwise(op: str) -> bool:
    return op == "meshwright.dropout" or (
        op.startswith("aten.") and torch.Tag.pointwise in operator_named(op).tags
    )


def _pointwise(f: _Follow, n: Node) -> Place:
    rank, found = len(n.outputs[0].shape), set()
    for use in n.uses:
        rows = f.at.get(use)
        if rows:
            found.add(replace(rows, dim=rows.dim + rank - len(f.types[use].shape)))
    if len(found) > 1:
        raise Mixed
    return found.pop()


def _apart(at: int, default: Any = None) -> Callable[[_Follow, Node], Place]:
    """An operator that works along the dims of argument `at`; rows must lie in another."""

    def rule(f: _Follow, n: Node) -> Place:
        dims = n.arg(at, "dim", default)
        rank = len(f.shape(n.args[0]))
        dims = (
            {d % rank for d in (dims if isinstance(dims, tuple) else (dims,))}
            if dims is not None
            else set(range(rank))
        )
        places = {f.rows(v) for v in n.args if isinstance(v, Ref)} - {None}
        if len(places) != 1 or next(iter(places)).dim in dims:
            raise Mixed
        return places.pop()

    return rule


def _reduce(f: _Follow, n: Node) -> Place:
    rows, rank = f.rows(n.args[0]), len(f.shape(n.args[0]))
    dims = n.arg(1, "dim")
    dims = (
        set(range(rank))
        if dims is None
        else {d % rank for d in (dims if isinstance(dims, tuple) else (dims,))}
    )
    assert rows is not None
    if rows.dim in dims:
        return None
    return (
        rows
        if len(n.outputs[0].shape) == rank
        else replace(rows, dim=rows.dim - sum(d < rows.dim for d in dims))
    )


def _view(f: _Follow, n: Node) -> Place:
    rows, shape, result = f.rows(n.args[0]), f.shape(n.args[0]), n.outputs[0].shape
    assert rows is not None
    before, prefix = math.prod(shape[: rows.dim]) * rows.outer, 1
    for dim, size in enumerate(result):
        if before % prefix == 0 and prefix * size >= before * f.examples:
            outer = before // prefix
            if size % (outer * f.examples):
                raise Mixed
            return Rows(dim, outer, size // (outer * f.examples))
        prefix *= size
    raise Mixed


def _permute(f: _Follow, n: Node) -> Place:
    rows = f.rows(n.args[0])
    return rows and replace(rows, dim=n.args[1].index(rows.dim))


def _expand(f: _Follow, n: Node) -> Place:
    rows = f.rows(n.args[0])
    return rows and replace(rows, dim=rows.dim + len(n.outputs[0].shape) - len(f.shape(n.args[0])))


def _cat(f: _Follow, n: Node) -> Place:
    places = {f.rows(v) for v in n.args[0]} - {None}
    if len(places) != 1 or next(iter(places)).dim == n.args[1]:
        raise Mixed
    return places.pop()


def _linear(f: _Follow, n: Node) -> Place:
    f.whole(*n.args[1:])
    rows = f.rows(n.args[0])
    if rows is None or rows.dim == len(f.shape(n.args[0])) - 1:
        raise Mixed
    return rows


def _addmm(f: _Follow, n: Node) -> Place:
    f.whole(n.args[0], n.args[2])
    rows = f.rows(n.args[1])
    if rows is None or rows.dim != 0:
        raise Mixed
    return rows


def _matmul(f: _Follow, n: Node) -> Place:
    (a, b), rank = n.args[:2], len(n.outputs[0].shape)
    x, y = f.rows(a), f.rows(b)
    left, right = len(f.shape(a)), len(f.shape(b))
    if min(left, right) < 2:
        raise Mixed
    if y is None and x is not None and x.dim != left - 1:
        return replace(x, dim=x.dim + rank - left)
    if x is None and y is not None and y.dim != right - 2:
        return replace(y, dim=y.dim + rank - right)
    if x and y and x == replace(y, dim=y.dim + left - right) and x.dim < left - 2:
        return replace(x, dim=x.dim + rank - left)
    raise Mixed


def _embedding(f: _Follow, n: Node) -> Place:
    f.whole(n.args[0])
    return f.rows(n.args[1])


def _attention(f: _Follow, n: Node) -> Place:
    rank, places = len(n.outputs[0].shape), set()
    for value in n.args[:4]:
        rows = f.rows(value)
        if rows:
            places.add(replace(rows, dim=rows.dim + rank - len(f.shape(value))))
    if len(places) != 1 or next(iter(places)).dim >= rank - 2:
        raise Mixed
    return places.pop()


def _layer_norm(f: _Follow, n: Node) -> Place:
    f.whole(*n.args[2:])
    rows = f.rows(n.args[0])
    if rows is None or rows.dim >= len(f.shape(n.args[0])) - len(n.args[1]):
        raise Mixed
    return rows


def _images(f: _Follow, n: Node) -> Place:
    """Convolution and pooling: examples are dim 0 of a batched image."""
    f.whole(*n.args[1:])
    rows = f.rows(n.args[0])
    if rows != Rows(0) and not (rows and rows.dim == 0):
        raise Mixed
    return rows


def _batch_norm(f: _Follow, n: Node) -> tuple[Place, ...]:
    return (_images(f, n), *(None for _ in n.outputs[1:]))


def _loss(f: _Follow, n: Node) -> Place:
    """A loss with a reduction sums over the examples; without one its rows stay."""
    places = {f.rows(v) for v in n.args[:2]} - {None}
    if len(places) != 1 or next(iter(places)).dim != 0:
        raise Mixed
    return None if not n.outputs[0].shape else places.pop()


def _same(f: _Follow, n: Node) -> Place:
    return f.rows(n.args[0])


def _named(names: str, rule: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Callable[..., Any]] = {
    **_named("view.default", _view),
    **_named("permute.default", _permute),
    **_named("expand.default", _expand),
    **_named("_to_copy.default detach.default bernoulli.default bernoulli.p rand_like.default "
             "randn_like.default", _same),
    **_named("cat.default", _cat),
    **_named("linear.default", _linear),
    **_named("addmm.default", _addmm),
    **_named("matmul.default bmm.default", _matmul),
    **_named("embedding.default", _embedding),
    **_named("scaled_dot_product_attention.default", _attention),
    **_named("layer_norm.default rms_norm.default", _layer_norm),
    **_named("conv1d.default conv2d.default conv3d.default conv2d.padding max_pool2d.default avg_pool2d.default "
             "adaptive_avg_pool2d.default adaptive_avg_pool1d.default group_norm.default upsample_bilinear2d.vec "
             "upsample_nearest2d.vec", _images),
    **_named("_native_batch_norm_legit_functional.default batch_norm.default "
             "_native_batch_norm_legit_no_training.default", _batch_norm),
    **_named("sum.default mean.default sum.dim_IntList mean.dim amax.default amin.default any.dim all.dim "
             "argmax.default logsumexp.default max.dim min.dim var.correction std.correction", _reduce),
    **_named("slice.Tensor split_with_sizes.default softmax.int _softmax.default log_softmax.int _log_softmax.default "
             "cumsum.default topk.default sort.default gather.default flip.default", _apart(1)),
    **_named("cross_entropy_loss.default nll_loss.default binary_cross_entropy_with_logits.default mse_loss.default "
             "l1_loss.default smooth_l1_loss.default huber_loss.default binary_cross_entropy.default", _loss),
}  # fmt: skip
RULES["aten.split_with_sizes.default"] = _apart(2)
RULES["aten.topk.default"] = _apart(2)
RULES["aten.linalg_vector_norm.default"] = lambda f, n: _reduce(
    f, replace(n, args=(n.args[0], n.arg(2, "dim")))
)
