"""Exact minimisation by eliminating one variable after the other (bucket elimination, Dechter 1999).

Eliminating a variable adds up all tables that name it and takes the minimum over its states: a table over its
neighbours is left. With two neighbours that is a min-plus matrix product. The work is exponential only in the
treewidth of the pairs, which is 2 to 4 for the forward graphs of transformers.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.search.solve.problem import NoStates, Problem

BLOCK = 1 << 16  # entries of a chunk: 512 KB of float64, which stays in the second-level cache

Scope = tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """The cost of an elimination in `order`, known before it starts.

    `work` counts the sums of entries, `largest` the entries of the largest table made, `size_bytes` all tables made;
    `scopes` are the variables of the table that each variable leaves behind.
    """

    order: tuple[int, ...]
    work: float
    largest: float
    size_bytes: float
    scopes: tuple[Scope, ...] = field(repr=False)

    def resized(self, sizes: Sequence[int], dtype: type = np.float64) -> Estimate:
        """The same order over other numbers of states."""
        tables = [math.prod(sizes[w] for w in scope) for scope in self.scopes]
        work = sum(sizes[v] * table for v, table in zip(self.order, tables, strict=True))
        size_bytes = 1.0 * sum(tables) * np.dtype(dtype).itemsize
        return Estimate(self.order, 1.0 * work, 1.0 * max(tables, default=0), size_bytes, self.scopes)


@dataclass(frozen=True)
class Eliminated:
    """The best states, their price summed in float64 from the problem's own entries, and what it took."""

    states: tuple[int, ...]
    price: float
    estimate: Estimate


def estimate(problem: Problem, dtype: type = np.float64) -> Estimate:
    """The cheaper one of two greedy orders: least table first, and least fill first (not tried where the first order
    never joins more than three variables)."""
    sizes = tuple(problem.sizes)
    edges = tuple(
        (u, v) for u, v in problem.pairs if sizes[u] > 1 and sizes[v] > 1
    )  # one state is a constant
    plan = _greedy(sizes, edges, fill=False).resized(sizes, dtype)
    if max(map(len, plan.scopes), default=0) <= 2:
        return plan
    return min(plan, _greedy(sizes, edges, fill=True).resized(sizes, dtype), key=lambda p: p.work)


def eliminate(
    problem: Problem,
    plan: Estimate | None = None,
    *,
    dtype: type = np.float64,
) -> Eliminated:
    """The optimum of a problem. float32 tables halve the memory, and then the states may miss it by rounding.

    Raises NoStates when no choice has a finite price.
    """
    found = eliminate_until(problem, plan, lambda done, total: False, dtype=dtype)
    assert found is not None
    return found


def eliminate_until(
    problem: Problem,
    plan: Estimate | None,
    ended: Callable[[int, int], bool],
    *,
    dtype: type = np.float64,
) -> Eliminated | None:
    """The same; None where `ended`, called with (variables eliminated, all) after each, says to end before the last."""
    plan = plan or estimate(problem, dtype)
    tables = _Tables(problem, dtype)
    steps = []
    for done, v in enumerate(plan.order):
        named = tables.take(v)
        steps.append((v, named))
        rest = tuple(sorted({w for scope, _ in named for w in scope if w != v}))
        tables.put(rest, _least(v, rest, named))
        if ended(done + 1, len(plan.order)) and done + 1 < len(plan.order):
            return None
    if not math.isfinite(tables.constant):
        raise NoStates(None)
    states = [0] * len(problem.unary)
    for v, named in reversed(steps):
        total = sum(
            table[tuple(slice(None) if w == v else states[w] for w in scope)] for scope, table in named
        )
        states[v] = int(np.argmin(total))
    return Eliminated(tuple(states), problem.price(states), plan)


class _Tables:
    """The tables not yet used up, found by the variables they name."""

    def __init__(self, problem: Problem, dtype: type) -> None:
        self.constant = 0.0
        self._of: list[dict[Scope, np.ndarray]] = [{} for _ in problem.unary]
        for v, row in enumerate(problem.unary):
            self.put((v,), row.astype(dtype, copy=False))
        for (u, v), matrix in problem.pairs.items():
            if len(problem.unary[u]) == 1:
                self.put((v,), matrix[0].astype(dtype, copy=False))
            elif len(problem.unary[v]) == 1:
                self.put((u,), matrix[:, 0].astype(dtype, copy=False))
            else:
                self.put((u, v), matrix.astype(dtype, copy=False))

    def put(self, scope: Scope, table: np.ndarray) -> None:
        if not scope:
            self.constant += float(table)
            return
        before = self._of[scope[0]].get(scope)
        table = table if before is None else before + table
        for v in scope:
            self._of[v][scope] = table

    def take(self, v: int) -> list[tuple[Scope, np.ndarray]]:
        """All tables that name v; they are gone from here."""
        named = list(self._of[v].items())
        for scope, _ in named:
            for w in scope:
                del self._of[w][scope]
        return named


