"""The gradients that are said to be added up over micro-batches are those that a rank adds up."""

from __future__ import annotations

import math
from collections import Counter as Multiset
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from meshwright.capture.pytree import leaves
from meshwright.compile import captured_of, lower, values_of
from meshwright.cost.cluster import Cluster
from meshwright.examples import mlp
from meshwright.partition import Partition
from meshwright.predict.accumulated import added, added_seconds
from meshwright.predict.price import program_price
from meshwright.predict.step_time import step_times
from meshwright.runtime.communicator import Counter
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

PIECES = 3
BUILT = mlp.build(batch=36, features=10, hidden=14, classes=22)  # no activation is as large as a weight
WAYS = (
    {},
    {"optimizer_parallel": 1},
    {"optimizer_parallel": 2},
    {"optimizer_parallel": 3},
    {"optimizer_parallel": 2, "gradient_accumulation_shard": True},
    {"interleave": 2},
)


def parts_of(**techniques: Any) -> Partition:
    model, batch, loss = BUILT
    asked = {"micro_batches": PIECES, **techniques}
    if "optimizer_parallel" in asked:
        asked["threshold_kb"] = 0
    plan = mw.plan(model, batch, loss=loss, mesh=2, mode="data_parallel", **asked)
    return lower(captured_of(model, batch, loss), plan)


def adds_of_a_step(parts: Partition) -> Multiset[int]:
    """Elements → how often so many are added to as many on the first rank: in place, where copies take turns anew."""
    model, batch, loss = BUILT
    values = values_of(model, captured_of(model, batch, loss))
    rank = Rank(Counter(parts.requested.ranks, 0), torch.device("cpu"))
    step = LocalStep(parts, rank, values, None)
    given = dict(leaves(batch))
    step(given)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step(given)
    found: Multiset[int] = Multiset()
    for event in seen.events():
        if event.name in ("aten::add", "aten::add_"):
            one, other = (math.prod(shape) for shape in event.input_shapes[:2])
            found[one] += one == other
    return found


@pytest.mark.parametrize("techniques", WAYS, ids=str)
def test_a_rank_adds_up_what_is_priced(techniques: dict[str, Any]) -> None:
    parts = parts_of(**techniques)
    told: Multiset[int] = Multiset()
    for each in added(parts).values():
        told.update({one.size_bytes // 4: parts.micro_batches - 1 for one in each})
    done = adds_of_a_step(parts)
    assert told and told == {size: done[size] for size in told}


def test_it_takes_no_time_without_micro_batches_and_is_part_of_the_step_with_them() -> None:
    """On a machine that adds very slowly."""
    cluster = Cluster.local(2)
    slow = replace(
        cluster, measured=replace(cluster.measured, rates={"memory": ((1.0, 1e12), (1e8, 1e12), (1e9, 1.0))})
    )
    whole, pieces = parts_of(micro_batches=1), parts_of()
    assert not any(added_seconds(whole, name, slow) for name in added(whole))
    more = (PIECES - 1) * sum(3.0 * one.size_bytes for each in added(pieces).values() for one in each)
    quick = [program_price(pieces, c).compute for c in (slow, cluster)]
    assert quick[0] - quick[1] == pytest.approx(more, rel=1e-3)
    assert step_times(pieces, slow, 2).step_seconds == pytest.approx(more, rel=1e-3)
