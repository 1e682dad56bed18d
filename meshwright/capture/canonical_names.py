"""The last passes: share equal computations, number seed slots in execution order, and give readable names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from meshwright.capture.convert import INPUT
from meshwright.capture.normalize import DROPOUT
from meshwright.core.graph import Graph, Node, Ref, map_refs


def share_constants(graph: Graph) -> Graph:
    """Compute equal expressions without gradient and randomness once (each mask, each iota)."""
    became: dict[str, str] = {}
    seen: dict[Any, Node] = {}
    trained, kept = graph.needs_grad, []
    for node in graph.nodes:
        node = _rename(node, became)
        free = not trained.intersection(node.values) and node.op != DROPOUT and node.kwarg("seed") is None
        # repr keeps 1, 1.0 and True apart, which are equal as keys
        key = (node.op, repr(node.args), repr(node.kwargs), node.outputs)
        if free and key in seen:
            became.update(zip(node.values, seen[key].values, strict=True))
            continue
        if free:
            seen[key] = node
        kept.append(node)
    return _with_nodes(graph, kept, became)


def hoist_constants(graph: Graph) -> Graph:
    """Move values of iotas, constants and buffers to the front: all layers share them, so they are part of none.

    What a single layer computes of a buffer (the decay of its heads) goes to the start of that layer instead, so that
    equal layers stay equal.
    """
    given = {i.name for i in graph.inputs if i.role in ("buffer", "constant")}
    fixed = set(given)
    early: list[Node] = []
    late: list[Node] = []
    for node in graph.nodes:
        random = node.op == DROPOUT or node.kwarg("seed") is not None
        if not random and fixed.issuperset(node.uses):
            fixed.update(node.values)
            given.update(node.values if given.intersection(node.uses) else ())
            early.append(node)
        else:
            late.append(node)
    place = {node.name: number for number, node in enumerate(late)} | _starts(early, late, given)
    return replace(graph, nodes=tuple(sorted([*early, *late], key=lambda node: place[node.name])))


def _starts(early: Sequence[Node], late: Sequence[Node], given: AbstractSet[str]) -> dict[str, int]:
    """Return the number of the late node before which each early node goes: 0, or the first one of its only layer.

    `given`: values that are computed of a buffer or a constant; iotas, which all layers have, are not.
    """
    readers: dict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(late):
        for value in node.uses:
            readers[value].append(number)
    starts: dict[str, int] = {}
    for node in reversed(early):
        numbers = [number for value in node.values for number in readers[value]]
        alone = bool(numbers) and not given.isdisjoint(node.values)
        starts[node.name] = start = _start(late, min(numbers), max(numbers)) if alone else 0
        for value in node.uses:
            readers[value].append(start)
    return starts


def _start(late: Sequence[Node], first: int, last: int) -> int:
    """Return the number of the first node of the innermost layer that all nodes from `first` to `last` lie in; or 0."""
    parts = late[first].module.split(".")
    for count in range(len(parts), 0, -1):
        if not parts[count - 1].isdigit():
            continue
        layer = parts[:count]
        if all(late[n].module.split(".")[:count] == layer for n in range(first, last + 1)):
            while first and late[first - 1].module.split(".")[:count] == layer:
                first -= 1
            return first
    return 0


def number_seeds(graph: Graph) -> Graph:
    """Number the seed slots of random operators 0, 1, 2, … in execution order."""
    slot, nodes = 0, []
    for node in graph.nodes:
        if node.op == DROPOUT:
            node, slot = replace(node, args=(*node.args[:2], slot)), slot + 1
        elif node.kwarg("seed") is not None:
            node, slot = (
                replace(node, kwargs=tuple((k, slot if k == "seed" else v) for k, v in node.kwargs)),
                slot + 1,
            )
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def name_nodes(graph: Graph) -> Graph:
    """Name inputs after their tensor, and nodes after their operator: ``linear``, ``linear_1``, …"""
    became = {i.name: i.name.removesuffix(INPUT) for i in graph.inputs}
    inputs = tuple(replace(i, name=became[i.name]) for i in graph.inputs)
    taken = set(became.values())
    counts: dict[str, int] = {}
    nodes = []
    for node in graph.nodes:
        stem = node.op.split(".")[1].strip("_") or "value"
        while True:
            count = counts.get(stem, 0)
            counts[stem] = count + 1
            name = f"{stem}_{count}" if count else stem
            if name not in taken:
                break
        taken.add(name)
        fresh = replace(_rename(node, became), name=name)
        became.update(zip(node.values, fresh.values, strict=True))
        nodes.append(fresh)
    return _with_nodes(replace(graph, inputs=inputs), nodes, became)


def _rename(node: Node, became: Mapping[str, str]) -> Node:
    def change(ref: Ref) -> Ref:
        return Ref(became[ref.name]) if ref.name in became else ref

    return replace(
        node, args=map_refs(node.args, change), kwargs=tuple((k, map_refs(v, change)) for k, v in node.kwargs)
    )


def _with_nodes(graph: Graph, nodes: list[Node], became: Mapping[str, str]) -> Graph:
    return replace(
        graph,
        nodes=tuple(nodes),
        outputs=tuple((label, became.get(v, v)) for label, v in graph.outputs),
        mutations=tuple((target, became.get(v, v)) for target, v in graph.mutations),
    )
