"""A launcher whose scheduler came back without its state."""

from __future__ import annotations

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

    def __init__(self, place: Place, patience: float = 0.0) -> None:
        pass

    def ask(self, body: Any, kind: Any, wait: float = 0.0) -> m.Message:
        match body:
            case m.Join():
                return m.Formed(1, (body.node,))
            case m.Watch():
                time.sleep(0.01)
                return m.State(0)
        return m.Done()

    def own_address(self) -> str:
        return "127.0.0.1"

    def close(self) -> None:
        pass


def test_an_attempt_that_the_scheduler_has_forgotten_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "Client", Forgetful)
    nodes = Nodes(1, "127.0.0.1", 2000, index=0, id="node0")
    member = membership.Member(nodes, Place("127.0.0.1", 2000), 1, 3, tmp_path, tmp_path, lambda: False)
    assert member.begin().world == 1
    failed, found = Outcome(1, LaunchError("rank 0 failed")), []
    ending = threading.Thread(target=lambda: found.append(member.end(failed)), daemon=True)
    ending.start()
    ending.join(30)
    assert found == [(failed, False)]
    assert not member.over()  # the ranks could have gone on
    member.__exit__()
