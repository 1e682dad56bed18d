"""Who failed first, told from logs and exit codes."""

from __future__ import annotations

import os
import signal

import pytest

from meshwright.launch import failure
from meshwright.launch.failure import RankEnd, elsewhere, ended_early, explain, final_error, first, tail

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n{error}\n'
OWN = TRACE.format(error="ValueError: bad batch")
PEER = TRACE.format(error="RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:60603. GLHF!")


@pytest.fixture
def end(tmp_path):
    def make(rank, exit_code, log="", written=0, stopped=False):
        path = tmp_path / f"rank{rank}.log"
        path.write_text(log)
        os.utime(path, ns=(written, written))
        return RankEnd(rank, exit_code, path, stopped)

    return make


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        pytest.param([(0, 1, PEER, 1), (1, 1, OWN, 2)], 1, id="an error of its own before a lost peer"),
        pytest.param([(0, 1, OWN, 9), (2, 1, OWN, 3)], 2, id="among equals, who wrote first"),
        pytest.param([(0, -15, "", 1, True), (1, 1, OWN, 2)], 1, id="who was stopped comes last"),
        pytest.param(
            [(0, -15, OWN, 1, True), (1, 1, PEER, 2)], 0, id="stopped while its traceback stood already"
        ),
        pytest.param([(0, 1, PEER, 1), (1, -9, "", 2)], 1, id="killed"),
        pytest.param([(0, -9, "", 1, True), (1, 1, OWN, 2)], 1, id="killed by the launcher: last, too"),
        pytest.param([(0, 1, PEER, 1), (1, 3, "bye", 2)], 1, id="left by sys.exit"),
        pytest.param([(0, 1, PEER, 2), (1, 1, PEER, 1)], 1, id="only lost peers: the first to say so"),
    ],
)
def test_first(end, ends, named):
    assert first([end(*e) for e in ends]).rank == named


def test_a_rank_that_raised_and_was_stopped_on_its_way_out_failed_with_its_error(end):
    ends = [end(0, 1, PEER, 2), end(1, -signal.SIGTERM, OWN, 1, True)]
    named = first(ends)
    assert (named.rank, named.status) == (1, 1)
    assert str(explain(named, ends, 2)).startswith(
        "rank 1 of 2 failed with exit code 1: ValueError: bad batch\n"
    )


def test_a_rank_that_somebody_else_stopped_was_ended_by_the_signal(end):
    # the launcher did not stop rank 0, so the old traceback in its log is not the reason
    named = first([end(0, -signal.SIGTERM, OWN, 1), end(1, -signal.SIGTERM, "", 2, True)])
    assert named.status == 128 + signal.SIGTERM


def test_tail_is_what_a_person_would_see(end):
    log = "\x1b[31mred\x1b[0m\nstep  1%\rstep 50%\rstep 99%\n\nlast\n"
    assert tail(end(0, 1, log).log) == "red\nstep 99%\nlast"
    assert tail(end(0, 1).log.with_name("none.log")) == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (OWN, "ValueError: bad batch"),
        *(
            ("".join(f"{'[rank1]: ' * n}{line}\n" for line in OWN.splitlines()), "ValueError: bad batch")
            for n in (1, 3)
        ),
        (
            OWN + "\nDuring handling of the above exception:\n\n" + TRACE.format(error="KeyError: 3"),
            "KeyError: 3",
        ),
        (TRACE.format(error="torch.cuda.OutOfMemoryError"), "torch.cuda.OutOfMemoryError"),
        ("all is well\n", ""),
    ],
)
def test_final_error(text, error):
    assert final_error(text) == error


def test_explain_golden(end):
    lost, own = end(0, 1, PEER, 1), end(1, 1, OWN, 2)
    assert str(explain(own, [lost, own], 4)) == (
        "rank 1 of 4 failed with exit code 1: ValueError: bad batch\n"
        "  why:   Traceback (most recent call last):\n"
        '           File "train.py", line 7, in <module>\n'
        "             step()\n"
        "         ValueError: bad batch\n"
        f"  where: train.py:7, log {own.log}\n"
        "  try:   look at rank 1: the error of rank 0 above only says that it lost a peer"
    )


def test_words_on_the_terminal_of_another_machine_are_not_above(end):
    told = str(explain(end(0, 1, "boom"), [], 2, shown=0))
    assert "its last words are above" in told
    said = str(elsewhere(told, "b"))
    assert said.startswith("on node b: rank 0 of 2 failed with exit code 1")
    assert "why:   its last words are on the terminal there" in said and "above" not in said


def test_a_log_on_another_machine_has_no_path_here(end):
    error = explain(end(1, 1, "RuntimeError: Connection closed by peer"), [], 2)
    assert "its log is on its own machine" in str(ended_early(error, "rank 0 of 2 ended", None))


def test_the_place_of_an_error_is_the_users_line(end):
    ours = f'  File "{failure.__file__}", line 3, in check\n    refuse()\n'
    text = OWN.replace("ValueError: bad batch", f"{ours}ValueError: bad batch")
    assert ours in text
    assert explain(end(1, 1, text), [], 2).where.startswith("train.py:7, log ")


def test_explain_shortens_a_deep_traceback_and_keeps_its_ends(end):
    deep = OWN.replace("    step()\n", "    step()\n" * 200)
    said = str(explain(end(1, 1, deep), [], 2))
    assert len(said.splitlines()) < 40
    assert "Traceback (most recent call last)" in said
    assert "… 17" in said and "ValueError: bad batch" in said


@pytest.mark.parametrize(("exit_code", "status"), [(3, 3), (-signal.SIGKILL, 137), (-signal.SIGSEGV, 139)])
def test_status_is_what_a_shell_would_say(end, exit_code, status):
    assert end(0, exit_code).status == status


@pytest.mark.parametrize("mark", ["", "[rank0]: "])
def test_who_says_that_a_peer_was_lost_is_not_to_blame(end, mark):
    told = (
        f"{mark}meshwright.errors.PeerLost: rank 1 failed: ValueError: bad batch\n"
        f"{mark}  why:   this rank waited for it\n"
    )
    ends = [end(0, 1, told, 1), end(1, 1, OWN, 2)]
    assert first(ends).rank == 1


def test_an_error_in_a_step_is_placed_in_the_model(end):
    text = TRACE.format(
        error="IndexError: index out of range\nwhere: gpt.py:44  x = self.tokens(ids)  (aten.embedding.default)"
    )
    said = explain(end(1, 1, text), [], 2)
    assert said.what == "rank 1 of 2 failed with exit code 1: IndexError: index out of range"
    assert said.where.startswith("gpt.py:44, log ")
