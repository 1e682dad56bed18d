"""Means and losses over sharded dims: sums of the local terms, divided by the global count."""

from __future__ import annotations

import math
from typing import Any

from meshwright.core.graph import Node, Ref, TensorType
from meshwright.core.layout import dim_axes, dim_size, local_size, without_axes
from meshwright.ops.local.sharded_node import ShardedNode, ref, text, with_arg
from meshwright.ops.rule import dim_letters
from meshwright.ops.special.loss import MEAN, NONE, SUM, reduction_at, reduction_of
from meshwright.ops.special.norm import is_training


def _reduced(sharded: ShardedNode) -> list[str]:
    """Return the letters of the inputs that the results do not have."""
    rule = sharded.site.rule
    kept = {x for port in rule.outputs for x in rule.letters(port)}
    found = {x for port in rule.inputs for d in port for x in dim_letters(d)}
    return sorted(found - kept - rule.reduced_inside)


def mean(sharded: ShardedNode) -> tuple[Node, ...]:
    """Sum locally and divide by the global count."""
    names = _reduced(sharded)
    if not sharded.axes(names):
        return (sharded.last(),)
    node, kind = sharded.node, sharded.outputs[0]
    dims = (
        tuple(range(len(sharded.ports.inputs[0].shape)))
        if node.op == "aten.mean.default"
        else node.arg(1, "dim")
    )
    keep = False if node.op == "aten.mean.default" else bool(node.arg(2, "keepdim", False))
    kwargs = {k: v for k, v in node.kwargs if k == "dtype"}
    total = sharded.helper(
        0, "aten.sum.dim_IntList", (node.args[0], dims or (), keep), kind, kwargs, any(node.needs_grad)
    )
    count = math.prod(sharded.site.rule.sizes[x] for x in names)
    return (total, sharded.last("aten.div.Tensor", (ref(total), float(count)), {}))


def pairwise(sharded: ShardedNode) -> tuple[Node, ...]:
    """Sum the local terms and divide by the global number of terms."""
    node, names = sharded.node, _reduced(sharded)
    if reduction_of(node) != MEAN or not sharded.axes(names):
        return (sharded.last(),)
    count = math.prod(sharded.site.rule.sizes[x] for x in names)
    total = _summed(sharded)
    return (total, sharded.last("aten.div.Tensor", (ref(total), float(count)), {}))


DEFAULTS = {
    "cross_entropy_loss": (None, None, None, MEAN, -100, 0.0),
    "nll_loss_nd": (None, None, None, MEAN, -100),
    "binary_cross_entropy": (None, None, None, MEAN),
    "binary_cross_entropy_with_logits": (None, None, None, None, MEAN),
}


def _summed(sharded: ShardedNode) -> Node:
    node = sharded.node
    stem = node.op.split(".")[1]
    kwargs = {k: v for k, v in node.kwargs if k != "reduction"}
    args = with_arg(node.args, reduction_at(node), SUM, DEFAULTS.get(stem, (None, None, MEAN)))
    return sharded.helper(0, node.op, args, sharded.outputs[0], kwargs, any(node.needs_grad))


