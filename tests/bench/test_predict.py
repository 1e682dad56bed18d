"""What `bench.predict` makes of its rows, on rows whose answers are known by hand."""

from __future__ import annotations

import math

import pytest
from rich.table import Table

from bench import predict_report as report
from bench.predict_report import Row
from meshwright.calibrate.step_rows import HIDDEN, LAUNCH, Prediction
from meshwright.predict.timeline import COMPUTE, Task

LOUD = 2.0


def prediction(products: float, sent: float, starting: float = 0.0) -> Prediction:
    """A step that computes, and sends beside and after it."""
    tasks = (
        Task("a", (COMPUTE,), products + starting, (), "forward"),
        Task("bucket", ("dp",), sent, (0,), "reduce"),
        Task("b", (COMPUTE,), products, (), "backward"),
        Task("update", (COMPUTE,), 0.010, (1,), "update"),
    )
    classes = (
        {"matmul": products, LAUNCH: starting},
        {HIDDEN: sent},
        {"matmul": products},
        {"update": 0.010},
    )
    return Prediction(tasks, classes, {})


def row(model: str, plan: str, made: Prediction, seconds: float, ranks: int = 2, unrest: float = 1.0) -> Row:
    """Nine samples within one percent of `seconds`."""
    samples = [(seconds * (1 + 0.0025 * n), unrest) for n in range(-4, 5)]
    return Row(model, ranks, (plan,), "", made, samples)


def test_shares_are_the_step_by_what_shows_of_it() -> None:
    # The sum of gradients (30 ms) is longer than what is computed beside it (20 ms), which hides behind it.
    made = prediction(0.020, 0.030, 0.005)
    assert made.seconds() == pytest.approx(0.065)
    shares = made.shares()
    assert sum(shares.values()) == pytest.approx(made.seconds())
    assert shares["matmul"] == pytest.approx(0.020) and shares[HIDDEN] == pytest.approx(0.030)
    assert shares[LAUNCH] == pytest.approx(0.005) and shares["update"] == pytest.approx(0.010)
    assert made.seconds({HIDDEN: 0.1}) == pytest.approx(0.055)  # now the products decide


def test_a_model_is_predicted_by_factors_from_the_others() -> None:
    # Truth: products take twice what was thought. In the model that is left out they take four times as long.
    sizes = [(0.02, 0.03), (0.05, 0.01), (0.01, 0.06), (0.03, 0.02)]
    rows = [
        row(f"m{n // 2}", f"p{n}", prediction(a, b), prediction(2 * a, b).seconds())
        for n, (a, b) in enumerate(sizes)
    ]
    other = row("other", "p", prediction(0.04, 0.02), prediction(0.16, 0.02).seconds())
    report.fit_left_out([*rows, other])
    assert other.fitted == pytest.approx(prediction(0.08, 0.02).seconds(), rel=0.03)
    assert report.errors([other], "calibrated")[0] < report.errors([other], "fitted")[0] < -0.3
    assert all(abs(r.fitted / r.measured - 1) > 0.01 for r in rows)  # the other model led them astray


def test_loud_samples_do_not_count_where_there_are_quiet_ones() -> None:
    made = row("m", "p", prediction(0.02, 0.03), 0.1)
    made.samples += [(0.5, LOUD)] * 20
    assert made.quiet and made.measured == pytest.approx(0.1)
    loud = row("m", "q", prediction(0.02, 0.03), 0.1, unrest=LOUD)
    assert not loud.quiet and report.errors([loud], "calibrated") == []


def test_order_counts_separable_pairs_of_one_model_and_number_of_ranks() -> None:
    slow, quick = prediction(0.05, 0.01), prediction(0.02, 0.01)
    rows = [
        row("m", "a", slow, 0.20),
        row("m", "b", quick, 0.10),  # before a, as predicted
        row("m", "c", slow, 0.101),  # not separable from b; before a, by nothing predicted
        row("m", "d", slow, 0.05, ranks=4),
        row("n", "e", slow, 0.05),
    ]
    assert report.order(rows, "calibrated") == (1, 2)


def test_regret_is_what_auto_loses() -> None:
    made = prediction(0.02, 0.01)
    rows = [row("m", "auto", made, 0.12), row("m", "b", made, 0.10), row("m", "c", made, math.nan)]
    (one,) = report.regrets(rows)
    assert one.ratio == pytest.approx(1.2) and one.best_plan == "b" and one.quiet
    assert report.regrets(rows[1:]) == []
    rows[1].plans = ("b", report.TUNED)
    (tuned,) = report.regrets(rows, report.TUNED)
    assert tuned.ratio == 1 and tuned.way == report.TUNED


def test_tables_say_what_failed() -> None:
    good = row("m", "auto", prediction(0.02, 0.01), 0.1)
    bad = Row("m", 2, ("b",), "", prediction(0.02, 0.01), failed="the job died")
    tables: list[Table] = [report.time_table([good, bad]), report.memory_table([bad])]
    assert all("the job died" in report.markdown(t) for t in tables)
    assert report.markdown(tables[0]).count("\n") == 3  # head, rule, two rows
    assert "1 of 2 pairs quiet" in report.summary([good, bad])[0]
