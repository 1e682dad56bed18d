"""Parameters whose readers want the same, as columns: how each use is stored best.

Readers see how a parameter is used, not how it is stored, so of the storages of a use only the cheapest is left; where
a byte has a price, the cheapest of those gathered once and of those gathered again. The choices and the formulas are
those of `space/parameters.py`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.cluster import Cluster
from meshwright.redistribute.price_matrix import REPLICATED, Table
from meshwright.search.space.demands import Holding
from meshwright.search.space.layouts import Port
from meshwright.search.space.parameters import (
    ParameterStates,
    Storage,
    parameter_states,
    stored_seconds,
    subsets,
)
from meshwright.search.vectorized.sizes import Floats, Numbers, Sizes, sum_of

Flags = np.ndarray  # bool


@dataclass(frozen=True)
class Stored:
    """Every storage of each use for each parameter, [uses, storages, V] or what spreads to that: seconds by what they
    are of (infinite where there is no room), the place that storage is sharded at, the set of axes and whether it is
    gathered again [uses, storages], and the elements of a rank as used and as stored. `waits` [uses, storages]: its
    gradient waits for others in a bucket; `scattered`: it is added up over micro-batches before what is stored is left
    of it. `price`: seconds for the bytes that all of it takes."""

    use: Port
    blocking: Floats
    reduction: Floats
    update: Floats
    place: Numbers
    cut: Numbers
    again: Flags
    waits: Flags
    scattered: Flags
    used: Floats
    elements: Floats
    owners: int = 1
    price: Floats | float = 0.0

    def priced(self, holding: Holding, per_byte: Floats) -> Stored:
        """With a price per byte at each instant."""
        kept = np.where(((self.cut != 0) & ~self.again)[:, :, None], self.used, 0.0)
        taken = holding.taken(self.elements, kept, self._summed, self.waits[:, :, None])
        return replace(self, price=sum_of([a * b for a, b in zip(per_byte.tolist(), taken, strict=True)]))

    @functools.cached_property
    def _summed(self) -> Floats:
        return np.where(self.scattered[:, :, None], self.used, self.elements)

    @functools.cached_property
    def states(self) -> Port:
        """How it is used in each state: where anything may be gathered again, these follow all others."""
        return Port(*(np.tile(a, (len(self._kinds), 1)) for a in (self.use.forward, self.use.grad)))

    @functools.cached_property
    def is_again(self) -> Flags:
        """[states]: whether it is gathered again."""
        return np.repeat([kind for kind, _ in self._kinds], len(self.use.forward))

    @functools.cached_property
    def _kinds(self) -> list[tuple[bool, Floats]]:
        """Return the prices of storages [uses, storages, V] that gather once, and of those that gather again, if there
        are any."""
        total = self.owners * (self.blocking + self.reduction + self.update) + self.price
        if not self.again.any():
            return [(False, total)]
        return [(kind, np.where((self.again == kind)[:, :, None], total, np.inf)) for kind in (False, True)]

    @property
    def least(self) -> Floats:
        """Return the price of the best storage in each state: [states, V]."""
        return np.concatenate([total.min(axis=1) for _, total in self._kinds])

    def best(self, of: Numbers, table: Table) -> list[ParameterStates]:
        """For some of the parameters the states in which each use is stored best."""
        uses = len(self.use.forward)
        rows = np.tile(np.arange(uses), len(self._kinds))
        chosen = np.concatenate([total.argmin(axis=1) for _, total in self._kinds])  # [states, V]
        shape = self._kinds[0][1].shape
        arrays = [
            np.broadcast_to(a, shape)[rows[:, None], chosen, np.arange(chosen.shape[1])]
            for a in (
                self.blocking,
                self.reduction,
                self.update,
                self.place,
                self.used,
                self.elements,
                self._summed,
            )
        ]
        cut, again = self.cut[rows[:, None], chosen], self.again[rows[:, None], chosen]  # [states, V]
        found = []
        for v in of.tolist():
            blocking, reduction, update, place, used, elements, summed = (a[:, v] for a in arrays)
            stored = (cut[:, v, None] & table.bits) != 0
            kept = np.where((cut[:, v] != 0) & ~again[:, v], used, 0.0)
            place = np.where(cut[:, v] != 0, place, 0)
            found.append(
                ParameterStates(
                    self.states,
                    stored,
                    place,
                    again[:, v],
                    blocking,
                    reduction,
                    update,
                    elements,
                    kept,
                    summed,
                )
            )
        return found


def all_stored(
    sizes: Sizes,
    use: Port,
    needs_grad: bool,
    cluster: Cluster,
    table: Table,
    how: Storage,
    host: bool,
    kept: bool = False,
) -> Stored:
    """Price each storage of each use. `host`: the parameters are on the host; `kept`: autograd saves the gathered
    value, so if `how` counts memory it may be gathered again."""
    if not sizes.plain:
        return _one_by_one(sizes, use, needs_grad, cluster, table, how, host, kept)
    at = [table.sets(use.forward, 2 + place) for place in range(sizes.places)]  # per place [uses]
    free = table.sets(use.forward, REPLICATED)
    bits = [0, *(int(sum(table.bits[list(axes)])) for axes in subsets(how.groups))] if how.allowed else [0]
    cut = free[:, None] & np.array(bits)[None, :]  # [uses, storages]
    again = np.zeros(cut.shape, dtype=bool)
    if how.again and kept:
        cut, again = np.tile(cut, 2), np.concatenate([again, ~again], axis=1)
    used = _elements(sizes, [sizes.held(k, table.members[s])[:, None, :] for k, s in enumerate(at)])
    place, lawful = _place(sizes, at, cut, table)
    elements = sizes.elements(table, np.zeros((1, len(table.bits)), np.int8))[0]
    lawful &= sizes.itemsize * elements >= how.smallest_bytes
    lawful |= (cut == 0)[:, :, None]
    lawful &= ~(again & (cut == 0))[:, :, None]
    pending = (use.grad @ table.bits)[:, None]

    def held(more: Numbers) -> Floats:
        """Elements where the chosen place is sharded over more axes [uses, storages] too."""
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
        again[:, :, None],
        sizes.itemsize,
        needs_grad,
        table.mesh,
        cluster,
        table,
        how.states,
        host,
    )
    waits, scattered = (pending & ~cut) != 0, (pending & cut) != 0
    blocking = np.where(lawful, blocking, np.inf)
    return Stored(use, blocking, reduction, update, place, cut, again, waits, scattered, used, stored)


def _one_by_one(
    sizes: Sizes,
    use: Port,
    needs_grad: bool,
    cluster: Cluster,
    table: Table,
    how: Storage,
    host: bool,
    kept: bool,
) -> Stored:
    """The same for a value whose places are not apart: those storages alone that may be the best."""
    (value,) = sizes.values
    found = parameter_states(value, [use], needs_grad, kept, table.mesh, cluster, table, how, host)
    of: dict[bytes, list[int]] = defaultdict(list)
    for number, key in enumerate(found.use.keys().tolist()):
        of[key].append(number)
    rows = [of[key] for key in use.keys().tolist()]
    most = max(map(len, rows))
    at = np.array([row + row[:1] * (most - len(row)) for row in rows])  # [uses, storages], some of them twice
    used = table.local_elements(value, use.forward)[:, None, None]
    one = (found.blocking, found.reduction, found.update, found.place, found.elements)
    blocking, reduction, update, place, elements = (a[at][:, :, None] for a in one)
    cut = (found.stored @ table.bits)[at]
    pending = (use.grad @ table.bits)[:, None]
    waits, scattered = (pending & ~cut) != 0, (pending & cut) != 0
    again = found.again[at]
    return Stored(use, blocking, reduction, update, place, cut, again, waits, scattered, used, elements)


def _elements(sizes: Sizes, parts: list[Floats]) -> Floats:
    return functools.reduce(np.multiply, parts, sizes.whole[None, None, :])


def _place(sizes: Sizes, at: list[Numbers], cut: Numbers, table: Table) -> tuple[Numbers, np.ndarray]:
    """The place that storage is sharded at [uses, storages, V], the first that divides evenly, else the first with
    enough elements; and where there is one."""
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
