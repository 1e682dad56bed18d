"""Parameters whose readers want the same, as columns: how each use is stored best.

Readers see how a parameter is used, not how it is stored, so of the storages of a use only the cheapest is left. The
choices and the formulas are those of `space/parameters.py`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from meshwright.cost.cluster import Cluster
from meshwright.mesh import Mesh
from meshwright.redistribute.matrix import WHOLE, Table
from meshwright.search.alike.sizes import Floats, Numbers, Sizes
from meshwright.search.space.layouts import Port
from meshwright.search.space.parameters import Storage, parameter_states, stored_seconds, subsets


def best_stored(
    sizes: Sizes, use: Port, needs_grad: bool, mesh: Mesh, cluster: Cluster, table: Table, how: Storage
) -> Floats:
    """Seconds of each use for each parameter, stored as is best: [uses, V]. Memory has no say here."""
    if not sizes.plain:
        (value,) = sizes.values
        found = parameter_states(
            value, [use], needs_grad, False, mesh, cluster, table, replace(how, again=False)
        )
        total = found.blocking + found.reduction + found.update
        order = {key: number for number, key in enumerate(found.use.keys().tolist())}
        return total[[order[key] for key in use.keys().tolist()]][:, None]
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

    found = stored_seconds(
        used,
        held(cut),
        lambda: held(cut & ~pending),
        cut[:, :, None],
        pending[:, :, None],
        np.zeros(1, dtype=bool),
        sizes.itemsize,
        needs_grad,
        mesh,
        cluster,
        table,
        how.states,
        False,
    )
    return np.where(lawful, functools.reduce(np.add, found), np.inf).min(axis=1)


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
