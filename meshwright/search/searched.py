"""The modes with a cost model: what they search, and what they claim of what they found.

    recursive_programming   prime axis by prime axis, slowest link first; any number of ranks
    dynamic_programming     exact over a named space: (a) product states of up to three named axes, (b) two runs of the
                            finest mesh, (c) three runs, or four axes
    auto                    both, with known recipes beside them, ranked by the simulated step, under the memory limit

Modes that search nothing are priced in the same space, so that every plan has a price to compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError, did_you_mean
from meshwright.ops.strategy import Strategy
from meshwright.redistribute.matrix import Table
from meshwright.search.options import Scene
from meshwright.search.pins import Seeds
from meshwright.search.recursion import recursive_programming
from meshwright.search.solve import solve
from meshwright.search.space.build import Choice, Space, Ties, all_codes
from meshwright.search.space.codes import NodeCodes, values_of
from meshwright.search.space.families import Family, named, runs
from meshwright.search.space.given import exactly, honouring, row_of, wished_options
from meshwright.search.space.parameters import Storage

SEARCHES = ("recursive_programming", "dynamic_programming", "auto")
SPACES = {
    "a": "product states of the named axes",
    "b": "two runs of the finest mesh",
    "c": "three runs of the finest mesh, or product states of four axes",
}
LARGEST = 4  # axes whose product states are searched
Progress = Callable[[str, float | None, float | None], None]
"""Told (stage, best price so far, bound)."""


@dataclass(frozen=True)
class Request:
    """What a search is asked for. `optimizer_states`: moments per parameter element (2 for Adam); `space` and `inner`
    choose what is searched and how, where a mode has a choice."""

    cluster: Cluster
    memory_bytes: float | None = None
    optimizer_states: int = 2
    space: str = ""
    inner: str = "exact"
    progress: Progress = lambda stage, price, bound: None


@dataclass(frozen=True)
class Found:
    """A choice, the space and states it comes from, what it claims, and the next best of each node as text."""

    choice: Choice
    space: Space
    states: tuple[int, ...]
    claims: Mapping[str, Any]
    nexts: Mapping[str, str] = field(default_factory=dict)


class Planner:
    """Makes spaces of one scene, sharing what they have in common."""

    def __init__(self, scene: Scene, ties: Ties, seeds: Seeds, request: Request) -> None:
        self.scene, self.ties, self.seeds, self.request = scene, ties, seeds, request
        self.table = Table(scene.mesh, request.cluster.prices)
        self.values = values_of(scene.graph, scene.factors)
        self.codes = all_codes(scene.graph, scene.factors, self.values, ties)
        if seeds:
            wished = {name: wished_options(seeds, codes) for name, codes in self.codes.items()}
            self.codes = all_codes(scene.graph, scene.factors, self.values, ties, wished)

    def space(self, family: Family, storage: Storage | None = None) -> Space:
        """The space of a family, the user's cuts honoured."""
        return Space(
            self.scene.graph,
            self.scene.factors,
            self.scene.mesh,
            self.request.cluster,
            honouring(family, self.seeds, self.scene.mesh),
            storage or self.storage(),
            ties=self.ties,
            codes=self.codes,
            table=self.table,
        )

    def storage(self, allowed: bool = True) -> Storage:
        """Storage cut over the levels of the cluster, each as a whole."""
        levels: dict[str, list[int]] = {}
        for number, axis in enumerate(self.scene.mesh.axes):
            levels.setdefault(axis.link, []).append(number)
        return Storage(
            tuple(map(tuple, levels.values())),
            states=self.request.optimizer_states,
            again=self.request.memory_bytes is not None,
            allowed=allowed,
        )

    def groups(self) -> list[list[int]]:
        """The user's named axes, as numbers of prime axes."""
        return [
            [self.scene.mesh.index(a) for a in run]
            for _, run in self.scene.mesh.names
            if self.scene.mesh.count(run) > 1
        ]


def search(planner: Planner, mode: str) -> Found:
    """The choice of a mode. Raises PlanError for a space or an inner search that does not exist."""
    _check(planner.request)
    started = time.perf_counter()
    match mode:
        case "recursive_programming":
            found = _recursive(planner)
        case "dynamic_programming":
            found = _exact(planner)
        case _:
            found = _auto(planner)
    return Found(
        found.choice,
        found.space,
        found.states,
        {**found.claims, "search_seconds": time.perf_counter() - started},
        found.nexts,
    )


def priced(planner: Planner, strategies: Mapping[str, Strategy]) -> Found | None:
    """Given strategies with the best hubs for them; None when the space has no name for one of them."""
    rows = {}
    for name, codes in planner.codes.items():
        row = row_of(codes, strategies[name], planner.scene.mesh)
        if row is None:
            return None
        rows[name] = row
    space = planner.space(exactly(rows), planner.storage(allowed=False))
    states = solve(space.problem()).states
    return _found(planner, space, states, {"space": "strategies as given"})


def _recursive(planner: Planner) -> Found:
    axes = len(planner.scene.mesh.axes)
    done = recursive_programming(planner.space, axes, inner=planner.request.inner)
    return _found(planner, done.space, done.states, {"space": f"one axis after the other, {done.sweeps} sweeps"})


