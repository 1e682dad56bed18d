"""The torch functions that operators of a program stand for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.core.graph import Node
from meshwright.errors import RuleError


def torch_operator(node: Node) -> Callable[..., Any]:
    """The function of a node: a replacement below, else the `torch.ops` overload of that name. Raises RuleError where
    there is none."""
    if node.op in REPLACED:
        return REPLACED[node.op]
    space, *rest = node.op.split(".")
    try:
        found: Any = getattr(torch.ops, space)
        for part in rest:
            found = getattr(found, part)
        return found
    except AttributeError:
        raise RuleError(f"torch {torch.__version__} has no operator {node.op}", where=node.where) from None


def quick_operator(node: Node) -> Callable[..., Any]:
    """The same, by the function of torch's own Python binding where it takes the same arguments: it takes the host a
    microsecond or two less than an overload, which a step of many small operators notices."""
    return QUICK.get(node.op) or torch_operator(node)


def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts of a histogram, of integers on a CPU as CUDA counts them: torch has no kernel there. A value at the upper
    bound is in the last bin, one outside in none."""
    if x.device.type != "cpu" or x.is_floating_point():
        return torch.histc(x, bins, min, max)
    if min == max and x.numel():
        min, max = int(x.min()), int(x.max())
    low, high = (int(min), int(max)) if min != max else (int(min) - 1, int(max) + 1)
    values = x.reshape(-1).long()
    inside = (values >= low) & (values <= high)
    bin_of = ((values - low) * bins // (high - low)).clamp(0, bins - 1)
    return x.new_zeros(bins).index_add_(0, bin_of, inside.to(x.dtype))


def batch_norm(x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, ...]:
    """Batch norm, and the new running statistics. A GPU computes it with cuDNN, as eager PyTorch does: the functional
    operator has another kernel, with which a ResNet 50 took 1.17 times as long on an H100."""
    return FUNCTIONAL_NORM(x, *more) if x.device.type == "cpu" else eager_batch_norm(x, *more)


def eager_batch_norm(
    x: torch.Tensor,
    weight_c: torch.Tensor | None,
    bias_c: torch.Tensor | None,
    mean_c: torch.Tensor,
    var_c: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """The same by `F.batch_norm`. The batch's own statistics, which only backward reads, are empty."""
    if training:
        mean_c, var_c = mean_c.clone(), var_c.clone()
    result = F.batch_norm(x, mean_c, var_c, weight_c, bias_c, training, momentum, eps)
    return result, mean_c.new_empty(0), mean_c.new_empty(0), mean_c, var_c


NORM = "aten._native_batch_norm_legit_functional.default"
FUNCTIONAL_NORM: Callable[..., tuple[torch.Tensor, ...]] = operator.attrgetter(NORM)(torch.ops)

_FOREACH_COPY: Callable[..., None] = operator.attrgetter("aten._foreach_copy_.default")(torch.ops)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target. On a GPU tensors of one dtype are copied by few kernels: the statistics of the
    53 batch norms of a ResNet 50 are 159 tensors."""
    for dtype in dict.fromkeys(x.dtype for x in targets):
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0].dtype == dtype]
        _FOREACH_COPY([target for target, _ in pairs], [source for _, source in pairs])


REPLACED: Mapping[str, Callable[..., Any]] = {
    "aten.view.default": torch.ops.aten.reshape.default,  # a view copies where the local strides need it
    "aten.histc.default": histc,
    NORM: batch_norm,
}

QUICK: Mapping[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.sub.Tensor": torch.sub,
    "aten.mul.Tensor": torch.mul,
    "aten.div.Tensor": torch.div,
    "aten.neg.default": torch.neg,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.view.default": torch.reshape,
    "aten.reshape.default": torch.reshape,
    "aten.permute.default": torch.permute,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.split_with_sizes.default": torch.split_with_sizes,
    "aten.embedding.default": torch.embedding,
    "aten.layer_norm.default": torch.layer_norm,
    "aten.linear.default": F.linear,
    "aten.gelu.default": F.gelu,
    "aten.scaled_dot_product_attention.default": F.scaled_dot_product_attention,
}

__all__ = ["NORM", "QUICK", "copy_all", "eager_batch_norm", "histc", "quick_operator", "torch_operator"]
