"""Runs of axes that move together, and the states of a search over where each run is: on which leaves, or partial."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.core.mesh import Mesh

Run = tuple[str, ...]  # prime axes that move together
# Runs on each leaf (major first), and the partial runs.
State = tuple[tuple[tuple[Run, ...], ...], frozenset[Run]]


def state_of(stacks: list[Run], partial: Iterable[str], runs: Iterable[Run]) -> State:
    """The state in which axes split the leaves of `stacks`, or are partial; each axis belongs to a run."""
    by_axis = {axis: run for run in runs for axis in run}
    merged = tuple(tuple(dict.fromkeys(by_axis[a] for a in stack)) for stack in stacks)
    return merged, frozenset(by_axis[a] for a in partial)


def place_of(state: State, run: Run) -> frozenset[int] | str:
    """The leaves a run splits, or "partial", or "replicated"."""
    if run in state[1]:
        return "partial"
    return frozenset(i for i, stack in enumerate(state[0]) if run in stack) or "replicated"


def kind_of(place: frozenset[int] | str) -> str:
    """A place in a word: "partial", "replicated" or "split"."""
    return place if isinstance(place, str) else "split"


def push(state: State, run: Run, place: frozenset[int] | str) -> State:
    """The state with a run put on top of the stacks of some leaves."""
    assert isinstance(place, frozenset)
    return tuple((*s, run) if i in place else s for i, s in enumerate(state[0])), state[1]


def pop(state: State, run: Run) -> State:
    """The state with a run taken from the top of all stacks."""
    return tuple(s[:-1] if s and s[-1] == run else s for s in state[0]), state[1]


def axes_of(runs: Iterable[Run]) -> Run:
    """The axes of runs, in order."""
    return tuple(a for run in runs for a in run)


def merged_runs(mesh: Mesh, start: list[Run], goal: list[Run], partial: Run, partial_goal: Run) -> list[Run]:
    """Group axes into runs: axes with the same places at both ends that are neighbours wherever they split."""
    stacks = [*start, *goal]
    by_place: dict[tuple[tuple[bool, ...], bool, bool], list[str]] = {}
    used = {a for stack in stacks for a in stack} | set(partial) | set(partial_goal)
    for axis in mesh.sort(used):
        key = (tuple(axis in s for s in stacks), axis in partial, axis in partial_goal)
        by_place.setdefault(key, []).append(axis)
    runs: list[Run] = []
    for (inside, *_), axes in by_place.items():
        homes = [s for s, here in zip(stacks, inside, strict=True) if here]
        axes.sort(key=lambda a, homes=homes: homes[0].index(a) if homes else 0)
        run = (axes[0],)
        for axis in axes[1:]:
            if all(s.index(axis) == s.index(run[-1]) + 1 for s in homes):
                run += (axis,)
            else:
                runs.append(run)
                run = (axis,)
        runs.append(run)
    return runs
