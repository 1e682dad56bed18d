"""The factors of a graph are found once, for as long as the graph lives and the rules are the same."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from meshwright.core.graph import Graph
from meshwright.core.graph_text import parse
from meshwright.ops import table
from meshwright.ops.analysis import expect_factors, factors_of, keep_factors
from meshwright.ops.factors import Factors, analyze
from meshwright.ops.table import rules_of

TEXT = """
graph "g" {
  %x: f32[4, 8] = batch("x", batch_dim=0)
  %y: f32[4, 8] = mine.twice.default(%x)
  return loss=%y
}
"""


def test_found_once_until_a_rule_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_USER", {})
    graph = parse(TEXT)
    first = factors_of(graph)
    assert factors_of(graph) is first
    assert first.sites["y"].rule.why_replicated
    table.register("mine::twice", "... -> ...")
    second = factors_of(graph)
    assert not second.sites["y"].rule.why_replicated
    assert keep_factors(graph, first) is first and factors_of(graph) is first


def test_nothing_is_kept_of_a_graph_that_is_gone() -> None:
    graph = parse(TEXT)
    kept = weakref.ref(factors_of(graph))
    other = replace(graph)
    assert factors_of(other) is not kept()
    del graph
    gc.collect()
    assert kept() is None


def test_factors_that_are_expected_are_made_when_somebody_asks() -> None:
    graph, made = parse(TEXT), []

    def make(asked: Graph) -> Factors:
        made.append(asked.name)
        return analyze(asked, rules_of(asked))

    expect_factors(graph, make)
    assert not made
    first = factors_of(graph)
    assert factors_of(graph) is first and made == ["g"]
    expect_factors(graph, make)
    gone = weakref.ref(graph)
    del graph, first
    gc.collect()
    assert gone() is None  # what is expected of a graph does not keep it
