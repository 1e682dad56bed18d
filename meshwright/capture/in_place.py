"""Write operators in place as those that return a new tensor, where nothing else shares the memory written to.

``scores /= scores.sum(-1, keepdim=True)`` is such a write: `scores` is a fresh tensor that no view looks into, so
whoever reads it afterwards reads the result instead. ``shifted[..., 1:] = ids[..., :-1]`` writes into a part of a fresh
tensor, which becomes one with that part replaced. Decomposition does the same for every write, and traces the program
again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

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
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
}
# The same for a part of a tensor: the part's new value, and the tensor with that part replaced.
PART_VALUES = {
    aten.copy_.default: aten.copy.default,
    aten.fill_.Tensor: aten.fill.Tensor,
    aten.fill_.Scalar: aten.fill.Scalar,
}
REPLACED = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
ARITHMETIC = frozenset((aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor))
# Operators whose results are in memory of their own.
FRESH = frozenset(
    f"aten.{name}"
    for name in (
        "_grouped_mm.default add.Tensor div.Tensor empty_like.default gather.default linear.default matmul.default "
        "mm.default bmm.default mul.Tensor sigmoid.default softmax.int sub.Tensor sum.default sum.dim_IntList "
        "slice_scatter.default select_scatter.default topk.default zeros.default zeros_like.default new_zeros.default "
        "new_empty.default empty.memory_format eq.Scalar"
    ).split()
)


def may_be_new(node: fx.Node) -> bool:
    """Return whether an operator writes in place and would mean the same with a result of its own."""
    if node.op == "call_function" and node.target in PART_VALUES:
        return _may_be_replaced(node)
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
        user.op != "output" and (user is node or user not in earlier or _is_read_before(user, earlier))
        for user in (*written.users, *node.users)
    )


def _may_be_replaced(node: fx.Node) -> bool:
    """Return whether a write into a part may become a new tensor: no other view sees it, and its result is not used."""
    parts = _parts(node)
    base = parts[-1].args[0] if parts else None
    if not isinstance(base, fx.Node) or not _is_fresh(base) or node.users:
        return False
    earlier = _until(node, base)
    return all(_is_read_before(user, earlier) or user not in earlier for user in base.users) and all(
        user.op != "output" for user in base.users
    )


def _is_read_before(reader: fx.Node, earlier: Collection[fx.Node]) -> bool:
    """Return whether nothing reads the memory through this node after the write. `earlier` nodes are before it."""
    if reader not in earlier:
        return False
    if reader.target in REPLACED:
        return all(_is_read_before(u, earlier) or _writes_to(u, reader) for u in reader.users)
    return _is_fresh(reader) or (reader.target in PART_VALUES and not reader.users)


def _writes_to(node: fx.Node, part: fx.Node) -> bool:
    return node.target in PART_VALUES and node.args[0] is part and not node.users


def _parts(node: fx.Node) -> list[fx.Node]:
    """Return the views through which a write goes, the innermost first."""
    found: list[fx.Node] = []
    value = node.args[0]
    while isinstance(value, fx.Node) and value.op == "call_function" and value.target in REPLACED:
        found.append(value)
        value = value.args[0]
    return found


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
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in (*NEW, *PART_VALUES)]:
        if node.target in PART_VALUES:
            _replace_part(graph, node)
            continue
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


def _replace_part(graph: fx.Graph, node: fx.Node) -> None:
    """Have those who read a tensor after a write into a part of it read one with that part replaced."""
    parts = _parts(node)
    base: Any = parts[-1].args[0]
    target: Any = node.target
    earlier = _until(node, base)
    with graph.inserting_before(node):
        value = graph.call_function(PART_VALUES[target], node.args, node.kwargs)
        value.meta = dict(node.meta)
        for part in parts:
            whole: Any = part.args[0]
            view: Any = part.target
            value = graph.call_function(REPLACED[view], (whole, value, *part.args[1:]), part.kwargs)
            value.meta = {**node.meta, "val": whole.meta["val"]}
    graph.erase_node(node)
    base.replace_all_uses_with(value, lambda user: user is not value and user not in earlier)


def name_casts(module: fx.GraphModule) -> None:
    """Before each write of another dtype or shape into memory of the model, write the cast or expansion as operators.

    Decomposition makes what is copied into all of a buffer its new value, whatever dtype and shape that has.
    """
    for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in inner.graph.find_nodes(op="call_function", target=aten.copy_.default):
            written, read = (getattr(value, "meta", {}).get("val") for value in node.args[:2])
            if not isinstance(written, torch.Tensor) or not isinstance(read, torch.Tensor):
                continue
            if not _is_given(node.args[0]):
                continue
            with inner.graph.inserting_before(node):
                if read.dtype != written.dtype:
                    _read_through(node, aten.to.dtype, written.dtype, read.to(written.dtype))
                if read.shape != written.shape:
                    _read_through(node, aten.expand.default, list(written.shape), written)


def _read_through(node: fx.Node, target: Any, argument: Any, value: torch.Tensor) -> None:
    source = node.args[1]
    made = node.graph.call_function(target, (source, argument))
    made.meta = {**node.meta, "val": value}
    node.update_arg(1, made)


def _is_given(value: Any) -> bool:
    """Return whether a value is an input of its graph, or made of one without an operator that has its own result."""
    while isinstance(value, fx.Node) and value.op == "call_function" and not _is_fresh(value) and value.args:
        value = value.args[0]
    return isinstance(value, fx.Node) and value.op == "placeholder"


__all__ = ["NEW", "may_be_new", "name_casts", "write_anew"]
