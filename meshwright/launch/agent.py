"""Run a job: attempts, signals, logs, and the first failure.

Each attempt has processes, a folder of records, a store and a port of its own. Nothing of it listens beyond the
loopback address, and nothing that comes from a socket is unpickled. (torch's elastic agent does both, keeps one store
for all its restarts, and gives ranks half a minute to end after a failure, whatever it is told.)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launch import bootstrap, failure, reaper, terminal
from meshwright.launch.hang_watch import Watch
from meshwright.launch.job import Job, check
from meshwright.launch.outcome import Outcome
from meshwright.launch.port import LOOPBACK, Port
from meshwright.launch.ranks import Ranks

HANGS = 124  # the exit code of a job that was ended because it hung, as that of `timeout`
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# At most, after a failure: what the others wait for does not come, and most of them cannot hear a signal meanwhile.
AFTER_FAILURE_SECONDS = 2.0


class _Stopped(Exception):
    """The launcher was asked to stop."""


def run(job: Job) -> Outcome:
    """Run a job to its end: see `meshwright.launch.launch`."""
    check(job)
    folder = job.log_dir.resolve() if job.log_dir else Path(tempfile.mkdtemp(prefix="meshwright-"))
    records = Path(tempfile.mkdtemp(prefix="meshwright-"))  # which nobody else may read
    outcome = Outcome(0)
    heard: list[int] = []
    try:
        with _signals(heard):
            outcome = _attempts(job, folder, records, heard)
    except _Stopped:
        outcome = Outcome(128 + heard[0])
    finally:
        shutil.rmtree(records, ignore_errors=True)
        if job.log_dir is None and outcome.failure is None:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _attempts(job: Job, folder: Path, records: Path, heard: list[int]) -> Outcome:
    """As many attempts as the job may have, until one succeeds."""
    run_id = f"meshwright-{uuid.uuid4().hex}"
    outcome = Outcome(0)
    with reaper.guard(run_id):
        for rank in range(job.nproc):
            (folder / f"rank{rank}.log").unlink(missing_ok=True)
        for attempt in range(job.restarts + 1):
            outcome = _attempt(job, attempt, f"{run_id}-{attempt}", folder, records, heard)
            if outcome.failure is None or attempt == job.restarts:
                break
            print(f"{outcome.failure}\nattempt {attempt + 2} of {job.restarts + 1}:", file=sys.stderr)
            # a failed rank may have left children that hold ports, memory or a GPU
            reaper.sweep(run_id)
    return outcome


def _attempt(job: Job, attempt: int, run_id: str, folder: Path, records: Path, heard: list[int]) -> Outcome:
    watch = Watch(records, folder, job.nproc, job.hang_seconds, run_id)
    shared = {**os.environ, "TORCHELASTIC_RUN_ID": run_id}
    with terminal.shown(folder / "rank0.log"), watch, Port(shared) as port:
        settings = _settings(job, attempt, folder, records)
        command = (sys.executable, "-I", "-S", bootstrap.__file__, json.dumps(settings), *job.command)
        envs = [{**shared, **_rank_env(job, rank, port.number)} for rank in range(job.nproc)]
        ranks = Ranks([(command, env) for env in envs], records, folder)
        while ranks.running() and not ranks.failed() and not heard:
            port.look()
            time.sleep(job.poll_seconds)
        if heard:
            ranks.stop(heard[0], job.grace_seconds, lambda: len(heard) > 1)
            raise _Stopped
        ranks.stop(signal.SIGTERM, min(job.grace_seconds, AFTER_FAILURE_SECONDS))
    if heard:
        raise _Stopped
    ends = ranks.failures()
    if not ends:
        return Outcome(0, None, job.log_dir)
    if watch.found is not None:
        return Outcome(HANGS, watch.found, folder)
    end = failure.first(ends)
    error = failure.explain(end, ends, job.nproc, attempt=attempt + 1)
    # Who is still on its way out when others notice is stopped by the launcher.
    stopped = {e.rank for e in ends if e.stopped and not failure.raised(e)}
    whole = set(range(job.nproc)) - {e.rank for e in ends} | {r for r in stopped if watch.ended(r)}
    if whole and failure.lost_a_peer(failure.tail(end.log)):
        done = [folder / f"rank{rank}.log" for rank in sorted(whole)]
        error = failure.ended_early(error, done, job.nproc)
    if odd := watch.left_out():
        error = LaunchError(
            error.what, why=f"{odd}\n         {error.why}", where=error.where, hint=error.hint
        )
    return Outcome(end.status, error, folder)


def _settings(job: Job, attempt: int, folder: Path, records: Path) -> dict[str, object]:
    """Return the settings of `bootstrap.py`."""
    return {
        "launcher": os.getpid(),
        "log_dir": str(folder),
        "records": str(records),
        "watched": bool(job.hang_seconds),
        "env": _default_env(job),
        "fixed_env": {
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(job.restarts),
        },
        "shown_env": terminal.shown_env(),
    }


def _rank_env(job: Job, rank: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank, under the names that `torchrun` uses."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(job.nproc))
    return {
        **ranks,
        **sizes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "rank",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: no rank makes one
    }


def _default_env(job: Job) -> dict[str, str]:
    """Return environment variables that a rank gets unless the user's environment sets them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env = {
        "OMP_NUM_THREADS": str(max(1, cores // job.nproc)),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a stack in the log
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # all ranks are here; the machine's name need not resolve
            env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)
    return env


@contextlib.contextmanager
def _signals(heard: list[int]) -> Iterator[None]:
    """Note the signals that come within the block."""
    before = {s: signal.signal(s, lambda number, _: heard.append(number)) for s in HANDLED}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
