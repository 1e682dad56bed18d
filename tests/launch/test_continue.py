"""Ranks and machines that are lost, while those on other machines go on, and take back what comes again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.machines import Machine, machines
from tests.launch.conftest import Launches, eventually
from tests.survive.test_continue import alone

pytestmark = [pytest.mark.procs, pytest.mark.timeout(400)]
ROOT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
KEY = {"MESHWRIGHT_SECRET": "the secret of a job that is tested"}
PORT = 29481

SCRIPT = """
    import os, pathlib, sys, time
    import torch
    import meshwright as mw
    from tests.survive.job import build, loader_of, optimizer_of

    torch.set_num_threads(1)
    me = os.environ["RANK"]
    pathlib.Path(f"pid{me}").write_text(str(os.getpid()))
    model, batch, loss, samples = build()
    more = {"optimizer_parallel": 2, "threshold_kb": 0} if sys.argv[1:] == ["shards"] else {}
    step = mw.train_step(model, optimizer_of, batch, loss=loss, mesh=int(os.environ["WORLD_SIZE"]), **more)
    loader, last = mw.shard_loader(loader_of(samples), step), pathlib.Path("last")
    autosave = mw.Autosave(step, "ckpt", every=5, data=loader)
    steps = 1 << 40
    with open(f"losses{me}", "a") as out:
        while step.steps < steps:
            for part in loader:
                value = step(part)
                print(step.steps, step.mesh.size, value.item().hex(), os.getpid(), file=out, flush=True)
                autosave()
                time.sleep(0.02)
                if last.exists():
                    steps = int(last.read_text())
                if step.steps >= steps:
                    break
    autosave.close()
    torch.save(step.full_state(), f"weights{me}.pt")
    mw.shutdown()
"""


@pytest.fixture
def two() -> Iterator[list[Machine]]:
    with machines(2) as found:
        yield found


class Continuing:
    """A job of one rank on machine 0 and two on machine 1, beside a scheduler of its own on machine 0."""

    def __init__(self, launches: Launches, two: list[Machine]) -> None:
        self.launches, self.two, self.folder = launches, two, launches.folder
        self.script = launches.script(SCRIPT)
        self.scheduler = self.schedule()

    @property
    def at(self) -> str:
        return f"{self.two[0].address}:{PORT}"

    def schedule(self, *words: object) -> subprocess.Popen[str]:
        words = ("--listen", self.at, "--state", "kept", *words)
        process = self.launches.start(
            *words, env={**ROOT, **KEY}, prefix=self.two[0].prefix, verb="scheduler"
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("scheduler at")
        return process

    def start(self, index: int, *words: object, restarts: int = 1) -> subprocess.Popen[str]:
        options = ("--nnodes", 2, "--nproc", 1 + index, "--node-rank", index, "--master", self.at)
        options += ("--on-failure", "continue", "--max-restarts", restarts, "--log-dir", f"logs{index}")
        env = {**ROOT, **KEY, "OMP_NUM_THREADS": "1"}
        return self.launches.start(*options, self.script, *words, env=env, prefix=self.two[index].prefix)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def lines(self, rank: int) -> list[list[str]]:
        """Step, number of ranks, loss and process of the steps that a rank has done."""
        path = self.folder / f"losses{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, ranks: int) -> None:
        """Wait until some more steps are done by so many ranks."""
        done = len(self.lines(0))
        eventually(
            lambda: [line[1] for line in self.lines(0)[done:]].count(str(ranks)) > 3, f"{ranks} ranks go on"
        )

    def end(self) -> int:
        """Have all ranks end after the same step."""
        last = int(self.lines(0)[-1][0]) + 60
        (self.folder / "last.new").write_text(str(last))
        (self.folder / "last.new").rename(self.folder / "last")
        return last

    def check(self, last: int) -> None:
        """All steps have one device's losses, each process has done one after another, and so are the weights."""
        losses, state = alone(last)
        for rank in range(3):
            lives: dict[str, list[int]] = {}
            for step, _, loss, pid in self.lines(rank):
                assert float.fromhex(loss) == pytest.approx(losses[int(step) - 1], rel=1e-8)
                lives.setdefault(pid, []).append(int(step))
            for steps in lives.values():
                assert steps == list(range(steps[0], steps[-1] + 1))
            found = torch.load(self.folder / f"weights{rank}.pt", weights_only=True)
            for name, value in state.items():
                if value.is_floating_point():
                    torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)


@pytest.fixture
def job(launches: Launches, two: list[Machine]) -> Continuing:
    return Continuing(launches, two)


def test_a_rank_a_machine_and_the_scheduler_are_lost_and_come_back(job: Continuing) -> None:
    first, second = job.start(0), job.start(1)
    job.until(3)
    os.kill(job.pid(2), signal.SIGKILL)
    job.until(2)
    job.scheduler.send_signal(signal.SIGKILL)  # while the rank is started again
    job.scheduler.communicate()
    job.scheduler = job.schedule()
    job.until(3)
    second.send_signal(signal.SIGKILL)
    job.until(1)
    again = job.start(1)
    job.until(3)
    last = job.end()
    ends = [process.communicate(timeout=200) for process in (first, again)]
    assert (first.returncode, again.returncode) == (0, 0), ends
    said = ends[0][1]
    assert "rank 2 of 3 was ended by SIGKILL: the others go on; it is started again" in said
    assert "is lost: its connection closed; the others go on without ranks 1, 2" in said
    assert "joins: ranks 1, 2" in said
    job.check(last)
    job.launches.wait_until_gone()


@pytest.mark.full
def test_a_machine_that_was_silent_too_long_joins_again(launches: Launches, two: list[Machine]) -> None:
    job = Continuing(launches, two)
    job.scheduler.kill()
    job.scheduler.communicate()
    job.scheduler = job.schedule("--node-time-out", 3)
    first, second = job.start(0), job.start(1)
    job.until(3)
    stopped = [second.pid, job.pid(1), job.pid(2)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    job.until(1)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    job.until(3)
    last = job.end()
    ends = [process.communicate(timeout=200) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ends
    assert "the others took this machine for lost, and go on" in ends[1][1]
    job.check(last)
    job.launches.wait_until_gone()


@pytest.mark.full
def test_what_cannot_go_on_restarts_on_all_machines(job: Continuing) -> None:
    first, second = job.start(0, "shards"), job.start(1, "shards")
    job.until(3)
    os.kill(job.pid(2), signal.SIGKILL)
    eventually(lambda: len({line[3] for line in job.lines(0)}) == 2, "all have begun again")
    last = job.end()
    ends = [process.communicate(timeout=200) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ends
    for _, said in ends:
        assert "the others cannot go on without it; all start again, from the checkpoint" in said
        assert "why: ranks hold shards" in said
    losses, _ = alone(last)
    for rank in range(3):
        for step, _, loss, _ in job.lines(rank):
            assert float.fromhex(loss) == pytest.approx(losses[int(step) - 1], rel=1e-8)
    job.launches.wait_until_gone()
