"""What is kept for backward elsewhere than where it lies, as sentences for a plan's summary."""

from __future__ import annotations

from meshwright.partition import Partition
from meshwright.partition.stash_prices import moved_values
from meshwright.partition.stashes import SLICE, part_bytes
from meshwright.redistribute.steps import origin, show_bytes


def stashed(parts: Partition) -> list[str]:
    """A sentence for slices and one for the host's memory; none where all is kept as it lies."""
    mesh = parts.plan.mesh
    rank = mesh.rank(origin(mesh))
    local = parts.local(rank)
    lines: list[str] = []
    for host in (False, True):
        mine = [v for v in moved_values(parts, local) if parts.stashes[v].host == host]
        if not mine:
            continue
        whole = sum(local.types[v].size_bytes for v in mine)
        part = sum(part_bytes(parts.stashes[v], local, v, mesh, rank) for v in mine)
        cut = sum(bool(parts.stashes[v].gather) for v in mine)
        where = "in the host's memory" if host else "in slices"
        also = f", {cut} of them in slices" if host and cut else ""
        lines.append(
            f"kept for backward {where}: {len(mine)} values of {show_bytes(whole)} as {show_bytes(part)}{also}"
        )
    uneven = [v for v, how in parts.plan.keeps.items() if SLICE in how.split() and not _cut(parts, v)]
    if uneven:
        lines.append(
            f"{len(uneven)} values that might be kept in slices are not: ranks hold uneven parts of what reads "
            "them, no dim can be cut, or the operator that makes them keeps them itself"
        )
    return lines


def _cut(parts: Partition, value: str) -> bool:
    return value in parts.stashes and bool(parts.stashes[value].gather)


__all__ = ["stashed"]
