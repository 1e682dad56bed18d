"""Sizes of buckets: by the link, or as set by the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from meshwright.core.mesh import IN_TIME, Mesh
from meshwright.partition.buckets import BUCKET_BYTES, BucketBytes, Gradient, balanced_bytes, fused_bytes
from meshwright.plan.plan import Plan


def sizes(plan: Plan) -> Callable[[str, Sequence[str]], int]:
    """Return a function from (kind of collective, axes) to the bytes of a full bucket; 0 means no buckets."""
    fusion, prices, mesh = plan.techniques.fusion, plan.prices, plan.mesh
    if isinstance(fusion, int):
        return lambda kind, axes: fusion
    given, known = plan.techniques.fusion_sizes, prices is not None and _known(plan.mesh, prices.rows)

    def by_link(kind: str, axes: Sequence[str]) -> int:
        return fused_bytes(kind, mesh, axes, prices) if prices is not None and known else BUCKET_BYTES

    return lambda kind, axes: given[kind] if kind in given else by_link(kind, axes)


def gradient_bytes(plan: Plan, pending: Sequence[Gradient]) -> BucketBytes:
    """Return the bytes of a bucket of gradients under a plan; `pending`: all that are reduced in a step."""
    found, prices = sizes(plan), plan.prices
    by_link = plan.techniques.fusion == "auto" and prices is not None and _known(plan.mesh, prices.rows)
    totals: Counter[tuple[str, ...]] = Counter()
    for gradient in pending:
        totals[gradient.axes] += gradient.wire_bytes

    def size(gradient: Gradient) -> int:
        if gradient.parted and gradient.cut:
            return found("reduce_scatter", gradient.cut)
        limit, axes = found("all_reduce", gradient.axes), gradient.axes
        if not by_link or prices is None:
            return limit
        return min(limit, balanced_bytes("all_reduce", plan.mesh, axes, prices, totals[axes]))

    return size


def _known(mesh: Mesh, rows: Sequence[tuple[str, str, float, float]]) -> bool:
    links = {link for _, link, _, _ in rows}
    return "*" in links or all(axis.link in links or axis.link == IN_TIME for axis in mesh.axes)


__all__ = ["gradient_bytes", "sizes"]
