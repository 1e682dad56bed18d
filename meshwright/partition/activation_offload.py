"""Saved activations that are sharded, offloaded to host memory, or both.

A sharded one is split over the axes on which it is replicated, and gathered again in backward. An offloaded one is
brought back a layer ahead of use. A plan names values of the model (``slice``, ``host``, ``slice host`` in
`Plan.keeps`). Stored are those that backward needs, and their resharded copies that backward needs. Transfers go in
*runs*: neighbours of one layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.folding import layer_of
from meshwright.core.graph import DTYPES, MOVES, RESHARD, TRANSFERS, Graph, Node
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.ops.saved import saved_in
from meshwright.partition.backward_demand import FirstReaders, demand_within
from meshwright.partition.insert_reshards import Resharded
from meshwright.partition.interleave import named
from meshwright.partition.recompute import VIEWS, readers_alike
from meshwright.plan.plan import Plan
from meshwright.redistribute import TWO_CORE_GLOO, Step, redistribute
from meshwright.redistribute.index_maps import exchange
from meshwright.redistribute.storage import repeated_axes, stored

SLICE, HOST = "slice", "host"
SAVED_AS = (SLICE, HOST, f"{SLICE} {HOST}")


@dataclass(frozen=True)
class SavedActivation:
    """How one activation is saved.

    `slices` compute this rank's shard, and `gather` the value from it; both are empty if it is not sharded. `host`: in
    host memory. `needed_by`: the nodes whose backward needs it first (`backward_demand.py`): one in a local program,
    one of each stage in a pipeline.
    """

    value: str
    layer: str
    host: bool
    slices: tuple[Step, ...] = ()
    gather: tuple[Step, ...] = ()
    needed_by: FirstReaders = ()


def saved_activations_of(
    resharded: Resharded, plan: Plan, asked: Mapping[str, FirstReaders], even: bool
) -> dict[str, SavedActivation]:
    """Return how values are saved, by name.

    `asked` maps values to the nodes that need them first. Nothing is sharded unless `even`: all ranks recompute the
    same.
    """
    wanted = {v: [str(w) for w in how.split()] for v, how in plan.keeps.items() if how in SAVED_AS}
    if not wanted:
        return {}
    graph, found = resharded.graph, dict[str, SavedActivation]()
    for node in graph.nodes:
        for value, how in _ways(node, graph, resharded, wanted):
            if value not in asked or value in resharded.hosted or value in _own(node, graph):
                continue
            slices, gather = (), ()
            if SLICE in how and even and _alike(value, resharded, plan.mesh):
                slices, gather = _cut(value, resharded, plan)
            if gather or HOST in how:
                layer = layer_of(node.module)
                found[value] = SavedActivation(value, layer, HOST in how, slices, gather, asked[value])
    return found


def _ways(
    node: Node, graph: Graph, resharded: Resharded, wanted: Mapping[str, list[str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield how the plan saves results of a node, with their names."""
    if node.op == RESHARD:
        # A view is saved with its base; a recomputed value is not saved.
        talks = any(s.kind in COLLECTIVES for s in resharded.pairs[node.name].forward)
        root = node.uses[0]
        while root in graph.producers and graph.producers[root].op in VIEWS.union(MOVES):
            root = graph.producers[root].uses[0]
        if talks and not node.kwarg("again") and root in wanted:
            yield node.name, wanted[root]
    elif node.op not in TRANSFERS:
        yield from ((v, wanted[v]) for v in node.values if v in wanted)


def _own(node: Node, graph: Graph) -> set[str]:
    """Return the results that an operator saves itself (a softmax, attention).

    Autograd holds them in full before they could be sharded, so a shard beside them would only cost more.
    """
    if node.op in MOVES:
        return set()
    return {node.values[number] for number in saved_in(graph)[node.name].outputs}


def _alike(value: str, resharded: Resharded, mesh: Mesh) -> bool:
    """Return whether all ranks save a value, or none of them does."""
    return readers_alike(resharded.graph, value, resharded.layouts, resharded.ports, resharded.pairs, mesh)[1]


