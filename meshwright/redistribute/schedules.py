"""The schedules of a redistribution: a few fixed phases, each one collective merged over all its axes.

A pair is *regular* when both layouts can be written over the same sub-dims. Then each axis has a place at either end
(some sub-dims, replicated, partial), and the step follows from the two places alone:

====================  ================================================================================================
``slice``             replicated → split (free, and everything after it is smaller)
``reduce_scatter``    partial → split
``all_reduce``        partial → replicated
``all_to_all``        split → split elsewhere, and whatever stands in the wrong order: below an axis that goes, or in
                      another order than wanted. What is gathered next comes to the top
``all_gather``        split → replicated
``pad``, ``mask``     split → partial, replicated → partial (free)
====================  ================================================================================================

The order is a choice of three, made for the pair at once. `_sending_least`: as in the table, whatever disorder that
makes. `_waiting_least`: nothing is put where it cannot stay, and what can be padded or gathered at once is, so that
the all-to-all is over few axes. `_without_exchange`: what it would move is gathered and sliced. In each, partial →
split goes by a reduce-scatter, or with the all-reduce and a free slice. The cheapest of the six by price is taken.
`matrix` says the same in numpy for many pairs; decision 0006 in `docs/explanation` says why, and
what is lost against a search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from meshwright.core.layout import Cat, Dim, Item, TensorLayout, dim_axes, leaves, map_leaves, normalize_dim
from meshwright.core.mesh import Mesh
from meshwright.redistribute.prices import Prices, total_seconds
from meshwright.redistribute.refine import common_refinement, same_tree
from meshwright.redistribute.steps import LOCAL, Step

Stack = tuple[str, ...]  # the axes that split one leaf (sub-dim), major first


def route(
    src: TensorLayout, dst: TensorLayout, mesh: Mesh, itemsize: int, prices: Prices
) -> tuple[Step, ...] | None:
    """The cheapest schedule from the forward half of `src` to that of `dst`; None where the pair is not regular, or
    where the price table has not the collectives for any of its schedules.
    """
    pair = Pair.of(src, dst, mesh)
    if pair is None:
        return None
    found: list[tuple[Step, ...]] = []
    for schedule, scatter in itertools.product(SCHEDULES, (True, False)):
        walk = schedule(pair, scatter and not pair.partial.isdisjoint(pair.split_goal))
        if walk is not None and (steps := walk.steps(src, dst)) not in found:
            found.append(steps)
    seconds = [total_seconds(steps, mesh, itemsize, prices) for steps in found]
    best = min(range(len(found)), key=seconds.__getitem__)
    return found[best] if math.isfinite(seconds[best]) else None


# ------------------------------------------------------------------------------------------------ a regular pair


@dataclass(frozen=True)
class Pair:
    """Two layouts over the same leaves: the axes on each leaf, and the partial ones, at the start and at the goal. Axes
    of size 1 are left out.
    """

    mesh: Mesh
    trees: tuple[Dim, ...]
    sizes: tuple[int, ...]
    start: tuple[Stack, ...]
    goal: tuple[Stack, ...]
    partial: frozenset[str]
    partial_goal: frozenset[str]

    @staticmethod
    def of(src: TensorLayout, dst: TensorLayout, mesh: Mesh) -> Pair | None:
        """Pair two layouts; None if a dim has no common sub-dims, or an axis splits only some parts of a
        concatenation."""
        trees: list[Dim] = []
        start: list[Stack] = []
        goal: list[Stack] = []
        for old, new in zip(src.dims, dst.dims, strict=True):
            ends = live(old, mesh), live(new, mesh)
            if not same_tree(*ends):
                refined = common_refinement(normalize_dim(ends[0], mesh), normalize_dim(ends[1], mesh), mesh)
                if refined is None:
                    return None
                ends = refined
            if not all(on_every_path(d, a) for d in ends for a in dim_axes(d)):
                return None
            trees.append(ends[0])
            start += [s.axes for s in leaves(ends[0])]
            goal += [s.axes for s in leaves(ends[1])]
        sizes = tuple(s.size for tree in trees for s in leaves(tree))
        partial = [frozenset(a for a in layout.partial if mesh.sizes[a] > 1) for layout in (src, dst)]
        return Pair(mesh, tuple(trees), sizes, tuple(start), tuple(goal), *partial)

    @property
    def split(self) -> frozenset[str]:
        """The axes that split a leaf at the start."""
        return frozenset(a for stack in self.start for a in stack)

    @property
    def split_goal(self) -> frozenset[str]:
        """The axes that split a leaf at the goal."""
        return frozenset(a for stack in self.goal for a in stack)

    @property
    def padded(self) -> frozenset[str]:
        """Axes that are split and end partial."""
        return self.split & self.partial_goal

    @property
    def gathered(self) -> frozenset[str]:
        """Axes that are split and end whole."""
        return self.split - self.split_goal - self.partial_goal

    def layout(self, stacks: Iterable[Iterable[str]], partial: Iterable[str]) -> TensorLayout:
        """The tensor with these axes on its leaves."""
        axes = iter(stacks)
        filled = (map_leaves(tree, lambda s: s.on(next(axes))) for tree in self.trees)
        return TensorLayout(tuple(filled), tuple(partial))


def live(dim: Dim, mesh: Mesh) -> Dim:
    """Without axes of size 1, which split nothing."""
    return map_leaves(dim, lambda s: s.on(a for a in s.axes if mesh.sizes[a] > 1))


def on_every_path(dim: Dim, axis: str) -> bool:
    """True if the axis splits the dim, in every part of a concatenation that it splits at all."""

    def cuts(item: Item) -> bool:
        if isinstance(item, Cat):
            return all(on_every_path(p, axis) for p in item.parts)
        return axis in item.axes

    return any(map(cuts, dim))


# ------------------------------------------------------------------------------------------------- the schedules


class _Walk:
    """The schedule so far: the axes on each leaf, the partial axes, and each move with the layouts before and after."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.stacks = pair.start
        self.partial = pair.partial
        self.moves: list[tuple[str, Stack, TensorLayout, TensorLayout]] = []
        self.legal = True

    def go(
        self, kind: str, axes: Iterable[str], stacks: tuple[Stack, ...], partial: frozenset[str] | None = None
    ) -> None:
        """One merged move over `axes`; none where there are none."""
        if not (run := tuple(dict.fromkeys(axes))):
            return
        before = self.pair.layout(self.stacks, self.partial)
        self.stacks, self.partial = stacks, self.partial if partial is None else partial
        self.moves.append((kind, run, before, self.pair.layout(self.stacks, self.partial)))
        blocks = map(self.pair.mesh.count, stacks)
        self.legal &= all(n <= size for n, size in zip(blocks, self.pair.sizes, strict=True))

    def push(self, kind: str, axes: Container[str]) -> None:
        """Put axes on the leaves where the goal has them, as the minor ones, in the goal's order."""
        added = [tuple(a for a in stack if a in axes) for stack in self.pair.goal]
        stacks = tuple(old + new for old, new in zip(self.stacks, added, strict=True))
        moved = [a for stack in added for a in stack]
        self.go(kind, moved, stacks, self.partial.difference(moved))

    def take(self, kind: str, axes: Container[str]) -> None:
        """Remove axes from the leaves: they become replicated, or partial by a pad."""
        stacks = tuple(tuple(a for a in stack if a not in axes) for stack in self.stacks)
        moved = [a for stack in self.stacks for a in stack if a in axes]
        self.go(kind, moved, stacks, self.partial.union(moved) if kind == "pad" else self.partial)

    def reduce(self, axes: frozenset[str]) -> None:
        """One all-reduce."""
        self.go("all_reduce", self.pair.mesh.sort(axes), self.stacks, self.partial - axes)

    def mask(self) -> None:
        """Mask the axes that are replicated and have to become partial."""
        missing = self.pair.partial_goal - self.partial
        self.go("mask", self.pair.mesh.sort(missing), self.stacks, self.partial | missing)

    def exchange(self) -> None:
        """One all-to-all: on each leaf what belongs there in the goal's order, what is padded, what is gathered."""
        pair, here = self.pair, _on(self.stacks)
        ready = tuple(
            (*_only(goal, here), *_only(now, pair.padded), *_only(now, pair.gathered))
            for now, goal in zip(self.stacks, pair.goal, strict=True)
        )
        differ = {a for now, then in zip(self.stacks, ready, strict=True) for a in _beyond_common(now, then)}
        self.go("all_to_all", pair.mesh.sort(differ), ready)

    def tops(self, axes: Container[str]) -> set[str]:
        """Those of `axes` that can be taken away: above each stand only others of them, on every leaf that it cuts."""
        free, stacks = set[str](), [list(s) for s in self.stacks]
        while True:
            under = {a for stack in stacks for a in stack[:-1]}
            tops = {stack[-1] for stack in stacks if stack and stack[-1] in axes} - under
            if not tops:
                return free
            free |= tops
            stacks = [[a for a in stack if a not in tops] for stack in stacks]

    def fitting(self, axes: Iterable[str]) -> set[str]:
        """Those of `axes` that can be put where they belong for good: all that is wanted below them is there."""
        stacks, goal = [list(s) for s in self.stacks], self.pair.goal
        todo = {a: [k for k, stack in enumerate(goal) if a in stack] for a in axes}
        placed: set[str] = set()
        while True:
            fits = [
                a
                for a, here in todo.items()
                if a not in placed
                and all([*stacks[k], a] == list(goal[k][: len(stacks[k]) + 1]) for k in here)
            ]
            if not fits:
                return placed
            placed.add(fits[0])
            for k in todo[fits[0]]:
                stacks[k].append(fits[0])

    def steps(self, src: TensorLayout, dst: TensorLayout) -> tuple[Step, ...]:
        """The moves as steps. The ends are written as the caller wrote them; the bytes are the same."""
        steps: list[Step] = []
        for kind, axes, before, after in self.moves:
            if steps and kind in LOCAL and steps[-1].kind == kind:
                axes, before = steps[-1].axes + axes, steps.pop().before
            steps.append(Step(kind, axes, before, after))
        if steps:
            steps[0] = Step(steps[0].kind, steps[0].axes, src.forward, steps[0].after)
            steps[-1] = Step(steps[-1].kind, steps[-1].axes, steps[-1].before, dst.forward)
        return tuple(steps)


