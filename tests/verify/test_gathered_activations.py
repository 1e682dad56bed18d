"""What a reader gathers of an activation, or of a view of it, is kept in slices or on the host, and gives the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.core.graph import RESHARD
from meshwright.partition import partition
from meshwright.partition.recompute import VIEWS
from meshwright.search.exact_spaces import families_of
from meshwright.search.joint.front import Front
from meshwright.search.joint.pareto import front
from meshwright.search.modes import plan_found
from meshwright.search.techniques.apply import apply
from tests.search.joint.test_stages import cluster, planner
from tests.search.planned import built


@pytest.mark.full  # test_stashes.py slices and offloads what is gathered
@pytest.mark.parametrize("asked", [{"offload": ("activations",)}, {"slice_activation": True}], ids=str)
def test_what_is_gathered_for_a_reader_is_kept_as_asked(asked: dict[str, Any]) -> None:
    made_for = planner("wide gpt", 1e9, cluster())
    candidate = front(Front(made_for), made_for.space(families_of(made_for)[0][1])).candidates[0]
    techniques = replace(made_for.techniques, **asked)
    found = made_for.under(techniques).found(candidate.space, candidate.states, {}, timed=False)
    graph = made_for.folds.full
    plan = apply(graph, plan_found(made_for, found), techniques, made_for.request.cluster)
    parts = partition(graph, plan)
    makers = parts.resharded.graph.producers
    gathered = [makers[value] for value in parts.activations if makers[value].op == RESHARD]
    assert any(makers[node.uses[0]].op in VIEWS for node in gathered)
    model, batch, loss = built("wide gpt")
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
