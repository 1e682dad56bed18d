"""`recursive_programming`: one prime axis at a time, slowest link first, each solved exactly beside what is fixed.

On one axis a node has a handful of options, so any number of ranks is a few small problems: sizes that are cut already
make the next axis cheaper or dearer, and a second sweep solves each axis again with all others fixed, until nothing
changes. (The reference system's double recursion is greedy by the weight of nodes; that is `inner="greedy"` here.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.search.solve import Problem, eliminate
from meshwright.search.space.build import Space
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.families import Family, one_axis

MakeSpace = Callable[[Family], Space]


@dataclass(frozen=True)
class Recursed:
    """The space of the last axis, and the states in it: they stand for options on all axes."""

    space: Space
    states: tuple[int, ...]
    price: float
    sweeps: int


def recursive_programming(
    make: MakeSpace,
    axes: int,
    *,
    inner: str = "exact",
    sweeps: int = 2,
    problem: Callable[[Space], Problem] | None = None,
) -> Recursed:
    """Solve axis after axis, then again until a sweep changes nothing (at most `sweeps` refining ones).

    `make` builds the space of a family; `inner` is ``exact`` or ``greedy``; `problem` is what is minimised in a space,
    by default its price.
    """
    rows: dict[str, np.ndarray] = {}
    objective = problem or Space.problem
    best: Recursed | None = None

    def fixed(codes: NodeCodes) -> np.ndarray:
        return rows.setdefault(codes.node.name, np.zeros(axes, dtype=np.int8))

    steady = 0  # axes in a row that changed nothing: solved again beside the same, they would not either
    for sweep in range(1 + sweeps):
        before = best.price if best else np.inf
        for axis in range(axes):
            if steady >= axes:
                break
            space = make(one_axis(axis, fixed))
            asked = objective(space)
            states = greedy(asked) if inner == "greedy" else eliminate(asked).states
            price = asked.price(states)
            if best is not None and sweep and price >= best.price * (1 - 1e-12):
                steady += 1
                continue
            steady = 1
            for name, found in space.nodes.items():
                rows[name] = found.rows[states[space.variable["node", name]]]
            best = Recursed(space, tuple(states), price, sweep + 1)
        assert best is not None
        if best.price >= before * (1 - 1e-9) or inner == "greedy":
            break
    assert best is not None
    return best


def greedy(problem: Problem) -> tuple[int, ...]:
    """Nodes in the order of their weight (the least they cost on one rank's whole share), each with the option that is
    cheapest beside those decided before it; hubs and parameters follow their first reader."""
    near: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in range(len(problem.unary))}
    for (u, v), matrix in problem.pairs.items():
        near[u].append((v, matrix.T))
        near[v].append((u, matrix))
    order = sorted(range(len(problem.unary)), key=lambda v: -float(problem.unary[v][0]))
    chosen: dict[int, int] = {}
    for v in order:
        total = problem.unary[v].copy()
        for u, matrix in near[v]:
            if u in chosen:
                total += matrix[chosen[u]]
        chosen[v] = int(np.argmin(total))
    return tuple(chosen[v] for v in range(len(problem.unary)))