def _sending_least(pair: Pair, scatter: bool) -> _Walk | None:
    """Slices and reductions first, as minor axes wherever they land; one all-to-all puts right what is wrong.

    None where that makes more blocks than elements.
    """
    walk, summed = _Walk(pair), pair.partial - pair.partial_goal
    arrive = pair.split_goal & summed
    walk.push("slice", pair.split_goal - pair.split - pair.partial)
    if scatter:
        walk.push("reduce_scatter", arrive)
        walk.reduce(summed - arrive)
    else:
        walk.reduce(summed)
        walk.push("slice", arrive)
    walk.exchange()
    walk.take("all_gather", pair.gathered)
    walk.take("pad", pair.padded)
    walk.mask()
    return walk if walk.legal else None


def _waiting_least(pair: Pair, scatter: bool) -> _Walk | None:
    """Slices and reductions only where they are there for good, pads and gathers of what stands on top, and an
    all-to-all over what is left.

    None where an axis that comes late belongs below one that is there.
    """
    walk = _settled(pair, scatter)
    walk.take("pad", walk.tops(pair.padded))
    walk.take("all_gather", walk.tops(pair.gathered))
    walk.take("pad", walk.tops(pair.padded))
    walk.exchange()
    walk.take("all_gather", pair.gathered)
    walk.take("pad", pair.padded)
    walk.mask()
    walk.push("slice", pair.split_goal - _on(walk.stacks))
    return walk if walk.legal and walk.stacks == pair.goal else None


