"""`meshwright run` with real processes: what a job sees, how it fails, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.breadth import quick

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240)]
ROOT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}

ALL_REDUCE = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}")
    dist.barrier()
    dist.destroy_process_group()
"""

# Writes its process id and waits; with a child of its own in a session of its own, as a data loader may have.
SLEEP = """
    import os, pathlib, subprocess, sys, time

    rank = os.environ["RANK"]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(f"pid{rank}.part").write_text(str(os.getpid()))
    os.rename(f"pid{rank}.part", f"pid{rank}")
    time.sleep(600)
"""


def pid(launches, rank: int) -> int:
    return int((launches.folder / f"pid{rank}").read_text())


def test_a_script_that_forgets_to_shut_down_ends_its_groups(launches):
    """Their threads could abort the process while Python ends, once it had done all its work."""
    script = launches.script("""
        import atexit

        @atexit.register
        def last():
            import torch.distributed as dist

            print("groups are left:", dist.is_initialized())

        import torch
        import meshwright as mw

        world = mw.world({"dp": 2}, check=False)
        world.all_reduce(torch.ones(2), "dp")
    """)
    done = launches.run("--nproc", 2, script, env=ROOT)
    assert (done.returncode, done.stdout) == (0, "groups are left: False\n"), done.stderr


@pytest.mark.full  # the next test has two and three of them
@pytest.mark.parametrize("world_size", [2, 3])
@quick(lambda world_size: world_size == 3)
def test_ranks_find_each_other(launches, world_size):
    done = launches.run("--nproc", world_size, "--log-dir", "logs", launches.script(ALL_REDUCE))
    assert (done.returncode, done.stderr) == (0, "")
    total = world_size * (world_size + 1) // 2
    assert done.stdout == f"rank 0 of {world_size}: {total}\n"
    for rank in range(world_size):
        log = (launches.folder / "logs" / f"rank{rank}.log").read_text()
        assert log == f"rank {rank} of {world_size}: {total}\n"
    launches.wait_until_gone()


def test_two_launches_at_the_same_time_do_not_meet(launches):
    script = launches.script(ALL_REDUCE)
    jobs = [launches.start("--nproc", n, script) for n in (2, 3)]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert outputs == [("rank 0 of 2: 3\n", ""), ("rank 0 of 3: 6\n", "")]


def test_the_script_gets_its_arguments_as_they_are(launches):
    script = launches.script("import json, sys; print(json.dumps(sys.argv[1:]))")
    arguments = ["--nproc", "8", "-m", "$$", "${local_rank}", "a b", "", "--help"]
    done = launches.run("--nproc", 1, script, *arguments)
    assert json.loads(done.stdout) == arguments


def test_a_module_runs_as_python_m_would(launches):
    (launches.folder / "package").mkdir()
    launches.script("import sys; print(__name__, __package__, sys.argv[1:])", "package/train.py")
    done = launches.run("--nproc", 2, "-m", "package.train", "--lr", 3)
    assert done.stdout == "__main__ package ['--lr', '3']\n"


def test_what_a_rank_finds_in_its_environment(launches):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
    script = launches.script(f"import os, sys; print(sys.executable, *(os.environ[n] for n in {names}))")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    interpreter = sys.executable
    done = launches.run("--nproc", 2, "--log-dir", "logs", script)
    assert done.stdout == f"{interpreter} 0 0 2 {threads} 1\n"
    assert (launches.folder / "logs/rank1.log").read_text() == f"{interpreter} 1 1 2 {threads} 1\n"
    mine = launches.run("--nproc", 2, script, env={"OMP_NUM_THREADS": "7"})
    assert mine.stdout == f"{interpreter} 0 0 2 7 1\n"


def test_the_first_failure_is_named_and_its_exit_code_passed_on(launches):
    script = launches.script("""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1))  # fails too, because rank 1 is gone
    """)
    done = launches.run("--nproc", 3, "--log-dir", "logs", script)
    assert done.returncode == 1
    first, *rest = done.stderr.splitlines()
    assert first == "LaunchError: rank 1 of 3 failed with exit code 1: ValueError: bad batch"
    assert 'raise ValueError("bad batch")' in done.stderr
    assert f"script.py:7, log {launches.folder / 'logs/rank1.log'}" in done.stderr
    assert not any("torch.distributed.elastic" in line for line in rest)
    launches.wait_until_gone()


