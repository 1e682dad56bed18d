"""Which strategies over many axes a search looks at: the named spaces of `docs/explanation/planner.md`.

A family says for every option list how options are laid over the prime axes, which stand in mesh order:

- `named`: the axes fall into named groups (``dp``, ``tp``), and all axes of a group take one option: product states;
- `runs`: the axes are split into at most so many runs, in mesh order, at any place, and each run takes one option;
- `resting`: of another family what leaves the first axes idle;
- `one_option`: all axes but some are as they were, and these take one: what `recursive_programming` begins with;
- `one_change`: all axes are as they were but one, or all from one on, and each node says which: what it refines with.

Where a run is longer than a sub-dim has room for, the axes that are left go to the next sub-dim of the same letter: 16
ranks split 32 heads in 8 groups of 4 as ``(8/a.b.c 4/d)``.

States that leave every rank an example of each micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshwright.ops.batch import batch_units
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import units
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.layouts import key_of

FEW = 64  # rows whose counts over all axes are found in one step; more, axis by axis, stay in the cache
Rows = np.ndarray  # int8[states, axes]: the option of each axis
Family = Callable[[NodeCodes, np.ndarray], Rows]


def named(groups: Sequence[Sequence[int]]) -> Family:
    """Product states over groups of axes (numbers of prime axes)."""
    where = np.empty(sum(map(len, groups)), dtype=np.int64)
    for number, group in enumerate(groups):
        where[list(group)] = number

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        choices = np.array(list(itertools.product(codes.starts, repeat=len(groups))), dtype=np.int8).reshape(
            -1, len(groups)
        )
        return legal(codes, choices[:, where], sizes)

    return rows


def runs(axes: int, most: int) -> Family:
    """At most `most` runs over the axes in mesh order."""

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        found: list[np.ndarray] = []
        for used in range(1, min(most, axes) + 1):
            neighbours_differ = np.array(
                [c for c in itertools.product(codes.starts, repeat=used) if all(map(int.__ne__, c, c[1:]))],
                dtype=np.int8,
            ).reshape(-1, used)
            for ends in itertools.combinations(range(1, axes), used - 1):
                lengths = np.diff([0, *ends, axes])
                found.append(np.repeat(neighbours_differ, lengths, axis=1))
        return legal(codes, np.concatenate(found), sizes)

    return rows


def outside(given: Mapping[str, np.ndarray], axes: int) -> Family:
    """The first axes as given, and one option for all the others together."""

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        choices = np.repeat(given[codes.node.name][None, :], len(codes.starts), axis=0)
        choices[:, axes:] = np.array(codes.starts, dtype=np.int8)[:, None]
        return legal(codes, choices, sizes)

    return rows


def resting(family: Family, axes: int) -> Family:
    """Those of a family that are replicated on the first axes: ranks along them repeat one another's work."""

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        working = sizes.copy()
        working[:axes] = 1
        return family(codes, working)

    return rows


def one_option(axes: Sequence[int], fixed: Callable[[NodeCodes], np.ndarray]) -> Family:
    """Every option on some axes together, beside a fixed row on the others, and the row as it is."""

    seen: dict[tuple[bytes, ...], Rows] = {}  # by all that `legal` looks at

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        now = fixed(codes)
        key = (now.tobytes(), bytes(codes.starts), *codes.room, sizes.tobytes())
        if key not in seen:
            seen[key] = legal(codes, together(codes, now, axes, sizes), sizes)
        return seen[key]

    return rows


def together(codes: NodeCodes, now: np.ndarray, axes: Sequence[int], sizes: np.ndarray) -> Rows:
    """A row as it is, and with each option that a run may begin with on some axes."""
    choices = np.repeat(now[None, :], 1 + len(codes.starts), axis=0)
    choices[1:, list(axes)] = np.array(codes.starts, dtype=np.int8)[:, None]
    choices[:, sizes == 1] = 0
    return choices


def one_change(axes: int, fixed: Callable[[NodeCodes], np.ndarray]) -> Family:
    """The fixed row, and every row in which one axis, or all axes from one on, take another option, whichever.

    A sharding that costs the same for two ranks as for many (a partial sum scattered instead of all-reduced) pays on
    many axes at once and on no single one of them.
    """
    single = np.eye(axes, dtype=bool)
    tails = np.triu(np.ones((axes - 1, axes), dtype=bool))  # that of the last axis alone is there already
    where = np.concatenate([single, tails])

    def rows(codes: NodeCodes, sizes: np.ndarray) -> Rows:
        now = fixed(codes)
        options = np.array(codes.starts, dtype=np.int8)
        changed = np.where(where[:, None, :], options[None, :, None], now)
        return legal(codes, np.concatenate([now[None, :], changed.reshape(-1, axes)]), sizes)

    return rows


