"""The next best strategy of an operator costs more: what sums call cheaper than the choice is not named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.cost.cluster import Cluster
from meshwright.examples import mlp
from meshwright.search import modes
from meshwright.search.next_best import next_best


@pytest.fixture
def found(monkeypatch):
    """A search's choice, and what sums say of it."""
    kept = []
    monkeypatch.setattr(modes, "next_best", lambda found: kept.append(found) or next_best(found))
    model, batch, loss = mlp.build()
    mw.plan(
        model, batch, loss=loss, cluster=Cluster.preset("h100", ranks_per_node=4), mode="dynamic_programming"
    )
    return kept[-1]


def test_an_optimum_of_sums_has_a_next_best_for_each_operator(found):
    texts = next_best(found)
    assert texts.keys() == found.space.nodes.keys()
    assert all(re.search(r" at \+[\d.e-]+ ms$", text) for text in texts.values())


def test_what_sums_call_cheaper_is_no_next_best(found):
    """A search that simulates steps chooses what sums call dearer; here each operator has its dearest state in turn."""
    dearer = 0
    problem = found.space.problem(micro_batches=found.techniques.micro_batches)
    for name in found.space.nodes:
        v = found.space.variable["node", name]
        states = list(found.states)
        prices = []
        for state in range(len(problem.unary[v])):
            states[v] = state
            prices.append(found.space.price(states).total)
        states[v] = max(range(len(prices)), key=prices.__getitem__)
        texts = next_best(replace(found, states=tuple(states)))
        assert not any(" at -" in text for text in texts.values())
        dearer += name not in texts
    assert dearer > 0  # all others of these are cheaper
