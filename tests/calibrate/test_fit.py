"""What is fitted to times: numbers that were put in come out, and rows become the cluster that they describe."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from meshwright.calibrate import fit, worker
from meshwright.calibrate.plan import FULL, NODES, PACES, SUFFIX, WAITED, MeasuredRow, Point
from meshwright.calibrate.result import calibration, si
from meshwright.calibrate.step_rows import priced
from meshwright.core.collectives import PRICED
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.machine import arithmetic_rate, seconds, update_seconds
from meshwright.cost.operators import Work

SIZES = [2**n for n in range(10, 25, 2)]


def times(
    kind: str, latency: float, rate: float, growth: str, ranks: tuple[int, ...], noise: float = 0.0
) -> list[Point]:
    """What a machine would show whose collective costs exactly so, give or take the noise."""
    dice = random.Random(0)
    messages = {"ring": lambda k: k - 1, "tree": lambda k: {2: 1, 4: 2, 8: 3}[k]}[growth]
    found = []
    for k in ranks:
        turns = 1 if kind == "send" else (2 if kind == "all_reduce" else 1) * messages(k)
        for size in SIZES:
            exact = turns * latency + size / rate
            found.append(Point(float(size), exact * (1 + noise * dice.uniform(-1, 1)), k))
    return found


@pytest.mark.parametrize("kind", PRICED)
def test_latency_and_rate_come_out(kind: str) -> None:
    found = fit.link(kind, times(kind, 40e-6, 2e9, "ring", (2, 4, 8)))
    assert (found.latency_seconds, found.bytes_per_s) == pytest.approx((40e-6, 2e9), rel=1e-4)
    assert found.error < 1e-4
    noisy = fit.link(kind, times(kind, 40e-6, 2e9, "ring", (2, 4, 8), noise=0.1))
    assert (noisy.latency_seconds, noisy.bytes_per_s) == pytest.approx((40e-6, 2e9), rel=0.1)
    assert 0.02 < noisy.error < 0.1


def test_one_outlier_does_not_bend_the_fit() -> None:
    points = times("all_reduce", 40e-6, 2e9, "ring", (2,))
    points[3] = Point(points[3].work, 20 * points[3].seconds, 2)
    found = fit.link("all_reduce", points)
    assert (found.latency_seconds, found.bytes_per_s) == pytest.approx((40e-6, 2e9), rel=0.35)


@pytest.mark.parametrize("growth", ["ring", "tree"])
def test_growth_is_told_from_groups_of_several_sizes(growth: str) -> None:
    rows = {k: times(k, 50e-6, 1e9, growth, (2, 8), noise=0.05) for k in PRICED}
    assert fit.links(rows)[0] == growth
    assert fit.links({k: times(k, 50e-6, 1e9, growth, (2,)) for k in PRICED})[0] == "ring"


def test_a_curve_is_of_the_work_without_its_launches() -> None:
    # 1 µs of work at 1 TFLOP/s and 5 µs of launch; a call that is all launch keeps a tenth of its time.
    points = [Point(1e6, 6e-6), Point(1e9, 1e-3 + 5e-6), Point(1e3, 5e-6)]
    assert fit.curve(points, 5e-6) == ((1e3, 2e9), (1e6, 1e12), (1e9, 1e12))


def test_a_size_that_was_disturbed_is_left_out_of_a_curve() -> None:
    """A dip between two sizes is; a slope is what a machine does."""
    even = [Point(w, w / 80e9) for w in (1e6, 1e7, 1e8, 1e9)]
    dip = [*even[:2], Point(1e8, 1e8 / 45e9), even[3]]
    assert fit.curve(dip, 0.0) == ((1e6, 80e9), (1e7, 80e9), (1e9, 80e9))
    slope = [Point(w, w / r) for w, r in ((1e6, 80e9), (1e7, 40e9), (1e8, 20e9))]
    assert [rate for _, rate in fit.curve(slope, 0.0)] == [80e9, 40e9, 20e9]


def test_corrections_come_out() -> None:
    truth = {"matmul": 1.3, "memory": 0.7, "attention": 2.0}
    dice = random.Random(1)
    parts = [{k: dice.uniform(0.1, 1.0) * 1e-2 for k in truth} for _ in range(8)]
    measured = [sum(truth[k] * s for k, s in row.items()) for row in parts]
    assert fit.corrections(parts, measured) == pytest.approx(truth, rel=0.15)
    assert fit.corrections(parts, measured, doubt=100) == pytest.approx(truth, rel=1e-3)


def test_operators_may_start_far_slower_in_a_step_than_in_a_loop() -> None:
    small, large = {"launch": 1e-3, "matmul": 1e-4}, {"launch": 1e-4, "matmul": 1e-1}
    found = fit.corrections([small, large], [7e-3, 0.1007])
    assert found["launch"] == pytest.approx(7.0, rel=0.05)
    assert found["matmul"] == pytest.approx(1.0, rel=0.05)
    other = fit.corrections([{"memory": 1e-3, "matmul": 1e-4}], [9e-3])
    assert other["memory"] <= 4.0  # of what was measured as it is in a step nothing is so far off


def test_a_factor_that_is_as_large_as_it_may_be_is_told() -> None:
    found = fit.corrections([{"launch": 1e-3}] * 3, [0.5] * 3)
    assert found["launch"] == pytest.approx(32, rel=5e-2) and fit.most_factor("launch") == 32
    assert fit.at_the_end({"launch": 8.0, "matmul": 3.5, "memory": 0.25}) == ("memory",)
    assert fit.at_the_end({"launch": 31.99}) == ("launch",)


def test_a_class_that_hardly_occurs_keeps_its_price() -> None:
    parts = [{"matmul": 1e-2, "conv": 1e-7}, {"matmul": 2e-2, "conv": 2e-7}]
    found = fit.corrections(parts, [1.2e-2, 2.4e-2])
    assert found["conv"] == pytest.approx(1.0, abs=1e-3)
    assert found["matmul"] == pytest.approx(1.2, rel=0.05)
    assert fit.corrections([], []) == {}


# ---------------------------------------------------------------- rows to a cluster

MACHINE = {
    "device": "4 cores shared by 2", "type": "cpu", "ranks": 2, "threads": 2, "cores": 4, "memory_bytes": 1 << 34,
    "host_memory_bytes": 1 << 34, "torch": "2.13.0", "backend": "gloo",
}  # fmt: skip
LAUNCH = 2e-6


def curve(name: str, rate: float, *works: float, launches: float = 1.0) -> MeasuredRow:
    return MeasuredRow(name, tuple(Point(w, w / rate + launches * LAUNCH) for w in works))


def rows() -> list[MeasuredRow]:
    links = [MeasuredRow(k, tuple(times(k, 100e-6, 1e9, "ring", (2,)))) for k in PRICED]
    return [
        MeasuredRow("launch", (Point(1.0, LAUNCH),)),
        curve("matmul f32", 50e9, 1e6, 1e9),
        curve("memory", 8e9, 1e5, 1e8),
        curve("update", 6e9, 1e5, 1e8),
        *links,
        MeasuredRow("slowdown", (Point(1, 1.5), Point(2, 2.0)), unrest=1.4, attempts=3),
    ]


def test_rows_become_the_cluster_that_they_describe() -> None:
    found = calibration(MACHINE, rows())
    cluster = found.cluster
    assert Cluster.from_yaml(cluster.to_yaml(found.note)) == cluster
    assert cluster.device.flops == pytest.approx({"f32": 50e9}, rel=1e-3)
    assert cluster.device.memory_bytes_per_s == pytest.approx(8e9, rel=1e-3)
    assert cluster.measured.slowdown == {"compute": 1.5, "collective": 2.0}
    assert found.void == ("slowdown",)
    assert found.lines[-1] == (
        "slowdown",
        "computing × 1.50, collective × 2.00",
        "",
        "no: void (1.40), measured 3 times",
    )
    # What was put in is what the planner then charges: a product of 1e8 FLOP, an all-reduce over both ranks, an update.
    work = Work("matmul", "f32", 1e8, 0.0, 1.0, 0.0, 1, 0)
    assert seconds(work, cluster.device, cluster.measured)[0] == pytest.approx(1e8 / 50e9 + LAUNCH, rel=1e-3)
    assert arithmetic_rate("matmul", "f32", 1e8, cluster.device, cluster.measured) == pytest.approx(
        50e9, rel=1e-3
    )
    assert update_seconds(1e6, 2, cluster.device, cluster.measured) == pytest.approx(
        28e6 / 6e9 + LAUNCH, rel=1e-3
    )
    mesh = cluster.place(Mesh.of(dp=2))
    assert cluster.prices.seconds("all_reduce", mesh, ["dp"], 1e6) == pytest.approx(200e-6 + 1e-3, rel=1e-3)


def test_machines_get_a_link_of_their_own() -> None:
    over = [MeasuredRow(k + SUFFIX[NODES], tuple(times(k, 1e-3, 1e8, "ring", (2,)))) for k in PRICED]
    found = calibration({**MACHINE, "ranks": 4, "nodes": 2}, [*rows(), *over])
    cluster = found.cluster
    assert Cluster.from_yaml(cluster.to_yaml(found.note)) == cluster
    assert [(level.name, level.size) for level in cluster.levels] == [("node", 2), ("rank", 2)]
    outer, inner = (
        cluster.prices.seconds("all_reduce", cluster.mesh, [axis], 1e6) for axis in ("node", "rank")
    )
    assert (outer, inner) == (pytest.approx(2e-3 + 1e-2, rel=1e-3), pytest.approx(200e-6 + 1e-3, rel=1e-3))


def whole(
    name: str, flops: float, waited: float, hidden: float, rows_hidden: float, slower: dict[str, float]
) -> MeasuredRow:
    """A step that computes, sends what it waits for and what it hides, on a machine where each class takes so many
    times as long as the other rows say."""
    tasks = [
        {
            "name": "a",
            "phase": "forward",
            "after": [],
            "work": ["matmul", "f32", flops, 1.0, 1.0, "", 0.0, 0.0, ""],
        },
        {"name": "b", "phase": "forward", "after": [], "send": ["all_reduce", ["rank"], waited, True]},
        {"name": "c", "phase": "reduce", "after": [1], "send": ["all_reduce", ["rank"], hidden, False]},
        {
            "name": "d",
            "phase": "backward",
            "after": [],
            "work": ["matmul", "f32", 2 * flops, 1.0, 2.0, "", 0.0, 0.0, ""],
        },
        {
            "name": "e",
            "phase": "backward",
            "after": [3],
            "send": ["all_gather", ["rank"], rows_hidden, False],
        },
        {"name": "update", "phase": "update", "after": [2, 4], "update": [[1000, 4], [2000, 4]]},
    ]
    about = {"mesh": [["rank", 2, "rank"]], "tasks": tasks}
    plain = calibration(MACHINE, [r for r in rows() if r.name != "slowdown"]).cluster
    return MeasuredRow(name, (Point(1.0, priced(about, plain).seconds(slower)),), about=about)


def test_whole_steps_correct_each_class_and_void_ones_do_not_count() -> None:
    truth = {"matmul": 1.2, "meeting": 3.0, "waited": 1.5, "hidden": 0.8, "hidden_rows": 2.0}
    amounts = [
        (1e6, 1e3, 1e3, 0),
        (1e9, 1e6, 1e5, 1e3),
        (1e7, 1e4, 1e3, 3e7),
        (4e8, 1e5, 4e7, 1e3),
        (1e7, 2e7, 1e4, 0),
        (1e6, 1e3, 1e4, 3e6),
        (1e6, 1e3, 3e6, 1e3),
    ]
    quiet = [whole(f"step {n}", *amount, slower=truth) for n, amount in enumerate(amounts)]
    loud = replace(whole("step x", 1e9, 1e6, 1e6, 1e3, {"matmul": 9.0}), unrest=3.0)
    found = calibration(MACHINE, [*(r for r in rows() if r.name != "slowdown"), *quiet, loud])
    known = found.cluster.measured.corrections
    assert {name: known[name] for name in truth} == pytest.approx(truth, rel=0.15)
    # What the corrected cluster says of the steps is what they took; of the void one it is far off, as a reader sees.
    for row in quiet:
        assert priced(row.about, found.cluster).seconds() == pytest.approx(row.points[0].seconds, rel=0.05)
    assert found.lines[-1][2].startswith("-8")
    assert found.void == ("step x",)
    assert found.fit.startswith("7 full steps: mean error") and "meeting × " in found.fit
    assert Cluster.from_yaml(found.cluster.to_yaml()) == found.cluster


def test_steps_that_were_disturbed_a_little_count_where_quiet_ones_are_few() -> None:
    """Of six steps one was quiet, and shows nothing of what is sent; a loud one never counts."""
    truth = {"matmul": 1.2, "waited": 1.5}
    amounts = [(1e9, 0, 0, 0), (1e9, 1e6, 1e5, 0), (1e6, 3e7, 0, 0), (4e8, 1e7, 0, 0), (1e7, 2e7, 1e4, 0)]
    steps = [whole(f"step {n}", *amount, slower=truth) for n, amount in enumerate(amounts)]
    near = [steps[0], *(replace(step, unrest=1.15) for step in steps[1:])]
    loud = replace(whole("step x", 1e9, 1e6, 1e6, 1e3, {"matmul": 9.0}), unrest=3.0)
    known = calibration(MACHINE, [*rows()[:-1], *near, loud]).cluster.measured.corrections
    assert {name: known[name] for name in truth} == pytest.approx(truth, rel=0.15)


def test_collectives_that_are_waited_for_have_rows_of_their_own() -> None:
    kinds = [name.partition(" ")[0] for name in WAITED]
    waited = [
        MeasuredRow(n, tuple(times(k, 250e-6, 5e8, "ring", (2,)))) for n, k in zip(WAITED, kinds, strict=True)
    ]
    cluster = calibration(MACHINE, [*rows(), *waited]).cluster
    for kind in kinds:
        assert cluster.measured.waited["rank"][kind] == pytest.approx((250e-6, 5e8), rel=1e-3)
        assert cluster.measured.collectives["rank"][kind] == pytest.approx((100e-6, 1e9), rel=1e-3)
    assert cluster.prices.seconds("all_gather", cluster.mesh, ["rank"], 1e6) == pytest.approx(
        2.25e-3, rel=1e-3
    )
    hidden = cluster.hidden_prices.seconds("all_gather", cluster.mesh, ["rank"], 1e6)
    assert hidden == pytest.approx(1.1e-3, rel=1e-3)
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


def test_one_rank_has_no_links() -> None:
    alone = [r for r in rows() if r.name not in (*PRICED, "slowdown")]
    cluster = calibration({**MACHINE, "ranks": 1}, alone).cluster
    assert cluster.ranks == 1 and not cluster.measured.collectives
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


def test_numbers_for_readers() -> None:
    assert [si(x) for x in (3.14159, 12_345.0, 2.5e9, 7e13)] == ["3.14 ", "12.3 k", "2.5 G", "70 T"]


# ---------------------------------------------------------------- measuring again


class Machine:
    """Stands for the bench and the probe: every attempt takes one second, and each has the noise it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, noise: dict[str, list[float]]) -> None:
        self.now, self.noise, self.told = 0.0, noise, []
        monkeypatch.setattr(worker, "measured", self.measured)

    def elapsed(self) -> float:
        return self.now

    def measured(self, bench: object, name: str, measure: object) -> MeasuredRow:
        self.now += 1.0
        attempt = sum("row" in e and e["row"] == name for e in self.told)
        return MeasuredRow(name, (Point(1.0, float(attempt + 1)),), self.noise[name][attempt])


