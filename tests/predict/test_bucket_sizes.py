"""Buckets that the link sizes cost little beside none: a large one leaves its bytes for after backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster
from meshwright.examples import gpt, llama
from meshwright.planning.search_request import request_for
from meshwright.predict.step_time import step_times

GPT = gpt.GPTConfig(vocabulary=512, width=256, layers=2, heads=8, sequence=64)
LLAMA = llama.LlamaConfig(vocabulary=512, width=256, inner=704, layers=4, heads=8, kv_heads=4, sequence=64)


def slow_links(seconds: float, bytes_per_s: float) -> Cluster:
    """Eight ranks on two nodes whose links have this latency and rate."""
    cluster = Cluster.preset("h100", nodes=2, ranks_per_node=4)
    levels = (replace(x, latency_seconds=seconds, bytes_per_s=bytes_per_s) for x in cluster.levels)
    return replace(cluster, levels=tuple(levels))


@pytest.mark.parametrize(
    ("build", "seconds", "bytes_per_s"),
    [
        (lambda: llama.build(LLAMA, batch=64), 4e-6, 50e9),  # in buckets of 8 MiB: 11 % slower than none
        (lambda: gpt.build(GPT, batch=4096), 2e-5, 5e9),  # in one: 8 %
    ],
    ids=("llama", "gpt"),
)
def test_buckets_sized_by_the_link_are_hardly_slower_than_none(
    build: Callable[[], Any], seconds: float, bytes_per_s: float
) -> None:
    cluster = slow_links(seconds, bytes_per_s)
    with torch.device("meta"):
        captured = captured_of(*build())

    def step(fusion: Any) -> float:
        asked = techniques_from({"fusion": fusion})
        plan = plan_captured(captured, None, "data_parallel", None, request_for(cluster), asked)
        return step_times(lower(captured, plan), cluster).step_seconds

    assert step("auto") <= 1.05 * step(0)
