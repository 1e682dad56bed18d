"""Recurrent layers: examples are independent, all else is computed together."""

from __future__ import annotations

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import Special, Types, make, replicated, shapes_in, shapes_out


def recurrent(node: Node, types: Types) -> Rule:
    """``t! b i!, l! b h!, w! v!, … ~> t! b o!, l! b h!``, or ``b t! …`` with `batch_first`: the states of all layers
    and directions are stacked in front of the examples."""
    shapes, results = shapes_in(node, types), shapes_out(node)
    if len(shapes[0]) != 3:
        return replicated(node, types, "a single sequence has no examples")
    batch_dim = 0 if node.args[-1] else 1
    sizes = {"b": shapes[0][batch_dim]}

    def port(name: str, shape: tuple[int, ...], batch: int) -> list[RuleDim]:
        letters = ["b" if d == batch else f"{name}_{d}" for d in range(len(shape))]
        sizes.update({x: n for x, n in zip(letters, shape, strict=True) if x != "b"})
        return [(x,) for x in letters]

    states = len(results) - 1
    batch_dims = [batch_dim, *[1] * states]
    inputs = [port(f"p{n}", s, batch_dims[n] if n <= states else -1) for n, s in enumerate(shapes)]
    outputs = [port(f"o{n}", s, batch_dims[n]) for n, s in enumerate(results)]
    return make(inputs, outputs, sizes, unsharded=[x for x in sizes if x != "b"])


RECURRENT: dict[str, Special] = {
    f"aten.{name}.input": recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
