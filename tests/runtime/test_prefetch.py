"""Weights that are gathered no layer, one or several layers ahead: equal numbers, in more or less memory and time."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import meshwright as mw
from bench.memory import peak_bytes
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, plan_captured, values_of
from meshwright.core.graph import START, WAIT
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.examples import mlp
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep
from tests.breadth import quick

AHEAD = (0, 1, 2, 3)
LAYERS, WIDTH = 8, 256


@functools.cache
def wide() -> Any:
    """Weights are large beside activations."""
    return mlp.build(batch=8, hidden=WIDTH, depth=LAYERS)


def sharded(ahead: int) -> tuple[Any, Any]:
    model, batch, loss = wide()
    captured = captured_of(model, batch, loss)
    asked = techniques_from({"optimizer_parallel": 3, "threshold_kb": 0, "prefetch": ahead})
    return captured, plan_captured(captured, Mesh.of(dp=4), "data_parallel", None, techniques=asked)


@pytest.mark.parametrize("more", [{}, {"micro_batches": 2}, {"pipeline": 2, "micro_batches": 4}])
@pytest.mark.parametrize("ahead", [0, 2])
@quick(lambda ahead, more: ahead == 2 or not more)
def test_numbers_are_those_of_one_device(ahead: int, more: dict[str, int]) -> None:
    model, batch, loss = mlp.build(batch=16, hidden=12, depth=4)
    report = mw.verify(
        model,
        batch,
        loss=loss,
        mesh={"dp": 2},
        optimizer_parallel=3,
        threshold_kb=0,
        prefetch=ahead,
        **more,
    )
    assert report.ok, report


def test_each_layer_ahead_is_there_in_full() -> None:
    """A layer has two matrices, of which a rank's own quarter is there in any case."""
    peaks = []
    for ahead in AHEAD:
        captured, plan = sharded(ahead)
        rank = Rank(Counter(plan.mesh, 1), torch.device("cpu"))
        step = LocalStep(lower(captured, plan), rank, values_of(wide()[0], captured), None)
        batch = dict(leaves(wide()[1]))
        peaks.append(peak_bytes(lambda step=step, batch=batch: lambda: step.gradients(batch), steps=1))
    layer = 2 * 4 * WIDTH * 4 * WIDTH
    steps = [more - less for less, more in itertools.pairwise(peaks)]
    assert steps[0] > layer / 4 and all(0.75 * layer < more <= layer for more in steps[1:]), (peaks, layer)


def test_weights_start_before_as_many_layers() -> None:
    """Between a start and its first wait lie the first waits of as many other starts."""
    for ahead in AHEAD:
        captured, plan = sharded(ahead)
        nodes = lower(captured, plan).local(0).nodes
        open_, most = list[str](), 0
        for node in nodes:
            if node.op == START:
                open_.append(node.name)
            elif node.op == WAIT and node.uses[0] in open_:
                open_.remove(node.uses[0])
                most = max(most, len(open_))
        assert most == max(0, ahead - 1)


def test_prefetch_hides_a_slow_link_and_is_in_vain_without_sharded_weights() -> None:
    model, batch, loss = wide()
    cluster = mw.Cluster.preset("h100", nodes=4, ranks_per_node=1)
    asked = {"loss": loss, "cluster": cluster, "optimizer_parallel": 3, "threshold_kb": 0}
    seconds = [
        mw.plan(model, batch, mode="data_parallel", prefetch=ahead, **asked).claims["step_seconds"]
        for ahead in AHEAD
    ]
    assert seconds[0] > seconds[1] >= seconds[2] >= seconds[3]
    replicated = mw.plan(model, batch, loss=loss, mesh={"dp": 2}, prefetch=2)
    assert any("prefetch=2 changes nothing" in note for note in replicated.notes)