def _without_exchange(pair: Pair, scatter: bool) -> _Walk:
    """Slice and scatter only into final positions. Whatever stands in the wrong place, or above such an
    axis, is gathered; what is then replicated is sliced.
    """
    walk = _settled(pair, scatter)
    walk.take("all_gather", _in_the_way(walk))
    walk.take("pad", pair.padded & _on(walk.stacks))
    walk.mask()
    walk.push("slice", pair.split_goal - _on(walk.stacks))
    return walk


SCHEDULES = (_sending_least, _waiting_least, _without_exchange)


def _settled(pair: Pair, scatter: bool) -> _Walk:
    """All sums taken, and all put in its place that can be there for good."""
    walk, summed = _Walk(pair), pair.partial - pair.partial_goal
    arrive = pair.split_goal - pair.split
    walk.push("slice", walk.fitting(arrive - pair.partial))
    if scatter:
        walk.push("reduce_scatter", walk.fitting(arrive & summed))
        walk.push("slice", walk.fitting(arrive - pair.partial - _on(walk.stacks)))
    walk.reduce(walk.partial & summed)
    walk.push("slice", walk.fitting(arrive - _on(walk.stacks)))
    return walk


def _in_the_way(walk: _Walk) -> set[str]:
    """Axes to gather: on each leaf all above what stays and above what is padded where it stands."""
    pair = walk.pair
    stay: set[str] = set(_on(walk.stacks))
    while True:
        gone: set[str] = set()
        for now, goal in zip(walk.stacks, pair.goal, strict=True):
            solid = 0
            while solid < min(len(now), len(goal)) and now[solid] == goal[solid] and now[solid] in stay:
                solid += 1
            while solid < len(now) and now[solid] in pair.partial_goal and now[solid] in stay:
                solid += 1
            gone |= set(now[solid:]) & stay
        if not gone:
            return _on(walk.stacks) - stay
        stay -= gone


def _on(stacks: Iterable[Stack]) -> set[str]:
    return {a for stack in stacks for a in stack}


def _only(stack: Stack, axes: Container[str]) -> Stack:
    return tuple(a for a in stack if a in axes)


def _beyond_common(left: Stack, right: Stack) -> Stack:
    """The axes of both stacks above the part in which they agree."""
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return left[same:] + right[same:]


__all__ = ["Pair", "route"]
