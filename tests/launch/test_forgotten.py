"""A launcher whose scheduler came back without its state, or is not the one that it has started."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import LaunchError
from meshwright.launch import membership
from meshwright.launch.nodes import Nodes
from meshwright.launch.outcome import Outcome
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Place


class Forgetful:
    """Answers as a scheduler that forms an attempt, and then is started again without what it knew."""

    def __init__(self, place: Place, patience: float = 0.0, reach_seconds: float = 0.0) -> None:
        pass

    def ask(self, body: Any, kind: Any, wait: float = 0.0) -> m.Message:
        match body:
            case m.Join():
                return m.Formed(1, (body.node,))
            case m.Watch():
                time.sleep(0.01)
                return m.State(0)
        return m.Done()

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return desired

    def own_address(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        pass


class Repeating(Forgetful):
    """Answers as a scheduler that knows of an attempt that ends to begin again."""

    def ask(self, body: Any, kind: Any, wait: float = 0.0) -> m.Message:
        if isinstance(body, m.Watch):
            time.sleep(0.3)
            return m.State(1, 1, over=True, settled=True, status=143, node="node1", again=True)
        return super().ask(body, kind, wait)


def a_member(folder: Path) -> membership.Member:
    nodes, place = Nodes(1, "127.0.0.1", 2000, index=0, id="node0"), Place("127.0.0.1", 2000)
    return membership.Member(nodes, place, 1, 3, "restart", folder, folder, lambda: False)


def test_whose_own_scheduler_came_too_late_hears_that_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the start of its own, another machine has started one."""

    def ended(*_: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
        process.wait()
        return process

    listens = iter([False, True])
    monkeypatch.setattr(membership, "Client", Repeating)
    monkeypatch.setattr(membership, "start_scheduler", ended)
    monkeypatch.setattr(membership, "_listens", lambda _: next(listens))
    with a_member(tmp_path) as member:
        member.begin()
        outcome, again = member.end(Outcome(0, cut_short=True))
    assert again and outcome.exit_code == 143


def test_an_attempt_that_the_scheduler_has_forgotten_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "Client", Forgetful)
    member = a_member(tmp_path)
    assert member.begin().world == 1
    failed, found = Outcome(1, LaunchError("rank 0 failed")), []
    ending = threading.Thread(target=lambda: found.append(member.end(failed)), daemon=True)
    ending.start()
    ending.join(30)
    assert found == [(failed, False)]
    assert not member.over()  # the ranks could have gone on
    member.__exit__()