def test_a_rank_that_is_slow_to_leave_after_its_error_is_named_with_it(launches):
    # Rank 1 has raised and is on its way out; rank 0 notices, ends first, and the launcher stops rank 1.
    script = launches.script("""
        import atexit, os, pathlib, time

        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 600)
            atexit.register(pathlib.Path("raised").touch)
            raise ValueError("bad batch")
        while not pathlib.Path("raised").exists():
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    """)
    done = launches.run("--nproc", 2, "--log-dir", "logs", script)
    assert done.returncode == 1
    assert done.stderr.startswith("LaunchError: rank 1 of 2 failed with exit code 1: ValueError: bad batch\n")


@pytest.mark.full  # so has the next test
def test_a_rank_that_ends_early_without_an_error_is_named(launches):
    script = launches.script("""
        import os
        import torch
        import torch.distributed as dist
        import meshwright as mw

        world = mw.world(3)
        world.all_reduce(torch.ones(1), "ranks")
        if world.rank == 1:
            dist.destroy_process_group()
            os._exit(0)  # torch's own threads, still at work, may abort an exit that waits for Python
        world.all_reduce(torch.ones(1), "ranks")
    """)
    ended_early(launches.run("--nproc", 3, "--log-dir", "logs", script, env=ROOT), launches, 3)


def test_so_is_one_that_is_slow_to_leave(launches):
    # Others have noticed that its connections are closed, and the launcher has stopped it.
    script = launches.script("""
        import atexit, os, pathlib, sys, time

        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 600)
            atexit.register(pathlib.Path("left").touch)
            import meshwright
            sys.exit(0)
        while not pathlib.Path("left").exists():
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    """)
    ended_early(launches.run("--nproc", 2, "--log-dir", "logs", script, env=ROOT), launches, 2)


def ended_early(done, launches, world_size):
    assert done.returncode == 1
    first, why, *rest = done.stderr.splitlines()
    assert first == (
        f"LaunchError: rank 1 of {world_size} ended with exit code 0 while others were still running"
    )
    assert "failed with exit code 1" in why and f"log {launches.folder / 'logs/rank1.log'}" in done.stderr
    assert "mw.shutdown()" in rest[-1]


