"""Layers compute again as little as the limit asks for: some everything, the others what is cheap, or nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt
from meshwright.plan.plan import Plan


@functools.cache
def planned(recompute: str | None = None, memory: float | None = None) -> Plan:
    """A model of twelve layers on two ranks; `recompute` as given, or within a limit of bytes."""
    config = gpt.GPTConfig(vocabulary=512, width=512, layers=12, heads=8, sequence=1024, tied=False)
    with torch.device("meta"):
        model, batch, loss = gpt.build(config, batch=32)
    how: dict[str, Any] = {"memory": memory} if recompute is None else {"recompute": recompute}
    return mw.plan(
        model, batch, loss=loss, cluster=Cluster.preset("h100", nodes=1, ranks_per_node=2), mode="auto", pipeline=1,
        micro_batches=1, offload=(), **how,
    )  # fmt: skip


def between(share: float, less: str, more: str) -> tuple[float, float]:
    """So far from the bytes of one policy to those of another, and the seconds of as many layers under each."""
    at, to = (planned(policy).claims for policy in (less, more))
    return tuple(at[k] + share * (to[k] - at[k]) for k in ("peak_bytes", "step_seconds"))


@pytest.mark.parametrize(
    ("share", "less", "more"),
    [(0.6, "full", "selective"), (0.3, "full", "selective"), (0.5, "selective", "")],
)
def test_the_limit_decides_how_many_layers_have_which_policy(share: float, less: str, more: str) -> None:
    limit, seconds = between(share, less, more)
    plan = planned(memory=limit)
    assert isinstance(plan.techniques.recompute, tuple)
    assert [policy for _, policy in plan.techniques.recompute] == [p for p in (less, more) if p]
    assert plan.claims["peak_bytes"] <= limit
    one_layer = abs(planned(less).claims["step_seconds"] - planned(more).claims["step_seconds"]) / 12
    assert plan.claims["step_seconds"] <= seconds + 1.5 * one_layer
