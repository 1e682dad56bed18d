"""Write operators in place as those that return a new tensor, where nothing else shares the memory written to.

``scores /= scores.sum(-1, keepdim=True)`` is such a write: `scores` is a fresh tensor that no view looks into, so
whoever reads it afterwards reads the result instead. Decomposition does the same for every write, and traces the
program again.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

aten = torch.ops.aten
# in place → the operator that returns a new tensor
NEW = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.scatter_.value: aten.scatter.value,
    aten.index_put_.default: aten.index_put.default,
}
ARITHMETIC = frozenset((aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor))
# Operators whose results are in memory of their own.
FRESH = frozenset(
    f"aten.{name}"
    for name in (
        "_grouped_mm.default add.Tensor div.Tensor empty_like.default gather.default linear.default matmul.default "
        "mm.default bmm.default mul.Tensor sigmoid.default softmax.int sub.Tensor sum.default sum.dim_IntList "
        "topk.default zeros.default zeros_like.default"
    ).split()
)


def may_be_new(node: fx.Node) -> bool:
    """Return whether an operator writes in place and would mean the same with a result of its own."""
    if node.op != "call_function" or node.target not in NEW or not isinstance(node.args[0], fx.Node):
        return False
    written = node.args[0]
    source = written.args[0] if written.target is operator.getitem else written
    if not isinstance(source, fx.Node) or not _keeps_dtype(node):
        return False
    if not _is_fresh(source) and not may_be_new(source):
        return False
    earlier = _until(node, written)
    return all(
        user.op != "output" and (user is node or user not in earlier or _is_fresh(user))
        for user in (*written.users, *node.users)
    )


def _is_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) in FRESH


def _keeps_dtype(node: fx.Node) -> bool:
    """Return whether the result has the dtype of the tensor that is written to, as in place it always has."""
    first, *others = (value.meta.get("val") for value in node.all_input_nodes)
    if node.target not in ARITHMETIC:
        return True
    return isinstance(first, torch.Tensor) and all(
        isinstance(x, torch.Tensor) and x.dtype == first.dtype for x in others
    )


def _until(node: fx.Node, written: fx.Node) -> set[fx.Node]:
    """The nodes between the one that makes a tensor and the one that writes to it."""
    found: set[fx.Node] = set()
    step = written.next
    while step is not node and step.op != "output":
        found.add(step)
        step = step.next
    return found


def write_anew(graph: fx.Graph) -> None:
    """Replace the operators in place, of which `may_be_new` is true."""
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in NEW]:
        written = node.args[0]
        assert isinstance(written, fx.Node)
        earlier = _until(node, written)
        with graph.inserting_before(node):
            result = graph.call_function(NEW[node.target], node.args, node.kwargs)
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        written.replace_all_uses_with(
            result, lambda user, made=result, e=earlier: user is not made and user not in e
        )


__all__ = ["NEW", "may_be_new", "write_anew"]
