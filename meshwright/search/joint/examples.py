"""The chain of a step (`space/step.py`) for a number of micro-batches: of each a rank has an example."""

from __future__ import annotations

import numpy as np

from meshwright.ops.batch import batch_units
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import units
from meshwright.search.joint.fronts import launching
from meshwright.search.planner import Planner
from meshwright.search.solve import solve
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.families import Family, Rows, block_counts, runs
from meshwright.search.space.step import step_problem


def chain_seconds(planner: Planner, micro_batches: int) -> float:
    """The least seconds that all micro-batches compute, and send while nothing can hide it, under cuts into two runs
    that leave an example of each micro-batch to a rank. The update is not in it."""
    family = in_pieces(runs(len(planner.scene.mesh.axes), 2), planner.scene.factors, micro_batches)
    found = solve(step_problem(planner.space(family, planner.storage(allowed=False)), update=False))
    if found.stopped:
        raise KeyboardInterrupt
    return found.bound + (micro_batches - 1) * launching(planner)


def in_pieces(family: Family, factors: Factors, pieces: int) -> Family:
    """Those states of a family that leave at least so many examples to a rank."""

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        found = family(codes, sizes)
        leaves = _examples(codes, factors)
        if pieces == 1 or not leaves.any():
            return found
        counts = block_counts(codes, found, sizes)[:, leaves]
        return found[(counts * pieces <= codes.leaf_sizes[leaves]).all(axis=1)]

    return rows


def _examples(codes: NodeCodes, factors: Factors) -> np.ndarray:
    """Which of a node's leaves count examples, by the first unit that does: bool[leaves]."""
    for letter, unit in batch_units(codes.site, factors):
        number = units(codes.site.trees[letter]).index(unit)
        for option, cuts in zip(codes.options, codes.cuts, strict=True):
            if (option.letter, option.unit) == (letter, number):
                return cuts
        break
    return np.zeros(len(codes.leaf_sizes), dtype=bool)


__all__ = ["chain_seconds", "in_pieces"]
