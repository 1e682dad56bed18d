"""A rank whose step waits for ranks that have gone on without it is freed, or ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright import heartbeat
from meshwright.heartbeat import generation
from meshwright.heartbeat.generation import Generation
from meshwright.runtime import regroup
from meshwright.runtime.communicator import leave_groups
from meshwright.runtime.regroup import STUCK_SECONDS, WATCH_SECONDS, Group
from meshwright.runtime.stores import HashStore

LOOKS = int(STUCK_SECONDS / WATCH_SECONDS) + 3


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each interrupt, which frees nobody. Instead of its process, a rank ends the test by SystemExit."""
    found: list[bool] = []

    def ends(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(regroup, "interrupt", lambda: found.append(True))
    monkeypatch.setattr(os, "_exit", ends)
    return found


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Group]:
    """A rank in a step of a generation that is over."""
    generation.write(tmp_path, Generation(0, (0, 1)))
    group = Group(tmp_path, 1, Generation(0, (0, 1)))
    with group.in_step():
        group.look()
        generation.write(tmp_path, Generation(1, (0, 1)))
        yield group


def test_a_step_may_end_by_itself_before_it_is_interrupted(behind: Group, interrupts: list[bool]) -> None:
    behind.look()
    assert not interrupts
    behind.look()
    assert len(interrupts) == 1
    behind.busy = False
    behind.look()
    assert len(interrupts) == 1


def test_a_rank_that_cannot_be_freed_ends(
    behind: Group,
    interrupts: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(heartbeat, "long_wait", lambda: STUCK_SECONDS + 1)
    with pytest.raises(SystemExit) as ended:
        for _ in range(LOOKS):
            behind.look()
    assert ended.value.code == 1 and len(interrupts) >= STUCK_SECONDS / WATCH_SECONDS
    assert "rank 1 still waits" in capsys.readouterr().err


def test_a_rank_that_computes_long_goes_on(behind: Group, interrupts: list[bool]) -> None:
    for _ in range(LOOKS):  # this process has no record, as one that waits for nothing
        behind.look()
    assert len(interrupts) == LOOKS - 1


def test_a_group_that_has_ended_is_in_the_way_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Holder:
        def __init__(self, *groups: Any) -> None:
            self.groups = groups

        def held(self) -> tuple[Any, ...]:
            return self.groups

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    ended = dist.new_group([0])
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(leave_groups, "living", [Holder(ended), Holder(dist.group.WORLD)])
        size = dist.get_world_size
        monkeypatch.setattr(dist, "get_world_size", lambda group: asked.append(group) or size(group))
        leave_groups.interrupt()
    finally:
        dist.destroy_process_group()
    assert len(asked) == 2  # the default group, and the second holder's
