"""The laws of a timeline, on drawn lists of tasks and on small ones worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.timeline import COMPUTE, Task, play

STREAMS = ("a", "b")


@st.composite
def drawn(draw, most: int = 12):
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(("compute", "blocking", "beside")))
        stream = draw(st.sampled_from(STREAMS))
        streams = {"compute": (COMPUTE,), "blocking": (COMPUTE, stream), "beside": (stream,)}[kind]
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        tasks.append(Task(f"t{number}", streams, draw(st.integers(0, 20)) / 4, tuple(after)))
    return tasks


FACTORS = st.sampled_from(({}, {"compute": 1.5}, {"collective": 2.0}, {"compute": 1.25, "collective": 1.5}))


def computed(tasks) -> float:
    return sum(t.seconds for t in tasks if t.computes)


@given(drawn(), FACTORS)
def test_a_step_is_no_shorter_than_what_any_stream_does(tasks, slowdown) -> None:
    found = play(tasks, slowdown)
    step = found.step_seconds
    assert step >= computed(tasks) - 1e-9
    for stream in found.streams:
        assert found.busy_seconds(stream) <= step + 1e-9
        assert found.busy_seconds(stream) >= sum(t.seconds for t in tasks if stream in t.streams) - 1e-9
    assert found.compute_seconds + found.exposed_seconds <= step + 1e-9
    assert found.hidden_seconds <= found.compute_seconds + 1e-9
    assert found.idle_seconds < 1e-9  # something always runs: whatever is first of its streams can


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=20))
def test_a_device_waits_for_its_host_and_never_the_other_way_round(pairs) -> None:
    """On one stream: the longest way, on the host as far as some task and from there on the device."""
    tasks = [Task(str(n), (COMPUTE,), s / 4, issue_seconds=i / 4) for n, (s, i) in enumerate(pairs)]
    seconds, issue = ([x / 4 for x in one] for one in zip(*pairs, strict=True))
    longest = max(sum(issue[: n + 1]) + sum(seconds[n:]) for n in range(len(tasks)))
    found = play(tasks)
    assert found.step_seconds == pytest.approx(longest)
    assert found.idle_seconds == pytest.approx(longest - sum(seconds))


@given(drawn(), FACTORS, st.integers(0, 8))
def test_a_slower_host_never_ends_a_step_earlier_without_slowdown(tasks, slowdown, issue) -> None:
    issued = [replace(task, issue_seconds=issue / 4) for task in tasks]
    found = play(issued, slowdown)
    assert found.step_seconds >= issue / 4 * len(tasks) - 1e-9
    assert all(start >= issue / 4 * (n + 1) - 1e-9 for n, start in enumerate(found.starts))
    assert play(issued).step_seconds >= play(tasks).step_seconds - 1e-9
    for task, start, end in zip(issued, found.starts, found.ends, strict=True):
        assert end - start >= task.seconds - 1e-9
        assert all(found.ends[a] <= start + 1e-9 for a in task.after)


@given(drawn(), FACTORS)
def test_tasks_wait_for_each_other_and_never_share_a_stream(tasks, slowdown) -> None:
    found = play(tasks, slowdown)
    last: dict[str, float] = {}
    for task, start, end in zip(tasks, found.starts, found.ends, strict=True):
        assert end - start >= task.seconds - 1e-9
        assert all(found.ends[a] <= start + 1e-9 for a in task.after)
        for stream in task.streams:
            assert last.get(stream, 0.0) <= start + 1e-9
            last[stream] = end


@given(drawn())
def test_without_overlap_a_step_is_the_sum(tasks) -> None:
    blocking = [Task(t.name, tuple({COMPUTE, *t.streams}), t.seconds, t.after) for t in tasks]
    found = play(blocking, {"compute": 2.0, "collective": 2.0})
    assert found.step_seconds == pytest.approx(sum(t.seconds for t in tasks))
    assert found.hidden_seconds == 0.0


@given(drawn(), st.floats(1.0, 3.0))
def test_a_slower_link_never_makes_a_step_faster(tasks, factor) -> None:
    slower = [t if t.computes else Task(t.name, t.streams, t.seconds * factor, t.after) for t in tasks]
    assert play(slower).step_seconds >= play(tasks).step_seconds - 1e-9


@given(drawn())
def test_without_slowdown_times_are_those_of_the_longest_path(tasks) -> None:
    """The independent truth: start = the latest end of what a task waits for, taken in list order."""
    found = play(tasks)
    ends: list[float] = []
    last: dict[str, float] = {}
    for task in tasks:
        start = max([0.0, *(ends[a] for a in task.after), *(last.get(s, 0.0) for s in task.streams)])
        ends.append(start + task.seconds)
        last.update(dict.fromkeys(task.streams, ends[-1]))
    assert found.ends == pytest.approx(ends)


def test_compute_and_a_collective_slow_each_other_down() -> None:
    tasks = [Task("send", ("a",), 3.0), Task("compute", (COMPUTE,), 4.0)]
    found = play(tasks, {"compute": 1.25, "collective": 1.5})
    # Side by side for 4.5 s, in which 3 s of sending and 3.6 s of computing are done; then 0.4 s alone.
    assert found.ends == pytest.approx((4.5, 4.9))
    assert (found.compute_seconds, found.exposed_seconds) == pytest.approx((4.9, 0.0))
    assert found.hidden_seconds == pytest.approx(4.5)
    assert [found.busy_seconds(stream) for stream in (COMPUTE, "a")] == pytest.approx([4.9, 4.5])


def test_a_blocking_collective_waits_for_one_under_way_on_its_axes() -> None:
    tasks = [
        Task("first", (COMPUTE,), 1.0),
        Task("bucket", ("a",), 5.0, (0,)),
        Task("second", (COMPUTE,), 1.0),
        Task("blocking", (COMPUTE, "a"), 1.0),
        Task("elsewhere", (COMPUTE, "b"), 1.0),
    ]
    found = play(tasks)
    assert found.starts == pytest.approx((0.0, 1.0, 1.0, 6.0, 7.0))
    assert found.exposed_seconds == pytest.approx(6.0) and found.hidden_seconds == pytest.approx(1.0)


@pytest.mark.parametrize(
    "task", [Task("later", (COMPUTE,), 1.0, (0,)), Task("none", (), 1.0), Task("nan", ("a",), float("nan"))]
)
def test_a_list_that_cannot_be_played_is_refused(task: Task) -> None:
    with pytest.raises(ValueError, match=task.name):
        play([task])
