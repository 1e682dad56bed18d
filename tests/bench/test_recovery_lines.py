"""What an event costs, from what ranks have written; and one event, run."""

from __future__ import annotations

import pytest

from bench.machines import Machine
from bench.recovery_events import EVENTS, measured
from bench.recovery_lines import Found, Line, after, furthest, latest, longest, read, redone
from bench.recovery_random import disturbed

FOLDER = (
    (
        "losses0",
        "1 0x1p+1 10.0 2 70\n2 0x1p+0 11.0 2 70\n3 0x1p-1 12.0 2 70\n3 0x1p-1 20.5 2 80\n4 0x1p-2 21 2 80\n",
    ),
    ("losses1", "1 0x1p+1 10.1 2 71\n2 0x1p+0 11.1 2 71\n3 0x1p-1 20.6 2 81\n4 0x1"),
)


@pytest.fixture
def lines(tmp_path) -> list[Line]:
    for name, text in FOLDER:
        (tmp_path / name).write_text(text)
    return read(tmp_path)


def test_what_an_event_cost(lines):
    """The last step was killed before it was saved: rank 0 had done it, and it is done once more."""
    assert [(line.step, line.pid) for line in lines] == [
        (1, 70), (1, 71), (2, 70), (2, 71), (3, 70), (3, 80), (3, 81), (4, 80)
    ]  # fmt: skip
    assert after(lines, 12.5, lambda line: line.pid >= 80) == Found(8.0, 1)
    assert after(lines, 10.5, lambda line: line.pid == 70) == Found(0.5, 0)
    assert after(lines, 12.5, lambda line: line.ranks == 1) is None


def test_the_last_line_of_a_rank_is_read_without_the_rest(lines, tmp_path):
    assert latest(tmp_path, 0) == lines[-1]
    found = latest(tmp_path, 1)  # its last one is half there
    assert found is not None and (found.step, found.pid) == (3, 81)
    assert latest(tmp_path, 2) is None


def test_a_step_is_done_once_more_by_others_or_behind_others():
    def line(step, pid, ranks=2):
        return Line(step, 1.0, 0.0, ranks, pid)

    once = [line(1, 70), line(1, 71), line(2, 71), line(2, 70), line(3, 70, 1)]
    assert redone(once) == 0
    assert redone([*once, line(4, 70), line(4, 72)]) == 0  # it joins
    assert redone([*once, line(3, 80), line(3, 81)]) == 1
    assert redone([*once, line(4, 70, 1), line(2, 80, 1)]) == 1


def test_the_longest_pause_is_that_of_a_process(lines):
    assert longest(lines, 10.5, 30.0) == 1.0
    assert longest((line for line in lines if line.pid == 80), 20.6, 20.7) == 0.5
    assert longest(lines, 40.0, 50.0) == 0.0


def test_losses_are_compared_step_by_step(lines):
    assert furthest(lines, lines) == 0.0
    other = [Line(line.step, line.loss * (1.5 if line.step == 4 else 1), 0.0, 1, 1) for line in lines]
    assert furthest(lines, other) == pytest.approx(1 / 3)
    assert furthest(lines, other[:4]) == float("inf")


@pytest.mark.full
@pytest.mark.procs
@pytest.mark.parametrize(
    "name", ["rank-continue", "network", "elastic-added", "memory-zero", "memory-tensor", "memory-stages"]
)
def test_an_event(name, tmp_path, monkeypatch):
    monkeypatch.setattr("bench.recovery_events.DOWN_SECONDS", 3.0)
    monkeypatch.setattr("bench.recovery_events.ALONE", [Machine("127.0.0.1")])
    row = measured(name, tmp_path)
    assert row.found is not None
    # a copy has gone before the next step, if not before the kill
    assert row.found.lost <= name.startswith("memory")
    assert row.equal.startswith("yes" if name == "network" else ("yes", "on all ranks"))
    assert EVENTS[name] is row.event


@pytest.mark.full
@pytest.mark.procs
@pytest.mark.timeout(900)
def test_random_events_over_machines_lose_nothing(tmp_path):
    result = disturbed(tmp_path, events=5, count=3, seed=11)
    assert len(result.told) == 5
    assert result.well, f"{result}"