@pytest.mark.parametrize(
    ("noise", "attempts", "limit", "kept", "left_out"),
    [
        # All quiet: each is measured once.
        ({"a": [1.0], "b": [1.05]}, 4, 99, {"a": (1, 1), "b": (1, 1)}, []),
        # Disturbed ones come again when all have been measured; the quietest attempt counts.
        (
            {"a": [1.3, 1.0], "b": [1.0], "c": [1.5, 1.2, 1.4]},
            3,
            99,
            {"a": (2, 2), "b": (1, 1), "c": (2, 3)},
            [],
        ),
        # No second look.
        ({"a": [1.3], "b": [1.0]}, 1, 99, {"a": (1, 1), "b": (1, 1)}, []),
        # Time for one more, then for none.
        ({"a": [1.3, 1.2], "b": [1.3]}, 4, 3, {"a": (2, 2), "b": (1, 1)}, []),
        # Not even time for all; the first is measured whatever it takes.
        ({"a": [1.0], "b": [1.0], "c": [1.0]}, 4, 1.5, {"a": (1, 1), "b": (1, 1)}, ["c"]),
        ({"a": [1.0], "b": [1.0]}, 4, -1, {"a": (1, 1)}, ["b"]),
    ],
)
def test_rows_are_measured_again_while_there_is_time(
    monkeypatch, noise, attempts, limit, kept, left_out
) -> None:
    machine, pace = Machine(monkeypatch, noise), replace(PACES[FULL], attempts=attempts, limit_seconds=limit)
    missing = worker.look(machine, dict.fromkeys(noise), pace, machine.told.append)  # type: ignore[arg-type]
    last = {e["row"]: MeasuredRow.of(e) for e in machine.told if "row" in e}
    assert {n: (row.points[0].seconds, row.attempts) for n, row in last.items()} == kept
    assert missing == left_out
    assert all(e["begin"] == after["row"] for e, after in itertools.pairwise(machine.told) if "begin" in e)
