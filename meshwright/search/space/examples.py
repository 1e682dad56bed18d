"""States that leave every rank an example of each micro-batch."""

from __future__ import annotations

import numpy as np

from meshwright.ops.batch import batch_units
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import units
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.families import Family, Rows, block_counts


def in_pieces(family: Family, factors: Factors, pieces: int) -> Family:
    """Those states of a family that leave at least so many examples to a rank; all where none does."""

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        found = family(codes, sizes)
        leaves = _examples(codes, factors)
        if pieces == 1 or not leaves.any():
            return found
        counts = block_counts(codes, found, sizes)[:, leaves]
        kept = (counts * pieces <= codes.leaf_sizes[leaves]).all(axis=1)
        return found[kept] if kept.any() else found

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


__all__ = ["in_pieces"]
