"""Random problems of the shapes that models have: chains, trees, cycles, joins, an input that all share."""

from __future__ import annotations

import numpy as np

from meshwright.search.solve import Memory, Problem
from tests.search.builder import Builder

SHAPES = ("chain", "tree", "cycle", "joins", "shared", "random", "loose")


def edges_of(shape: str, n: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    chain = [(i, i + 1) for i in range(n - 1)]
    match shape:
        case "chain":
            return chain
        case "tree":
            return [(int(rng.integers(i)), i) for i in range(1, n)]
        case "cycle":
            return [*chain, (n - 1, 0)] if n > 2 else chain
        case "joins":  # residual branches: around one or two nodes of the chain
            return chain + [(i, i + 2 + int(rng.integers(2))) for i in range(0, n - 3, 2)]
        case "shared":  # one input that every node reads
            return chain + [(i, 0) for i in range(2, n)]
        case "random":
            return [(i, j) for i in range(n) for j in range(i) if rng.random() < 0.5]
    return [e for e in chain if rng.random() < 0.5]


def draw(seed: int, most: int = 7, states: int = 5) -> Problem:
    """A problem with up to `most` variables of up to `states` states; every third has entries that are not allowed,
    every third has small whole prices, so that many choices tie."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, most + 1))
    sizes = rng.integers(1, states + 1, n)

    def prices(*shape: int) -> np.ndarray:
        block = rng.integers(-2, 4, shape).astype(float) if seed % 3 == 0 else rng.normal(0, 3, shape)
        if seed % 3 == 1:
            block[rng.random(shape) < 0.25] = np.inf
        return block

    builder = Builder()
    for k in sizes:
        builder.add_variable(prices(int(k)))
    for u, v in edges_of(SHAPES[seed % len(SHAPES)], n, rng):
        builder.add_pair(u, v, prices(int(sizes[u]), int(sizes[v])))
    return builder.problem()


def draw_memory(seed: int, problem: Problem) -> Memory:
    """Bytes for the states of a problem at one to four instants, some of them at pairs."""
    rng = np.random.default_rng([seed, 1])
    instants = int(rng.integers(1, 5))
    amounts = tuple(np.round(rng.random((k, instants)) * 10, 3) for k in problem.sizes)
    pairs = {
        (u, v): np.round(rng.random((instants, *m.shape)) * 3, 3)
        for (u, v), m in problem.pairs.items()
        if rng.random() < 0.3
    }
    return Memory(amounts, pairs)
