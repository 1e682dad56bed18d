"""The work of a block of experts."""

from __future__ import annotations

from meshwright.compile import captured_of
from meshwright.cost.operators import work
from meshwright.ops.table import rule_of
from tests.mixtures import mixture


def test_products_have_the_dtype_of_their_rows() -> None:
    """Weights of choices are f32 in a bf16 model, and so is the sum over choices: products are not."""
    model, batch, loss = mixture(num_hidden_layers=1)
    graph = captured_of(model.bfloat16(), batch, loss).graph
    (node,) = (n for n in graph.nodes if n.op == "meshwright.experts")
    rule = rule_of(node, graph.types)
    done = work(node, rule, rule.sizes, graph.types, [True] * len(node.uses))
    assert (node.outputs[0].dtype, done.dtype) == ("f32", "bf16")
    rows, choices, width, inner = 32, 2, 32, 48
    assert done.flops_forward == 2 * rows * choices * width * inner * 3
    assert done.flops_backward == 2 * done.flops_forward
