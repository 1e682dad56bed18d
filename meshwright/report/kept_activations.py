"""Sentences about saved activations for a plan's summary: sharded, offloaded, and recomputed ones.

Recompute is described per kind of layer: how many operators, and the bytes it saves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.core.graph import MOVES
from meshwright.partition import Partition
from meshwright.partition.activation_offload import SLICE, part_bytes
from meshwright.partition.recompute_marks import without_keeps
from meshwright.predict.memory.per_operator import kept_bytes
from meshwright.predict.offload_prices import moved_values
from meshwright.redistribute.steps import origin, show_bytes


def saved_activation_lines(parts: Partition) -> list[str]:
    """Return a sentence for sharded and one for offloaded activations; none without any."""
    mesh = parts.plan.mesh
    rank = mesh.rank(origin(mesh))
    local = parts.local(rank)
    lines: list[str] = []
    for host in (False, True):
        mine = [v for v in moved_values(parts, local) if parts.activations[v].host == host]
        if not mine:
            continue
        full = sum(local.types[v].size_bytes for v in mine)
        part = sum(part_bytes(parts.activations[v], local, v, mesh, rank) for v in mine)
        sharded = sum(bool(parts.activations[v].gather) for v in mine)
        where = "in host memory" if host else "sharded"
        also = f", {sharded} of them sharded" if host and sharded else ""
        lines.append(
            f"saved for backward {where}: {len(mine)} values of {show_bytes(full)} as {show_bytes(part)}{also}"
        )
    uneven = [v for v, how in parts.plan.keeps.items() if SLICE in how.split() and not _cut(parts, v)]
    if uneven:
        lines.append(
            f"{len(uneven)} values are saved replicated, not sharded: shards of their readers are uneven, "
            "no dim can be split, or the operator that produces them saves them itself"
        )
    return lines


def _cut(parts: Partition, value: str) -> bool:
    return value in parts.activations and bool(parts.activations[value].gather)


LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")  # a module's path up to the number of its layer


@dataclass
class _Layer:
    """The operators of a layer, how many are recomputed, and the saved bytes with and without that."""

    operators: int = 0
    again: int = 0
    kept: int = 0
    plain: int = 0


def recomputed(parts: Partition) -> list[str]:
    """Return a sentence for each kind of layer with recomputation."""
    if not parts.resharded.keeps:
        return []
    mesh = parts.plan.mesh
    rank = mesh.rank(origin(mesh))
    plain = replace(parts, resharded=without_keeps(parts.resharded, parts.plan), activations={})
    layers = dict[str, _Layer]()
    for node in parts.resharded.graph.nodes:
        if node.op not in MOVES:
            layer = layers.setdefault(_layer_of(node.module), _Layer())
            layer.operators += 1
            layer.again += node.name in parts.again
    for these, name in ((parts, "kept"), (plain, "plain")):
        modules = {n.name: n.module for n in these.local(rank).nodes}
        for node, size in kept_bytes(these, rank).items():
            layer = layers.setdefault(_layer_of(modules.get(node, "")), _Layer())
            setattr(layer, name, getattr(layer, name) + size)
    kinds: dict[tuple[str, int, int, int, int], list[str]] = {}
    for name, layer in layers.items():
        if layer.again:
            kind = (re.sub(r"\d+$", "*", name), layer.operators, layer.again, layer.kept, layer.plain)
            kinds.setdefault(kind, []).append(name)
    return [
        f"recomputed in backward: {again} of {operators} operators of {_named(stem, names)}, which saves "
        f"{show_bytes(kept)} instead of {show_bytes(plain)}"
        for (stem, operators, again, kept, plain), names in kinds.items()
    ]


def _layer_of(module: str) -> str:
    found = LAYER.match(module)
    return found[0] if found else ""


def _named(stem: str, names: list[str]) -> str:
    if not stem:
        return "operators outside of layers"
    return names[0] if len(names) == 1 else f"each of {len(names)} {stem} ({names[0]} to {names[-1]})"


__all__ = ["saved_activation_lines"]