def test_an_exit_code_is_passed_on(launches):
    script = launches.script("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    done = launches.run("--nproc", 2, script)
    assert done.returncode == 7
    assert "rank 1 of 2 failed with exit code 7" in done.stderr


def test_a_launcher_of_which_mpi_started_several_says_that_each_has_a_job(launches):
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    done = launches.run("--nproc", 1, launches.script("print(1)"), env=mpi)
    assert done.returncode == 0
    assert done.stderr.startswith("Open MPI has started 2 launchers, and each runs a job of its own; ")


def test_logs_of_a_failed_job_are_kept_and_named(launches):
    script = launches.script("raise SystemExit('no data')")
    done = launches.run("--nproc", 1, script, env={"TMPDIR": str(launches.folder)})
    (kept,) = launches.folder.glob("meshwright-*/rank0.log")
    assert kept.read_text() == "no data\n"
    assert f"log {kept}" in done.stderr


def test_logs_that_an_error_names_are_kept_where_the_job_goes_well_in_the_end(launches):
    script = launches.script("""
        import os, pathlib

        if not pathlib.Path("failed").exists() and os.environ["RANK"] == "1":
            pathlib.Path("failed").touch()
            raise ValueError("bad batch")
    """)
    done = launches.run("--nproc", 2, "--max-restarts", 1, script, env={"TMPDIR": str(launches.folder)})
    assert done.returncode == 0, done.stderr
    (kept,) = launches.folder.glob("meshwright-*/rank1.log")
    assert f"log {kept}" in done.stderr
    assert "bad batch" in kept.read_text()


def test_logs_of_a_job_that_went_well_are_not(launches):
    done = launches.run("--nproc", 1, launches.script("print(1)"), env={"TMPDIR": str(launches.folder)})
    assert done.returncode == 0
    assert not list(launches.folder.glob("meshwright-*"))


def test_a_restart_is_a_new_attempt_with_a_store_of_its_own(launches):
    # Keys of the first attempt must not meet the second one: with a shared store this hung for minutes.
    script = launches.script("""
        import os, torch
        import torch.distributed as dist

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if attempt < 1 and dist.get_rank() == 1:
            os._exit(3)
        dist.barrier()
        print("done in attempt", attempt)
        dist.destroy_process_group()
    """)
    done = launches.run("--nproc", 2, "--max-restarts", 1, script)
    assert done.returncode == 0
    assert "done in attempt 1\n" in done.stdout
    assert "rank 1 of 2 failed with exit code 3" in done.stderr


def test_a_killed_rank_takes_the_others_along(launches):
    job = launches.start("--nproc", 3, launches.script(SLEEP))
    launches.wait_for("pid0", "pid1", "pid2")
    os.kill(pid(launches, 1), signal.SIGKILL)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 128 + signal.SIGKILL
    assert err.startswith("LaunchError: rank 1 of 3 was ended by SIGKILL")
    launches.wait_until_gone()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_launcher_stops_all(launches, sig):
    job = launches.start("--nproc", 2, launches.script(SLEEP))
    launches.wait_for("pid0", "pid1")
    job.send_signal(sig)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 128 + sig
    assert err.endswith(f"stopped by {sig.name}: no rank is left\n")
    launches.wait_until_gone()


def test_ranks_that_will_not_stop_are_killed(launches):
    script = launches.script(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + textwrap.dedent(SLEEP)
    )
    job = launches.start("--nproc", 2, "--grace", 1, script)
    launches.wait_for("pid0", "pid1")
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=120)
    assert job.returncode == 128 + signal.SIGINT
    launches.wait_until_gone()


def test_a_launcher_that_is_killed_leaves_nothing(launches):
    job = launches.start("--nproc", 2, launches.script(SLEEP))
    launches.wait_for("pid0", "pid1")
    job.kill()
    job.communicate(timeout=120)
    launches.wait_until_gone()


def test_children_of_a_job_that_went_well_are_gone_too(launches):
    script = launches.script("""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    """)
    assert launches.run("--nproc", 2, script).returncode == 0
    launches.wait_until_gone()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc", "0", "script.py"], "--nproc is 0"),
        (["--nproc", "-2", "script.py"], "--nproc is -2"),
        (["--nproc", "two", "script.py"], "--nproc is 'two'"),
        (["--nproc", "2", "scrip.py"], "did you mean 'script.py'?"),
        (["--nproc", "2", "."], ". is a directory"),
        (["--nproc", "2", "-m", "no_such_module"], "there is no module no_such_module"),
        (["--nproc", "2", "--log-dir", "script.py/logs", "script.py"], "cannot write logs to script.py/logs"),
        (["--nproc", "2", "--monitor-interval", "0", "script.py"], "--monitor-interval is 0 seconds"),
        (["--nproc", "2", "--max-restarts", "-1", "script.py"], "--max-restarts is -1"),
    ],
)
@quick(lambda arguments, says: not {"-1", "-2"} & set(arguments))  # as 0 is
def test_bad_input_is_refused_before_anything_starts(launches, arguments, says):
    launches.script("open('started', 'w')")
    done = launches.run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("LaunchError: ")
    assert says in done.stderr
    assert not (launches.folder / "started").exists()


def test_help_and_refusals_do_not_wait_for_torch(launches):
    launches.script("raise SystemExit('torch was imported')", "torch.py")
    for arguments in (["--help"], ["nothing.py"]):
        done = launches.run(*arguments, env={"PYTHONPATH": str(launches.folder)})
        assert "torch was imported" not in done.stdout + done.stderr
