"""Ranks that hang are found by name, and nothing is left of the job."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

import meshwright
from bench.machines import machines
from meshwright.errors import LaunchError
from meshwright.launch.failure import of_a_library
from meshwright.launch.job import Job, check
from tests.launch.conftest import Launches

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
ROOT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}

SCRIPT = """
    import os, signal, sys, time
    import torch
    import meshwright as mw
    from meshwright.examples import mlp

    how, rank = sys.argv[1], os.environ["RANK"]
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, index):
            while how == "dataset" and rank == "1" and step.steps == 2 and first:
                pass
            return {name: value[0] for name, value in batch.items()}

    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=2)
    for part in mw.shard_loader(Samples(), step):
        step(part)
        if step.steps == 2 and first:
            if how == "stop" and rank == "1":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "save" and rank == "0":
                step.save("ckpt")
            if how == "hook" and rank == "1":
                step.module.register_forward_pre_hook(lambda *_: time.sleep(600))
        if how == "slow" and rank == "1":
            for _ in range(12):
                time.sleep(0.5)
                mw.alive()
            how = ""
    mw.shutdown()
    print("to the end")
"""


def test_an_endless_loop_in_a_dataset_is_found_and_takes_one_restart(launches: Launches) -> None:
    script = launches.script(SCRIPT)
    arguments = ("--nproc", 2, "--hang-after", 3, "--max-restarts", 1, script, "dataset")
    done = launches.run(*arguments, env=ROOT)
    assert done.returncode == 0 and "to the end" in done.stdout, done.stderr
    assert "rank 1 of 2 hangs: no rank has made progress for" in done.stderr
    assert "rank 1: reading a batch after step 2, for" in done.stderr
    assert "rank 0 waits in the all_reduce of %" in done.stderr and "of step 3" in done.stderr
    assert re.search(r"script\.py:1[56] in __getitem__", done.stderr), done.stderr
    launches.wait_until_gone()


@pytest.mark.full
def test_a_hang_on_another_machine(launches: Launches) -> None:
    script, jobs = launches.script(SCRIPT), []
    with machines(2) as two:
        for place, machine in enumerate(two):
            options = (
                "--nnodes",
                2,
                "--node-rank",
                place,
                "--master",
                f"{two[0].address}:29493",
                "--hang-after",
                3,
            )
            env = {**ROOT, "MESHWRIGHT_SECRET": "the secret of a job that is tested"}
            jobs.append(launches.start(*options, script, "dataset", env=env, prefix=machine.prefix))
        ends = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [124, 124], ends
    assert "on node node1: rank 1 of 2 hangs: no rank has made progress for" in ends[0][1]
    assert "rank 1: reading a batch after step 2, for" in ends[1][1]
    assert "rank 0 waits in the all_reduce of %" in ends[1][1] and "of step 3" in ends[1][1]
    assert re.search(r"script\.py:1[56] in __getitem__", ends[1][1]), ends
    launches.wait_until_gone()


ENDLESS = """
    import torch
    import meshwright as mw
    from meshwright.examples import mlp

    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=2)
    while True:
        step(batch)
        print(f"step {step.steps}", flush=True)
"""


@pytest.mark.full
def test_a_machine_that_hears_neither_of_the_others_nor_of_the_scheduler_ends(launches: Launches) -> None:
    """No connection closes: the machine of the scheduler is gone at once, as when it loses power."""
    script, jobs = launches.script(ENDLESS), []
    with machines(2) as two:
        if not two[0].port:
            pytest.skip("no network namespaces here")
        for place, machine in enumerate(two):
            options = ("--nnodes", 2, "--node-rank", place, "--master", f"{two[0].address}:29493")
            env = {**ROOT, "MESHWRIGHT_SECRET": "the secret of a job that is tested"}
            jobs.append(launches.start(*options, "--hang-after", 3, script, env=env, prefix=machine.prefix))
        for job in jobs:
            assert job.stdout is not None and "step 1" in job.stdout.readline()
        with two[0].unreachable():
            jobs[0].kill()
            _, said = jobs[1].communicate(timeout=200)
    assert jobs[1].returncode == 124, said
    assert "rank 1 waits for other machines, and the scheduler does not answer" in said
    assert "rank 1 waits in the all_reduce of " in said
    place = f"the scheduler at {two[0].address}:29493"
    assert f"{place} does not answer: training goes on" in said
    assert f"{place} has gone, and so the job ends here" in said
    launches.wait_until_gone()


GOES_ON = """
    import os, signal, time
    import torch
    import meshwright as mw
    from meshwright.examples import mlp

    rank = os.environ["RANK"]
    model, batch, loss = mlp.build()
    step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=3)
    while step.steps < 8:
        step(batch)
        if step.steps == 2 and rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if step.steps == 4 and rank == "2":
            time.sleep(600)
    mw.shutdown()
    print("to the end")
