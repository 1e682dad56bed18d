"""`recursive_programming`: a few prime axes at a time, slowest link first, each exactly beside what is fixed.

On the axes of one turn a node takes one of a handful of options, so any number of ranks is a few small problems: sizes
that are sharded already make the next axes cheaper or dearer. Then refining sweeps: every node may change what it does
on one axis, or on all axes from one on, each where it likes, and all of that is one problem. It has what solving single
axes again would look at as special cases, for the price of a few of them. Ends of the row matter where a sharding costs
the same for two ranks as for many: for GPT-2 with 25 heads no single axis gains by sharding the sequence of attention,
all together make the step five times shorter. (The reference system's double recursion is greedy by the weight of
nodes; that is `inner="greedy"` here.)

A graph of hundreds of distinct nodes is priced and solved as arrays over isomorphic nodes (`vectorized/`), and refined
by single axes, ends of the row and turns, one after the other; one of thousands by turns alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.mesh import Mesh
from meshwright.search.budget import RECURSION
from meshwright.search.solve import Problem, eliminate, solve
from meshwright.search.space.build import Space
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.constraints import rows_chosen, states_with
from meshwright.search.space.families import Family, Rows, one_change, one_option
from meshwright.search.space.variables import ArraySpace
from meshwright.search.vectorized.prices import MakePriced
from meshwright.search.vectorized.spaces import array_space

MakeSpace = Callable[[Family | ArraySpace], Space]


@dataclass(frozen=True)
class Recursed:
    """The last space that had a better choice, and the states in it: they stand for options on all axes."""

    space: Space
    states: tuple[int, ...]
    price: float
    sweeps: int


def turns(mesh: Mesh) -> list[list[int]]:
    """Which axes are solved together, by number: at most `TOGETHER` neighbours of one link."""
    found: list[list[int]] = []
    for number, axis in enumerate(mesh.axes):
        if found and len(found[-1]) < RECURSION.axes_together and mesh.axes[number - 1].link == axis.link:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def refining(order: list[list[int]]) -> list[list[int]]:
    """List the axes to solve again: each axis, all axes from a turn on, each turn."""
    single = [[axis] for turn in order for axis in turn]
    tails = [[axis for turn in order[number:] for axis in turn] for number in range(len(order) - 1)]
    return [*single, *tails, *order]


def recursive_programming(
    make: MakeSpace,
    mesh: Mesh,
    *,
    inner: str = "exact",
    problem: Callable[[Space], Problem] | None = None,
    vectorized: MakePriced | None = None,
) -> Recursed:
    """Solve turn after turn, then refine until a sweep gains next to nothing, at most `RECURSION.sweeps` times.

    `make` builds the space of a family; `inner` is ``exact`` or ``greedy``, which is not refined; `problem` is what is
    minimised in a space, by default its price. With `vectorized` the same is found and minimised as arrays.
    """
    if vectorized is not None and inner != "greedy":
        return _as_arrays(vectorized, make, mesh)
    rows: dict[str, np.ndarray] = {}
    objective, axes = problem or Space.problem, len(mesh.axes)

    def fixed(codes: NodeCodes) -> np.ndarray:
        return rows.setdefault(codes.node.name, np.zeros(axes, dtype=np.int8))

    def take(space: Space, states: Sequence[int], price: float, sweep: int) -> Recursed:
        rows.update(rows_chosen(space, states))
        return Recursed(space, tuple(states), price, sweep)

    best: Recursed | None = None
    for turn in turns(mesh):
        space = make(one_option(turn, fixed))
        asked = objective(space)
        states = greedy(asked) if inner == "greedy" else eliminate(asked).states
        best = take(space, states, asked.price(states), 1)
    assert best is not None
    for sweep in range(2, 2 + (RECURSION.sweeps if inner != "greedy" and axes > 1 else 0)):
        before = best.price
        space = make(one_change(axes, fixed))
        asked = objective(space)
        states = solve(asked, limit_work=RECURSION.sweep_work, first=states_with(space, asked, rows)).states
        if (price := asked.price(states)) < best.price * (1 - 1e-12):
            best = take(space, states, price, sweep)
        if best.price >= before * (1 - RECURSION.least_gain):
            break
    return best


def _as_arrays(priced: MakePriced, make: MakeSpace, mesh: Mesh) -> Recursed:
    """The recursion over isomorphic nodes, refined by some axes after the others, and a space of what was found."""
    now: Rows | None = None
    order = again = turns(mesh)
    best, last, sweep = math.inf, order[-1], 1
    for sweep in range(1, 2 + RECURSION.sweeps):
        before = best
        for turn in order if sweep == 1 else again:
            if sweep > 1 and turn == last:  # nothing has changed since
                break
            asked = priced(turn, now)
            states, price = asked.tables.solved()
            if sweep == 1 or price < best * (1 - 1e-12):
                now, best, last = asked.rows(states), price, turn
        again = order if now is None or len(now) > RECURSION.turns_only_nodes else refining(order)
        if sweep > 1 and best >= before * (1 - RECURSION.least_gain):
            break
    asked = priced((), now)
    space = make(array_space(asked))
    states = tuple(asked.tables.solved()[0].tolist())
    return Recursed(space, states, space.problem().price(states), sweep)


def greedy(problem: Problem) -> tuple[int, ...]:
    """Nodes in the order of their weight (the least they cost on one rank's full share), each with the option that is
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
