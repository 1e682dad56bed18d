"""Random operators on a rank draw by seed slot and global position, never from a generator that ranks would share."""

from __future__ import annotations

from typing import Any

from meshwright.core.graph import Device, Dtype, Node
from meshwright.ops.local.sharded_node import ShardedNode, text


def dropout(sharded: ShardedNode) -> tuple[Node, ...]:
    """Draw the mask by the global positions of this rank's elements."""
    x, p, slot = sharded.node.args
    return (sharded.last(args=(x, p, slot, text(sharded.ports.outputs[0]))),)


# operator → (kind of distribution, positions and defaults of its numbers; -1: always the default)
KINDS: dict[str, tuple[str, tuple[tuple[int, float], ...]]] = {
    "aten.rand.default": ("uniform", ()),
    "aten.rand_like.default": ("uniform", ()),
    "aten.uniform.default": ("uniform", ((1, 0.0), (2, 1.0))),
    "aten.randn.default": ("normal", ()),
    "aten.randn_like.default": ("normal", ()),
    "aten.normal_functional.default": ("normal", ((1, 0.0), (2, 1.0))),
    "aten.exponential.default": ("exponential", ((1, 1.0),)),
    "aten.randint.default": ("integer", ((-1, 0.0), (0, 1.0))),
    "aten.randint.low": ("integer", ((0, 0.0), (1, 1.0))),
    "aten.randint_like.default": ("integer", ((-1, 0.0), (1, 1.0))),
    "aten.randint_like.low_dtype": ("integer", ((1, 0.0), (2, 1.0))),
    "aten.log_normal.default": ("log normal", ((1, 1.0), (2, 2.0))),
    "aten.geometric.default": ("geometric", ((1, 0.5),)),
    "aten.cauchy.default": ("cauchy", ((1, 0.0), (2, 1.0))),
    "aten.randperm.default": ("permutation", ()),
}


def random(sharded: ShardedNode) -> tuple[Node, ...]:
    """Lower every distribution to one kernel."""
    node = sharded.node
    kind, numbers = KINDS[node.op]
    values: list[Any] = [node.args[at] if 0 <= at < len(node.args) else default for at, default in numbers]
    if kind in ("uniform", "normal") and not values:
        values = [0.0, 1.0]
    kwargs = {"dtype": Dtype(node.outputs[0].dtype), "device": Device()}
    args = (kind, tuple(float(v) for v in values), int(node.kwarg("seed", 0)), text(sharded.ports.outputs[0]))
    return (sharded.last("meshwright.random", args, kwargs),)


def bernoulli(sharded: ShardedNode) -> tuple[Node, ...]:
    """Draw one where a uniform number lies below the probability."""
    node = sharded.node
    x, *rest = node.args
    p = rest[0] if rest else node.kwarg("p")
    args = (x, p, int(node.kwarg("seed", 0)), text(sharded.ports.outputs[0]))
    return (sharded.last("meshwright.bernoulli", args, {}),)
