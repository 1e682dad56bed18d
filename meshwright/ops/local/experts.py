"""Experts on a rank: the numbers of those that it holds."""

from __future__ import annotations

from meshwright.core.graph import Node
from meshwright.ops.local.sharded_node import ShardedNode


def experts(sharded: ShardedNode) -> tuple[Node, ...]:
    """Give the first of this rank's experts and how many there are in all; nothing where a rank has none."""
    if not all(sharded.size(x) for x in ("g", "t", "m", "h") if x in sharded.letters):
        return (sharded.nothing(),)
    start = sharded.start(sharded.letters["g"])
    assert start is not None, "experts are split into contiguous blocks"
    args = (*sharded.node.args, *(((),) if len(sharded.node.args) == 8 else ()))
    return (sharded.last(args=(*args, start, sharded.site.rule.sizes["g"]), kwargs={}),)
