"""Means and losses over sharded dims: sums of the local terms, divided by the global count."""

from __future__ import annotations

import math
from typing import Any

from meshwright.core.graph import Node, Ref, TensorType
from meshwright.core.layout import dim_axes, dim_size, local_size, without_axes
from meshwright.ops.local.cut import Cut, ref, text, with_arg
from meshwright.ops.rule import dim_letters
from meshwright.ops.special.loss import MEAN, NONE, SUM, reduction_at, reduction_of
from meshwright.ops.special.norm import is_training


def _reduced(cut: Cut) -> list[str]:
    """Return the letters of the inputs that the results do not have."""
    rule = cut.site.rule
    kept = {x for port in rule.outputs for x in rule.letters(port)}
    found = {x for port in rule.inputs for d in port for x in dim_letters(d)}
    return sorted(found - kept - rule.inside)


def mean(cut: Cut) -> tuple[Node, ...]:
    """Sum locally and divide by the global count."""
    names = _reduced(cut)
    if not cut.axes(names):
        return (cut.last(),)
    node, kind = cut.node, cut.outputs[0]
    dims = (
        tuple(range(len(cut.ports.inputs[0].shape))) if node.op == "aten.mean.default" else node.arg(1, "dim")
    )
    keep = False if node.op == "aten.mean.default" else bool(node.arg(2, "keepdim", False))
    kwargs = {k: v for k, v in node.kwargs if k == "dtype"}
    total = cut.helper(
        0, "aten.sum.dim_IntList", (node.args[0], dims or (), keep), kind, kwargs, any(node.needs_grad)
    )
    count = math.prod(cut.site.rule.sizes[x] for x in names)
    return (total, cut.last("aten.div.Tensor", (ref(total), float(count)), {}))


def pairwise(cut: Cut) -> tuple[Node, ...]:
    """Sum the local terms and divide by the global number of terms."""
    node, names = cut.node, _reduced(cut)
    if reduction_of(node) != MEAN or not cut.axes(names):
        return (cut.last(),)
    count = math.prod(cut.site.rule.sizes[x] for x in names)
    total = _summed(cut)
    return (total, cut.last("aten.div.Tensor", (ref(total), float(count)), {}))


DEFAULTS = {
    "cross_entropy_loss": (None, None, None, MEAN, -100, 0.0),
    "nll_loss_nd": (None, None, None, MEAN, -100),
    "binary_cross_entropy": (None, None, None, MEAN),
    "binary_cross_entropy_with_logits": (None, None, None, None, MEAN),
}


def _summed(cut: Cut) -> Node:
    node = cut.node
    stem = node.op.split(".")[1]
    kwargs = {k: v for k, v in node.kwargs if k != "reduction"}
    args = with_arg(node.args, reduction_at(node), SUM, DEFAULTS.get(stem, (None, None, MEAN)))
    return cut.helper(0, node.op, args, cut.outputs[0], kwargs, any(node.needs_grad))


def classes(cut: Cut) -> tuple[Node, ...]:
    """Lower cross entropy: a kernel with collectives for sharded classes, the global count for sharded examples."""
    node = cut.node
    defaults: tuple[Any, ...] = (None, None, None, MEAN, -100)
    x, target, weight, reduction, ignore = (*node.args, *defaults[len(node.args) :])[:5]
    smoothing = float(node.arg(5, "label_smoothing", 0.0)) if "cross_entropy" in node.op else 0.0
    tokens = [n for n in _reduced(cut) if n != "c"] if reduction != NONE else []
    apart = cut.axes(tokens) if reduction == MEAN else ()
    over = cut.axes(["c"])
    if not apart and not over:
        return (cut.last(),)
    before: list[Node] = []
    if over:
        dim = 0 if len(cut.ports.inputs[0].dims) == 1 else 1
        classes_total = dim_size(cut.ports.inputs[0].dims[dim])
        start = cut.start(cut.ports.inputs[0].dims[dim])
        local: Ref = target
        if start is None:
            kind = TensorType("i64", cut.input_shape(1))
            before.append(
                cut.helper(1, "meshwright.local_places", (target, text(cut.ports.inputs[0]), dim), kind)
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
            return (*before, cut.last("meshwright.cross_entropy_split", args, {}))
        before.append(
            cut.helper(0, "meshwright.cross_entropy_split", args, cut.outputs[0], grad=any(node.needs_grad))
        )
    else:
        before.append(_summed(cut))
    total = before[-1]
    count = _count(cut, target, weight, int(ignore), apart, tokens)
    divisor = ref(count[-1]) if count else float(math.prod(cut.site.rule.sizes[t] for t in tokens))
    return (*before, *count, cut.last("aten.div.Tensor", (ref(total), divisor), {}))


def _count(
    cut: Cut, target: Ref, weight: Ref | None, ignore: int, axes: tuple[str, ...], tokens: list[str]
) -> list[Node]:
    """Return the nodes that count, or weigh, the examples of all ranks; none when the targets are probabilities."""
    if "c" in cut.site.rule.letters(cut.site.rule.inputs[1]):
        return []
    if weight is not None:
        kind = TensorType(cut.outputs[0].dtype, ())
        mine = cut.helper(3, "meshwright.target_weight", (target, weight, ignore), kind)
        return [mine, cut.helper(4, "meshwright.all_reduce", (ref(mine), axes), kind)]
    shape, kind = cut.input_shape(1), TensorType("i64", ())
    valid = cut.helper(2, "aten.ne.Scalar", (target, ignore), TensorType("b8", shape))
    mine = cut.helper(3, "aten.sum.default", (ref(valid),), kind)
    return [valid, mine, cut.helper(4, "meshwright.all_reduce", (ref(mine), axes), kind)]


def batch_norm(cut: Cut) -> tuple[Node, ...]:
    """Compute statistics of the full batch, or micro-batch, as sums over the ranks that shard it."""
    node, inside = cut.node, sorted(cut.site.rule.inside)
    axes = tuple(a for a in cut.axes(inside) if a not in cut.mesh.time)
    if not cut.size("c"):
        return (cut.nothing(),)
    if not is_training(node):
        if 0 not in cut.outputs[0].shape:
            return (cut.last(),)
        args = (*node.args[:5], _momentum_eps(node)[1], len(node.outputs))  # torch crashes on an empty batch
        return (cut.last("meshwright.batch_norm_fixed", args, {}),)
    if not axes:
        return (cut.last(),)
    no_stats = node.op == "aten._native_batch_norm_legit.no_stats"
    x, weight, bias = node.args[:3]
    mean_, var = (None, None) if no_stats else node.args[3:5]
    momentum, eps = _momentum_eps(node)
    count = math.prod(_size_now(cut, x) for x in inside)
    args = (x, weight, bias, mean_, var, momentum, eps, count, len(node.outputs), axes)
    return (cut.last("meshwright.batch_norm_sync", args, {}),)


def _size_now(cut: Cut, letter: str) -> int:
    """Return the number of elements of a letter that all ranks together hold at one time."""
    dim, ranks = cut.letters[letter], (a for a in dim_axes(cut.letters[letter]) if a not in cut.mesh.time)
    return local_size(without_axes(dim, ranks), cut.mesh, cut.at)


def _momentum_eps(node: Node) -> tuple[float, float]:
    momentum, eps = node.args[6:8] if node.op == "aten.batch_norm.default" else node.args[-2:]
    return float(momentum), float(eps)
