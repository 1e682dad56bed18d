"""How much a step computes and reads, by its program: the model's own FLOPs and its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from meshwright.cost.operators import work
from meshwright.partition import Partition

COUNTED = ("matmul", "attention", "causal", "conv")


def model_flops(parts: Partition) -> dict[str, float]:
    """Dtype → FLOPs of a step on the global batch, forward and backward, of products, attention and convolutions.

    Recompute and replicated computation do not count (PaLM, Chowdhery et al. 2022,
    appendix B). A causal mask counts half of the scores.
    """
    graph, found = parts.resharded.graph, defaultdict[str, float](float)
    for site in parts.factors.sites.values():
        wanted = [use in graph.needs_grad for use in site.node.uses]
        done = work(site.node, site.rule, site.rule.sizes, graph.types, wanted)
        if done.kind in COUNTED:
            found[done.dtype] += float(done.flops_forward) + float(done.flops_backward)
    return dict(found)


def seconds_at_peak(flops: Mapping[str, float], peaks: Mapping[str, float]) -> float | None:
    """Seconds that one device would take at its peak rates; None where one is not given."""
    if any(dtype not in peaks for dtype in flops):
        return None
    return sum(amount / peaks[dtype] for dtype, amount in flops.items())


def tokens_of(parts: Partition) -> int:
    """The places of the first input of whole numbers with two dims, batch and sequence; 0 for other models."""
    for entry in parts.resharded.graph.input_of("batch"):
        if entry.type.dtype in ("i64", "i32") and len(entry.type.shape) == 2:
            return entry.type.shape[0] * entry.type.shape[1]
    return 0
