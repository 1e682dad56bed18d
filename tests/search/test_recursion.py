"""The recursion on many small axes: what refining finds, held to the exact optimum of two runs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from meshwright.compile import captured_of
from meshwright.cost.cluster import Cluster
from meshwright.examples import zoo
from meshwright.ops.analysis import factors_of
from meshwright.search.context import SearchContext
from meshwright.search.layer_groups import folded
from meshwright.search.planner import Planner, Request
from meshwright.search.recursion import recursive_programming
from meshwright.search.solve import solve
from meshwright.search.space.families import one_change, runs
from tests.breadth import quick
from tests.search.planned import tower


@functools.cache
def planner(build: Any, nodes: int) -> Planner:
    """A planner on nodes of eight GPUs."""
    captured = captured_of(*build())
    cluster = Cluster.preset("h100", nodes=nodes)
    folds = folded(captured.graph, captured.folding)
    context = SearchContext(folds.graph, factors_of(folds.graph), cluster.place(cluster.mesh))
    return Planner(context, folds, {}, Request(cluster))


def odd_heads() -> Any:
    """GPT-2 with five heads: over powers of two attention has the batch and the sequence to cut."""
    return zoo.hugging_face("gpt2", hidden=640, heads=5, layers=2, batch=4, sequence=2048)


@pytest.mark.parametrize("build", [odd_heads, functools.partial(tower, 512, 3, 4096)], ids=["gpt2", "mlp"])
@pytest.mark.parametrize("nodes", [8, 32])
@quick(lambda build, nodes: build is not odd_heads)
def test_near_the_optimum_of_two_runs(build: Any, nodes: int) -> None:
    here = planner(build, nodes)
    axes = len(here.context.mesh.axes)
    exact = solve(here.space(runs(axes, 2)).problem()).price
    assert recursive_programming(here.space, here.context.mesh).price <= 1.01 * exact


def test_a_change_is_of_one_axis_or_of_all_from_one_on() -> None:
    here = planner(functools.partial(tower, 512, 3, 4096), 4)
    axes, codes = (
        len(here.context.mesh.axes),
        next(c for c in here.codes.values() if c.node.op == "aten.linear.default"),
    )
    now = np.array([1, 1, 0, 0, 1][:axes], dtype=np.int8)
    found = one_change(axes, lambda _: now)(codes, np.array([a.size for a in here.context.mesh.axes]))
    assert any((row == now).all() for row in found)
    for row in found:
        where = np.flatnonzero(row != now)
        tail = len({*row[where[0] :].tolist()}) == 1 if len(where) else True
        assert len(where) <= 1 or tail, row
    assert {len(np.flatnonzero(row != now)) for row in found} == set(range(axes + 1))