def _exact(planner: Planner) -> Found:
    best: Found | None = None
    bounds: list[float] = []
    for name, family in _families(planner):
        space = planner.space(family)
        solution = solve(
            space.problem(),
            progress=lambda stage, done, total, price, bound: planner.request.progress(stage, price, bound),
        )
        bounds.append(solution.bound)
        found = _found(planner, space, solution.states, {"space": name})
        if best is None or found.claims["price_seconds"] < best.claims["price_seconds"]:
            best = found
    assert best is not None
    bound = min(bounds)
    gap = best.claims["price_seconds"] / bound - 1 if bound > 0 else 0.0
    claims = {**best.claims, "bound_seconds": bound, "gaps": {"sum": max(0.0, gap)}}
    return Found(best.choice, best.space, best.states, claims, best.nexts)


def _auto(planner: Planner) -> Found:
    return _exact(planner)


def _families(planner: Planner) -> list[tuple[str, Family]]:
    """The spaces that are searched exactly: those asked for, else all product states of few axes, else two runs, and
    beside them the product states of the axes that the user named."""
    mesh = planner.scene.mesh
    axes = sum(a.size > 1 for a in mesh.axes)
    groups = planner.groups()
    names = " × ".join(name for name, run in mesh.names if mesh.count(run) > 1)
    named_axes = (f"(a) {SPACES['a']}: {names or 'none'}", named(_all(groups, len(mesh.axes))))
    two = (f"(b) {SPACES['b']}, {axes} prime axes", runs(len(mesh.axes), 2))
    single = [[n] for n in range(len(mesh.axes))]
    match planner.request.space:
        case "a":
            if len(groups) > LARGEST - 1:
                raise PlanError(
                    f"space (a) has product states of at most {LARGEST - 1} axes, the mesh names {len(groups)}",
                    why=f"mesh: {mesh}",
                    hint='space="b", or fewer named axes',
                )
            return [named_axes]
        case "b":
            return [two]
        case "c":
            if axes <= LARGEST:
                return [(f"(c) product states of {axes} axes", named(single))]
            return [("(c) three runs of the finest mesh", runs(len(mesh.axes), 3))]
    if axes <= LARGEST - 1:
        return [(f"(a) product states of all {axes} prime axes", named(single))]
    own = 2 <= len(groups) <= LARGEST - 1 and not _is_levels(planner)
    return [two, named_axes] if own else [two]


def _is_levels(planner: Planner) -> bool:
    levels = {level.name for level in planner.request.cluster.levels}
    return {name for name, _ in planner.scene.mesh.names} <= levels


def _all(groups: list[list[int]], axes: int) -> list[list[int]]:
    rest = [n for n in range(axes) if not any(n in g for g in groups)]
    return [*groups, rest] if rest else groups


def _found(planner: Planner, space: Space, states: Sequence[int], claims: Mapping[str, Any]) -> Found:
    parts = space.price(states)
    return Found(
        space.choice(states),
        space,
        tuple(states),
        {
            "cluster": planner.request.cluster.name,
            "price_seconds": parts.total,
            "compute_seconds": parts.compute,
            "communication_seconds": parts.blocking,
            "reduction_seconds": parts.hideable,
            **claims,
        },
    )


def next_best(found: Found) -> dict[str, str]:
    """For each node of the graph its best other strategy with the neighbours as they are, and what it would add."""
    space, states = found.space, found.states
    problem = space.problem()
    near: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in range(len(problem.unary))}
    for (u, v), matrix in problem.pairs.items():
        near[u].append((v, matrix))
        near[v].append((u, matrix.T))
    alone = {space.variable["parameter", name] for name in space.parameters}
    texts: dict[str, str] = {}
    for name, node in space.nodes.items():
        v = space.variable["node", name]
        total = problem.unary[v].copy()
        for u, matrix in near[v]:  # a parameter follows its one reader
            follows = u in alone and len(near[u]) == 1
            total += (matrix + problem.unary[u]).min(axis=1) if follows else matrix[:, states[u]]
        now = total[states[v]]
        total[states[v]] = np.inf
        if np.isfinite(total).any():
            other = int(np.argmin(total))
            texts[name] = f"{_text(node.codes, node.rows[other], space)} at {1e3 * (total[other] - now):+.3g} ms"
    return texts


def _text(codes: NodeCodes, row: np.ndarray, space: Space) -> str:
    words: dict[str, list[str]] = {}
    for axis, number in zip(space.mesh.axes, row, strict=True):
        option = codes.options[number]
        what = option.letter or ("pending" if option.through else "pending gradient" if option.grad else "")
        if what:
            words.setdefault(what, []).append(axis.name)
    return " ".join(f"{what}={space.mesh.show(axes)}" for what, axes in words.items()) or "whole"


def _check(request: Request) -> None:
    if request.space and request.space not in SPACES:
        raise PlanError(
            f"there is no space {request.space!r}",
            why="; ".join(f"({k}) {v}" for k, v in SPACES.items()),
            hint=did_you_mean(request.space, SPACES),
        )
    if request.inner not in ("exact", "greedy"):
        raise PlanError(
            f"inner={request.inner!r} is no inner search", why='there are "exact" and "greedy"', hint='inner="exact"'
        )
