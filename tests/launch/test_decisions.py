"""What a machine does not know yet while the scheduler is away."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from meshwright.launch import decisions
from meshwright.launch.decisions import AWAY_SECONDS, Decisions
from meshwright.scheduler import messages as m
from meshwright.scheduler.client import Place


def test_a_loss_that_the_scheduler_has_not_heard_of_is_undecided_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(decisions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = Decisions(Place("127.0.0.1", 1), "node0", 1, range(1), m.Standing(0), threading.Condition())
    made.hear([m.RankState(0)])
    made._told = made._states  # the scheduler has heard
    assert not made.undecided
    now[0] = 10 * AWAY_SECONDS  # of training, in which nobody asked
    made.hear([m.RankState(0, status=137)])
    assert made.undecided
    now[0] += AWAY_SECONDS + 1.0
    assert not made.undecided


def test_an_answer_that_nobody_has_looked_at_is_undecided() -> None:
    """The launcher looks at its ranks, at what is decided of them, and then whether all is over."""
    made = Decisions(Place("127.0.0.1", 1), "node0", 1, range(1), m.Standing(0), threading.Condition())
    lost = [m.RankState(0, status=137)]
    made.hear(lost)
    made._told = made._states  # meanwhile the scheduler has heard, and answers
    again = m.Standing(1, coming=(0,), lives={0: 1})
    made.heard(again)
    assert made.undecided
    assert made.hear(lost) is again
    assert not made.undecided
