"""Seconds: peaks are never beaten, curves are followed, more work never takes less time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.cluster import Device, Measured
from meshwright.cost.machine import launches_of, seconds, update_seconds
from meshwright.cost.operators import Work

GPU = Device("a gpu", {"f32": 2e13, "bf16": 3e14}, 80 << 30, 2e12, 5e-6)


def one(kind: str, flops: float, moved: float, dtype: str = "f32", launches: float = 0) -> Work:
    """Work of one call, half as much backward."""
    return Work(kind, dtype, flops, flops / 2, moved, moved / 2, launches, launches)


def test_a_view_takes_no_time_and_a_kernel_its_launch() -> None:
    assert seconds(one("free", 0, 0), GPU) == (0, 0)
    assert seconds(one("memory", 0, 0, launches=2), GPU) == (10e-6, 10e-6)


def test_large_work_runs_at_the_documented_share_of_the_peak() -> None:
    forward, backward = seconds(one("matmul", 1e15, 0, "bf16"), GPU)
    assert 1e15 / forward == pytest.approx(0.7 * 3e14, rel=1e-2)
    assert backward == pytest.approx(forward / 2, rel=1e-2)
    assert 1e12 / seconds(one("memory", 0, 1e12), GPU)[0] == pytest.approx(0.8 * 2e12, rel=1e-2)


def test_the_slower_of_arithmetic_and_memory_decides() -> None:
    arithmetic, memory = seconds(one("matmul", 1e13, 0), GPU)[0], seconds(one("matmul", 0, 1e12), GPU)[0]
    assert seconds(one("matmul", 1e13, 1e12), GPU)[0] == max(arithmetic, memory)


@given(
    st.lists(st.floats(1, 1e15), min_size=2, max_size=20),
    st.sampled_from(["matmul", "attention", "conv", "memory"]),
)
def test_more_work_never_takes_less_time_and_the_peak_is_never_beaten(
    amounts: list[float], kind: str
) -> None:
    amounts = sorted(amounts)
    found = [seconds(one(kind, a, a), GPU)[0] for a in amounts]
    assert all(x <= y * (1 + 1e-12) for x, y in itertools.pairwise(found))
    assert all(t >= a / 2e12 for t, a in zip(found, amounts, strict=True))


def test_measured_curves_are_followed_between_and_beyond_their_points() -> None:
    curve = ((1e6, 1e9), (1e8, 3e9))
    known = Measured(rates={"matmul f32": curve})
    for flops, rate in ((1e4, 1e9), (1e6, 1e9), (1e7, 2e9), (1e8, 3e9), (1e12, 3e9)):
        assert flops / seconds(one("matmul", flops, 0), GPU, known)[0] == pytest.approx(rate)


def test_corrections_scale_their_class() -> None:
    known = Measured(corrections={"conv": 1.5, "launch": 3.0})
    plain = seconds(one("conv", 1e12, 1e6), GPU)
    assert np.allclose(seconds(one("conv", 1e12, 1e6), GPU, known), np.multiply(plain, 1.5))
    started = seconds(one("conv", 1e12, 1e6, launches=2), GPU, known)
    assert np.allclose(started, np.multiply(plain, 1.5) + 2 * 3.0 * GPU.launch_seconds)
    assert seconds(one("matmul", 1e12, 1e6), GPU, known) == seconds(one("matmul", 1e12, 1e6), GPU)


def test_causal_attention_has_rates_of_its_own_and_else_those_of_attention() -> None:
    work = one("causal", 1e10, 1e6)
    both = {"attention f32": ((1e6, 8e12),), "causal f32": ((1e6, 4e12),)}
    known, less = Measured(rates=both), Measured(rates={"attention f32": both["attention f32"]})
    assert seconds(work, GPU, known)[0] == pytest.approx(1e10 / 4e12)
    assert seconds(work, GPU, less)[0] == pytest.approx(1e10 / 8e12)
    slower = replace(less, corrections={"attention": 1.5})
    assert seconds(work, GPU, slower)[0] == pytest.approx(1.5e10 / 8e12)


def test_arrays_are_priced_place_by_place() -> None:
    flops, moved = np.array([0.0, 1e9, 1e14]), np.array([1e3, 1e9, 1e6])
    for kind in ("matmul", "memory"):
        many = seconds(Work(kind, "f32", flops, flops, moved, moved, 1, 1), GPU)[0]
        assert many.shape == (3,)
        for place in range(3):
            assert many[place] == seconds(one(kind, flops[place], moved[place], launches=1), GPU)[0]


def test_an_update_moves_parameter_gradient_and_states() -> None:
    adam = update_seconds(1e9, 2, GPU)
    assert adam == pytest.approx(7 * 4e9 / (0.8 * 2e12), rel=0.01)
    assert update_seconds(1e9, 0, GPU) == pytest.approx(adam * 3 / 7, rel=0.01)
    assert update_seconds(1e9, 2, GPU, Measured(rates={"update": ((1e6, 1e12),)})) == pytest.approx(
        7 * 4e-3, rel=0.01
    )


def test_an_operator_that_was_measured_takes_its_factor_forward_and_backward() -> None:
    known = Measured(operators={"layer_norm bf16": (2.0, 5.0), "bias bf16": (1.0, 3.0)})
    norm = replace(one("memory", 0, 1e9, "bf16"), name="layer_norm")
    plain, found = seconds(norm, GPU), seconds(norm, GPU, known)
    assert found == pytest.approx((2 * plain[0], 5 * plain[1]))
    assert seconds(replace(norm, dtype="f32"), GPU, known) == plain
    assert seconds(replace(norm, name="gelu"), GPU, known) == plain
    product = one("matmul", 1e12, 0, "bf16")
    biased = replace(product, bias_bytes=1e9)
    more = np.subtract(seconds(biased, GPU, known), seconds(product, GPU, known))
    assert more == pytest.approx([0, 3 * seconds(one("memory", 0, 1e9), GPU)[0]])
    assert seconds(biased, GPU) == seconds(product, GPU)


def test_an_accelerator_that_was_measured_runs_a_memory_bound_operator_as_one_kernel() -> None:
    norm = replace(one("memory", 0, 0, launches=5), launches_backward=9)
    assert launches_of(norm, GPU) == (5, 9)
    assert launches_of(norm, replace(GPU, issue_seconds=1e-5)) == (1, 2)
    assert launches_of(one("matmul", 1, 0, launches=3), replace(GPU, issue_seconds=1e-5)) == (3, 3)
