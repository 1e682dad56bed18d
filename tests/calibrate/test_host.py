"""The host's time to issue an operator, by kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.calibrate import host
from meshwright.calibrate.bench import Bench
from meshwright.calibrate.plan import PACES, QUICK, Point
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.machine import issued_seconds, step_issue_seconds, update_issue_seconds
from meshwright.cost.operators import Work
from meshwright.runtime.communicator import Alone


def test_every_chain_runs() -> None:
    """On a processor too, where calibration has no such rows."""
    bench = Bench(Alone(Mesh.of(rank=1)), torch.device("cpu"), cores=1)
    assert host.names(bench) == []
    for name in (*host.CHAINS, host.UPDATE):
        points = [*host.measure(bench, host.PREFIX + name, PACES[QUICK])]
        assert len(points) == 1 + (name != host.UPDATE)
        assert all(0.0 <= p.seconds < 0.1 for p in points)


def test_operators_take_the_host_their_kinds_time() -> None:
    rows = {
        "host matmul": (2.0, 8.0),
        "host biased": (2.5, 11.5),
        "host memory": (1.0, 3.0),
        "host free": (0.5, 1.5),
    }
    points = {name: tuple(Point(1.0, s * 1e-5) for s in times) for name, times in rows.items()}
    known = host.issues({**points, "host update": (Point(1.0, 4e-6),), "issue": (Point(1.0, 1e-5),)}, 1e-5)
    assert known == {"matmul": (2.0, 6.0), "memory": (1.0, 2.0), "free": (0.5, 1.0), "bias": (0.5, 3.0),
                     "update": (0.4, 0.01)}  # fmt: skip
    cluster = Cluster.preset("h100")
    device = replace(cluster.device, issue_seconds=1e-5)
    measured = replace(
        cluster.measured, issues={**known, "step": (100.0, 0.01)}, corrections={"issue": 2.0, "step": 3.0}
    )

    def of(kind: str, launches: tuple[float, float], bias: float = 0.0) -> tuple[float, float]:
        work = Work(kind, "f32", 0.0, 0.0, 1.0, 1.0, *launches, bias_bytes=bias)
        return issued_seconds(work, device, measured)

    assert of("matmul", (1.0, 2.0)) == pytest.approx((4e-5, 12e-5))
    assert of("matmul", (1.0, 3.0), bias=8.0) == pytest.approx((4e-5, 19e-5))
    assert of("memory", (1.0, 0.0)) == pytest.approx((2e-5, 0.0))
    assert of("free", (0.0, 0.0)) == pytest.approx((1e-5, 2e-5))
    assert update_issue_seconds(device, measured) == pytest.approx(8e-6)
    assert step_issue_seconds(device, measured) == pytest.approx(3e-3)
