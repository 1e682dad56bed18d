"""Refuse dtypes that torch would.

On fake tensors some operators accept inputs of two dtypes and raise on real ones, so the export of such a model
succeeds. The rules here are those of torch 2.13 on a processor. Operators that promote (`add`, `where`) may mix
dtypes, and operators that check on fake tensors need no rule.
"""

from __future__ import annotations

from meshwright.core.graph import Graph, Node
from meshwright.errors import CaptureError

PRODUCTS = frozenset(
    "linear matmul mm bmm mv dot addmm addmv baddbmm convolution conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
NORMS = frozenset(
    "layer_norm native_layer_norm group_norm native_group_norm instance_norm batch_norm native_batch_norm "
    "_native_batch_norm_legit _native_batch_norm_legit_functional".split()
)
CLASSES = frozenset(
    "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward".split()
)
OF_CLASSES = ("i64", "f64", "f32", "bf16", "f16")  # of numbers of classes, or of their probabilities
HALVES = ("bf16", "f16")  # a norm takes f32 parameters for an input of these


def check_dtypes(graph: Graph) -> Graph:
    """Return the graph. Raises CaptureError at the first operator whose tensors torch would not accept together."""
    for node in graph.nodes:
        namespace, _, name = node.op.partition(".")
        name = name.partition(".")[0]
        if namespace == "aten" and (name in PRODUCTS or name in NORMS):
            _check(graph, node, norm=name in NORMS)
        elif namespace == "aten" and name in CLASSES:
            _check_classes(graph, node)
    return graph


def _check(graph: Graph, node: Node, *, norm: bool) -> None:
    first, *others = node.uses
    dtype = graph.types[first].dtype
    allowed = {dtype, "f32"} if norm and dtype in HALVES else {dtype}
    other = next((u for u in others if graph.types[u].dtype not in allowed), None)
    if other is not None:
        raise CaptureError(
            f"{node.op} is given {dtype} and {graph.types[other].dtype}",
            why=f"%{first} is {graph.types[first]}, %{other} is {graph.types[other]}; torch refuses such a pair",
            where=node.where,
            hint="bring model and batch to one dtype, as with batch.to(dtype) or model.to(dtype), "
            "or compute under torch.autocast",
        )


def _check_classes(graph: Graph, node: Node) -> None:
    target = node.uses[1]
    kind = graph.types[target]
    if kind.dtype not in OF_CLASSES:
        raise CaptureError(
            f"{node.op} is given targets of {kind.dtype}",
            why=f"%{target} is {kind}; torch takes numbers of classes as i64",
            where=node.where,
            hint="labels.long(), where the batch is made or in the loss",
        )
