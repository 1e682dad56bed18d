"""Find the repeated blocks of a graph (the layers of a transformer), so that plans are made once per kind of layer.

A block repeats when `period` nodes later the same operators follow with the same literals and types (`signature` says
which floats count as equal). Each of their inputs must be the same value (a mask, a rotary table), the value `period`
nodes later (inside the block, or from the block before), or a separate parameter of the same type. The outside inputs
of the first block correspond to the results of its predecessor in later ones, and have the same type. Candidate periods
are the distances between equal runs of 1, 2, 4, … nodes, so the work is n log n. Where kinds of layers take turns
(local and global attention read another mask), a few layers together are the block: multiples of the period are
candidates, too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.core.folding import Block, Folding, signature
from meshwright.core.graph import Graph, Node

MAX_PERIODS = 48
MAX_ROTATIONS = 64
MAX_TURNS = 8  # layers that take turns; the most of a published model
TURNING_PERIODS = 4  # periods, the longest runs first, whose multiples are tried
MIN_LENGTH = 4  # shorter ones are a layer's own k and v, not layers


Wire = tuple[int, int]  # (number of the node, or -1 - number of the input; which result)
Run = tuple[int, int, int]  # start, stop, period: equal tokens a period later, from start to stop


@dataclass(frozen=True)
class _View:
    """The graph as numbers: a token for each node (all but its wiring), and the source of each port."""

    nodes: tuple[Node, ...]
    tokens: np.ndarray
    wires: tuple[tuple[Wire, ...], ...]
    inputs: tuple[str, ...]  # role, type and flag of each input
    live: np.ndarray  # values alive across the border before each node


def fold(graph: Graph) -> Folding:
    """Return repeated blocks of a graph without overlap: layers that take turns, then those of the longest runs."""
    view = _numbers(graph)
    found: list[Block] = []
    free = np.ones(len(graph.nodes), dtype=bool)
    runs = sorted(_runs(view.tokens, _periods(view.tokens)), key=_longest)

    def take(blocks: Iterable[Block]) -> None:
        for block in blocks:
            if free[block.start : block.stop].all():
                found.append(block)
                free[block.start : block.stop] = False

    take(_turning(view, runs))
    for start, stop, period in runs:
        for low, high in _stretches(free, start, stop, period):
            take(_blocks(view, low, high, period))
    found.sort(key=lambda b: b.start)
    return Folding(tuple(found), len(graph.nodes) - sum(b.length * (b.repeats - 1) for b in found))


def _longest(run: Run) -> tuple[int, int]:
    """Order runs by what they cover, the most first, then by period."""
    start, stop, period = run
    return start - stop - period, period


def _turning(view: _View, runs: Sequence[Run]) -> list[Block]:
    """Return blocks of several layers that take turns, where these leave out more nodes than equal neighbours do."""
    found: list[Block] = []
    covered: list[tuple[int, int]] = []
    for start, stop, period in runs:
        if any(low <= start and stop <= high for low, high in covered):
            continue
        covered.append((start, stop + period))
        if len(covered) > TURNING_PERIODS:
            break
        best = list(_blocks(view, start, stop, period))
        if sum(b.length * b.repeats for b in best) >= stop - start:
            continue  # all are equal
        for turns in range(2, MAX_TURNS + 1):
            longer = turns * period
            if stop + period - start < 2 * longer:
                break
            blocks = list(_blocks(view, start, stop + period - longer, longer))
            if _left_out(blocks) > _left_out(best):
                best = blocks
        if best and best[0].length > period:
            found += best
    return found


def _left_out(blocks: Sequence[Block]) -> int:
    """Return how many nodes need not be planned once each block counts once or twice."""
    return sum(b.length * max(0, b.repeats - 2) for b in blocks)


def _numbers(graph: Graph) -> _View:
    place: dict[str, Wire] = {i.name: (-1 - k, 0) for k, i in enumerate(graph.inputs)}
    known: dict[Any, int] = {}
    tokens, wires = [], []
    last: dict[Wire, int] = {}
    types = graph.types
    for number, node in enumerate(graph.nodes):
        tokens.append(known.setdefault((signature(node), tuple([types[u] for u in node.uses])), len(known)))
        wires.append(tuple([place[u] for u in node.uses]))
        for wire in wires[-1]:
            last[wire] = number
        for i, value in enumerate(node.values):
            place[value] = (number, i)
    live = np.zeros(len(tokens) + 2, dtype=np.int64)
    for (number, _), stop in last.items():
        if number >= 0:
            live[number + 1] += 1
            live[stop + 1] -= 1
    inputs = tuple(f"{i.role} {i.type} {i.needs_grad}" for i in graph.inputs)
    return _View(graph.nodes, np.array(tokens, dtype=np.int64), tuple(wires), inputs, np.cumsum(live))


def _runs(tokens: np.ndarray, periods: Iterable[int]) -> Iterator[Run]:
    """Yield (start, stop, period): tokens[i] == tokens[i + period] for all i of [start, stop), of at least a period."""
    for period in periods:
        same = np.concatenate(([False], tokens[:-period] == tokens[period:], [False])).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop - start >= period:
                yield int(start), int(stop), period


def _periods(tokens: np.ndarray) -> list[int]:
    """Return the most frequent distances between an n-gram and its next occurrence, for n = 1, 2, 4, …"""
    count: Counter[int] = Counter()
    grams, width = tokens, 1
    while len(grams) > 1:
        order = np.argsort(grams, kind="stable")
        equal = grams[order[1:]] == grams[order[:-1]]
        if not equal.any():
            break
        count.update((order[1:] - order[:-1])[equal].tolist())
        if len(grams) <= width:
            break
        pairs = grams[:-width] * len(tokens) + grams[width:]
        grams, width = np.unique(pairs, return_inverse=True)[1].reshape(-1), 2 * width
    limit = len(tokens) // 2
    return [p for p, _ in count.most_common() if MIN_LENGTH <= p <= limit][:MAX_PERIODS]


def _stretches(free: np.ndarray, start: int, stop: int, period: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a run whose blocks are free."""
    low = start
    while low < stop:
        while low < stop and not free[low]:
            low += 1
        high = low
        while high < stop + period and free[high]:
            high += 1
        if high - period - low >= period:
            yield low, high - period
        low = max(high, low + 1)