def _cut(value: str, resharded: Resharded, plan: Plan) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps to a rank's shard and back; none if nothing is replicated, or if the value is partial."""
    have, kind = resharded.layouts[value].forward, resharded.graph.types[value]
    part = sliced(have, plan.mesh)
    if part is None or not kind.is_float:
        return (), ()
    prices, size = plan.prices or TWO_CORE_GLOO, DTYPES[kind.dtype]
    there = redistribute(have, part, plan.mesh, size, prices)
    back = redistribute(part, have, plan.mesh, size, prices)
    local = all(s.kind == "slice" for s in there)
    return (there, back) if local and all(s.kind == "all_gather" for s in back) else ((), ())


def sliced(layout: TensorLayout, mesh: Mesh) -> TensorLayout | None:
    """Return a layout split over the axes (not in time) on which it is replicated; None if that changes nothing."""
    axes = [a for a in repeated_axes(layout, mesh) if a not in mesh.time]
    if layout.partial or not axes:
        return None
    part = stored(layout.forward, axes, mesh)
    return part.forward if part.dims != layout.dims else None


# ---------------------------------------------------------------- in a rank's program


def activations_in(
    activations: Mapping[str, SavedActivation], graph: Graph, copies: int = 1
) -> dict[str, SavedActivation]:
    """Return those of a local program or stage, by their names in a program of so many half-batches."""
    if copies > 1:
        activations = {
            named(v, c): replace(s, needed_by=tuple(named(node, c) for node in s.needed_by))
            for v, s in activations.items()
            for c in range(copies)
        }
    asked = demand_within({v: s.needed_by for v, s in activations.items()}, graph)
    return {v: replace(activations[v], needed_by=(node,)) for v, node in asked.items()}


def runs_of(graph: Graph, activations: Mapping[str, SavedActivation]) -> list[list[str]]:
    """Return the values of a rank's program that are offloaded, in order, those of one layer together."""
    saved = ((v, activations[v]) for node in graph.nodes for v in node.values if v in activations)
    hosted = ((v, activation.layer) for v, activation in saved if activation.host)
    return [[v for v, _ in run] for _, run in itertools.groupby(hosted, key=lambda one: one[1])]


def room_bytes(graph: Graph, activations: Mapping[str, SavedActivation], mesh: Mesh, rank: int) -> int:
    """Return the bytes of the largest run: they may be on their way to the host and still be on the device."""
    sizes = (
        [part_bytes(activations[v], graph, v, mesh, rank) for v in run] for run in runs_of(graph, activations)
    )
    return max(map(sum, sizes), default=0)


def part_bytes(activation: SavedActivation, graph: Graph, value: str, mesh: Mesh, rank: int) -> int:
    """Return the bytes that a rank saves of a value (by its name in this program)."""
    kind = graph.types[value]
    if not activation.slices:
        return kind.size_bytes
    size = DTYPES[kind.dtype]
    for count in exchange(activation.slices[-1], mesh, rank).shape_after:
        size *= count
    return size


def settled_before(graph: Graph, activations: Mapping[str, SavedActivation]) -> str:
    """Return the node before which all offloaded values have left the device.

    It is the end of the layer after the last one that sends something; empty if there is none.
    """
    runs = runs_of(graph, activations)
    if not runs:
        return ""
    last = graph.producers[runs[-1][-1]]
    place = next(n for n, node in enumerate(graph.nodes) if node is last)
    changes, layer = 0, activations[runs[-1][-1]].layer
    for node in graph.nodes[place + 1 :]:
        if not any(node.needs_grad) or node.op in MOVES:
            continue
        here = layer_of(node.module)
        changes, layer = changes + (here != layer), here
        if changes == 2:
            return node.name
    return ""


__all__ = [
    "HOST",
    "SLICE",
    "SAVED_AS",
    "SavedActivation",
    "part_bytes",
    "room_bytes",
    "runs_of",
    "settled_before",
    "sliced",
    "activations_in",
    "saved_activations_of",
]