def legal(codes: NodeCodes, rows: Rows, sizes: np.ndarray) -> Rows:
    """The rows whose shardings have elements for every block, axes without room moved on to the letter's next
    sub-dim."""
    rows = rows.astype(np.int8, copy=True)
    rows[:, sizes == 1] = 0
    roomy = (block_counts(codes, rows, sizes) <= codes.leaf_sizes).all(axis=1)
    if not roomy.all():
        moved, alive = moved_on(codes, rows[~roomy], sizes, codes.leaf_sizes)
        rows[~roomy] = moved
        rows = np.delete(rows, np.flatnonzero(~roomy)[~alive], axis=0)
    return distinct(rows)


def block_counts(codes: NodeCodes, rows: Rows, sizes: np.ndarray) -> np.ndarray:
    """Into how many blocks each row splits each leaf: float64[states, leaves]."""
    used = np.flatnonzero(rows.any(axis=0))
    if len(rows) > FEW:
        counts = np.ones((len(rows), len(codes.leaf_sizes)))
        for axis in used:
            counts *= np.where(codes.splits[rows[:, axis]], sizes[axis], 1.0)
        return counts
    return np.where(codes.splits[rows[:, used]], sizes[used, None], 1.0).prod(axis=1)


def moved_on(
    codes: NodeCodes, rows: Rows, sizes: np.ndarray, leaf_sizes: np.ndarray
) -> tuple[Rows, np.ndarray]:
    """The rows with axes that have no room at the next sub-dim, and which of them have room then. `leaf_sizes` are
    those of the node, or of each row's own [rows, leaves]."""
    rows = rows.copy()
    counts = np.ones((len(rows), len(codes.leaf_sizes)))
    alive = np.ones(len(rows), dtype=bool)
    spill = np.array(codes.spill, dtype=np.int8)
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        option = rows[:, axis]
        full = (codes.splits[option] & (counts * size > leaf_sizes)).any(axis=1)
        while (moving := full & (spill[option] >= 0)).any():
            option = np.where(moving, spill[option], option)
            full = (codes.splits[option] & (counts * size > leaf_sizes)).any(axis=1)
        alive &= ~full
        rows[:, axis] = option
        counts[codes.splits[option]] *= size
    return rows, alive


def distinct(rows: Rows) -> Rows:
    """The rows without repeats, in their order."""
    _, first = np.unique(key_of(rows), return_index=True)
    return rows[np.sort(first)]


def letter_sizes(codes: NodeCodes, rows: Rows, sizes: np.ndarray) -> dict[str, np.ndarray]:
    """Return the largest size that any rank holds of each letter, and of each part of a concatenation:
    float64[states]."""
    return letters_held(codes, np.ceil(codes.leaf_sizes / block_counts(codes, rows, sizes)))


def letters_held(codes: NodeCodes, held: np.ndarray) -> dict[str, np.ndarray]:
    """`letter_sizes` from what is held of each leaf [states, leaves]."""
    found: dict[str, np.ndarray] = {}
    start = 0
    for letter in codes.letters:
        found[letter], start, parts = _product(codes.site.trees[letter], held, start, len(held))
        names = codes.site.rule.parts(letter)
        if names and len(parts) == len(names):
            found |= dict(zip(names, parts, strict=True))
    return found


def _product(tree, held: np.ndarray, start: int, count: int) -> tuple[np.ndarray, int, list[np.ndarray]]:
    total, parts = np.ones(count), []
    for item in tree:
        if hasattr(item, "parts"):
            parts = []
            for part in item.parts:
                size, start, _ = _product(part, held, start, count)
                parts.append(size)
            total = total * np.sum(parts, axis=0)
        else:
            total, start = total * held[:, start], start + 1
    return total, start, parts


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
        for option, splits in zip(codes.options, codes.splits, strict=True):
            if (option.letter, option.unit) == (letter, number):
                return splits
        break
    return np.zeros(len(codes.leaf_sizes), dtype=bool)


__all__ = ["in_pieces"]
