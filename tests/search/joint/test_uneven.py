"""Stages have whole layers: how much longer the slowest rank computes than the mean of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.core.folding import layer_of
from meshwright.search.pipeline.uneven import Uneven, slowest, split_places
from tests.search.test_memory_of_plans import planner_of


@pytest.mark.parametrize("ranks", (1, 2, 3, 5, 8))
def test_the_slowest_part_is_that_of_the_best_of_all_splits(ranks: int) -> None:
    """Against every way to split a row of operators."""
    draw = np.random.default_rng(ranks)
    for _ in range(5):
        seconds = draw.uniform(0.0, 1.0, 9).round(2)
        splits = itertools.combinations(range(1, 9), ranks - 1)
        best = min(max(p.sum() for p in np.split(seconds, at)) for at in splits)
        assert slowest(np.cumsum(seconds), ranks) == pytest.approx(best * ranks / seconds.sum(), rel=1e-4)


def test_whole_layers_are_counted() -> None:
    """Of 36 equal layers in 32 stages one has two; more stages than layers leave ranks idle."""
    layers = np.cumsum(np.ones(36))
    assert slowest(layers, 32) == pytest.approx(2 * 32 / 36, rel=1e-4)
    assert slowest(layers, 36) == pytest.approx(1.0, rel=1e-4)
    assert slowest(layers, 72) == pytest.approx(2.0, rel=1e-4)


def test_a_model_is_split_between_its_layers_and_not_inside_attention() -> None:
    """It is searched with two of its equal layers, and split with all of them."""
    planner = planner_of("wide gpt", "2", "gpu")
    full = planner.folds.full
    uneven = Uneven(planner.folds, planner.least)
    assert len(full.nodes) > len(planner.context.graph.nodes)
    total = float(planner.least.computing(4).sum())
    assert uneven.least.each(4)[uneven.order].sum() == pytest.approx(total)
    places = split_places(full)
    layers = [layer_of(n.module) for n in full.nodes]
    borders = {
        k for k in range(len(layers) - 1) if layers[k] and layers[k + 1] and layers[k] != layers[k + 1]
    }
    assert len(borders) == 5 and borders <= {*places.tolist()}
    inside = [k for k, n in enumerate(full.nodes) if "scaled_dot_product" in n.op]
    assert inside and not {k - 1 for k in inside} & {*places.tolist()}
