"""`meshwright run` on several machines: who meets, who is named when one fails, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.machines import Machine, machines
from tests.launch.conftest import Launches, eventually
from tests.launch.test_loopback import listening

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
ROOT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
KEY = {"MESHWRIGHT_SECRET": "the secret of a job that is tested"}
PORT = 29471

# A step of ours, and a group that torch makes; each over the scheduler.
STEP = """
    import os
    import torch
    import torch.distributed as dist
    import meshwright as mw
    from meshwright.examples import mlp

    if os.environ["MAKE"] == "torch":
        dist.init_process_group("gloo")
    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh={"dp": 3})
    print(f"{step(batch):.6f} {step(batch):.6f}", *(os.environ[n] for n in ("LOCAL_RANK", "GROUP_RANK")))
    mw.shutdown()
"""

# No torch: what a launcher does is seen without it.
PLAIN = """
    import os, pathlib, sys, time

    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(f"here{rank}.{attempt}").touch()
    assert "MESHWRIGHT_SECRET" not in os.environ
    if sys.argv[1] == "fail" and (rank, attempt) == ("2", "0"):
        raise ValueError("bad batch")
    while attempt == "0" and not pathlib.Path("go").exists():
        time.sleep(0.02)
    print("rank", rank, "attempt", attempt)
"""


@pytest.fixture
def two() -> Iterator[list[Machine]]:
    with machines(2) as found:
        yield found


class Several:
    """A job of one rank on machine 0 and two on machine 1."""

    def __init__(self, launches: Launches, two: list[Machine]) -> None:
        self.launches, self.two = launches, two

    def start(self, index: int, *words: object, key: dict[str, str] = KEY) -> subprocess.Popen[str]:
        host = self.two[0].address
        at = f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"
        options = ("--nnodes", 2, "--nproc", 1 + index, "--node-rank", index, "--master", at)
        return self.launches.start(
            *options, "--log-dir", f"logs{index}", *words, env={**ROOT, **key}, prefix=self.two[index].prefix
        )


@pytest.fixture
def several(launches: Launches, two: list[Machine]) -> Several:
    return Several(launches, two)


@pytest.mark.parametrize("make", ["ours", pytest.param("torch", marks=pytest.mark.full)])
def test_a_step_over_machines_is_that_of_one(launches: Launches, several: Several, make: str) -> None:
    script = launches.script(STEP)
    jobs = [several.start(i, script, key={**KEY, "MAKE": make}) for i in (1, 0)]  # in any order
    ends = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    said = [out.splitlines()[-1] for out, _ in ends]  # torch may have warned before
    said.append((launches.folder / "logs1/rank2.log").read_text().splitlines()[-1])
    values = " ".join(said[0].split()[:2])
    assert values.split()[0] > values.split()[1]
    assert said == [f"{values} 0 1", f"{values} 0 0", f"{values} 1 1"]
    launches.wait_until_gone()


def test_ipv6_and_what_listens(launches: Launches) -> None:
    with machines(2, v6=True) as two:
        several = Several(launches, two)
        script = launches.script(PLAIN)
        jobs = [several.start(i, script, "wait") for i in (0, 1)]
        launches.wait_for("here0.0", "here1.0", "here2.0")
        found = listening(launches.alive())
        (launches.folder / "go").touch()
        ends = [job.communicate(timeout=100) for job in jobs]
        assert [(job.returncode, *end) for job, end in zip(jobs, ends, strict=True)] == [
            (0, "rank 0 attempt 0\n", ""),
            (0, "rank 1 attempt 0\n", ""),
        ]
        if two[0].prefix:  # /proc/net shows this test's own namespace, in which nothing may listen
            assert found == set()
    launches.wait_until_gone()


def test_a_failure_is_named_on_all_machines_and_costs_one_attempt(
    launches: Launches, several: Several
) -> None:
    script = launches.script(PLAIN)
    jobs = [several.start(i, "--max-restarts", 1, script, "fail") for i in (0, 1)]
    ends = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    assert ends[0][0] == "rank 0 attempt 1\n"
    assert "on node node1: rank 2 of 3 failed with exit code 1: ValueError: bad batch" in ends[0][1]
    assert "rank 2 of 3 failed with exit code 1: ValueError: bad batch" in ends[1][1]
    assert all("attempt 2 of 2:" in err for _, err in ends)
    assert not list(launches.folder.glob("here*.2"))
    launches.wait_until_gone()


def test_a_machine_that_is_lost_ends_the_job_and_is_named(launches: Launches, several: Several) -> None:
    script = launches.script(PLAIN)
    jobs = [several.start(i, script, "wait") for i in (0, 1)]
    launches.wait_for("here0.0", "here1.0", "here2.0")
    jobs[1].send_signal(signal.SIGKILL)
    _, error = jobs[0].communicate(timeout=100)
    assert jobs[0].returncode == 137
    assert "on node node1: node node1 (" in error
    assert "is lost: its connection closed" in error
    launches.wait_until_gone()


@pytest.mark.full
def test_a_machine_that_comes_again_takes_its_place(launches: Launches, several: Several) -> None:
    script = launches.script(PLAIN)
    jobs = [several.start(i, "--max-restarts", 1, script, "wait") for i in (0, 1)]
    launches.wait_for("here0.0", "here1.0", "here2.0")
    jobs[1].send_signal(signal.SIGKILL)
    again = several.start(1, "--max-restarts", 1, script, "wait")
    ends = [job.communicate(timeout=100) for job in (jobs[0], again)]
    assert (jobs[0].returncode, again.returncode) == (0, 0), ends
    assert (launches.folder / "logs1/rank2.log").read_text().endswith("rank 2 attempt 1\n")
    launches.wait_until_gone()


def test_ctrl_c_on_one_machine_stops_all(launches: Launches, several: Several) -> None:
    script = launches.script(PLAIN)
    jobs = [several.start(i, "--max-restarts", 3, script, "wait") for i in (0, 1)]
    launches.wait_for("here0.0", "here1.0", "here2.0")
    jobs[1].send_signal(signal.SIGINT)
    ends = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [130, 130], ends
    assert "on node node1: stopped by a signal" in ends[0][1]
    launches.wait_until_gone()


def test_missing_machines_are_named(launches: Launches, several: Several) -> None:
    job = several.start(0, "--cluster-time-out", 1, launches.script(PLAIN), "wait")
    _, error = job.communicate(timeout=100)
    assert job.returncode == 2
    assert "LaunchError: after 1 s nodes are missing: --node-rank 1" in error
    launches.wait_until_gone()


def test_a_wrong_secret_is_refused_and_the_job_goes_on(launches: Launches, several: Several) -> None:
    script = launches.script(PLAIN)
    (launches.folder / "go").touch()
    first = several.start(0, script, "wait")
    eventually(lambda: (launches.folder / "logs0/scheduler.log").exists(), "the scheduler is there")
    stranger = several.start(1, script, "wait", key={"MESHWRIGHT_SECRET": "something else, long enough"})
    _, error = stranger.communicate(timeout=100)
    assert stranger.returncode == 2
    assert "is not trusted" in error
    second = several.start(1, script, "wait")
    waited = first.communicate(timeout=100)[1].replace("waiting for --node-rank 1\n", "")  # on a busy machine
    assert [waited, second.communicate(timeout=100)[1]] == ["", ""]
    launches.wait_until_gone()


def scheduler(several: Several) -> subprocess.Popen[str]:
    """A scheduler of its own, which listens."""
    at = f"{several.two[0].address}:{PORT}"
    found = several.launches.start("--listen", at, "--state", "kept", env={**ROOT, **KEY},
                                   prefix=several.two[0].prefix, verb="scheduler")  # fmt: skip
    assert found.stdout is not None
    assert found.stdout.readline().startswith("scheduler at")
    return found


@pytest.mark.full  # tests/launch/test_continue.py kills it, too
def test_a_scheduler_of_its_own_may_start_again(launches: Launches, several: Several) -> None:
    script = launches.script(PLAIN)
    before = scheduler(several)
    jobs = [several.start(i, script, "wait") for i in (1, 0)]
    launches.wait_for("here0.0", "here1.0", "here2.0")
    before.send_signal(signal.SIGKILL)
    before.communicate()
    after = scheduler(several)
    (launches.folder / "go").touch()
    ends = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    out, error = after.communicate(timeout=60)
    assert (after.returncode, error) == (0, ""), out
    launches.wait_until_gone()


SAVES = """
    import pathlib, time
    import torch
    import meshwright as mw
    from meshwright.examples import mlp

    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=3)
    autosave = mw.Autosave(step, "saved", every=2)
    last = 10**6
    while step.steps < last:
        if pathlib.Path("last").exists():
            last = int(pathlib.Path("last").read_text())
        step(batch)
        autosave()
        time.sleep(0.02)
    mw.shutdown()
