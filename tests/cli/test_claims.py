"""What a plan claims, in the order in which it is read; nothing is said that is not claimed."""

from __future__ import annotations

from meshwright.report.claims import claim_lines


def test_a_step_above_its_price_is_explained():
    lines = dict(claim_lines({"step_seconds": 8.749e-4, "price_seconds": 8.674e-4}))
    assert "by the sum of operators and collectives" in lines["step"] and "waits" in lines["step"]
    assert "waits" not in dict(claim_lines({"step_seconds": 8e-4, "price_seconds": 9e-4}))["step"]


def test_claims_are_lines():
    lines = dict(
        claim_lines(
            {
                "price_seconds": 0.5, "step_seconds": 0.4, "bound_seconds": 0.39, "peak_bytes": 5e9,
                "peak_where": "head, backward", "gaps": {"sum": 0.012, "step": 4e-16},
                "candidates": {"data parallel": None, "recursion": 0.4},
            }
        )
    )  # fmt: skip
    assert lines["step"] == "400 ms   500 ms if nothing overlapped"
    assert lines["peak memory"] == "5.0 GB a rank   head, backward"
    assert lines["gap (sum)"] == "1.2 %" and lines["gap (step)"] == "0 %"
    assert lines["candidates"] == "recursion 400 ms, data parallel does not fit"
    assert "390 ms" in lines["bound"] and "space" not in lines


def test_a_plan_without_claims_has_no_lines():
    assert claim_lines({}) == []
