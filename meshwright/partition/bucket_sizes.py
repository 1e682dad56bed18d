"""Sizes of buckets: by the link, or as set by the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.core.mesh import IN_TIME, Mesh
from meshwright.partition.buckets import BUCKET_BYTES, BucketBytes, Gradient, fused_bytes
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


def gradient_bytes(plan: Plan) -> BucketBytes:
    """Return the bytes of a bucket of gradients under a plan."""
    found = sizes(plan)

    def size(gradient: Gradient) -> int:
        if gradient.parted and gradient.cut:
            return found("reduce_scatter", gradient.cut)
        return found("all_reduce", gradient.axes)

    return size


def _known(mesh: Mesh, rows: Sequence[tuple[str, str, float, float]]) -> bool:
    links = {link for _, link, _, _ in rows}
    return "*" in links or all(axis.link in links or axis.link == IN_TIME for axis in mesh.axes)


__all__ = ["gradient_bytes", "sizes"]
