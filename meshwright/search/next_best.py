"""Alternatives of a node and the seconds that they would add, by sums of prices.

A search that simulates steps may choose what sums call dearer: in a step transfers overlap with computation, and what
is made of weights is sent again for each micro-batch, which sums count once. So what sums call cheaper than the choice
is not known to be better, and is not named.
"""

from __future__ import annotations

import numpy as np

from meshwright.search.planner import SearchResult
from meshwright.search.space.build import Space
from meshwright.search.space.codes import NodeCodes

ROUNDED = 1e-9  # of sums of the same prices in another order


def next_best(found: SearchResult) -> dict[str, str]:
    """For each node of the graph the strategy that costs least of those that cost more, with the neighbours as they
    are, and what it would add (for one layer, where several are planned as one)."""
    space, states = found.space, found.states
    problem = space.problem(micro_batches=found.techniques.micro_batches)
    near: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in range(len(problem.unary))}
    for (u, v), matrix in problem.pairs.items():
        near[u].append((v, matrix))
        near[v].append((u, matrix.T))
    alone = {space.variable["parameter", name] for name in space.parameters}
    copies: dict[str, int] = {}
    for node in space.graph.nodes:
        first = space.ties.first(node.name)
        copies[first] = copies.get(first, 0) + space.ties.times(node.name)
    texts: dict[str, str] = {}
    for name, node in space.nodes.items():
        v = space.variable["node", name]
        total = problem.unary[v].copy()
        for u, matrix in near[v]:  # a parameter follows its one reader
            follows = u in alone and len(near[u]) == 1
            total += (matrix + problem.unary[u]).min(axis=1) if follows else matrix[:, states[u]]
        now = total[states[v]]
        total[states[v]] = np.inf
        total[total < now * (1 - ROUNDED)] = np.inf
        if np.isfinite(total).any():
            other = int(np.argmin(total))
            more = max(0.0, total[other] - now)
            texts[name] = (
                f"{_text(node.codes, node.rows[other], space)} at {1e3 * more / copies[name]:+.3g} ms"
            )
    return texts


def _text(codes: NodeCodes, row: np.ndarray, space: Space) -> str:
    words: dict[str, list[str]] = {}
    for axis, number in zip(space.mesh.axes, row, strict=True):
        option = codes.options[number]
        what = option.letter or ("partial" if option.through else "partial gradient" if option.grad else "")
        if what:
            words.setdefault(what, []).append(axis.name)
    return " ".join(f"{what}={space.mesh.show(axes)}" for what, axes in words.items()) or "whole"
