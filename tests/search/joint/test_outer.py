"""What is said of pipelines before any is simulated: formulas against schedules that are played."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.cost.cluster import Cluster
from meshwright.pipeline.play import play
from meshwright.pipeline.schedules import make
from meshwright.predict.pipeline_claims import play_stages
from meshwright.predict.stage_time import StageSeconds
from meshwright.search.pipeline.configurations import (
    SEARCHED,
    FullModel,
    Outer,
    Schedule,
    may_win,
    outers,
    peak_bytes,
    pipelined_seconds,
    simulated_peak_bytes,
    step_seconds,
    unmixed,
)
from meshwright.search.planner import Evaluation

PLAYED = [
    (name, chunks, ranks, pieces)
    for name, chunks in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero_bubble", 1),
    )
    for ranks, pieces in itertools.product((2, 4, 8), (8, 16, 32))
]


@pytest.mark.parametrize(("name", "chunks", "ranks", "pieces"), PLAYED)
def test_idle_share_and_micro_batches_in_flight_are_those_of_the_played_schedule(name, chunks, ranks, pieces):
    played, told = play(make(name, ranks, pieces, chunks)), Schedule(name, chunks)
    idle = played.bubble / (1 - played.bubble)
    assert told.idle_share(ranks, pieces) == pytest.approx(idle, rel=1e-9)
    held = max(played.peaks) / chunks
    assert held <= told.in_flight(ranks, pieces) <= held + 1


@pytest.mark.parametrize(("ranks", "pieces"), list(itertools.product((2, 4, 8), (8, 16, 32))))
def test_a_v_of_stages_idles_about_as_told_and_holds_no_more(ranks, pieces):
    """Its order comes of a race, so the formula is the least of it."""
    played, told = play(make("zero_bubble_v", ranks, pieces, 2)), Schedule("zero_bubble_v", 2)
    idle = played.bubble / (1 - played.bubble)
    assert (
        told.idle_share(ranks, pieces) <= idle * (1 + 1e-9)
        and idle <= 0.04 + told.idle_share(ranks, pieces) * 1.5
    )
    assert max(played.peaks) / 2 <= told.in_flight(ranks, pieces)


def test_a_v_of_stages_is_among_what_is_searched():
    cluster = Cluster.preset("h100", nodes=4, ranks_per_node=2)
    found = {(o.schedule.name, o.schedule.chunks) for o in outers(cluster, layers=8)}
    assert found == {
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero_bubble", 1),
        ("zero_bubble_v", 2),
        ("gpipe", 1),
    }


def test_as_many_stages_as_there_are_layers_are_among_them():
    cluster = Cluster.preset("h100", nodes=4, ranks_per_node=2)
    found = {(o.ranks, o.schedule.chunks) for o in outers(cluster, 30) if o.schedule.name == "interleaved"}
    assert found == {(2, 2), (2, 4), (2, 8), (2, 15), (4, 2), (4, 4), (4, 7), (8, 2), (8, 3)}


def test_outer_configurations_divide_levels_and_leave_the_rest_to_a_stage():
    cluster = Cluster.preset("h100", nodes=4, ranks_per_node=2)
    every = list(outers(cluster, layers=8))
    assert {o.taken for o in every} == {(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)}
    assert len(every) == len(set(every))
    for outer in every:
        assert outer.ranks * outer.inside(cluster).ranks == cluster.ranks
        assert outer.stages <= 8
    assert not list(outers(cluster, layers=1))


def test_parts_of_two_levels_are_left_out_where_more_of_the_outer_one_gives_as_many_ranks():
    cluster = Cluster.preset("h100", nodes=4, ranks_per_node=6)
    every = {o.taken for o in outers(cluster, layers=30)}
    left = {o.taken for o in unmixed(cluster, outers(cluster, layers=30))}
    # (4, 1) and (4, 3) give 4 and 12 ranks; of 6, (2, 3) is the only way.
    assert every - left == {(2, 2), (2, 6)}


def test_a_message_goes_over_the_slowest_level_between_stages():
    cluster = Cluster.preset("h100", nodes=4, ranks_per_node=2)
    node, gpu = cluster.levels
    across, inside = (Outer(taken, Schedule("1f1b")) for taken in ((2, 2), (1, 2)))
    assert across.message_seconds(cluster, 1e9) == node.latency_seconds + 1e9 / node.bytes_per_s
    assert inside.message_seconds(cluster, 1e9) == gpu.latency_seconds + 1e9 / gpu.bytes_per_s


@pytest.mark.parametrize(
    ("name", "chunks", "micro_batches"),
    [
        ("1f1b", 1, 16),
        ("zero_bubble", 1, 16),
        ("zero_bubble_v", 2, 16),
        ("interleaved", 2, 16),
        ("gpipe", 1, 16),
        ("1f1b", 1, 4),
    ],
)
@pytest.mark.parametrize("message", (0.0, 0.01, 0.3, 1.0))
def test_what_is_waited_for_messages_is_near_what_a_schedule_waits(
    name: str, chunks: int, micro_batches: int, message: float
) -> None:
    """Four ranks; forward takes a third of a second of each rank's share of a micro-batch, as do both halves."""
    outer, third = Outer((4, 1), Schedule(name, chunks)), 1 / 3
    schedule = make(name, 4, micro_batches, chunks)
    stage = StageSeconds(third / chunks, 2 * third / chunks, third / chunks, 0.0)
    played = play_stages(schedule, [stage] * (4 * chunks), [message] * (4 * chunks), [0.0] * 4)
    told = pipelined_seconds(4.0 * micro_batches, 0.0, outer, micro_batches, message)
    assert told == pytest.approx(played.end, rel=0.3)
    if message:
        assert told > pipelined_seconds(4.0 * micro_batches, 0.0, outer, micro_batches, 0.0)


