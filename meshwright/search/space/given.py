"""What is decided already: strategies as rows of options, and the states that a user's cuts leave."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.errors import StrategyError
from meshwright.layout import dim_axes, leaves
from meshwright.mesh import Mesh
from meshwright.ops.strategy import WHOLE, Strategy, unit_leaves, units
from meshwright.search.space.codes import NodeCodes, Option
from meshwright.search.space.families import Family, Rows, distinct


def option_on(codes: NodeCodes, strategy: Strategy, axis: str) -> Option | None:
    """What a strategy does on one axis; None when it does two things there."""
    found: list[Option] = []
    for letter, dim in strategy.cuts:
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


def honouring(family: Family, seeds: Mapping[str, Mapping[str, Strategy]], mesh: Mesh) -> Family:
    """A family in which nodes keep the user's cuts. `seeds`: axis → node → single-axis strategy. The family raises
    StrategyError for a cut that is none of a node's options."""
    if not seeds:
        return family

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        wishes = {a: nodes[codes.node.name] for a, nodes in seeds.items() if codes.node.name in nodes}
        found = family(codes, sizes)
        if not wishes:
            return found
        columns = {a.name: n for n, a in enumerate(mesh.axes)}
        for axis, wish in wishes.items():
            option = option_on(codes, wish, axis)
            if option not in codes.options:
                raise StrategyError(
                    f"%{codes.node.name} ({codes.node.op}) cannot be planned with {wish} on {axis}",
                    why="no option of the search is this cut",
                    where=codes.node.where,
                    hint='another cut, or mode="sharding_propagation", which takes annotations as they are',
                )
            number = codes.options.index(option)
            kept = found[:, columns[axis]] == number
            if kept.any():
                found = found[kept]
            else:  # no strategy of the family has it: the family's first choice with this axis set by force
                found = found.copy()
                found[:, columns[axis]] = number
        return distinct(found)

    return rows


def wished_options(seeds: Mapping[str, Mapping[str, Strategy]], codes: NodeCodes) -> tuple[Option, ...]:
    """Options that the user asks of a node, to be among its options even where a search would not look."""
    found = []
    for axis, nodes in seeds.items():
        strategy = nodes.get(codes.node.name, WHOLE)
        option = option_on(codes, strategy, axis)
        if option is not None and option.letter != "?" and option not in codes.options:
            found.append(option)
    return tuple(dict.fromkeys(found))
