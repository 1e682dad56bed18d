"""Attention on a rank: its causal mask starts at its first query, and dropout is drawn by global position."""

from __future__ import annotations

from meshwright.core.graph import Device, Dtype, Node, TensorType
from meshwright.core.layout import TensorLayout
from meshwright.ops.local.shape import places
from meshwright.ops.local.sharded_node import ShardedNode, ref, text

DEFAULTS = (None, None, None, None, 0.0, False)


def attention(sharded: ShardedNode) -> tuple[Node, ...]:
    """Lower attention: an explicit mask for sharded queries, a kernel for dropout, zeros for an empty rank."""
    node = sharded.node
    if 0 in sharded.outputs[0].shape:
        # torch returns early and gives mask, k and v no gradient, while other ranks may wait in its reduction.
        return (sharded.nothing(),)
    q, k, v, mask, dropout, causal = (*node.args, *DEFAULTS[len(node.args) :])
    before: list[Node] = []
    if causal and "q" in sharded.letters and sharded.axes(["q"]):
        before = _causal_mask(sharded)
        mask, causal = ref(before[-1]), False
    options = {name: value for name, value in node.kwargs if name in ("scale", "enable_gqa")}
    if dropout:
        rule, inputs = sharded.site.rule, sharded.ports.inputs
        keys = inputs[1].dims[-2]
        probabilities = TensorLayout((*sharded.ports.outputs[0].dims[:-1], keys))
        assert len(rule.outputs) == 1
        args = (q, k, v, mask, float(dropout), bool(causal), int(node.kwarg("seed", 0)), text(probabilities))
        return (*before, sharded.last("meshwright.attention_dropout", args, options))
    return (*before, sharded.last(args=(q, k, v, mask, 0.0, bool(causal)), kwargs=options))


def _causal_mask(sharded: ShardedNode) -> list[Node]:
    """Build ``row >= column``, where rows are the global positions of this rank's queries."""
    rows_dim = TensorLayout((sharded.letters["q"],))
    rows = places(sharded, 0, rows_dim)
    count, keys = rows.outputs[0].shape[0], sharded.input_shape(1)[-2]
    column = sharded.helper(1, "aten.reshape.default", (ref(rows), (count, 1)), TensorType("i64", (count, 1)))
    kind = TensorType("i64", (keys,))
    columns = sharded.helper(
        2, "aten.arange.start_step", (0, keys, 1), kind, {"dtype": Dtype("i64"), "device": Device()}
    )
    return [
        rows,
        column,
        columns,
        sharded.helper(3, "aten.ge.Tensor", (ref(column), ref(columns)), TensorType("b8", (count, keys))),
    ]
