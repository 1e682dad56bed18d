"""Constraints: strategies as rows of options, and the states that remain under a user's shardings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.core.layout import dim_axes, leaves
from meshwright.core.mesh import Mesh
from meshwright.errors import StrategyError
from meshwright.ops.strategy import Strategy, unit_leaves, units
from meshwright.search.solve import Problem, completed
from meshwright.search.space.build import Space
from meshwright.search.space.codes import NodeCodes, Option
from meshwright.search.space.families import Family, Rows, block_counts, distinct

Seeds = Mapping[str, Mapping[str, Strategy]]
"""The user's shardings: axis → node → strategy on that axis alone."""


def option_on(codes: NodeCodes, strategy: Strategy, axis: str) -> Option | None:
    """Return the option of a strategy on one axis; None if it combines two there."""
    found: list[Option] = []
    for letter, dim in strategy.splits:
        if axis not in dim_axes(dim):
            continue
        tree = codes.site.trees[letter]
        cut = tuple(i for i, leaf in enumerate(leaves(dim)) if axis in leaf.axes)
        match = [n for n, unit in enumerate(units(tree)) if unit_leaves(tree, unit) == cut]
        found += [Option(letter, n) for n in match] or [Option("?")]
    found += [Option(through=ports) for a, ports in strategy.through if a == axis]
    if not found and axis in strategy.grad:
        return Option(grad=True)
    return found[0] if len(found) == 1 else Option() if not found else None


def row_of(codes: NodeCodes, strategy: Strategy, mesh: Mesh) -> np.ndarray | None:
    """The row of options that a strategy is, None when the space has none that equals it."""
    row = []
    for axis in mesh.axes:
        option = option_on(codes, strategy, axis.name)
        if option is None or option not in codes.options:
            return None
        row.append(codes.options.index(option))
    return np.array(row, dtype=np.int8)


def rows_of(
    codes: Mapping[str, NodeCodes], strategies: Mapping[str, Strategy], mesh: Mesh
) -> dict[str, np.ndarray] | None:
    """The rows that strategies of all nodes are; None when the space has no name for one of them."""
    rows = {name: row_of(found, strategies[name], mesh) for name, found in codes.items()}
    known = {name: row for name, row in rows.items() if row is not None}
    return known if len(known) == len(rows) else None


def exactly(rows: Mapping[str, np.ndarray]) -> Family:
    """One state per node: the row given for it."""

    def family(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        return rows[codes.node.name][None, :]

    return family


def rows_chosen(space: Space, states: Sequence[int]) -> dict[str, np.ndarray]:
    """The row of each node in a choice."""
    return {name: found.rows[states[space.variable["node", name]]] for name, found in space.nodes.items()}


def states_with(space: Space, problem: Problem, rows: Mapping[str, np.ndarray]) -> tuple[int, ...] | None:
    """A choice of a space in which the nodes have given rows, all else as is best beside them by `problem`; None where
    the space has not all of them or does not allow it."""
    known: dict[int, int] = {}
    for name, found in space.nodes.items():
        same = np.flatnonzero((found.rows == rows[name]).all(axis=1))
        if not len(same):
            return None
        known[space.variable["node", name]] = int(same[0])
    states = completed(problem, known)
    return states if math.isfinite(problem.price(states)) else None


def honouring(family: Family, seeds: Seeds, mesh: Mesh) -> Family:
    """A family in which nodes keep the user's shardings. It raises StrategyError for a sharding that is none of a
    node's options."""
    if not seeds:
        return family

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        found = family(codes, sizes)
        constraints = constraints_of(seeds, codes.node.name)
        return honoured(codes, found, constraints, mesh) if constraints else found

    return rows


def constraints_of(seeds: Seeds, node: str) -> dict[str, Strategy]:
    """Return the user's constraints on a node: axis → strategy on it."""
    return {axis: nodes[node] for axis, nodes in seeds.items() if node in nodes}


def honoured(codes: NodeCodes, rows: Rows, constraints: Mapping[str, Strategy], mesh: Mesh) -> Rows:
    """The rows that do what is asked for on each axis. Raises StrategyError for a sharding that is none of the options,
    or that there is no room for beside the others."""
    numbers = numbers_of(codes, constraints)
    rows = forced(rows, numbers, mesh)
    sizes = np.array([a.size for a in mesh.axes], dtype=np.float64)
    roomy = (block_counts(codes, rows, sizes) <= codes.leaf_sizes).all(axis=1)
    if not roomy.any():
        raise no_room(codes, numbers)
    return rows[roomy]


def numbers_of(codes: NodeCodes, constraints: Mapping[str, Strategy]) -> dict[str, int]:
    """Axis → number of the option that is asked for there. Raises StrategyError where it is none."""
    found: dict[str, int] = {}
    for axis, constraint in constraints.items():
        option = option_on(codes, constraint, axis)
        if option not in codes.options:
            raise StrategyError(
                f"%{codes.node.name} ({codes.node.op}) cannot be planned with {constraint} on {axis}",
                why="the search has no such option",
                where=codes.node.where,
                hint='another sharding, or mode="sharding_propagation", which takes annotations as they are',
            )
        found[axis] = codes.options.index(option)
    return found


def forced(rows: Rows, numbers: Mapping[str, int], mesh: Mesh) -> Rows:
    """The rows with these options on axes, whether there is room for them or not."""
    columns = {a.name: n for n, a in enumerate(mesh.axes)}
    for axis, number in numbers.items():
        kept = rows[:, columns[axis]] == number
        if kept.any():
            rows = rows[kept]
        else:  # no strategy of the family has it: what the family has, with this axis set by force
            rows = rows.copy()
            rows[:, columns[axis]] = number
    return distinct(rows)


def no_room(codes: NodeCodes, numbers: Mapping[str, int]) -> StrategyError:
    """Build the error for a node that cannot be sharded as requested: too many blocks of one factor."""
    splits = ", ".join(f"{codes.options[n].letter} over {axis}" for axis, n in numbers.items() if n)
    return StrategyError(
        f"%{codes.node.name} ({codes.node.op}) has no room for all its splits",
        why=f"requested: {splits}; a factor has at most as many blocks as elements",
        where=codes.node.where,
        hint="fewer axes for one factor, or another factor for some of them",
    )


def constrained_options(seeds: Seeds, codes: NodeCodes) -> tuple[Option, ...]:
    """Options that the user asks of a node, to be among its options even where a search would not look."""
    found = []
    for axis, strategy in constraints_of(seeds, codes.node.name).items():
        option = option_on(codes, strategy, axis)
        if option is not None and option.letter != "?" and option not in codes.options:
            found.append(option)
    return tuple(dict.fromkeys(found))
