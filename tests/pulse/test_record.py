"""What a rank's record says is what was put in."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest

from meshwright import heartbeat
from meshwright.heartbeat import record
from meshwright.heartbeat.reader import Group, Waits, computes, read
from meshwright.heartbeat.record import KEPT, Pulse


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = Pulse(tmp_path / "rank1")
    monkeypatch.setattr(heartbeat, "_mine", made)
    yield made
    faulthandler.unregister(record.stack_signal())
    made.close()


def test_what_a_rank_does_and_waits_for(mine: Pulse) -> None:
    path, group = mine.path, Group((0, 1), "dp")
    seen = read(path)
    assert seen is not None and (seen.doing, seen.step, seen.waits) == (heartbeat.OWN_CODE, -1, None)
    heartbeat.step(3)
    heartbeat.doing("forward", 0, 2)
    heartbeat.of("%x forward (model.py:3)")
    heartbeat.begun("all_reduce", (0, 1), "dp")
    entry = heartbeat.begun("all_gather", (0, 1), "dp")
    with heartbeat.waiting(entry):
        seen = read(path)
        assert seen is not None and (seen.doing, seen.step, seen.numbers) == ("forward", 3, (0, 2))
        assert seen.waits == Waits("all_gather", group, 2)  # what was told was of the one before
    seen = read(path)
    assert seen is not None and seen.waits is None and seen.begun == {group: 2}
    told = {(group, 1): ("all_reduce", "%x forward (model.py:3)"), (group, 2): ("all_gather", "")}
    assert seen.latest == told


def test_the_latest_collectives_are_kept_in_their_order(mine: Pulse) -> None:
    for number in range(KEPT + 10):
        heartbeat.begun("all_reduce", (0, number % 2 + 1), of=str(number))
    seen = read(mine.path)
    assert seen is not None and len(seen.latest) == KEPT
    assert [of for _, of in seen.latest.values()] == [str(n) for n in range(10, KEPT + 10)]
    assert sum(seen.begun.values()) == KEPT + 10


def test_after_a_regroup_collectives_are_counted_anew_by_launched_ranks(mine: Pulse) -> None:
    for ranks in ((0, 1, 2), (1, 2)):
        heartbeat.begun("all_reduce", ranks, "dp")
    with heartbeat.waiting(heartbeat.begun("all_reduce", (0, 1, 2), "dp")):
        heartbeat.regroup((0, 2))
    heartbeat.begun("all_gather", (0, 1), "dp")
    seen, group = read(mine.path), Group((0, 2), "dp")
    assert seen is not None and seen.waits is None
    assert seen.begun == {group: 1}
    assert seen.latest == {(group, 1): ("all_gather", "")}
    heartbeat.regroup((0, 2, 1))  # and a group that there was before
    entry = heartbeat.begun("all_reduce", (0, 1, 2), "dp")
    with heartbeat.waiting(entry):
        seen = read(mine.path)
        assert seen is not None and seen.waits == Waits("all_reduce", Group((0, 2, 1), "dp"), 1)


def test_a_thread_that_saves_waits_beside(mine: Pulse) -> None:
    told = heartbeat.begun("checkpoint", (0, 1), "save", "step-1")
    with heartbeat.waiting(told, beside=True):
        seen = read(mine.path)
        assert seen is not None and seen.waits is None
        with heartbeat.during(heartbeat.FOR_SAVE):
            seen = read(mine.path)
            assert seen is not None and seen.waits == Waits("checkpoint", Group((0, 1), "save"), 1, "step-1")


def test_who_builds_may_be_silent_while_it_computes(mine: Pulse) -> None:
    def data() -> bytes:
        return mine.path.with_suffix(".pulse").read_bytes()

    assert not computes(data()) and not computes(b"")
    with heartbeat.during("building", patient=True):
        assert computes(data())
        with heartbeat.waiting(heartbeat.begun("word", (0, 1))):
            assert not computes(data())
    assert not computes(data())


def test_a_sign_of_life_is_seen(mine: Pulse) -> None:
    before = mine.path.with_suffix(".pulse").read_bytes()
    heartbeat.alive()
    assert mine.path.with_suffix(".pulse").read_bytes() != before


def test_nobody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        heartbeat.OWN, f"1:{tmp_path / 'rank0'}"
    )  # of another process: this is a child of a rank
    heartbeat.begin()
    assert not list(tmp_path.iterdir()) and heartbeat.begun("all_reduce", (0,)) is None
    with heartbeat.during("nothing"), heartbeat.waiting(None):
        heartbeat.alive()
    assert read(tmp_path / "rank0") is None
