"""Who hangs, told from records alone."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from meshwright.heartbeat import IN_STEP, OWN_CODE, SAVING
from meshwright.heartbeat.reader import Group, Seen, Waits
from meshwright.launch.hang_diagnosis import State, diagnose
from meshwright.launch.hang_elsewhere import Silent, silent, state_of

ALL = Group((0, 1, 2), "dp")
TOLD = {(ALL, 7): ("all_reduce", "%a forward (model.py:3)"), (ALL, 8): ("all_gather", "%b forward")}


def waiting(number: int, kind: str = "", group: Group = ALL, **told: object) -> State:
    kind, of = (kind, "") if kind else TOLD[group, number]
    latest = {(g, n): k for (g, n), k in TOLD.items() if n <= number}
    waits = Waits(kind, group, number, of)
    return State(Seen("forward", False, 5, (0, 0), 90.0, waits, {group: number}, {**latest, **told}))  # pyright: ignore[reportArgumentType]


def busy(number: int, what: str = OWN_CODE, process: str = "running") -> State:
    latest = {(g, n): k for (g, n), k in TOLD.items() if n <= number}
    return State(Seen(what, False, 4, (), 88.0, None, {ALL: number}, latest), process)


def test_who_has_not_come_to_a_collective_hangs() -> None:
    found = diagnose({0: waiting(8), 1: busy(7, "reading a batch"), 2: waiting(8)}, 10.0, 100.0)
    assert found is not None and found.ranks == (1,)
    assert found.what == "rank 1 of 3 hangs: no rank has made progress for 10 s"
    assert found.lines == (
        "rank 1: reading a batch after step 4, for 12 s; its last collective was the all_reduce of %a forward "
        "(model.py:3), "
        "7th of ranks 0 to 2 along dp",
        "ranks 0, 2 wait in the all_gather of %b forward, 8th of ranks 0 to 2 along dp: forward(0, 0) of step 5",
    )


def test_who_waits_for_one_that_waits_for_another_does_not_hang() -> None:
    message = waiting(3, "receive", Group((1, 0), "received"))
    found = diagnose({0: message, 1: waiting(8), 2: busy(7)}, 10.0, 100.0)
    assert found is not None and found.ranks == (2,)
    assert "rank 0 waits in a receive, 3rd message from rank 1 to rank 0" in found.lines[1]


def test_who_alone_makes_a_call_of_all_ranks_is_told_so() -> None:
    """`if rank == 0: step.save(path)` while the others go on."""
    seen = waiting(8).seen
    assert seen is not None
    saves, steps = State(replace(seen, doing=SAVING)), waiting(7)
    found = diagnose({0: saves, 1: busy(7), 2: steps}, 10.0, 100.0)
    assert found is not None and found.alone == (0,)
    assert "every rank calls step.save(path)" in found.hint and "`if rank == 0:`" in found.hint
    together = diagnose({0: saves, 1: State(replace(seen, doing=SAVING, waits=None))}, 10.0, 100.0)
    assert together is not None and not together.alone and not together.hint
    in_steps = diagnose({0: steps, 1: busy(6), 2: steps}, 10.0, 100.0)
    assert in_steps is not None and not in_steps.alone and not in_steps.hint


@pytest.mark.parametrize("state", [busy(8, process="stopped"), State(waiting(8).seen, "stopped")])
def test_who_is_stopped_hangs_also_within_a_collective(state: State) -> None:
    found = diagnose({0: waiting(8), 1: state, 2: waiting(8)}, 10.0, 100.0)
    assert found is not None and found.ranks == (1,)
    assert found.what == "rank 1 of 3 is stopped: no rank has made progress for 10 s"
    assert found.lines[0].startswith("rank 1: is stopped (SIGSTOP, or a debugger): ")


def test_who_has_ended_is_waited_for_in_vain() -> None:
    found = diagnose({0: waiting(8), 1: busy(7, process="gone"), 2: waiting(8)}, 10.0, 100.0)
    assert found is not None and found.ranks == (1,)
    assert found.lines[0].startswith("rank 1: has ended: the script's own code after step 4")


def test_who_has_no_record_yet_is_waited_for() -> None:
    found = diagnose({0: waiting(1, "word of all ranks"), 1: State(None), 2: busy(1)}, 10.0, 100.0)
    assert found is not None and found.ranks == (1,)
    assert found.lines[0] == "rank 1: has not reached `import meshwright` yet"


def test_who_left_a_collective_out_is_found_where_all_wait() -> None:
    other = waiting(8)
    assert other.seen is not None
    skipped = {**TOLD, (ALL, 7): ("all_gather", "%b forward"), (ALL, 8): ("all_reduce", "%c")}
    waits = Waits("all_reduce", ALL, 8, "%c")
    odd = State(Seen("forward", False, 5, (), 90.0, waits, {ALL: 8}, skipped))
    found = diagnose({0: other, 1: odd, 2: other}, 10.0, 100.0)
    assert found is not None and found.ranks == (1,)
    assert found.lines[0] == (
        "rank 1 left a collective out, or began one too many: the 7th of ranks 0 to 2 along dp is the all_gather of "
        "%b forward there, and the all_reduce of %a forward (model.py:3) on rank 0"
    )


def test_ranks_that_wait_for_one_another() -> None:
    one, two = (waiting(1, "receive", Group(pair, "received")) for pair in ((1, 0), (0, 1)))
    found = diagnose({0: one, 1: two}, 10.0, 100.0)
    assert found is not None and found.ranks == (0, 1)
    assert found.what == "ranks 0, 1 of 2 wait for one another: no rank has made progress for 10 s"


def test_a_checkpoint_without_a_name_waits_for_rank_0() -> None:
    group = Group((0, 1, 2), "save")
    others = waiting(1, "checkpoint", group)
    found = diagnose({0: busy(0, "saving"), 1: others, 2: others}, 10.0, 100.0)
    assert found is not None and found.ranks == (0,)


def test_where_nobody_waits() -> None:
    assert diagnose({0: busy(8), 1: busy(8)}, 10.0, 100.0) is None  # an evaluation of the script's own, maybe
    assert diagnose({0: State(None), 1: State(None)}, 10.0, 100.0) is None
    assert diagnose({0: busy(8, process="gone"), 1: busy(7)}, 10.0, 100.0) is None  # it has come to its end
    found = diagnose({0: busy(8), 1: busy(7)}, 10.0, 100.0)  # on a GPU nobody is seen to wait
    assert found is not None and found.ranks == (1,)
    found = diagnose({0: busy(8, IN_STEP), 1: busy(8, IN_STEP)}, 10.0, 100.0)
    assert found is not None and found.ranks == (0, 1)


def test_a_rank_is_read_on_another_machine_as_it_is() -> None:
    """Its clock is another one."""
    for state in (waiting(8), busy(7), State(None, "gone"), busy(8, process="stopped")):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(silent(1, state, 100.0)), type=Silent)
        found = state_of(sent, 1100.0)
        assert found.process == state.process
        if state.seen is not None:
            assert found.seen == replace(state.seen, since=state.seen.since + 1000.0)
