"""Every schedule is complete and free of deadlock, whatever the sizes; bubbles and memory are what the papers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.pipeline import Action, Schedule, make, play, with_messages
from meshwright.pipeline.draw import draw

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 13), st.integers(2, 4))


def all_of(ranks: int, micro_batches: int, chunks: int) -> list[Schedule]:
    one = [make(name, ranks, micro_batches) for name in ("gpipe", "1f1b", "zero_bubble", "forward")]
    more = [make("interleaved", ranks, micro_batches, chunks), make("zero_bubble_v", ranks, micro_batches, 2)]
    return [*one, *more, make("forward", ranks, micro_batches, chunks)]


@settings(max_examples=120, deadline=None)
@given(SIZES)
def test_every_schedule_runs_to_its_end(sizes):
    for schedule in all_of(*sizes):
        played = play(schedule)
        work = {"forward": 1}.get(schedule.name, 3) * schedule.stages * schedule.micro_batches
        busy = sum(end - begin for rank in played.times for _, begin, end in rank)
        assert busy == pytest.approx(work)
        assert 0.0 <= played.bubble < 1.0
        assert played.end >= work / len(schedule.actions)


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_messages_pair_up_and_change_nothing(sizes):
    for schedule in all_of(*sizes):
        told = with_messages(schedule)
        assert play(told).end == play(schedule).end
        flat = [a for actions in told.actions for a in actions]
        sent = {(a.stage + 1, a.micro_batch) for a in flat if a.kind == "send_value"}
        assert sent == {(a.stage, a.micro_batch) for a in flat if a.kind == "receive_value"}
        back = {(a.stage - 1, a.micro_batch) for a in flat if a.kind == "send_gradient"}
        assert back == {(a.stage, a.micro_batch) for a in flat if a.kind == "receive_gradient"}


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_bubbles_and_memory_are_those_of_the_papers(ranks, micro_batches):
    p, m = ranks, micro_batches
    gpipe, simple = play(make("gpipe", p, m)), play(make("1f1b", p, m))
    assert gpipe.end == simple.end == 3 * (m + p - 1)
    assert gpipe.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert gpipe.peaks == (m,) * p
    assert simple.peaks == tuple(min(p - r, m) for r in range(p))
    # Interleaving v stages a rank divides the bubble by v; a stage is then a v-th of the work.
    for v in (2, 3):
        assert play(make("interleaved", p, m, v)).end == 3 * (m * v + p - 1)
    halves, turned = play(make("zero_bubble", p, m)), play(make("zero_bubble_v", p, m, 2))
    assert halves.end <= 3 * m + p - 1 < simple.end  # ZB-H1: a third of 1F1B's bubble
    assert max(halves.peaks) <= p
    assert turned.bubble < halves.bubble and max(turned.peaks) <= 2 * p  # a stage there is half of one here


@pytest.mark.parametrize(
    ("name", "chunks", "wanted"),
    [("1f1b", 2, "pipeline=2 "), ("interleaved", 1, "pipeline=4 "), ("zero_bubble_v", 1, "pipeline=4 ")],
)
def test_too_many_or_few_stages_a_rank_say_how_many_there_may_be(name, chunks, wanted):
    with pytest.raises(PlanError) as caught:
        make(name, 2, 4, chunks)
    assert wanted in caught.value.hint
    assert ("interleaved" in caught.value.hint) == (name == "1f1b")


def test_a_slow_link_delays_and_never_stops():
    schedule = make("1f1b", 4, 8)
    assert play(schedule, message_seconds=0.5).end > play(schedule).end


def test_a_schedule_that_waits_for_ever_is_named():
    good = make("1f1b", 2, 2)
    first = (
        Action("forward", 0, 0),
        Action("backward", 0, 0),
        Action("forward", 0, 1),
        Action("backward", 0, 1),
    )
    last = (
        Action("forward", 1, 0),
        Action("forward", 1, 1),
        Action("backward", 1, 0),
        Action("backward", 1, 1),
    )
    with pytest.raises(PlanError, match="deadlocks") as raised:
        play(replace(good, actions=(first, last)))
    text = str(raised.value)
    assert "rank 0 waits at action 1, backward(0, 0), for backward_input(1, 0) of rank 1" in text
    assert "rank 1 waits at action 1, forward(1, 1), for forward(0, 1) of rank 0" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a[:-3], "lacks backward(0, 2)"),
        (lambda a: (*a, a[0]), "listed 2 times"),
        (lambda a: (*a, Action("forward", 7, 0)), "a stage or micro-batch that"),
        (lambda a: (*a, Action("forward", 1, 0)), "held by rank 1"),
        (lambda a: (*a, Action("sleep")), "no action 'sleep'"),
        (lambda a: (*a, Action("backward_weight", 0, 0)), "both halves"),
    ],
)
def test_a_schedule_that_is_wrong_says_where(change, says):
    good = make("1f1b", 2, 3)
    with pytest.raises(PlanError) as raised:
        play(replace(good, actions=(change(good.actions[0]), good.actions[1])))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("1f2b", 2, 4), "did you mean '1f1b'"),
        (("1f1b", 0, 4), "pipeline ranks=0"),
        (("1f1b", 2, 0), "micro_batches=0"),
        (("interleaved", 2, 4, 1), "at least 2"),
        (("zero_bubble_v", 2, 4, 3), "exactly 2"),
        (("1f1b", 2, 4, 2), "exactly 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(words, says):
    with pytest.raises(PlanError) as raised:
        make(*words)
    assert says in str(raised.value)


def test_a_drawing_shows_who_waits():
    lines = draw(play(make("1f1b", 2, 2)), width=27).splitlines()
    assert lines[0] == "1f1b: 2 stages, 2 micro-batches, bubble 33.3 %"
    assert lines[1].startswith("rank   0 │F0 F1 ···") and lines[1].endswith("at most 2 in memory")
    assert lines[2].startswith("rank   1 │···F0 B0")


def test_a_drawing_tells_the_stages_of_a_rank_apart():
    lines = draw(play(make("zero_bubble_v", 2, 2, 2)), width=96).splitlines()
    found = [word.strip("─·") for word in lines[1].partition("│")[2].partition("│")[0].split()]
    assert {"F0", "f0", "I1", "i1", "W1", "w1"} <= set(found)
    assert not any(c.islower() for c in draw(play(make("1f1b", 2, 2)), width=96).splitlines()[1][10:90])


def test_messages_from_a_rank_to_another_go_one_after_the_other() -> None:
    """Not all of GPipe's at once: a link that takes five times a forward's time decides how long eight take."""
    slow = play(make("gpipe", 2, 8), message_seconds=5.0)
    first, *_, last = [begin for a, begin, _ in slow.times[1] if a.kind == "forward"]
    assert (first, last) == (6.0, 6.0 + 7 * 5.0)
    quick = play(make("gpipe", 2, 8), message_seconds=0.5)  # the next one is made later than that
    assert [begin for a, begin, _ in quick.times[1] if a.kind == "forward"] == [1.5 + m for m in range(8)]
