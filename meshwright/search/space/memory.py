"""Bytes of a choice at three instants, as sums over its variables: never more than the peak that a simulation finds.

At the *loss* there are parameters, optimizer states, the buckets' buffers, gathered weights that are kept, everything
that autograd keeps, and what the loss reads; at the *update* parameters, gradients and states; when backward has passed
the last product (the *head*), what is kept before it, its weight's gradient and its input's. What lives only for a
moment beside these is left to the simulation (`partition/memory.py`), which has the last word on whether a plan fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.cost.operators import PIECES, PRODUCTS, REPEATS, VIEWS
from meshwright.cost.saved import saved
from meshwright.graph import DTYPES, Graph
from meshwright.redistribute.buckets import alone_bytes
from meshwright.redistribute.matrix import WHOLE
from meshwright.search.solve import Memory
from meshwright.search.space.build import Space
from meshwright.search.space.wiring import is_kept

INSTANTS = ("the loss", "the update", "the head's backward")


@dataclass(frozen=True)
class Elsewhere:
    """What is kept elsewhere than where it lies. `sliced`: what backward asks for, in slices over the ranks that would
    repeat it. `stay`: operator whose results the host keeps → of how many of those that it stands for they stay here.
    `parked`: parameters that the host has between their uses, and where `updated_there` at the update too."""

    sliced: bool = False
    stay: Mapping[str, int] = field(default_factory=dict)
    parked: Collection[str] = ()
    updated_there: bool = False


HERE = Elsewhere()


def memory_of(
    space: Space, optimizer_states: int, again: Collection[str] = (), elsewhere: Elsewhere = HERE
) -> Memory:
    """float64[states, 3] for every variable of a space. `again`: values that backward computes again."""
    amounts = [np.zeros((parts.shape[1], len(INSTANTS))) for parts in space.unary]
    loss, head, late = _end(space.graph)
    keepers = _keepers(space.graph)
    for node in space.graph.nodes:
        first, times = space.ties.first(node.name), space.ties.times(node.name)
        states = space.nodes[first]
        rows = amounts[space.variable["node", first]]
        for port, name, share in keepers.get(node.name, ()) if node.name not in space.hosts else ():
            if name in again:
                continue
            value = space.values[space.ties.first(name)]
            codes = states.ports[port].forward
            held = space.table.local_elements(value, codes)
            if elsewhere.sliced and space.graph.types[name].is_float:
                held = np.minimum(held, _whole(space, value) / space.mesh.size)
            maker = space.graph.producers[name].name
            kept = share * min(times, elsewhere.stay.get(maker, times)) * value.itemsize * held
            rows[:, 0] += kept
            rows[:, 2] += 0 if node.name in late else kept
        if node.name in space.hosts:
            continue
        wanted = [u in space.graph.needs_grad for u in node.uses]
        extra = saved(node, space.graph.types, wanted).extra_bytes
        if extra and node.uses and not any(value in again for value in node.values):
            value = space.values[space.ties.first(node.uses[0])]
            local = space.table.local_elements(value, states.ports[0].forward)
            rows[:, 0] += times * extra * local / _whole(space, value)
            rows[:, 2] += 0 if node.name in late else times * extra * local / _whole(space, value)
        if node.name in (loss, head):
            value = space.values[space.ties.first(node.uses[0])]
            read = value.itemsize * space.table.local_elements(value, states.ports[0].forward)
            kept_too = any(port == 0 and kept not in again for port, kept, _ in keepers.get(node.name, ()))
            if node.name == loss and not kept_too:
                rows[:, 0] += read
            if node.name == head and wanted[0]:
                rows[:, 2] += read
    for name, found in space.parameters.items():
        if name in space.hosted:
            continue
        rows = amounts[space.variable["parameter", name]]
        kind = space.graph.types[name]
        item, count = DTYPES[kind.dtype], space.owners(name)
        trained = name in space.graph.needs_grad
        state = item * optimizer_states if trained else 0  # torch keeps moments in the parameter's dtype
        waits = (found.use.grad & ~found.stored).any(axis=1)
        alone = alone_bytes(space.cluster.device_type)
        buffered = waits & (found.elements * item < alone) & trained
        here = name not in elsewhere.parked
        rows[:, 0] += count * (
            found.elements * (item * here + state + item * buffered)
            + item * found.kept_elements * (here and trained and is_kept(space.graph, name))
        )
        weights = item * (here or (trained and not elsewhere.updated_there))
        rows[:, 1] += count * found.elements * (weights + item * trained + state)
        rows[:, 2] += rows[:, 0]
        if trained and any(n.name == head for n, _ in space.graph.consumers[name]):
            rows[:, 2] += np.where(buffered, 0.0, found.elements * item)
    return Memory(tuple(amounts), _gathered(space, late))


def _gathered(space: Space, late: frozenset[str]) -> dict[tuple[int, int], np.ndarray]:
    """Weights that a reader gathers for itself and autograd keeps: float64[3, states, states] for each pair."""
    found: dict[tuple[int, int], np.ndarray] = {}
    for (source, _, target, port, name), times in space.wiring.edges.items():
        if source[0] != "parameter" or name not in space.graph.needs_grad or name in space.hosted:
            continue
        node = space.graph.producers[space.nodes[target[1]].codes.node.values[0]]
        wanted = [u in space.graph.needs_grad for u in node.uses]
        if port not in saved(node, space.graph.types, wanted).inputs:
            continue
        value = space.values[name]
        have, want = space.port(source, -1, gives=True), space.port(target, port, gives=False)
        held, asked = (space.table.local_elements(value, p.forward) for p in (have, want))
        more = times * value.itemsize * np.where(asked[None, :] > held[:, None], asked[None, :], 0.0)
        if not more.any():
            continue
        u, v = space.variable[source], space.variable[target]
        block = np.stack([more, np.zeros_like(more), np.zeros_like(more) if node.name in late else more])
        key = (u, v) if u < v else (v, u)
        block = block if u < v else block.transpose(0, 2, 1)
        found[key] = found[key] + block if key in found else block
    return found


def fixed_bytes(space: Space) -> float:
    """Bytes of what no choice changes: the batch, buffers and constants."""
    given = (i for i in space.graph.inputs if i.role != "parameter" and i.name not in space.hosted)
    return float(sum(i.type.size_bytes for i in given))


def _end(graph: Graph) -> tuple[str, str, frozenset[str]]:
    """The node that reads most of what makes the loss, the last product, and the nodes after that."""
    graded = [n for n in graph.nodes if any(n.needs_grad)]
    place = next((i for i in reversed(range(len(graded))) if graded[i].op in PRODUCTS), -1)
    late = graded[place + 1 :]
    losses = [n for n in late if n.uses and n.uses[0] in graph.needs_grad]
    loss = max(
        reversed(losses), key=lambda n: graph.types[n.uses[0]].size_bytes, default=None
    )  # the last of them
    head = graded[place].name if place >= 0 else ""
    return loss.name if loss else "", head, frozenset(n.name for n in late)


def _whole(space: Space, value) -> float:
    axes = len(space.mesh.axes)
    return float(space.table.local_elements(value, np.full((1, axes), WHOLE, np.int8))[0])


def _keepers(graph: Graph) -> dict[str, list[tuple[int, str, float]]]:
    """Node → (port, value, share) of what autograd keeps. Those that keep one tensor, or views of it, share it equally.

    Where all of them have it in one layout that is its size. Where not there are several tensors, and the mean of their
    sizes is less than any way to hold them all; but no more than a share is saved by the one that takes a smaller part.
    """
    views = VIEWS | REPEATS | PIECES
    inputs = {i.name for i in graph.inputs}
    root: dict[str, str] = {}
    for node in graph.nodes:
        for value in node.values:
            base = node.uses[0] if node.op in views and node.uses else value
            root[value] = root.get(base, base)
    kept: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
    for node in graph.nodes:
        found = saved(node, graph.types, [u in graph.needs_grad for u in node.uses])
        own = [(port, node.uses[port]) for port in dict.fromkeys(found.inputs)]
        own += [(len(node.uses) + number, node.values[number]) for number in found.outputs]
        for port, name in own:
            if (base := root.get(name, name)) not in inputs:
                kept[base].append((node.name, port, name))
    shares: dict[str, list[tuple[int, str, float]]] = defaultdict(list)
    for keepers in kept.values():
        for node, port, name in keepers:
            shares[node].append((port, name, 1 / len(keepers)))
    return shares
