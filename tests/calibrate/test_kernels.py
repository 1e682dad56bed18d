"""Operators by themselves: each is captured as one, and its factor is its time over what its bytes take."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.calibrate import kernels
from meshwright.calibrate.plan import PACES, QUICK, MeasuredRow, Point
from meshwright.calibrate.result import calibration
from meshwright.cost.machine import launches_of, seconds
from meshwright.cost.operators import Work


class Stopwatch:
    """One rank on a processor that measures each call once."""

    device = torch.device("cpu")

    def seconds(self, call: Any, budget: float) -> float:
        """Of one call."""
        began = time.perf_counter()
        call()
        return time.perf_counter() - began


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SIZE", kernels.Size(rows=128, width=64, tokens=256, images=2, channels=8))


def row(name: str) -> MeasuredRow:
    """As it comes back from the file of a calibration."""
    points, about = kernels.measure(Stopwatch(), name, PACES[QUICK])  # type: ignore[arg-type]
    return MeasuredRow.of(json.loads(json.dumps(MeasuredRow(name, tuple(points), about=about).data())))


@pytest.mark.parametrize("name", [kernels.BIAS, *kernels.OPERATORS])
def test_each_operator_is_captured_and_run(name: str) -> None:
    found = row(f"{kernels.PREFIX}{name} f32")
    assert "left out" not in found.about, found.about
    assert len(found.points) == 2 and found.points[1].seconds > 0
    work = Work(**found.about["work"])
    assert work.dtype == "f32" and (name == kernels.BIAS or work.name == name)


def test_what_cannot_be_run_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(o: Any) -> torch.Tensor:
        raise RuntimeError("no kernel here")

    monkeypatch.setattr(kernels, "OPERATORS", {**kernels.OPERATORS, "gelu": kernels.Call(broken)})
    found = row(f"{kernels.PREFIX}gelu f32")
    assert found.points == () and "no kernel here" in found.about["left out"]


@pytest.mark.parametrize(("name", "launches"), (("layer_norm", (1, 1)), ("rms_norm", (1, 2))))
def test_a_factor_makes_the_price_of_an_operator_its_time(name: str, launches: tuple[int, int]) -> None:
    """Whatever the rates of the device are."""
    plain = [
        MeasuredRow("launch", (Point(1.0, 2e-6),)),
        MeasuredRow("issue", (Point(1.0, 11e-6),)),
        MeasuredRow("matmul f32", (Point(1e9, 1e-3),)),
        MeasuredRow("memory", (Point(1e6, 1e-5), Point(1e9, 3e-4))),
    ]
    norm = row(f"{kernels.PREFIX}{name} f32")
    norm = replace(norm, points=(Point(1.0, 31e-6), Point(1.0, 77e-6)))
    machine = {"device": "a gpu", "type": "cuda", "ranks": 1, "nodes": 1, "threads": 1, "cores": 1,
               "memory_bytes": 1 << 30, "host_memory_bytes": 1 << 30, "torch": "2", "backend": "none"}  # fmt: skip
    found = calibration(machine, [*plain, norm]).cluster
    assert found.device.launch_seconds == 2e-6 and found.device.issue_seconds == 11e-6
    work = Work(**norm.about["work"])
    assert launches_of(work, found.device) == launches
    assert seconds(work, found.device, found.measured) == pytest.approx((31e-6, 77e-6), rel=1e-3)
