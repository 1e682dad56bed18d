"""All ranks of a mesh in one process, as numpy arrays: executes steps by `positions` alone, and tells what values
mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.redistribute.index_maps import Exchange, exchange
from meshwright.redistribute.slices import Selection
from meshwright.redistribute.steps import Step

Values = dict[int, np.ndarray]  # rank → what it holds


def execute(steps: Iterable[Step], values: Mapping[int, np.ndarray], mesh: Mesh) -> Values:
    """Execute steps on arrays: rank → local value before and after."""
    held = dict(values)
    for step in steps:
        plans = {rank: exchange(step, mesh, rank) for rank in range(mesh.size)}
        held = {rank: _receive(plans[rank], plans, held) for rank in range(mesh.size)}
    return held


def _receive(plan: Exchange, plans: Mapping[int, Exchange], held: Values) -> np.ndarray:
    mine = held[plan.group[plan.me]]
    assert mine.shape == plan.shape_before, (mine.shape, plan)
    result = np.zeros(plan.shape_after, dtype=mine.dtype)
    match plan.kind:
        case name if name in COLLECTIVES:
            kind = COLLECTIVES[name]
            brought = [_Chunks(held[r], plans[r].send) if kind.splits else held[r] for r in plan.group]
            found = kind.meaning(brought, plan.me)
            if kind.adds:
                return found
            for place, chunk in zip(plan.place, found, strict=True):
                result[grid(place)] = chunk
        case "slice":
            return mine[grid(plan.send[0])]
        case "mask":
            return mine if plan.keeps else result
        case "pad":
            result[grid(plan.place[0])] = mine
        case kind:
            raise AssertionError(f"unknown kind {kind}")
    return result


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The chunks that a member sends, indexed by the receiving member."""

    x: np.ndarray
    send: Sequence[Selection]

    def __getitem__(self, member: int) -> np.ndarray:
        return self.x[grid(self.send[member])]


def grid(selection: Selection) -> tuple[np.ndarray, ...]:
    """A selection as numpy's open mesh of positions."""
    return np.ix_(*(selection.index(d) for d in range(len(selection.of))))


def scatter(array: np.ndarray, layout: TensorLayout, mesh: Mesh, rng: np.random.Generator) -> Values:
    """Rank values that mean `array`: its blocks, and random integer terms (sums are exact) where it is pending."""
    terms = dict.fromkeys(product(*(range(mesh.sizes[a]) for a in layout.partial)), array)
    if layout.partial:
        *others, last = terms
        terms = {key: rng.integers(-99, 99, array.shape).astype(array.dtype) for key in others}
        terms[last] = array - sum(terms.values())
    values: Values = {}
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        term = terms[tuple(at[a] for a in layout.partial)]
        values[rank] = term[np.ix_(*layout.indices(mesh, at))].copy()
    return values


def assemble(values: Mapping[int, np.ndarray], layout: TensorLayout, mesh: Mesh) -> np.ndarray:
    """Assemble the global tensor from the values of all ranks. Asserts that replicas are equal and that no element is
    missing."""
    dtype = values[0].dtype
    terms: dict[tuple[int, ...], np.ndarray] = {}
    held: dict[tuple[int, ...], np.ndarray] = {}
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        key = tuple(at[a] for a in layout.partial)
        term = terms.setdefault(key, np.zeros(layout.shape, dtype))
        seen = held.setdefault(key, np.zeros(layout.shape, bool))
        where = np.ix_(*layout.indices(mesh, at))
        value = values[rank]
        want = term[where].shape
        assert value.shape == want, f"rank {rank} holds {value.shape} where {layout} has {want}"
        copies_agree = np.array_equal(term[where][seen[where]], value[seen[where]])
        assert copies_agree, f"replicas of {layout} differ on rank {rank}"
        term[where] = value
        seen[where] = True
    assert all(s.all() for s in held.values()), f"no rank holds some element of {layout}"
    return sum(terms.values(), np.zeros(layout.shape, dtype))


def pairing(
    x: Mapping[int, np.ndarray], g: Mapping[int, np.ndarray], layout: TensorLayout, mesh: Mesh
) -> float:
    """<x, g> of a value and its gradient: over all ranks, counting once those along axes on which both are whole."""
    once = set(mesh.sizes) - set(layout.split_axes) - set(layout.partial) - set(layout.grad)
    counted = [r for r in range(mesh.size) if all(mesh.coordinate(r)[a] == 0 for a in once)]
    return math.fsum(float(np.sum(x[r] * g[r])) for r in counted)
