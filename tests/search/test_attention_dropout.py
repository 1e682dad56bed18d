"""What dropout of attention costs is a remark of a plan, where it costs much."""

from __future__ import annotations

import functools
import re

import pytest

import meshwright as mw
from meshwright.examples import gpt
from meshwright.plan.plan import Plan
from tests.breadth import first

SAYS = "attention dropout takes at least "


@functools.cache
def planned(dropout: float, sequence: int = 2048, mode: str = "data_parallel", kind: str = "h100") -> Plan:
    config = gpt.GPTConfig(width=256, layers=3, heads=4, sequence=sequence)
    model, batch, loss = gpt.build(config, batch=64)
    for module in model.modules():
        if isinstance(module, gpt.Attention):
            module.drop = dropout
    return mw.plan(model, batch, loss=loss, cluster=mw.Cluster.preset(kind), mode=mode, time_limit=60)


def remarks(plan: Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith(SAYS)]


def test_a_plan_says_what_attention_dropout_costs_and_what_to_try() -> None:
    (said,) = remarks(planned(0.1))
    step, without = (planned(p).claims["step_seconds"] for p in (0.1, 0.0))
    told = float(said.removeprefix(SAYS).split()[0])
    assert 0.7 * (step - without) < told < step - without
    assert "3×" in said and re.search(r"gpt\.py:\d+", said) and "dropout of 0" in said


def test_it_is_said_once_of_a_search_too() -> None:
    assert len(remarks(planned(0.1, mode="auto"))) == 1


@pytest.mark.parametrize(("dropout", "sequence"), first(1, [(0.1, 16), (0.0, 2048)]))
def test_nothing_is_said_where_there_is_none_or_it_costs_little(dropout: float, sequence: int) -> None:
    assert not remarks(planned(dropout, sequence))