def classes(sharded: ShardedNode) -> tuple[Node, ...]:
    """Lower cross entropy: a kernel with collectives for sharded classes, the global count for sharded examples."""
    node = sharded.node
    defaults: tuple[Any, ...] = (None, None, None, MEAN, -100)
    x, target, weight, reduction, ignore = (*node.args, *defaults[len(node.args) :])[:5]
    smoothing = float(node.arg(5, "label_smoothing", 0.0)) if "cross_entropy" in node.op else 0.0
    tokens = [n for n in _reduced(sharded) if n != "c"] if reduction != NONE else []
    apart = sharded.axes(tokens) if reduction == MEAN else ()
    over = sharded.axes(["c"])
    if not apart and not over:
        return (sharded.last(),)
    before: list[Node] = []
    if over:
        dim = 0 if len(sharded.ports.inputs[0].dims) == 1 else 1
        classes_total = dim_size(sharded.ports.inputs[0].dims[dim])
        start = sharded.start(sharded.ports.inputs[0].dims[dim])
        local: Ref = target
        if start is None:
            kind = TensorType("i64", sharded.input_shape(1))
            before.append(
                sharded.helper(
                    1, "meshwright.local_places", (target, text(sharded.ports.inputs[0]), dim), kind
                )
            )
            local = ref(before[-1])
        args = (
            x,
            target,
            local,
            start or 0,
            classes_total,
            SUM if apart else reduction,
            ignore,
            smoothing,
            over,
        )
        if not apart:
            return (*before, sharded.last("meshwright.cross_entropy_split", args, {}))
        before.append(
            sharded.helper(
                0, "meshwright.cross_entropy_split", args, sharded.outputs[0], grad=any(node.needs_grad)
            )
        )
    else:
        before.append(_summed(sharded))
    total = before[-1]
    count = _count(sharded, target, weight, int(ignore), apart, tokens)
    divisor = ref(count[-1]) if count else float(math.prod(sharded.site.rule.sizes[t] for t in tokens))
    return (*before, *count, sharded.last("aten.div.Tensor", (ref(total), divisor), {}))


def _count(
    sharded: ShardedNode,
    target: Ref,
    weight: Ref | None,
    ignore: int,
    axes: tuple[str, ...],
    tokens: list[str],
) -> list[Node]:
    """Return the nodes that count, or weigh, the examples of all ranks; none when the targets are probabilities."""
    if "c" in sharded.site.rule.letters(sharded.site.rule.inputs[1]):
        return []
    if weight is not None:
        kind = TensorType(sharded.outputs[0].dtype, ())
        mine = sharded.helper(3, "meshwright.target_weight", (target, weight, ignore), kind)
        return [mine, sharded.helper(4, "meshwright.all_reduce", (ref(mine), axes), kind)]
    shape, kind = sharded.input_shape(1), TensorType("i64", ())
    valid = sharded.helper(2, "aten.ne.Scalar", (target, ignore), TensorType("b8", shape))
    mine = sharded.helper(3, "aten.sum.default", (ref(valid),), kind)
    return [valid, mine, sharded.helper(4, "meshwright.all_reduce", (ref(mine), axes), kind)]


def batch_norm(sharded: ShardedNode) -> tuple[Node, ...]:
    """Compute statistics of the full batch, or micro-batch, as sums over the ranks that shard it."""
    node, inside = sharded.node, sorted(sharded.site.rule.reduced_inside)
    axes = tuple(a for a in sharded.axes(inside) if a not in sharded.mesh.time)
    if not sharded.size("c"):
        return (sharded.nothing(),)
    if not is_training(node):
        if 0 not in sharded.outputs[0].shape:
            return (sharded.last(),)
        args = (*node.args[:5], _momentum_eps(node)[1], len(node.outputs))  # torch crashes on an empty batch
        return (sharded.last("meshwright.batch_norm_fixed", args, {}),)
    if not axes:
        return (sharded.last(),)
    no_stats = node.op == "aten._native_batch_norm_legit.no_stats"
    x, weight, bias = node.args[:3]
    mean_, var = (None, None) if no_stats else node.args[3:5]
    momentum, eps = _momentum_eps(node)
    count = math.prod(_size_now(sharded, x) for x in inside)
    args = (x, weight, bias, mean_, var, momentum, eps, count, len(node.outputs), axes)
    return (sharded.last("meshwright.batch_norm_sync", args, {}),)


def _size_now(sharded: ShardedNode, letter: str) -> int:
    """Return the number of elements of a letter that all ranks together hold at one time."""
    dim, ranks = (
        sharded.letters[letter],
        (a for a in dim_axes(sharded.letters[letter]) if a not in sharded.mesh.time),
    )
    return local_size(without_axes(dim, ranks), sharded.mesh, sharded.at)


def _momentum_eps(node: Node) -> tuple[float, float]:
    momentum, eps = node.args[6:8] if node.op == "aten.batch_norm.default" else node.args[-2:]
    return float(momentum), float(eps)
