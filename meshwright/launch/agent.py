"""Run a job through torch's elastic agent: attempts, signals, logs, and the first failure.

Each attempt has an agent, a store and a port of its own. (torch's agent can restart workers itself, but keeps one
store for all attempts, and keys of the old one made a new one wait for minutes.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.errors import LaunchError
from meshwright.launch import bootstrap, failure, terminal, warden
from meshwright.launch.hang import Watch
from meshwright.launch.job import Job, check
from meshwright.launch.outcome import Outcome

HANGS = 124  # the exit code of a job that was ended because it hung, as that of `timeout`
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class OwnLogs(LogsSpecs):
    """torch opens no log: each rank points both of its streams at one file, in `bootstrap.py`."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        silent = dict.fromkeys(envs, "")
        return LogsDest(stdouts=silent, stderrs=silent, error_files=silent)

    @property
    def root_log_dir(self) -> str:
        return ""


def run(job: Job) -> Outcome:
    """Run a job to its end: see `meshwright.launch.launch`."""
    check(job)
    folder = job.log_dir.resolve() if job.log_dir else Path(tempfile.mkdtemp(prefix="meshwright-"))
    records = Path(tempfile.mkdtemp(prefix="meshwright-"))
    outcome = Outcome(0)
    try:
        with _signals_restored():
            outcome = _attempts(job, folder, records)
    except SignalException as stopped:
        outcome = Outcome(128 + stopped.sigval)
    except KeyboardInterrupt:  # before torch's agent took the signals over
        outcome = Outcome(128 + signal.SIGINT)
    finally:
        shutil.rmtree(records, ignore_errors=True)
        if job.log_dir is None and outcome.failure is None:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _attempts(job: Job, folder: Path, records: Path) -> Outcome:
    """As many attempts as the job may have, until one succeeds."""
    run_id = f"meshwright-{uuid.uuid4().hex}"
    outcome = Outcome(0)
    with warden.guard(run_id):
        for rank in range(job.nproc):
            (folder / f"rank{rank}.log").unlink(missing_ok=True)
        for attempt in range(job.restarts + 1):
            outcome = _attempt(job, attempt, f"{run_id}-{attempt}", folder, records)
            if outcome.failure is None or attempt == job.restarts:
                break
            print(f"{outcome.failure}\nattempt {attempt + 2} of {job.restarts + 1}:", file=sys.stderr)
            # a failed rank may have left children that hold ports, memory or a GPU
            warden.sweep(run_id)
    return outcome


def _attempt(job: Job, attempt: int, run_id: str, folder: Path, records: Path) -> Outcome:
    settings = {
        "launcher": os.getpid(),
        "log_dir": str(folder),
        "records": str(records) if job.hang_seconds else "",
        "env": _default_env(job),
        "fixed_env": {
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(job.restarts),
        },
        "shown_env": terminal.shown_env(),
    }
    command = ("-I", "-S", bootstrap.__file__, json.dumps(settings), *job.command)
    arguments = [a.replace("$", "$$") for a in command]  # torch substitutes ${macros} in arguments
    watch = Watch(records, folder, job.nproc, job.hang_seconds, run_id)
    try:
        with terminal.shown(folder / "rank0.log"), watch:
            elastic_launch(_config(job, run_id), sys.executable)(*arguments)
    except ChildFailedError as failed:
        if watch.found is not None:
            return Outcome(HANGS, watch.found, folder)
        ends = [
            failure.RankEnd(rank, f.exitcode, folder / f"rank{rank}.log")
            for rank, f in failed.failures.items()
        ]
        end = failure.first(ends)
        error = failure.explain(end, ends, job.nproc, attempt=attempt + 1)
        # Who is still on its way out when others notice is stopped by the launcher.
        stopped = {e.rank for e in ends if e.exit_code == -signal.SIGTERM and not failure.raised(e)}
        whole = set(range(job.nproc)) - failed.failures.keys() | {r for r in stopped if watch.ended(r)}
        if whole and failure.lost_a_peer(failure.tail(end.log)):
            done = [folder / f"rank{rank}.log" for rank in sorted(whole)]
            error = failure.ended_early(error, done, job.nproc)
        if odd := watch.left_out():
            error = LaunchError(
                error.what, why=f"{odd}\n         {error.why}", where=error.where, hint=error.hint
            )
        return Outcome(end.status, error, folder)
    return Outcome(0, None, job.log_dir)


def _config(job: Job, run_id: str) -> LaunchConfig:
    _quiet_loggers()
    known = {f.name for f in dataclasses.fields(LaunchConfig)}
    grace = {"shutdown_timeout": max(1, round(job.grace_seconds))} if "shutdown_timeout" in known else {}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.nproc,
        run_id=run_id,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port, found by binding it
        rdzv_configs={"is_host": True},
        local_addr="localhost",  # no look-up of this machine's name, which may not resolve
        max_restarts=0,
        monitor_interval=job.poll_seconds,
        logs_specs=OwnLogs(),
        signals_to_handle=",".join(s.name for s in HANDLED),
        **grace,
    )


def _default_env(job: Job) -> dict[str, str]:
    """What a rank gets unless the user's environment says otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env = {
        "OMP_NUM_THREADS": str(max(1, cores // job.nproc)),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a stack in the log
    }
    if Path("/sys/class/net/lo").exists():
        env["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here; the machine's name need not resolve
    return env


def _quiet_loggers() -> None:
    """torch's agent reports each failure in its own words; ours are enough."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    before = {s: signal.getsignal(s) for s in HANDLED}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
