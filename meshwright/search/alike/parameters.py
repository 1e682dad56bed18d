"""Parameters whose readers want the same, as columns: how each use is stored best.

Readers see how a parameter is used, not how it is stored, so of the storages of a use only the cheapest is left. The
choices and the formulas are those of `space/parameters.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.cluster import Cluster
from meshwright.redistribute.matrix import WHOLE, Table
from meshwright.search.alike.sizes import Floats, Numbers, Sizes
from meshwright.search.space.layouts import Port
from meshwright.search.space.parameters import (
    ParameterStates,
    Storage,
    parameter_states,
    stored_seconds,
    subsets,
)


@dataclass(frozen=True)
class Stored:
    """Every storage of each use for each parameter, [uses, storages, V] or what spreads to that: seconds by what they
    are of (infinite where there is no room), the place that storage is cut at and the set of axes [uses, storages], and
    the elements of a rank as used and as stored."""

    blocking: Floats
    reduction: Floats
    update: Floats
    place: Numbers
    cut: Numbers
    used: Floats
    elements: Floats

    @functools.cached_property
    def seconds(self) -> Floats:
        """All that a storage takes."""
        return self.blocking + self.reduction + self.update

    @property
    def least(self) -> Floats:
        """The seconds of the best storage of each use: [uses, V]."""
        return self.seconds.min(axis=1)

    def best(self, use: Port, of: Numbers, table: Table) -> list[ParameterStates]:
        """For some of the parameters the states in which each use is stored best."""
        rows, chosen = np.arange(len(use.forward)), self.seconds.argmin(axis=1)  # [uses, V]
        arrays = [
            np.broadcast_to(a, self.seconds.shape)[rows[:, None], chosen, np.arange(chosen.shape[1])]
            for a in (self.blocking, self.reduction, self.update, self.place, self.used, self.elements)
        ]
        cut = self.cut[rows[:, None], chosen]  # [uses, V]
        found = []
        for v in of.tolist():
            blocking, reduction, update, place, used, elements = (a[:, v] for a in arrays)
            stored = (cut[:, v, None] & table.bits) != 0
            kept = np.where(cut[:, v] != 0, used, 0.0)
            again = np.zeros(len(rows), dtype=bool)
            place = np.where(cut[:, v] != 0, place, 0)
            found.append(
                ParameterStates(use, stored, place, again, blocking, reduction, update, elements, kept)
            )
        return found


def all_stored(
    sizes: Sizes, use: Port, needs_grad: bool, cluster: Cluster, table: Table, how: Storage, host: bool
) -> Stored:
    """What each storage of each use takes. Memory has no say here, so nothing is gathered again. `host`: they live
    there."""
    if not sizes.plain:
        return _one_by_one(sizes, use, needs_grad, cluster, table, how, host)
    at = [table.sets(use.forward, 2 + place) for place in range(sizes.places)]  # per place [uses]
    free = table.sets(use.forward, WHOLE)
    bits = [0, *(int(sum(table.bits[list(axes)])) for axes in subsets(how.groups))] if how.allowed else [0]
    cut = free[:, None] & np.array(bits)[None, :]  # [uses, storages]
    used = _elements(sizes, [sizes.held(k, table.members[s])[:, None, :] for k, s in enumerate(at)])
    place, lawful = _place(sizes, at, cut, table)
    elements = sizes.elements(table, np.zeros((1, len(table.bits)), np.int8))[0]
    lawful &= sizes.itemsize * elements >= how.smallest_bytes
    lawful |= (cut == 0)[:, :, None]
    pending = (use.grad @ table.bits)[:, None]

    def held(more: Numbers) -> Floats:
        """Elements where the chosen place is cut over more axes [uses, storages] too."""
        parts = [
            np.where(
                place == k,
                sizes.held(k, table.members[s[:, None] | more]),
                sizes.held(k, table.members[s])[:, None, :],
            )
            for k, s in enumerate(at)
        ]
        return _elements(sizes, parts) * np.ones((*cut.shape, 1))  # a scalar has no place

    stored = held(cut)
    blocking, reduction, update = stored_seconds(
        used,
        stored,
        lambda: held(cut & ~pending),
        cut[:, :, None],
        pending[:, :, None],
        np.zeros(1, dtype=bool),
        sizes.itemsize,
        needs_grad,
        table.mesh,
        cluster,
        table,
        how.states,
        host,
    )
    return Stored(np.where(lawful, blocking, np.inf), reduction, update, place, cut, used, stored)


def _one_by_one(
    sizes: Sizes, use: Port, needs_grad: bool, cluster: Cluster, table: Table, how: Storage, host: bool
) -> Stored:
    """The same for a value whose places are not apart: its best storage alone."""
    (value,) = sizes.values
    found = parameter_states(
        value, [use], needs_grad, False, table.mesh, cluster, table, replace(how, again=False), host
    )
    order = {key: number for number, key in enumerate(found.use.keys().tolist())}
    found = found.take(np.array([order[key] for key in use.keys().tolist()]))
    used = table.local_elements(value, use.forward)
    one = [found.blocking, found.reduction, found.update, found.place, used, found.elements]
    blocking, reduction, update, place, used, elements = (a[:, None, None] for a in one)
    return Stored(blocking, reduction, update, place, (found.stored @ table.bits)[:, None], used, elements)


def _elements(sizes: Sizes, parts: list[Floats]) -> Floats:
    return functools.reduce(np.multiply, parts, sizes.whole[None, None, :])


def _place(sizes: Sizes, at: list[Numbers], cut: Numbers, table: Table) -> tuple[Numbers, np.ndarray]:
    """The place that storage is cut at [uses, storages, V], the first that divides evenly, else the first with enough
    elements; and where there is one."""
    shape = (*cut.shape, len(sizes.whole))
    enough, even = np.full(shape, -1), np.full(shape, -1)
    for k in reversed(range(sizes.places)):
        blocks = (table.members[at[k]][:, None] * table.members[cut])[:, :, None]
        fits, divides = np.ones(shape, dtype=bool), np.ones(shape, dtype=bool)
        for factor, leaf in zip(sizes.factors[k], sizes.leaves[k], strict=True):
            none = factor == 0  # a part that others have
            fits &= (leaf >= blocks) | none
            divides &= (leaf % blocks == 0) | none
        enough[fits], even[fits & divides] = k, k
    place = np.where(even >= 0, even, enough)
    return place, place >= 0