"""


@pytest.mark.full
def test_the_others_go_on_without_a_rank_that_hangs(launches: Launches) -> None:
    """One that was lost before does not confuse who is who. Ranks 1 and 2 are on another machine."""
    script, jobs = launches.script(GOES_ON), []
    with machines(2) as two:
        for place, machine in enumerate(two):
            options = ("--nnodes", 2, "--nproc", 1 + place, "--node-rank", place)
            options += ("--master", f"{two[0].address}:29494", "--hang-after", 3, "--on-failure", "continue")
            env = {**ROOT, "MESHWRIGHT_SECRET": "the secret of a job that is tested"}
            jobs.append(launches.start(*options, script, env=env, prefix=machine.prefix))
        ends = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    assert "to the end" in ends[0][0]
    for _, said in ends:
        assert "rank 1 of 3 was ended by SIGKILL: the others go on" in said
        assert re.search("rank 2 of 3 hangs: no rank has made progress for . s: the others go on", said)
    assert "rank 2: the script's own code after step 4, for" in ends[1][1]
    assert re.search("rank 0 waits in the .* of ranks 0, 2 along .*: .* of step 5", ends[1][1]), ends[1][1]
    assert "script.py:15 in <module>" in ends[1][1]
    launches.wait_until_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stop", "rank 1 of 2 is stopped: no rank has made progress for"),
        ("hook", "rank 1: forward(0, 0) of step 3, for"),
        ("save", "rank 0 waits in a step.save"),
    ],
)
def test_others_that_hang(launches: Launches, how: str, said: str) -> None:
    done = launches.run(
        "--nproc", 2, launches.script(SCRIPT), how, env={**ROOT, "MESHWRIGHT_HANG_AFTER": "3"}
    )
    assert done.returncode == 124
    assert said in done.stderr
    launches.wait_until_gone()


@pytest.mark.slow
def test_who_says_that_it_is_alive_does_not_hang(launches: Launches) -> None:
    done = launches.run("--nproc", 2, "--hang-after", 3, launches.script(SCRIPT), "slow", env=ROOT)
    assert done.returncode == 0 and "to the end" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_rank_of_a_pipeline_with_meshes_of_their_own(launches: Launches) -> None:
    script = launches.script("""
        import time
        import torch
        import meshwright as mw
        from meshwright.examples import gpt

        model, batch, loss = gpt.build(batch=12)
        own = [{"dp": 2}, {"dp": 1, "tp": 2}]
        step = mw.train_step(model, torch.optim.AdamW, batch, loss=loss, mesh=own, micro_batches=2)
        step(batch)
        if step.rank == 3:
            time.sleep(600)
        step(batch)
    """)
    done = launches.run("--nproc", 4, "--hang-after", 6, script, env=ROOT)
    assert done.returncode == 124
    assert "rank 3 of 4 hangs: no rank has made progress for" in done.stderr
    assert "rank 3: the script's own code after step 1" in done.stderr
    assert re.search(r"rank 1 waits in the receive of .* message from rank 3 to rank 1", done.stderr)
    assert re.search(r"rank 2 waits in the all_reduce of .* of ranks 2, 3 along tp", done.stderr)
    launches.wait_until_gone()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3], ids=["taken for another", "of another length: gloo aborts"])
def test_a_collective_that_is_left_out(launches: Launches, size: int) -> None:
    script = launches.script("""
        import sys
        import torch
        import meshwright as mw

        size = int(sys.argv[1])
        world = mw.world({"dp": 2}, check=False)
        for n in range(5):
            if not (n == 3 and world.rank == 1):
                world.all_reduce(torch.ones(size), "dp")
            world.all_gather(torch.ones(2), 0, "dp")
        mw.shutdown()
    """)
    done = launches.run("--nproc", 2, "--hang-after", 3, script, size, env=ROOT)
    assert done.returncode == (124 if size == 2 else 134)
    assert "left a collective out, or began one too many: the 7th of ranks 0, 1 along dp is" in done.stderr


def test_the_place_is_in_the_users_own_code() -> None:
    files = ["<frozen os>", torch.__file__, meshwright.__file__, __file__]
    assert [of_a_library(file) for file in files] == [True, True, True, False]


@pytest.mark.parametrize("seconds", [-1.0, 0.5, 1e6])
def test_a_silence_that_cannot_be(seconds: float, tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    with pytest.raises(LaunchError, match="--hang-after is"):
        check(Job(1, str(tmp_path / "script.py"), hang_seconds=seconds))
