"""The cheapest sequence of steps by search, for pairs of layouts that have no schedule, and the oracle of the
schedules.

Uniform-cost (Dijkstra) over where each run of axes is: on the sub-dims it starts on, replicated, partial, or on the
sub-dims it ends on. A few milliseconds a pair. What is priced here is what is executed: prices come from the same
formulas as `steps.wire_bytes`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.core.layout import Cat, Dim, TensorLayout, dim_axes, leaves, map_leaves, normalize_dim
from meshwright.core.mesh import Mesh
from meshwright.errors import LayoutError
from meshwright.redistribute.axis_runs import (
    Run,
    State,
    axes_of,
    kind_of,
    merged_runs,
    place_of,
    pop,
    push,
    state_of,
)
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.refine import common_refinement, holds, same_elements, same_tree
from meshwright.redistribute.schedules import live, on_every_path
from meshwright.redistribute.steps import LOCAL, Step, largest_size, wire_elements


@functools.lru_cache(maxsize=1 << 14)
def cheapest(
    src: TensorLayout, dst: TensorLayout, mesh: Mesh, itemsize: int, prices: Prices
) -> tuple[Step, ...]:
    """The cheapest steps from the forward half of `src` to that of `dst`.

    Expects lawful layouts of one shape. Raises LayoutError where the price table leaves no way.
    """
    return _Problem(src.forward, dst.forward, mesh, itemsize, prices).solve()


# ------------------------------------------------------------------------------------------------- the state space


@dataclass(frozen=True)
class _Move:
    kind: str
    runs: tuple[Run, ...]
    after: State


class _Problem:
    """One redistribution as a search problem. Sub-dims that both ends share are one leaf; a dim without common
    refinement has the leaves of its source and those of its target, and only one of the two sets is ever split.
    """

    def __init__(
        self, src: TensorLayout, dst: TensorLayout, mesh: Mesh, itemsize: int, prices: Prices
    ) -> None:
        self.src, self.dst, self.mesh, self.itemsize, self.prices = src, dst, mesh, itemsize, prices
        self.trees: list[tuple[Dim, ...]] = []  # per dim its one tree, or the source's and the target's
        self.leaf_dim: list[int] = []
        self.leaf_side: list[str] = []  # both | src | dst
        self.leaf_size: list[int] = []
        start: list[Run] = []
        goal: list[Run] = []
        for number, (old, new) in enumerate(zip(src.dims, dst.dims, strict=True)):
            a, b = normalize_dim(live(old, mesh), mesh), normalize_dim(live(new, mesh), mesh)
            if same_tree(old, new):
                a, b = live(old, mesh), live(new, mesh)
            if pair := (a, b) if same_tree(a, b) else common_refinement(a, b, mesh):
                self._add(number, "both", pair[0])
                start += [s.axes for s in leaves(pair[0])]
                goal += [s.axes for s in leaves(pair[1])]
                self.trees.append((pair[0],))
            elif same_elements(a, b, mesh):
                self._add(number, "both", a)
                start += [s.axes for s in leaves(a)]
                goal += [s.axes for s in leaves(a)]
                self.trees.append((a,))
            else:
                for side, tree in (("src", a), ("dst", b)):
                    self._add(number, side, tree)
                    for leaf in leaves(tree):
                        start.append(leaf.axes if side == "src" else ())
                        goal.append(leaf.axes if side == "dst" else ())
                self.trees.append((a, b))
        partial = [tuple(a for a in layout.partial if mesh.sizes[a] > 1) for layout in (src, dst)]
        runs = merged_runs(mesh, start, goal, *partial)
        self.start = state_of(start, partial[0], runs)
        self.goal = state_of(goal, partial[1], runs)
        self.target = {run: place_of(self.goal, run) for run in runs}
        self.fixed = self._fixed(runs)
        self._sizes: dict[tuple[object, ...], int] = {}

    def _add(self, dim: int, side: str, tree: Dim) -> None:
        for leaf in leaves(tree):
            self.leaf_dim.append(dim)
            self.leaf_side.append(side)
            self.leaf_size.append(leaf.size)

    def _fixed(self, runs: Iterable[Run]) -> set[Run]:
        """Runs that are at their place with nothing but such runs below them: they never move."""
        fixed = {
            r for r in runs if (p := place_of(self.start, r)) == self.target[r] and isinstance(p, frozenset)
        }
        while True:
            bad = set[Run]()
            for old, new in zip(self.start[0], self.goal[0], strict=True):
                solid = 0
                while solid < min(len(old), len(new)) and old[solid] == new[solid] and old[solid] in fixed:
                    solid += 1
                bad |= {r for r in (*old[solid:], *new[solid:]) if r in fixed}
            if not bad:
                return fixed
            fixed -= bad

    # ---------------------------------------------------------------------------------------------- the search

    def solve(self) -> tuple[Step, ...]:
        if steps := self._cut_at_once():
            return steps
        counter = itertools.count()  # ties go to what was found first
        heap = [(0.0, 0, next(counter), self.start)]
        best: dict[State, tuple[float, int]] = {self.start: (0.0, 0)}
        came: dict[State, tuple[State, _Move]] = {}
        done: set[State] = set()
        while heap:
            seconds, count, _, state = heapq.heappop(heap)
            if state in done:
                continue
            done.add(state)
            if state == self.goal:
                return self._steps(came)
            for move in self._moves(state):
                price = (seconds + self._seconds(state, move), count + 1)
                if math.isfinite(price[0]) and price < best.get(move.after, (math.inf, 0)):
                    best[move.after] = price
                    came[move.after] = (state, move)
                    heapq.heappush(heap, (*price, next(counter), move.after))
        raise LayoutError(
            f"no collective of the price table leads from {self.src} to {self.dst}",
            why=f"the table has {', '.join(sorted({row[0] for row in self.prices.rows})) or 'no collective'}",
            hint="all_reduce and all_gather are enough for every redistribution",
        )

    def _cut_at_once(self) -> tuple[Step, ...]:
        """Return one free slice, and a free mask of the axes that become partial, if the local values hold all that is
        needed; this covers dims with other sub-dims and concatenations that are replicated in part. Empty otherwise."""
        if not self.start[1] <= self.goal[1] or self.start == self.goal:
            return ()
        pairs = [(a, b) for a, b in zip(self.src.dims, self.dst.dims, strict=True) if a != b]
        odd = any(len(trees) > 1 for trees in self.trees) or any(
            isinstance(i, Cat) for a, _ in pairs for i in a
        )
        if not odd or not all(holds(a, b, self.mesh) for a, b in pairs):
            return ()
        axes = self.mesh.sort(axis for _, dim in pairs for axis in dim_axes(dim))
        if self.start[1] == self.goal[1]:
            return (Step("slice", axes, self.src, self.dst),)
        # No axis that is to be partial splits these dims, unless it has one rank.
        partial = tuple(a for a in self.src.partial if self.mesh.sizes[a] > 1)
        sliced = TensorLayout(self.dst.dims, partial)
        masked = self.mesh.sort(axes_of(self.goal[1] - self.start[1]))
        return (Step("slice", axes, self.src, sliced), Step("mask", masked, sliced, self.dst))

    def _moves(self, state: State) -> Iterator[_Move]:
        # never a loss: it is free and makes everything after it smaller
        if (free := self._slice(state)) is not None:
            yield free
            return
        yield from self._masks_and_pads(state)
        yield from self._reductions(state)
        yield from self._gathers(state)
        yield from self._exchanges(state)

    def _slice(self, state: State) -> _Move | None:
        after, moved = state, list[Run]()
        while runs := [r for r in self.target if place_of(after, r) == "replicated" and self._fits(after, r)]:
            after = push(after, runs[0], self.target[runs[0]])
            moved.append(runs[0])
        if knot := self._knotted_to_slice(after):
            stacks = zip(after[0], self.goal[0], strict=True)
            all_at_once = tuple(goal if knot.intersection(goal) else old for old, goal in stacks), after[1]
            if self._legal(all_at_once):
                after = all_at_once
                moved += [r for r in self.target if r in knot]
        return _Move("slice", tuple(moved), after) if moved else None

    def _knotted_to_slice(self, state: State) -> set[Run]:
        """Return the replicated runs that are to split, if they complete all they split: parts of a concatenation that
        are split in opposite orders wait for each other one by one."""
        runs = {
            r
            for r, to in self.target.items()
            if kind_of(to) == "split" and place_of(state, r) == "replicated"
        }
        for old, goal in zip(state[0], self.goal[0], strict=True):
            if runs.intersection(goal) and not (
                old == goal[: len(old)] and runs.issuperset(goal[len(old) :])
            ):
                return set()
        return runs

    def _masks_and_pads(self, state: State) -> Iterator[_Move]:
        wanted = [r for r, place in self.target.items() if place == "partial"]
        if masked := tuple(r for r in wanted if place_of(state, r) == "replicated"):
            yield _Move("mask", masked, (state[0], state[1] | set(masked)))
        for run in wanted:
            if self._on_top(state, run) and self._cuts_all(state, run):
                yield _Move("pad", (run,), (pop(state, run)[0], state[1] | {run}))

    def _reductions(self, state: State) -> Iterator[_Move]:
        todo = [r for r in self.target if r in state[1] and self.target[r] != "partial"]
        ends_replicated = [r for r in todo if self.target[r] == "replicated"]
        for runs in _distinct([(r,) for r in todo], [tuple(ends_replicated)], [tuple(todo)]):
            yield _Move("all_reduce", runs, (state[0], state[1] - set(runs)))
        for run in (r for r in todo if self.target[r] != "replicated"):
            after, moved, place = (state[0], state[1] - {run}), [run], self.target[run]
            if not self._legal(after := push(after, run, place)):
                continue
            yield _Move("reduce_scatter", (run,), after)
            while more := [r for r in todo if r not in moved and self._fits(after, r, partial=True)]:
                after = push((after[0], after[1] - {more[0]}), more[0], self.target[more[0]])
                moved.append(more[0])
                yield _Move("reduce_scatter", tuple(moved), after)
        # in order, or an exchange's task
        if at_once := [r for stack in self.goal[0] for r in stack if r in todo]:
            after = (state[0], state[1].difference(at_once))
            for run in dict.fromkeys(at_once):
                after = push(after, run, self.target[run])
            if self._legal(after):
                yield _Move("reduce_scatter", tuple(dict.fromkeys(at_once)), after)
        for run in self.target:  # a split below one that moves later: an exchange puts them in order
            waits = place_of(state, run) == "replicated" and isinstance(self.target[run], frozenset)
            if waits and self._legal(after := push(state, run, self.target[run])):
                yield _Move("slice", (run,), after)

    def _gathers(self, state: State) -> Iterator[_Move]:
        for run in self.target:
            after, moved = state, list[Run]()
            top: Run | None = run if self._on_top(state, run) else None
            while top is not None:
                after, moved = pop(after, top), [top, *moved]
                yield _Move("all_gather", tuple(moved), after)
                below = [r for leaf in self._leaves_of(state, run) for r in after[0][leaf][-1:]]
                top = next((r for r in below if self._on_top(after, r)), None)
        every, kept = set(self.target), self._padded_where_they_stand(state)
        padded, replicated = (
            {r for r in every if self.target[r] == place} for place in ("partial", "replicated")
        )
        for ends in (every, every - kept, every - padded, replicated):
            after, moved = state, list[Run]()
            while tops := [r for r in self.target if r in ends and self._on_top(after, r)]:
                after, moved = pop(after, tops[0]), [tops[0], *moved]
            if moved:
                yield _Move("all_gather", tuple(moved), after)
        if knotted := self._knotted(state):
            after = tuple(tuple(r for r in stack if r not in knotted) for stack in state[0])
            yield _Move("all_gather", knotted, (after, state[1]))

    def _knotted(self, state: State) -> tuple[Run, ...]:
        """Return the runs that split and may move, if none is on top: parts of a concatenation that are split in
        opposite orders block each other one by one."""
        runs = tuple(r for r in self.target if self._leaves_of(state, r) and r not in self.fixed)
        return () if any(self._on_top(state, r) for r in runs) else runs

    def _padded_where_they_stand(self, state: State) -> set[Run]:
        """Return the runs that end partial and have only such runs, or runs that never move, below them."""
        kept = {r for r, place in self.target.items() if place == "partial"}
        while True:
            under = [
                {r for r in stack[i:] if r in kept}
                for stack in state[0]
                for i, below in enumerate(stack)
                if below not in kept and below not in self.fixed
            ]
            if not (bad := set[Run]().union(*under)):
                return kept
            kept -= bad

    def _exchanges(self, state: State) -> Iterator[_Move]:
        for run in self.target:
            after, moved = state, list[Run]()
            here = self._leaves_of(state, run)
            while run is not None and self._on_top(after, run) and isinstance(self.target[run], frozenset):
                popped = pop(after, run)
                if not self._fits(popped, run):
                    break
                after = push(popped, run, self.target[run])
                moved.append(run)
                yield _Move("all_to_all", tuple(moved), after)
                below = [r for leaf in here for r in after[0][leaf][-1:]]
                run = next((r for r in below if r not in moved and self._on_top(after, r)), None)
        after, wrong = self._rearranged(state), list[Run]()
        for old, new in zip(state[0], after[0], strict=True):
            same = next(
                (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
            )
            wrong += [*old[same:], *new[same:]]
        if wrong and self._legal(after):
            yield _Move("all_to_all", tuple(r for r in self.target if r in wrong), after)

    def _rearranged(self, state: State) -> State:
        """Every run that is split and ends so at its place, in the order wanted; above them what is padded, then what
        is gathered."""
        split = {r for stack in state[0] for r in stack}
        stacks: list[tuple[Run, ...]] = []
        for old, goal in zip(state[0], self.goal[0], strict=True):
            ends = [[r for r in old if kind_of(self.target[r]) == kind] for kind in ("partial", "replicated")]
            stacks.append((*(r for r in goal if r in split), *ends[0], *ends[1]))
        return tuple(stacks), state[1]

    # ------------------------------------------------------------------------------------------ what is allowed

    def _leaves_of(self, state: State, run: Run) -> frozenset[int]:
        return frozenset(i for i, stack in enumerate(state[0]) if run in stack)

    def _on_top(self, state: State, run: Run) -> bool:
        """The run splits something, can be taken away, and need not stay."""
        here = self._leaves_of(state, run)
        return bool(here) and run not in self.fixed and all(state[0][leaf][-1] == run for leaf in here)

    def _cuts_all(self, state: State, run: Run) -> bool:
        """True if the run splits every part of some dim; padded, a replicated part would be counted once per rank."""
        return any(on_every_path(dim, run[0]) for dim in self._layout(state).dims)

    def _fits(self, state: State, run: Run, partial: bool = False) -> bool:
        """The run's sub-dims hold exactly what the target holds below it, so it can be put there for good."""
        place = self.target[run]
        if not isinstance(place, frozenset) or (run in state[1]) != partial or self._leaves_of(state, run):
            return False
        for leaf in place:
            stack, goal = state[0][leaf], self.goal[0][leaf]
            if stack != goal[: len(stack)] or goal[len(stack)] != run:
                return False
        return self._legal(push(state, run, place))

    def _legal(self, state: State) -> bool:
        """A dim is split in one way of writing it, and has no more blocks than elements."""
        used = {(self.leaf_dim[i], self.leaf_side[i]) for i, stack in enumerate(state[0]) if stack}
        if any((dim, "src") in used and side == "dst" for dim, side in used):
            return False
        leaves_cut = zip(state[0], self.leaf_size, strict=True)
        return all(self.mesh.count(axes_of(stack)) <= size for stack, size in leaves_cut)

    # ------------------------------------------------------------------------------------------------- the price

    def _seconds(self, state: State, move: _Move) -> float:
        if move.kind in LOCAL:
            return 0.0
        axes = axes_of(move.runs)
        before, after = self._size(state), self._size(move.after)
        sent = wire_elements(move.kind, self.mesh.count(axes), before, after)
        return self.prices.seconds(move.kind, self.mesh, axes, sent * self.itemsize)

    def _size(self, state: State) -> int:
        key = state[0]
        if key not in self._sizes:
            self._sizes[key] = largest_size(self._layout(state), self.mesh)
        return self._sizes[key]

    def _layout(self, state: State) -> TensorLayout:
        dims: list[Dim] = []
        leaf = 0
        for trees in self.trees:
            filled: list[Dim] = []
            for tree in trees:
                stacks = iter(state[0][leaf:])
                filled.append(map_leaves(tree, lambda s, stacks=stacks: s.on(axes_of(next(stacks)))))
                leaf += sum(1 for _ in leaves(tree))
            dims.append(next((t for t in filled if dim_axes(t)), filled[0]))
        return TensorLayout(tuple(dims), axes_of(state[1]))

    def _steps(self, came: dict[State, tuple[State, _Move]]) -> tuple[Step, ...]:
        path: list[tuple[State, _Move]] = []
        state = self.goal
        while state in came:
            path.append(came[state])
            state = came[state][0]
        steps: list[Step] = []
        for before, move in reversed(path):
            step = Step(move.kind, axes_of(move.runs), self._layout(before), self._layout(move.after))
            if steps and step.kind in LOCAL and steps[-1].kind == step.kind:
                first = steps.pop()
                step = Step(step.kind, first.axes + step.axes, first.before, step.after)
            steps.append(step)
        if steps:  # the ends are written as the caller wrote them; the bytes are the same
            steps[0] = Step(steps[0].kind, steps[0].axes, self.src, steps[0].after)
            steps[-1] = Step(steps[-1].kind, steps[-1].axes, steps[-1].before, self.dst)
        return tuple(steps)


def _distinct(*groups: list[tuple[Run, ...]]) -> Iterator[tuple[Run, ...]]:
    yield from dict.fromkeys(g for group in groups for g in group if g)