@pytest.mark.parametrize("model", [(4, 16), (8, 32), (2, 8)], ids=str)
def test_all_forwards_before_all_backwards_win_where_messages_are_heavy(model: tuple[int, int]) -> None:
    """Without messages `gpipe` takes what `1f1b` takes, and keeps more. Where one takes half of a stage's forward, no
    other schedule is quicker."""
    ranks, pieces = model

    def step(name: str, message: float) -> float:
        chunks = SEARCHED[name][0]
        stage = StageSeconds(1 / chunks, 2 / chunks, 1 / chunks, 0.0)
        stages, schedule = ranks * chunks, make(name, ranks, pieces, chunks)
        return play_stages(schedule, [stage] * stages, [message] * stages, [0.0] * ranks).end

    assert step("gpipe", 0.0) == step("1f1b", 0.0)
    assert min(SEARCHED, key=lambda name: step(name, 0.0)) not in ("gpipe", "1f1b")
    others = [name for name in SEARCHED if name not in ("gpipe", "zero_bubble_v")]
    assert step("gpipe", 1.0) < min(step(name, 1.0) for name in others)
    outer = Outer((ranks, 1), Schedule("gpipe"))
    assert may_win(outer, 3.0 * ranks * pieces, pieces, 1.0)
    assert not may_win(outer, 3.0 * ranks * pieces, pieces, 0.01)


def test_time_and_memory_of_a_whole_model_are_divided_by_the_ranks_of_the_pipeline():
    cluster = Cluster.preset("h100", nodes=4, ranks_per_node=2)
    whole = FullModel(8.0, 80.0, 0.0, 16.0, 0.0)
    outer = Outer((4, 1), Schedule("1f1b"))
    sends = 6 * outer.message_seconds(cluster, 0.0) * 6 / 4  # a round trip for each four micro-batches
    assert step_seconds(whole, outer, 6, cluster) == pytest.approx(2.0 * (1 + 3 / 6) + sends, rel=1e-12)
    assert peak_bytes(whole, outer, 6) == 20 + 4 * 16 / 4
    assert peak_bytes(whole, outer, 1) == 20 + 16 / 4
    assert math.isclose(peak_bytes(FullModel(8.0, 80.0, 10.0, 0, 0), outer, 6), 20 + 7.5)


def test_halves_of_backward_that_wait_cost_their_queue_and_win_nothing_where_layers_are_computed_again():
    cluster = Cluster.preset("h100", nodes=4, ranks_per_node=2)
    plain, halves = (Outer((4, 1), Schedule(name)) for name in ("1f1b", "zero_bubble"))
    again = FullModel(8.0, 80.0, 0.0, 16.0, 0.0)
    assert step_seconds(again, halves, 6, cluster) == step_seconds(again, plain, 6, cluster)
    assert peak_bytes(again, halves, 6) == peak_bytes(again, plain, 6)
    apart = FullModel(8.0, 80.0, 0.0, 16.0, 0.0, 20.0, 0.01)
    assert step_seconds(apart, plain, 6, cluster) == step_seconds(again, plain, 6, cluster)
    assert step_seconds(apart, halves, 6, cluster) == pytest.approx(
        (8.0 + 6 * 0.01) / 4 * (1 + 3 / 6 / 3), rel=1e-3
    )
    assert peak_bytes(apart, halves, 6) == 20 + 4 * 20 / 4


def test_a_simulated_peak_has_once_what_is_there_once_and_of_layers_a_share():
    """Layers take 80 bytes of which 16 are kept for backward; at the loss 40 live once."""
    whole, outer = FullModel(8.0, 64.0, 0.0, 16.0, 0.0), Outer((4, 1), Schedule("1f1b"))
    evaluation = Evaluation(8.0, 125.0, "loss", at=((40.0, 70.0), (5.0, 80.0)), at_layers=((5.0, 80.0),))
    assert simulated_peak_bytes(evaluation, whole, outer, 6) == max(40 + 70 / 4, 5 + 80 / 4 + 3 * 16 / 4)
    assert simulated_peak_bytes(evaluation, whole, Outer((2, 1), Schedule("1f1b")), 6) == 40 + 70 / 2
