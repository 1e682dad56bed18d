"""The states of a parameter: how it is used, how it is stored, and whether it is gathered again in backward.

A parameter enters the program in its *storage* layout. Where it is used replicated on some axes it may be stored
sharded over them (as minor axes of one of its sub-dims): then it is gathered before use, and its gradient is reduced to
what is stored. So the levels of optimizer parallel are states here: stored replicated is data parallel, stored sharded
and kept after the first gather is ZeRO-2 (Rajbhandari et al. 2020), gathered again in backward is ZeRO-3."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from meshwright.core.layout import Dim, TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.gradients import reduction_seconds
from meshwright.cost.host import place as place_of
from meshwright.cost.machine import update_seconds
from meshwright.partition.buckets import fused_bytes
from meshwright.redistribute.price_matrix import REPLICATED, Table, Value
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.steps import wire_elements
from meshwright.search.space.codes import place_dims
from meshwright.search.space.layouts import Port, union


@dataclass(frozen=True)
class ParameterStates:
    """`use` is the layout in which it is used; `stored[s, a]` says that axis a shards its storage only, at `place[s]`.

    `blocking` are the seconds of gathers and scatters, `reduction` those of what backward reduces beside computing,
    `update` those of the optimizer. `elements` is what the rank that holds most stores, `kept_elements` what it holds
    beside that from forward to backward, gathered. `summed_elements` is what it holds of the gradient between
    micro-batches: they are added up as the parameter is used where what is stored takes a scatter.
    """

    use: Port
    stored: np.ndarray  # bool[states, axes]
    place: np.ndarray  # int64[states]
    again: np.ndarray  # bool[states]
    blocking: np.ndarray
    reduction: np.ndarray
    update: np.ndarray
    elements: np.ndarray
    kept_elements: np.ndarray
    summed_elements: np.ndarray

    def sliced(self) -> np.ndarray:
        """The codes of the gradient before it is scattered: sharded where it is stored sharded and nothing is to be
        summed."""
        where = self.stored & ~self.use.grad
        return np.where(where, 2 + self.place[:, None], self.use.forward).astype(np.int8)

    def take(self, at: np.ndarray) -> ParameterStates:
        """Some of the states."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "use"}
        return ParameterStates(self.use.take(at), **{name: array[at] for name, array in arrays.items()})


@dataclass(frozen=True)
class Storage:
    """The storages that a search may choose from. `groups`: axes that shard storage together or not at all, as numbers
    of prime axes; `smallest`: bytes below which a parameter stays replicated; `states`: optimizer states per element.
    """

    groups: tuple[tuple[int, ...], ...]
    smallest_bytes: int = 64 << 10
    states: int = 2
    again: bool = False
    allowed: bool = True


def parameter_states(
    value: Value,
    wants: list[Port],
    needs_grad: bool,
    kept: bool,
    mesh: Mesh,
    cluster: Cluster,
    table: Table,
    how: Storage,
    host: bool = False,
) -> ParameterStates:
    """Every use that some consumer asks for, with every storage of it. `kept`: autograd keeps what is gathered, so it
    may be gathered again instead. `host`: it lives there, and is updated there."""
    uses = union(wants)
    sizes = np.array([a.size for a in mesh.axes])
    members = [a.size for a in mesh.axes]
    whole_bytes = value.itemsize * float(table.local_elements(value, np.zeros((1, len(sizes)), np.int8))[0])
    found: list[tuple[int, tuple[int, ...], int, bool]] = []
    choices = list(subsets(how.groups)) if how.allowed and whole_bytes >= how.smallest_bytes else []
    for state in range(len(uses.forward)):
        found.append((state, (), 0, False))
        seen: set[tuple[int, ...]] = {()}
        codes = uses.forward[state].tolist() if choices else []
        counts = _counts(value, codes, members)
        for chosen in choices:
            axes = tuple([a for a in chosen if codes[a] == REPLICATED and members[a] > 1])
            if axes in seen:
                continue
            place = _room(value, counts, math.prod([members[a] for a in axes]))
            if place is None:
                continue
            seen.add(axes)
            found.append((state, axes, place, False))
            if how.again and kept:
                found.append((state, axes, place, True))
    rows = np.array([f[0] for f in found])
    stored = np.zeros((len(found), len(sizes)), dtype=bool)
    for number, (_, axes, _, _) in enumerate(found):
        stored[number, list(axes)] = True
    use = uses.take(rows)
    place = np.array([f[2] for f in found])
    again = np.array([f[3] for f in found])
    priced = _priced(value, use, stored, place, again, needs_grad, mesh, cluster, table, how.states, host)
    return priced.take(_undominated(rows, priced, how.again))


