"""Lower a node and its layouts to the nodes that one rank runs.

The default is the same operator on local tensors, with literal local sizes. Operators that need collectives or global
counts become kernels. Arguments of local nodes are literals, so they print and parse.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.core.graph import Node
from meshwright.core.layout import Coordinate
from meshwright.core.mesh import Mesh
from meshwright.errors import RuleError
from meshwright.ops.factors import Site
from meshwright.ops.local import attention, experts, random, reduce, shape, window
from meshwright.ops.local.sharded_node import ShardedNode
from meshwright.ops.strategy import Ports

Localizer = Callable[[ShardedNode], tuple[Node, ...]]

LOCAL: dict[str, Localizer] = {
    "aten.view.default": shape.view,
    "aten.reshape.default": shape.view,
    "aten.expand.default": shape.sized(1),
    "aten.full.default": shape.sized(0),
    "aten.split_with_sizes.default": shape.split_with_sizes,
    "aten.slice.Tensor": shape.slice_,
    "aten.arange.default": shape.arange,
    "aten.arange.start": shape.arange,
    "aten.arange.start_step": shape.arange,
    "aten.embedding.default": shape.embedding,
    **{f"aten.{n}": window.windowed for n in (
        "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "convolution.default",
        "max_pool1d.default", "max_pool2d.default", "max_pool3d.default",
        "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")},
    **{f"aten.{n}.default": window.mean_of_image for n in (
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool3d")},
    **{f"aten.{n}": shape.groups(6) for n in ("conv_transpose1d.default", "conv_transpose2d.input")},
    "aten.group_norm.default": shape.groups(1),
    "aten.mean.default": reduce.mean,
    "aten.mean.dim": reduce.mean,
    "aten.cross_entropy_loss.default": reduce.classes,
    "aten.nll_loss_nd.default": reduce.classes,
    **{f"aten.{n}.default": reduce.pairwise for n in (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "soft_margin_loss")},
    "aten._native_batch_norm_legit_functional.default": reduce.batch_norm,
    "aten._native_batch_norm_legit.no_stats": reduce.batch_norm,
    "aten._native_batch_norm_legit_no_training.default": reduce.batch_norm,
    "aten.batch_norm.default": reduce.batch_norm,
    "aten.scaled_dot_product_attention.default": attention.attention,
    "meshwright.experts": experts.experts,
    "meshwright.dropout": random.dropout,
    "aten.bernoulli.default": random.bernoulli,
    "aten.bernoulli.p": random.bernoulli,
    **dict.fromkeys(random.KINDS, random.random),
}  # fmt: skip

BETWEEN = "nn.Dropout between recurrent layers of one layer each"
# Operators that draw in their own code → what to write instead.
OTHER_DRAWS = {
    **dict.fromkeys(("lstm", "gru", "rnn"), BETWEEN),
    "rrelu": "F.leaky_relu",
    "multinomial": "F.gumbel_softmax(logits, hard=True) for one-hot rows, or numbers of classes by "
    "(logits - torch.empty_like(logits).exponential_().log()).argmax(-1)",
}
# They accept empty matrices. Schedules that delay the gradients of weights delay those of each of them on all ranks, or
# ranks would begin the collectives behind them in different orders.
MULTIPLY_EMPTY = frozenset({"aten.linear.default", "aten.addmm.default", "aten.mm.default"})


def localize(
    site: Site, ports: Ports, mesh: Mesh, at: Coordinate, wanted: tuple[bool, ...] = ()
) -> tuple[Node, ...]:
    """Return the nodes that the rank at a coordinate runs for a node.

    The last node keeps the name; helpers end in ``_k0``, ``_k1``, … `wanted` says for each input whether its gradient
    is needed; by default that is so where the gradients of the results are needed.

    Raises RuleError for a random operator that no kernel can draw.
    """
    sharded = ShardedNode(site, ports, mesh, at, wanted)
    localizer = LOCAL.get(site.node.op)
    if localizer:
        return localizer(sharded)
    if site.node.kwarg("seed") is not None:
        raise RuleError(
            f"{site.node.op} draws random numbers that would differ between ranks",
            why="no kernel draws the numbers of one device for it on every rank",
            where=site.node.where,
            hint=next((hint for name, hint in OTHER_DRAWS.items() if name in site.node.op), "")
            or f"known: {', '.join(sorted(k for k, v in LOCAL.items() if v in (random.random, random.bernoulli)))}",
        )
    # Few operators accept an empty tensor on every device, and their results would be empty as well.
    empty = site.node.op not in MULTIPLY_EMPTY and all(0 in t.shape for t in sharded.outputs)
    return (sharded.nothing() if empty and site.node.uses else sharded.last(),)
