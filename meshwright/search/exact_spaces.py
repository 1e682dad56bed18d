"""The spaces that are searched exactly: of a few named axes, of runs of the finest mesh, and of fewer ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.errors import PlanError, did_you_mean
from meshwright.search.budget import SPACE
from meshwright.search.planner import Planner, Request
from meshwright.search.space.families import Family, named, resting, runs

SPACES = {
    "a": "product states of the named axes",
    "b": "two runs of the finest mesh",
    "c": "three runs of the finest mesh, or product states of four axes",
}


def families_of(planner: Planner) -> list[tuple[str, Family]]:
    """The spaces that are searched exactly: those asked for, else all product states of few axes, else two runs, and
    beside them the product states of the axes that the user named."""
    mesh = planner.context.mesh
    axes = sum(a.size > 1 for a in mesh.axes)
    groups = planner.groups()
    names = " × ".join(name for name, run in mesh.names if mesh.count(run) > 1)
    named_axes = (f"(a) {SPACES['a']}: {names or 'none'}", named(_all(groups, len(mesh.axes))))
    two = two_runs(planner)
    single = [[n] for n in range(len(mesh.axes))]
    match planner.request.space:
        case "a":
            if len(groups) > (most := SPACE.product_axes - 1):
                raise PlanError(
                    f"space (a) has product states of at most {most} axes, the mesh names {len(groups)}",
                    why=f"mesh: {mesh}",
                    hint='space="b", or fewer named axes',
                )
            return [named_axes]
        case "b":
            return [two]
        case "c":
            if axes <= SPACE.product_axes:
                return [(f"(c) product states of {axes} axes", named(single))]
            return [("(c) three runs of the finest mesh", runs(len(mesh.axes), 3))]
    if axes <= SPACE.product_axes - 1:
        return [(f"(a) product states of all {axes} prime axes", named(single))]
    own = 2 <= len(groups) <= SPACE.product_axes - 1 and not _is_levels(planner)
    return [two, named_axes] if own else [two]


def resting_families(planner: Planner) -> Iterator[tuple[int, str, Family]]:
    """The exact spaces of fewer ranks, the most first: with more and more of the outermost axes idle."""
    axes = planner.context.mesh.axes
    used = [n for n, a in enumerate(axes) if a.size > 1]
    for idle in range(1, len(used) + 1):
        working = used[idle:]
        rest = working[0] if working else len(axes)
        ranks = math.prod(axes[n].size for n in working)
        family = runs(len(axes), 2)
        if len(working) < SPACE.product_axes:  # what is idle has no option of its own, and goes with any
            others = [[n] for n in working[1:]]
            family = named([[n for n in range(len(axes)) if n not in working[1:]], *others])
        yield rest, f"{ranks} rank{'s' * (ranks > 1)}, repeated", resting(family, rest)


def two_runs(planner: Planner) -> tuple[str, Family]:
    """Space (b)."""
    axes = planner.context.mesh.axes
    return f"(b) {SPACES['b']}, {sum(a.size > 1 for a in axes)} prime axes", runs(len(axes), 2)


def _is_levels(planner: Planner) -> bool:
    levels = {level.name for level in planner.request.cluster.levels}
    return {name for name, _ in planner.context.mesh.names} <= levels


def _all(groups: list[list[int]], axes: int) -> list[list[int]]:
    rest = [n for n in range(axes) if not any(n in g for g in groups)]
    return [*groups, rest] if rest else groups


def check_request(request: Request) -> None:
    """Raise PlanError for a space or an inner search that does not exist."""
    if request.space and request.space not in SPACES:
        raise PlanError(
            f"there is no space {request.space!r}",
            why="; ".join(f"({k}) {v}" for k, v in SPACES.items()),
            hint=did_you_mean(str(request.space), SPACES),
        )
    if request.inner not in ("exact", "greedy"):
        raise PlanError(
            f"inner={request.inner!r} is not an inner search",
            why='there are "exact" and "greedy"',
            hint='inner="exact"',
        )
