"""Well-known machines by their data sheets: a cluster file each in ``machines/``, with a source for every number.

The file of a preset describes one full node (its inner levels) below a level ``node`` of size 1. `preset` sets the
sizes: ranks fill a node from the innermost level outwards.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources

from meshwright.core.mesh import MOST_RANKS
from meshwright.core.type_guards import is_whole
from meshwright.cost.cluster_data import Description, Level
from meshwright.cost.cluster_file import parse
from meshwright.errors import ClusterError, did_you_mean

ALIASES = {
    "a100": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "h100-sxm": "h100",
    "910": "ascend-910",
    "910b": "ascend-910b",
    "ascend910": "ascend-910",
    "ascend910b": "ascend-910b",
}


def names() -> tuple[str, ...]:
    """Return the names of the presets."""
    folder = resources.files("meshwright.cost") / "machines"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def preset(name: str, nodes: int = 1, ranks_per_node: int = 8) -> Description:
    """Return a machine of `nodes` nodes. Raises ClusterError for an unknown name or an impossible size."""
    key = re.sub(r"[ _]", "-", str(name).strip().lower())
    key = ALIASES.get(key, key)
    if key not in names():
        raise ClusterError(f"there is no preset {name!r}", hint=did_you_mean(key, names()))
    for value, what in ((nodes, "nodes"), (ranks_per_node, "ranks_per_node")):
        if not is_whole(value) or value < 1:
            raise ClusterError(
                f"{what} is {value!r}", why="it must be a whole number, at least 1", hint=f"{what}=2"
            )
    if nodes * ranks_per_node > MOST_RANKS:
        raise ClusterError(
            f"{nodes} nodes of {ranks_per_node} are {nodes * ranks_per_node:,} ranks",
            why=f"the limit is {MOST_RANKS:,}",
        )
    text = (resources.files("meshwright.cost") / "machines" / f"{key}.yaml").read_text("utf-8")
    found = parse(text, f"the preset {key}")
    outer, *inner = found.levels
    levels = _filled(inner, ranks_per_node, key, nodes)
    if nodes > 1 or not levels:
        levels = [replace(outer, size=nodes), *levels]
    return replace(found, levels=tuple(levels))


def _filled(inner: list[Level], ranks: int, name: str, nodes: int) -> list[Level]:
    """Return the levels of a node with so many ranks, without levels of a single unit."""
    left, levels, room = ranks, list[Level](), 1
    for level in reversed(inner):
        room *= level.size
        size = min(level.size, left)
        if left % size:
            raise ClusterError(
                f"a node of {name} cannot have {ranks} ranks",
                why=f"they do not fill groups of {size} ({level.name})",
                hint=f"ranks_per_node={ranks - ranks % size}",
            )
        left //= size
        if size > 1:
            levels.insert(0, replace(level, size=size))
    if left > 1:
        raise ClusterError(
            f"a node of {name} has at most {room} ranks, not {ranks}",
            hint=f"nodes={-(-nodes * ranks // room)}, ranks_per_node={room}",
        )
    return levels


__all__ = ["names", "preset"]
