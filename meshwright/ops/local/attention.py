"""Attention on a rank: its causal mask starts at its first query, and dropout is drawn by global position."""

from __future__ import annotations

from meshwright.core.graph import Device, Dtype, Node, TensorType
from meshwright.core.layout import TensorLayout
from meshwright.ops.local.cut import Cut, ref, text
from meshwright.ops.local.shape import places

DEFAULTS = (None, None, None, None, 0.0, False)


def attention(cut: Cut) -> tuple[Node, ...]:
    """Lower attention: an explicit mask for sharded queries, a kernel for dropout, zeros for an empty rank."""
    node = cut.node
    if 0 in cut.outputs[0].shape:
        # torch returns early and gives mask, k and v no gradient, while other ranks may wait in its reduction.
        return (cut.nothing(),)
    q, k, v, mask, dropout, causal = (*node.args, *DEFAULTS[len(node.args) :])
    before: list[Node] = []
    if causal and "q" in cut.letters and cut.axes(["q"]):
        before = _causal_mask(cut)
        mask, causal = ref(before[-1]), False
    options = {name: value for name, value in node.kwargs if name in ("scale", "enable_gqa")}
    if dropout:
        rule, inputs = cut.site.rule, cut.ports.inputs
        keys = inputs[1].dims[-2]
        probabilities = TensorLayout((*cut.ports.outputs[0].dims[:-1], keys))
        assert len(rule.outputs) == 1
        args = (q, k, v, mask, float(dropout), bool(causal), int(node.kwarg("seed", 0)), text(probabilities))
        return (*before, cut.last("meshwright.attention_dropout", args, options))
    return (*before, cut.last(args=(q, k, v, mask, 0.0, bool(causal)), kwargs=options))


def _causal_mask(cut: Cut) -> list[Node]:
    """Build ``row >= column``, where rows are the global positions of this rank's queries."""
    rows_dim = TensorLayout((cut.letters["q"],))
    rows = places(cut, 0, rows_dim)
    count, keys = rows.outputs[0].shape[0], cut.input_shape(1)[-2]
    column = cut.helper(1, "aten.reshape.default", (ref(rows), (count, 1)), TensorType("i64", (count, 1)))
    kind = TensorType("i64", (keys,))
    columns = cut.helper(
        2, "aten.arange.start_step", (0, keys, 1), kind, {"dtype": Dtype("i64"), "device": Device()}
    )
    return [
        rows,
        column,
        columns,
        cut.helper(3, "aten.ge.Tensor", (ref(column), ref(columns)), TensorType("b8", (count, keys))),
    ]
