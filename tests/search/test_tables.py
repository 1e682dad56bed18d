"""Tables that `auto` puts on the host: only where nothing fits otherwise, no more than it takes, within its memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.core.techniques import Techniques
from meshwright.errors import PlanError
from meshwright.examples import gpt, recommender
from meshwright.search.evaluate import Evaluator
from meshwright.search.host_tables import tables_of, with_tables
from meshwright.search.layer_groups import folded
from meshwright.search.planner import Request
from tests.breadth import first

H100 = mw.Cluster.preset("h100", ranks_per_node=2)
LARGEST, NEXT = "deep_tables.2.weight", "deep_tables.0.weight"


@functools.cache
def built():
    return recommender.build(rows=(2000, 40, 3000, 50))


def planned(memory, cluster=H100, mode="auto", alone=True):
    """`alone`: without the techniques that might make it fit, too."""
    model, batch, loss = built()
    fixed = {"recompute": "", "micro_batches": 1, "offload": ()} if alone else {}
    return mw.plan(model, batch, loss=loss, cluster=cluster, mode=mode, memory=memory, **fixed)


@functools.cache
def not_alone(memory):
    """The plan with all techniques, and what its search asked to simulate."""
    asked, evaluated = [], Evaluator.__call__

    def evaluator(self, choice, **how):
        asked.append((self.techniques, self.hosts, choice, how))
        return evaluated(self, choice, **how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Evaluator, "__call__", evaluator)
        return planned(memory, alone=False), asked


def hosted(plan):
    """The tables that embeddings on the host read."""
    model, batch, loss = built()
    tables = tables_of(captured_of(model, batch, loss).graph)
    assert plan.hosts == frozenset().union(*(t.nodes for t in tables if t.nodes <= plan.hosts))
    return [t.target for t in tables if t.nodes <= plan.hosts]


def test_tables_are_the_parameters_that_only_embeddings_read_the_largest_first():
    model, batch, loss = built()
    found = tables_of(captured_of(model, batch, loss).graph)
    assert [t.target for t in found[:2]] == [LARGEST, NEXT] and len(found) == 8
    assert found[0].size_bytes == 3000 * 8 * 4
    model, batch, loss = gpt.build()
    assert [t.target for t in tables_of(captured_of(model, batch, loss).graph)] == ["positions.weight"]


@pytest.mark.parametrize(
    ("memory", "tables"), first(2, ((10e6, []), (200e3, [LARGEST, NEXT]), (420e3, [LARGEST])))
)
def test_as_few_tables_as_make_it_fit_are_on_the_host_and_the_numbers_stay(memory, tables):
    plan = planned(memory)
    assert hosted(plan) == tables
    assert plan.claims["peak_bytes"] <= memory
    said = [n for n in plan.notes if n.startswith("tables on the host")]
    assert len(said) == bool(tables) and all(t in said[0] for t in tables)
    model, batch, loss = built()
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize("memory", first(1, (350e3, 200e3, 420e3)))
def test_the_quicker_of_tables_and_states_on_the_host_is_chosen(memory):
    plan, _ = not_alone(memory)
    assert plan.claims["peak_bytes"] <= memory
    assert plan.claims["step_seconds"] <= planned(memory).claims["step_seconds"]
    model, batch, loss = built()
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_host_without_room_for_the_tables_is_told_with_its_numbers():
    with pytest.raises(PlanError, match=r"no plan fits into 200 kB .* the host has no room") as caught:
        planned(200e3, replace(H100, host_memory_bytes=1000))
    assert LARGEST in caught.value.why and "of 1.0 kB" in caught.value.why


def test_where_no_table_helps_nothing_is_moved():
    with pytest.raises(PlanError, match=r"no plan fits into 10\.0 kB per rank\n"):
        planned(10e3)


@pytest.mark.parametrize(("layers", "searches"), [(3, 2), (12, 1)])
def test_tables_that_are_little_of_a_deep_model_are_no_reason_to_search_again(layers, searches):
    """Two layers stand for all while a plan is searched; the table is a fifth of two, and little of many."""
    config = gpt.GPTConfig(vocabulary=16, width=16, layers=layers, heads=2, sequence=128)
    with torch.device("meta"):
        captured = captured_of(*gpt.build(config, batch=4))
    asked = []

    def run(hosts, offload):  # it fits with states on the host, and without them where tables are there
        asked.append(offload)
        techniques = Techniques(offload=("optimizer",) if offload else ())
        return SimpleNamespace(techniques=techniques, claims={"step_seconds": 1.0}, evaluation=None)

    with_tables(folded(captured.graph, captured.folding), frozenset(), Request(H100), run)
    assert asked == [True, False][:searches]


def test_a_choice_is_simulated_once():
    _, asked = not_alone(350e3)
    assert len(asked) > 10
    assert not [one for n, one in enumerate(asked) if one in asked[:n]]


def test_other_modes_and_clusters_without_a_host_of_their_own_refuse():
    with pytest.raises(PlanError, match="no plan fits"):
        planned(200e3, mode="dynamic_programming")
    with pytest.raises(PlanError, match="no plan fits"):
        planned(200e3, replace(H100, host_bytes_per_s=0))