"""


@pytest.mark.full  # tests/launch/test_continue.py has steps without it
def test_steps_and_saves_go_on_without_the_scheduler(launches: Launches, several: Several) -> None:
    script = launches.script(SAVES)
    before = scheduler(several)
    jobs = [several.start(i, script) for i in (0, 1)]

    def newest() -> int:
        return max(
            (int(path.name.rpartition("-")[2]) for path in launches.folder.glob("saved/step-*")), default=0
        )

    eventually(lambda: newest() > 0, "the first save")
    before.send_signal(signal.SIGKILL)
    before.communicate()
    reached = newest()
    eventually(lambda: newest() > reached + 10, "more saves")
    after = scheduler(several)
    (launches.folder / "new").write_text(
        str(newest() + 50)
    )  # far enough ahead for all ranks to see it before
    (launches.folder / "new").rename(launches.folder / "last")
    ends = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    after.communicate(timeout=60)
    launches.wait_until_gone()


LEAVES = """
    import os, sys

    if sys.argv[1] == "at once" and os.environ["RANK"] == "0":
        sys.exit(0)

    import torch
    import meshwright as mw
    from meshwright.examples import mlp

    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh={"dp": 3})
    for number in range(3):
        if number == 2 and os.environ["RANK"] == "0":
            if sys.argv[1] == "ends":
                os._exit(0)
            break
        step(batch)
    mw.shutdown()
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "shuts down",
            "rank 0 of 3 reached mw.shutdown() after step 2, and ranks 1, 2 wait for it in step 3",
        ),
        pytest.param(
            "ends",
            "rank 0 of 3 ended with exit code 0 after step 2 while others were still running",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "at once",
            "rank 0 of 3 ended with exit code 0, and ranks 1, 2 wait for it",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_that_leaves_is_named_on_another_machine(
    launches: Launches, several: Several, how: str, said: str
) -> None:
    script = launches.script(LEAVES)
    jobs = [several.start(i, script, how) for i in (0, 1)]
    ends = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1], ends
    assert all(said in err for _, err in ends), ends
    launches.wait_until_gone()