def _blocks(view: _View, start: int, stop: int, period: int) -> Iterator[Block]:
    """Yield the best block of each part of a run whose wiring repeats: most repeats, then fewest values passed on."""
    for low, high in _wired_stretches(view, start, stop, period):
        low = max(start, low - period)  # what breaks the wiring before it may be the first block's way in
        while (best := _best(view, low, high, period)) is not None:
            yield best
            low = best.stop


def _best(view: _View, low: int, high: int, period: int) -> Block | None:
    found: tuple[int, int] | None = None  # repeats, start
    starts = range(low, min(high - period, low + 2 * period - 1) + 1)
    ranked = sorted(starts, key=lambda s: (-((high - s + period) // period), view.live[s + period], s))
    for start in ranked[:MAX_ROTATIONS]:
        possible = (high - start + period) // period
        repeats = _wired(view, start, period, possible)
        if repeats > (found[0] if found else 1):
            found = (repeats, start)
        if repeats == possible:
            break
    return found and Block(found[1], period, found[0], _key(view, found[1] + period, period))


def _wired_stretches(view: _View, start: int, stop: int, period: int) -> Iterator[tuple[int, int]]:
    """Yield the maximal parts of a run in which each node reads what the node a period later reads."""
    low = start
    for i in range(start, stop + 1):
        if i < stop and all(
            _same(a, b, period, view) for a, b in zip(view.wires[i], view.wires[i + period], strict=True)
        ):
            continue
        if low < i:
            yield low, i
        low = i + 1


def _same(a: Wire, b: Wire, period: int, view: _View) -> bool:
    if a == b or (a[0] >= 0 and b == (a[0] + period, a[1])):
        return True
    return a[0] < 0 and b[0] < 0 and view.inputs[-1 - a[0]] == view.inputs[-1 - b[0]]


def _wired(view: _View, start: int, period: int, repeats: int) -> int:
    """Return how many blocks read as their predecessor does: passed on, shared by all, or separate.

    For each port one of the three must hold in all blocks, and values must map one to one.
    """
    kinds: dict[tuple[int, int], str] = {}
    for base in range(start, start + (repeats - 1) * period, period):
        good = (base - start) // period + 1
        forward: dict[Wire, Wire] = {}
        backward: dict[Wire, Wire] = {}
        for i in range(base, base + period):
            for port, (a, b) in enumerate(zip(view.wires[i], view.wires[i + period], strict=True)):
                way_in = base == start and a[0] < base <= b[0] < base + period
                if way_in or (a[0] >= 0 and b == (a[0] + period, a[1])):
                    kind = "handed on"
                elif a == b and a[0] < start:
                    kind = "shared"
                elif a[0] < 0 and b[0] < 0 and _same(a, b, period, view):
                    kind = "own"
                else:
                    return good
                if kinds.setdefault((i - base, port), kind) != kind:
                    return good
                if forward.setdefault(a, b) != b or backward.setdefault(b, a) != a:
                    return good
    return repeats


def _key(view: _View, start: int, period: int) -> str:
    """Return a hash of a block's operators, literals, types and wiring."""
    digest = hashlib.sha256()
    outside: dict[Wire, int] = {}
    for i in range(start, start + period):
        marks = []
        for number, result in view.wires[i]:
            if number >= start:
                marks.append(f"{number - start}.{result}")
            else:
                kind = view.inputs[-1 - number] if number < 0 else "value"
                marks.append(f"{kind} {outside.setdefault((number, result), len(outside))}")
        digest.update(f"{signature(view.nodes[i])} {marks}\n".encode())
    return digest.hexdigest()[:16]