def _least(v: int, rest: Scope, named: Sequence[tuple[Scope, np.ndarray]]) -> np.ndarray:
    """min over the states of v of the sum of tables, as a table over `rest`."""
    axes = (v, *rest)
    folded: list[tuple[set[int], np.ndarray]] = []
    for scope, table in sorted(named, key=lambda n: -len(n[0])):
        table = _spread(axes, scope, table)
        # a table within another's scope joins it, before the big sum
        for i, (wider, sums) in enumerate(folded):
            if wider >= set(scope):
                folded[i] = (wider, sums + table)
                break
        else:
            folded.append((set(scope), table))
    terms = [table for _, table in folded]
    if len(terms) == 1:
        return terms[0].min(axis=0)
    return _least_of_sum(terms)


def _spread(axes: Scope, scope: Scope, table: np.ndarray) -> np.ndarray:
    """The table with its axes in the order of `axes`, of length 1 where it does not name the variable."""
    place = {w: i for i, w in enumerate(scope)}
    table = table.transpose([place[w] for w in axes if w in place])
    lengths = iter(table.shape)
    return table.reshape([next(lengths) if w in place else 1 for w in axes])


def _least_of_sum(terms: list[np.ndarray]) -> np.ndarray:
    """min over axis 0 of the broadcast sum, in chunks of about BLOCK entries, so that the sum never stands whole."""
    depth, *shape = np.broadcast_shapes(*(t.shape for t in terms))
    out = np.empty(shape, terms[0].dtype)
    plane = math.prod(shape[1:])
    rows = max(1, min(shape[0], BLOCK // plane))
    deep = max(1, min(depth, BLOCK // (rows * plane)))
    for r in range(0, shape[0], rows):
        target = out[r : r + rows]
        total = np.empty((deep, *target.shape), out.dtype)
        part = np.empty_like(target)
        for d in range(0, depth, deep):
            first, second, *more = (_cut(t, d, d + deep, r, r + rows) for t in terms)
            chunk = np.add(first, second, out=total[: min(deep, depth - d)])
            for term in more:
                chunk += term
            if d == 0:
                np.minimum.reduce(chunk, axis=0, out=target)
            else:
                least = chunk[0] if len(chunk) == 1 else np.minimum.reduce(chunk, axis=0, out=part)
                np.minimum(target, least, out=target)
    return out


def _cut(table: np.ndarray, low: int, high: int, row: int, end: int) -> np.ndarray:
    """Entries low:high of axis 0 (every term names the variable) and row:end of axis 1, where it has one."""
    return table[low:high, row:end] if table.shape[1] > 1 else table[low:high]


@functools.lru_cache(maxsize=64)  # one problem is solved for many prices
def _greedy(sizes: tuple[int, ...], edges: tuple[tuple[int, int], ...], fill: bool) -> Estimate:
    """Eliminate on the graph alone. Costs of neighbours are refreshed lazily: stale heap entries are skipped."""
    near: list[set[int]] = [set() for _ in sizes]
    for u, v in edges:
        near[u].add(v)
        near[v].add(u)

    def cost(v: int) -> tuple[float, float, int]:
        around, table = near[v], 1.0
        for w in around:
            table *= sizes[w]
        if not fill or len(around) < 2:
            return (0.0 if fill else table, table, v)
        missing = sum(len(around - near[a]) - 1 for a in around)  # each pair twice; none is its own neighbour
        return (missing / 2, table, v)

    now = [cost(v) for v in range(len(sizes))]
    heap = list(now)
    heapq.heapify(heap)
    order: list[int] = []
    scopes: list[Scope] = []
    while heap:
        entry = heapq.heappop(heap)
        v = entry[2]
        if now[v] != entry:
            continue
        now[v] = (-1.0, -1.0, -1)
        order.append(v)
        scopes.append(tuple(sorted(near[v])))
        for w in near[v]:
            near[w].discard(v)
            near[w] |= near[v] - {w}
        for w in near[v]:
            now[w] = cost(w)
            heapq.heappush(heap, now[w])
    return Estimate(tuple(order), 0.0, 0.0, 0.0, tuple(scopes))