def _undominated(use: np.ndarray, states: ParameterStates, memory_counts: bool) -> np.ndarray:
    """Of the storages of one use, those that no other beats in seconds and, where it counts, in bytes too.

    Readers see the use alone, so what is dropped is in no best plan.
    """
    seconds = states.blocking + states.reduction + states.update
    if not memory_counts:
        order = np.lexsort((seconds, use))
        return np.sort(order[np.unique(use[order], return_index=True)[1]])
    costs = np.stack(
        [states.blocking + states.update, states.reduction, states.elements, states.kept_elements]
    )
    kept = []
    for number in range(len(use)):
        rivals = np.flatnonzero(use == use[number])
        no_worse = (costs[:, rivals] <= costs[:, [number]]).all(axis=0)
        better = no_worse & ((costs[:, rivals] < costs[:, [number]]).any(axis=0) | (rivals < number))
        # What is stored as it is used is not gathered, which counts where there are many micro-batches.
        if not better.any() or not states.stored[number].any():
            kept.append(number)
    return np.array(kept)


def subsets(groups: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """The axes of any one or more of the groups."""
    return [
        tuple(sorted({a for g in chosen for a in g}))
        for count in range(1, len(groups) + 1)
        for chosen in itertools.combinations(groups, count)
    ]


def _counts(value: Value, codes: list[int], members: list[int]) -> list[int]:
    """Into how many blocks a use splits each leaf."""
    counts = [1] * len(value.leaves)
    for code, size in zip(codes, members, strict=False):
        if code >= 2:
            for leaf in value.places[code - 2]:
                counts[leaf] *= size
    return counts


def _room(value: Value, counts: list[int], members: int) -> int | None:
    """The place that storage is sharded at: the first that divides evenly, else the first with enough elements."""
    sizes, enough = value.leaves, None
    for k, leaves in enumerate(value.places):
        blocks = [counts[x] * members for x in leaves]
        if enough is None and all(sizes[x] >= n for x, n in zip(leaves, blocks, strict=True)):
            enough = k
        if all(sizes[x] >= n and sizes[x] % n == 0 for x, n in zip(leaves, blocks, strict=True)):
            return k
    return enough


def _priced(
    value: Value,
    use: Port,
    stored: np.ndarray,
    place: np.ndarray,
    again: np.ndarray,
    needs_grad: bool,
    mesh: Mesh,
    cluster: Cluster,
    table: Table,
    states: int,
    host: bool,
) -> ParameterStates:
    used = table.local_elements(value, use.forward)
    storage = np.where(stored, 2 + place[:, None], use.forward).astype(np.int8)
    elements = table.local_elements(value, storage)

    def sliced() -> np.ndarray:
        codes = np.where(stored & ~use.grad, storage, use.forward).astype(np.int8)
        return table.local_elements(value, codes)

    cut, pending = stored @ table.bits, use.grad @ table.bits  # sets of axes
    found = stored_seconds(
        used,
        elements,
        sliced,
        cut,
        pending,
        again,
        value.itemsize,
        needs_grad,
        mesh,
        cluster,
        table,
        states,
        host,
    )
    kept = np.where(stored.any(axis=1) & ~again, used, 0.0)
    summed = np.where((stored & use.grad).any(axis=1), used, elements)
    return ParameterStates(use, stored, place, again, *found, elements, kept, summed)


def stored_seconds(
    used: np.ndarray,
    elements: np.ndarray,
    sliced: Callable[[], np.ndarray],
    cut: np.ndarray,
    pending: np.ndarray,
    again: np.ndarray,
    itemsize: int,
    needs_grad: bool,
    mesh: Mesh,
    cluster: Cluster,
    table: Table,
    states: int,
    host: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of gathers and scatters, of reductions and of the update, for parameters and states of any number (arrays
    that go together by broadcasting). `used`, `elements`, `sliced()`: elements on a rank as used, as stored, and of the
    gradient before it is scattered. `cut`: the axes that only storage is sharded over; `pending`: those of the
    gradient."""

    def seconds(kind: str, axes: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        return _sent_seconds(kind, axes, before, after, itemsize, table)

    blocking, reduction = np.zeros(elements.shape), np.zeros(elements.shape)
    if cut.any():
        blocking += gather_seconds(used, elements, cut, again, itemsize, table)
    if needs_grad and (both := cut & pending).any():
        before = sliced()
        scatter = seconds("reduce_scatter", both, before, elements)
        blocking += np.where(both, np.minimum(scatter, seconds("all_reduce", both, before, before)), 0.0)
    if needs_grad:
        left = np.broadcast_to(pending & ~cut, elements.shape)
        for axes in np.unique(pending & ~cut).tolist():
            if axes:
                at, per_byte = _reduction_law(
                    tuple(table.names(axes)), mesh, cluster.prices, cluster.hidden_prices
                )
                rows = left == axes
                reduction[rows] = at + elements[rows] * itemsize * per_byte
    update = (
        update_seconds(elements, states, *place_of(cluster, host), itemsize)
        if needs_grad
        else np.zeros(elements.shape)
    )
    return blocking, reduction, update


def gather_seconds(
    used: np.ndarray, elements: np.ndarray, cut: np.ndarray, again: np.ndarray, itemsize: int, table: Table
) -> np.ndarray:
    """Seconds in which parameters that are stored sharded are gathered for one run of the model, forward and, where
    that is done again, backward. See `stored_seconds`."""
    each = _sent_seconds("all_gather", cut, elements, used, itemsize, table)
    return np.where(cut, each * (1.0 + again), 0.0)


def _sent_seconds(
    kind: str, axes: np.ndarray, before: np.ndarray, after: np.ndarray, itemsize: int, table: Table
) -> np.ndarray:
    sent = wire_elements(kind, table.members[axes], before, after)
    return table.collective(kind, axes, np.asarray(itemsize * sent))


@functools.lru_cache(maxsize=4096)
def _reduction_law(axes: tuple[str, ...], mesh: Mesh, prices: Prices, hidden: Prices) -> tuple[float, float]:
    """Seconds to add up gradients of no bytes, and for each byte: `hidden` prices, in buckets as `prices` ask."""
    full = fused_bytes("all_reduce", mesh, axes, prices)
    at = reduction_seconds(0.0, axes, mesh, hidden, full)
    return at, reduction_seconds(1.0, axes, mesh, hidden, full) - at


def storage_layout(
    dims: tuple[Dim, ...], value: Value, states: ParameterStates, state: int, mesh: Mesh, needs_grad: bool
) -> tuple[TensorLayout, TensorLayout]:
    """The layouts of a state: as stored (what is still partial there is reduced in buckets), and as used."""
    use = layout_of(dims, value, states.use.forward[state], states.use.grad[state], mesh, needs_grad)
    stored = [
        (a.name, bool(g))
        for a, on, g in zip(mesh.axes, states.stored[state], states.use.grad[state], strict=True)
        if on
    ]
    # Axes on which the gradient is replicated come first: it is sliced there, and what is left is scattered.
    cut = [name for name, pending in stored if not pending] + [name for name, pending in stored if pending]
    # A bias that enters as one term of a sum is stored replicated: one rank's term is it, the others are zeros.
    if not cut:
        return TensorLayout(use.dims, (), use.grad), use
    at: list[list[str]] = [[] for _ in value.places]
    for axis, code in zip(mesh.axes, states.use.forward[state], strict=True):
        if code >= 2:
            at[code - 2].append(axis.name)
    at[states.place[state]] += cut
    grad = tuple(a for a in use.grad if a not in cut)
    return TensorLayout(place_dims(dims, value, at), (), grad), use


def layout_of(
    dims: tuple[Dim, ...], value: Value, codes: np.ndarray, grad: np.ndarray, mesh: Mesh, needs_grad: bool
) -> TensorLayout:
    """The layout that a row of codes stands for."""
    at: list[list[str]] = [[] for _ in value.places]
    pending = []
    for axis, code in zip(mesh.axes, codes, strict=True):
        if code == 1:
            pending.append(axis.name)
        elif code >= 2:
            at[code - 2].append(axis.name)
    waiting = tuple(a.name for a, on in zip(mesh.axes, grad, strict=True) if on) if needs_grad else ()
    return TensorLayout(place_dims(dims, value, at), tuple(pending), waiting)
