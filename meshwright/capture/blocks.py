"""Inline the blocks that export makes of ``torch.no_grad()``: the operators inside are those of the program.

A block says only how autograd was set. `trace` has written a detach after each operator without gradient, so that the
operators mean the same outside. Decomposition inlines blocks as well, and traces the program again for it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

BLOCK = "wrap_with_set_grad_enabled"


def is_block(node: fx.Node) -> bool:
    """Return whether a node is a block of ``torch.no_grad()`` or ``torch.enable_grad()``."""
    return node.op == "call_function" and str(node.target) == BLOCK


def body_of(node: fx.Node, module: fx.GraphModule) -> fx.GraphModule | None:
    """Return what a block of a module contains; None where it has not the expected form."""
    if len(node.args) < 2 or not isinstance(node.args[1], fx.Node) or node.args[1].op != "get_attr":
        return None
    body = getattr(module, str(node.args[1].target), None)
    ends = all(
        user.op == "call_function" and user.target is operator.getitem and _stays_inside(user)
        for user in node.users
    )
    return body if isinstance(body, fx.GraphModule) and ends else None


def _stays_inside(result: fx.Node) -> bool:
    """Return whether this value is not a result of the program; a signature names those."""
    return all(user.op != "output" for user in result.users)


def inline(module: fx.GraphModule) -> None:
    """Put the operators of all blocks, which `body_of` knows, where the blocks are; a body that has blocks first."""
    graph = module.graph
    for node in [n for n in graph.nodes if is_block(n)]:
        body = body_of(node, module)
        assert body is not None
        inline(body)
        _replace(graph, node, body.graph)
        attribute = node.args[1]
        graph.erase_node(node)
        if isinstance(attribute, fx.Node) and not attribute.users:
            graph.erase_node(attribute)


def _replace(graph: fx.Graph, node: fx.Node, body: fx.Graph) -> None:
    """Copy a body before its block, and have the readers of the block's results read the copies."""
    values: dict[fx.Node, Any] = {}
    arguments = iter(node.args[2:])
    results: Any = ()
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "placeholder":
                values[inner] = next(arguments)
            elif inner.op == "output":
                (results,) = inner.args
            else:
                values[inner] = graph.node_copy(inner, values.__getitem__)
    for user in list(node.users):
        result = results[int(user.args[1])]  # pyright: ignore[reportArgumentType]
        user.replace_all_uses_with(values[result] if isinstance(result, fx.Node) else result)
        graph.erase_node(user)


__all__ = ["BLOCK", "body_of", "inline", "is_block"]
