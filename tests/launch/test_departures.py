"""A rank that has left while others wait for it is named within seconds, and nobody else is disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.heartbeat import IN_STEP, OWN_CODE, SAVING, SHUTDOWN, STATE
from meshwright.heartbeat.reader import Group, Seen, Waits
from meshwright.launch.departures import diagnose, left
from tests.launch.conftest import Launches

ROOT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
ALL, EVERYBODY = Group((0, 1, 2), "dp"), Group((0, 1, 2), "")
SENT, RECEIVED = Group((1, 0), "sent"), Group((1, 0), "received")

# ---- from records alone


def seen(begun: dict[Group, int], waits: Waits | None = None, doing: str = IN_STEP, step: int = 5) -> Seen:
    latest = dict.fromkeys(begun.items(), ("all_reduce", "%a"))
    return Seen(doing, False, step, (), 90.0, waits, begun, latest)


def waiting(kind: str, group: Group, number: int) -> Seen:
    return seen({group: number}, Waits(kind, group, number, "%a"))


def in_shutdown(begun: dict[Group, int]) -> Seen:
    return seen({**begun, EVERYBODY: 1}, Waits(SHUTDOWN, EVERYBODY, 1), OWN_CODE, 4)


def found(states: dict[int, Seen], gone: Seen | None, *, ended: bool = False, silent: tuple[int, ...] = ()):
    one = left(1, gone, ended)
    return None if one is None else diagnose(states, silent, {1: one}, 3)


def test_who_waits_for_a_rank_in_shutdown_waits_in_vain() -> None:
    waits = waiting("all_reduce", ALL, 8)
    finding = found({0: waits, 2: waits}, in_shutdown({ALL: 7}))
    assert finding is not None and finding.ranks == (1,)
    assert (
        finding.what == "rank 1 of 3 reached mw.shutdown() after step 4, and ranks 0, 2 wait for it in step 5"
    )
    assert finding.lines == (
        "ranks 0, 2 wait in the all_reduce of %a, 8th of ranks 0 to 2 along dp: in step 5",
    )


def test_a_call_of_all_ranks_that_others_have_left_out_is_named() -> None:
    """`if rank == 0: step.full_state()` and its like."""
    for doing, call in ((STATE, "step.full_state()"), (SAVING, "step.save(path)"), (IN_STEP, "")):
        waits = seen({ALL: 8}, Waits("all_reduce", ALL, 8), doing)
        finding = found({0: waits}, in_shutdown({ALL: 7}))
        assert finding is not None and finding.alone == ((0,) if call else ())
        assert finding.hint.startswith(f"every rank calls {call}: ") if call else not finding.hint


def test_who_has_taken_part_is_not_waited_for() -> None:
    assert found({0: waiting("all_reduce", ALL, 8)}, in_shutdown({ALL: 8})) is None
    assert found({0: waiting("all_reduce", Group((0, 2), "dp"), 8)}, in_shutdown({})) is None
    assert found({0: waiting(SHUTDOWN, EVERYBODY, 1)}, in_shutdown({})) is None


def test_who_still_runs_has_not_left() -> None:
    assert found({0: waiting("all_reduce", ALL, 8)}, seen({ALL: 7}, None, OWN_CODE)) is None
    assert found({0: waiting("all_reduce", ALL, 8)}, None) is None  # it has not imported meshwright yet


def test_one_that_never_imported_meshwright_may_end() -> None:
    finding = found({0: waiting("word of all ranks", ALL, 1)}, None, ended=True)
    assert finding is not None
    assert finding.what == "rank 1 of 3 ended with exit code 0, and rank 0 waits for it in step 5"


@pytest.mark.parametrize(("sent", "vain"), [(2, True), (3, False)])
def test_messages_are_counted_at_the_other_end(sent: int, vain: bool) -> None:
    assert (found({0: waiting("receive", RECEIVED, 3)}, in_shutdown({SENT: sent})) is not None) == vain


def test_a_thread_of_a_rank_in_shutdown_may_still_save() -> None:
    save = Group((0, 1, 2), "save")
    assert found({0: waiting("checkpoint", save, 1)}, in_shutdown({})) is None
    assert found({0: waiting("checkpoint", save, 1)}, seen({}), ended=True) is not None


def test_a_group_that_is_not_counted_says_nothing() -> None:
    many = {Group((1, n), "sent"): 1 for n in range(240)}
    assert found({0: waiting("all_reduce", ALL, 8)}, seen(many), ended=True) is None


def test_on_a_gpu_silence_and_more_collectives_tell() -> None:
    ahead = seen({ALL: 8}, doing=OWN_CODE)  # it waits for the GPU, in no collective
    assert found({0: ahead}, in_shutdown({ALL: 7})) is None
    finding = found({0: ahead}, in_shutdown({ALL: 7}), silent=(0,))
    assert finding is not None
    assert (
        finding.what == "rank 1 of 3 reached mw.shutdown() after step 4, and rank 0 waits for it after step 5"
    )
    assert found({0: ahead}, in_shutdown({ALL: 8}), silent=(0,)) is None
    words = seen({Group((0, 1, 2), "before the process groups"): 3}, doing=OWN_CODE)
    assert found({0: words}, in_shutdown({}), silent=(0,)) is None


# ---- real processes; nothing here waits for --hang-after, which is ten minutes

SCRIPT = """
    import os, sys, time

    how, last = sys.argv[1], os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if how == "at once" and last:
        sys.exit(0)

    import torch
    import meshwright as mw
    from meshwright.examples import gpt, mlp

    if how == "pipeline":
        model, batch, loss = gpt.build(batch=4)
        step = mw.train_step(model, torch.optim.SGD, batch, loss=loss, mesh=2, pipeline=2, micro_batches=2)
    elif how == "manual":
        model, batch, loss = mlp.build()
        step = mw.manual_step(model, lambda p: torch.optim.SGD(p, lr=0.1), loss=loss)
    else:
        model, batch, loss = mlp.build()
        step = mw.train_step(model, torch.optim.SGD, batch, loss=loss)
    for number in range(2 if how in ("uneven ends", "save") else 3):
        if number == 2 and last:
            break
        step(batch)
    if how == "save" and not last:
        step.save("ckpt")
    if how == "uneven ends":
        if not last:
            time.sleep(6)
        elif len(sys.argv) > 2:
            os._exit(0)
    if not (how == "uneven ends" and len(sys.argv) > 2):
        mw.shutdown()
    print("to the end")
