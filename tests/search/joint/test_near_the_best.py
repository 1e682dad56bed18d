"""What `auto` chooses under a limit of memory, against every combination of techniques planned by itself.

Each combination is planned twice: with its cuts searched within the limit, and as data parallel with the optimizer's
states, gradients and weights in parts (levels 1 to 3). Neither looks at another combination.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import meshwright as mw
from meshwright.core.techniques import OFFLOAD
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.plan.plan import Plan
from tests.search.planned import MESHES, built, cluster

MESH = "2x2"
NEAR = 1.01  # of the best step
SLOW = (pytest.mark.slow, pytest.mark.timeout(3000))  # hundreds of plans each
ALL_WORDS = tuple(w for n in range(4) for w in itertools.combinations(OFFLOAD, n))
ALL: dict[str, tuple[Any, ...]] = {
    "recompute": ("", "selective", "full"),
    "micro_batches": (1, 2, 4),
    "slice_activation": (False, True),
    "offload": ALL_WORDS,
}
FEW: dict[str, tuple[Any, ...]] = {
    "micro_batches": (1, 4),
    "offload": ((), ("optimizer",)),
}


def machine(host_bytes_per_s: float) -> Cluster:
    """Four ranks; over a slow way to the host what is kept there costs as much as computing it again."""
    return replace(cluster("gpu", MESH), host_bytes_per_s=host_bytes_per_s)


@functools.cache
def model(name: str) -> Any:
    if name == "three layers":
        return gpt.build(gpt.GPTConfig(vocabulary=96, width=96, layers=3, heads=4, sequence=32), batch=16)
    return built(name)


def planned(name: str, host: float, mode: str = "auto", **asked: Any) -> Plan:
    net, batch, loss = model(name)
    return mw.plan(net, batch, loss=loss, mesh=MESHES[MESH], mode=mode, cluster=machine(host), **asked)


@functools.cache
def plain_bytes(name: str, host: float) -> float:
    """The peak where memory has no limit."""
    return planned(name, host).claims["peak_bytes"]


def combinations(name: str, host: float, limit: float, over: dict[str, tuple[Any, ...]]) -> Iterator[Plan]:
    """Every combination that can be, under both ways to cut."""
    for values in itertools.product(*over.values()):
        asked = dict(zip(over, values, strict=True))
        ways: list[dict[str, Any]] = [{"memory": limit, "interleave": 1}]
        ways += [
            {"mode": "data_parallel", "optimizer_parallel": level, "threshold_kb": 0} for level in (1, 2, 3)
        ]
        for way in ways:
            try:
                yield planned(name, host, **asked, **way)
            except PlanError:  # it does not fit, or techniques that do not go together
                continue


@pytest.mark.parametrize(
    ("name", "host", "share", "over"),
    [
        ("wide mlp", 3e7, 0.85, FEW),
        *(
            pytest.param(name, host, share, ALL, marks=SLOW)
            for name, shares in (("wide mlp", (0.95, 0.85, 0.68)), ("three layers", (0.7, 0.5, 0.4)))
            for host, share in itertools.product((1e10, 3e7), shares)
        ),
    ],
    ids=lambda value: "few" if value is FEW else "all" if value is ALL else str(value),
)
@pytest.mark.full  # test_joint.py compares with fewer combinations
def test_what_auto_chooses_is_near_the_best_that_fits(
    name: str, host: float, share: float, over: dict[str, tuple[Any, ...]]
) -> None:
    limit = share * plain_bytes(name, host)
    every = [p for p in combinations(name, host, limit, over) if p.claims["peak_bytes"] <= limit]
    assert every, "nothing to compare with"
    best = min(every, key=lambda plan: plan.claims["step_seconds"])
    chosen = planned(name, host, memory=limit)
    assert chosen.claims["peak_bytes"] <= limit
    assert chosen.claims["step_seconds"] <= NEAR * best.claims["step_seconds"], (
        str(chosen.techniques),
        str(best.techniques),
        best.mode,
    )