"""
LEAVES = [
    pytest.param(  # over machines, in test_machines.py
        "shutdown",
        "reached mw.shutdown() after step 2, and rank 0 waits for it in step 3",
        marks=pytest.mark.full,
    ),
    ("at once", "ended with exit code 0, and rank 0 waits for it"),
    pytest.param(
        "pipeline",
        "reached mw.shutdown() after step 2, and rank 0 waits for it in step 3",
        marks=pytest.mark.full,
    ),
    pytest.param(
        "manual",
        "reached mw.shutdown() after step 2, and rank 0 waits for it in step 3",
        marks=pytest.mark.full,
    ),
    pytest.param(
        "save",
        "reached mw.shutdown() after step 2, and rank 0 waits for it after step 2",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.procs
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "said"), LEAVES)
def test_a_rank_that_leaves_early_is_named(launches: Launches, how: str, said: str) -> None:
    done = launches.run("--nproc", 2, launches.script(SCRIPT), how, env=ROOT)
    assert done.returncode == 1
    assert f"LaunchError: rank 1 of 2 {said}" in done.stderr
    if how == "save":
        assert "every rank calls step.save(path)" in done.stderr
        assert f"where: {launches.folder / 'script.py'}:26," in done.stderr
    assert how == "at once" or f"{launches.folder / 'script.py'}:" in done.stderr
    launches.wait_until_gone()


@pytest.mark.procs
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "how", [pytest.param((), id="in shutdown", marks=pytest.mark.full), pytest.param(("ends",), id="ended")]
)
def test_ranks_that_end_at_different_moments_are_left_alone(launches: Launches, how: tuple[str, ...]) -> None:
    done = launches.run("--nproc", 2, launches.script(SCRIPT), "uneven ends", *how, env=ROOT)
    assert done.returncode == 0 and "to the end" in done.stdout, done.stderr
