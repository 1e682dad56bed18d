"""Run a job: attempts, signals, logs, and the first failure.

Each attempt has processes, a folder of records, a store and a port of its own. On one machine nothing of it listens
beyond the loopback address; over several, only the scheduler and the back ends do. Nothing from a socket is unpickled.
(torch's elastic agent listens and unpickles, keeps one store for all its restarts, and gives ranks half a minute to end
after a failure, whatever time it was given.)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.heartbeat import JOB
from meshwright.launch import bind, bootstrap, failure, reaper, terminal
from meshwright.launch.departures import HINT, Departures, leaving
from meshwright.launch.hang_elsewhere import Elsewhere
from meshwright.launch.hang_watch import Watch
from meshwright.launch.job import Job, check
from meshwright.launch.keeper import Keeper, memory_folder
from meshwright.launch.membership import Member, Stopped
from meshwright.launch.nodes import trusted
from meshwright.launch.outcome import Outcome
from meshwright.launch.port import Port
from meshwright.launch.ranks import Ranks
from meshwright.launch.servers import attempt_begins, check_joins, machines_are
from meshwright.launch.span import Alone, Span
from meshwright.launch.survivors import Survivors
from meshwright.scheduler.client import Place
from meshwright.scheduler.trust import SECRET, Trust

HANGS = 124  # the exit code of a job that was ended because it hung, as that of `timeout`
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# At most, after a failure: what the others wait for does not come, and most of them cannot hear a signal meanwhile.
AFTER_FAILURE_SECONDS = 2.0


def run(job: Job) -> Outcome:
    """Run a job to its end: see `meshwright.launch.launch`."""
    job = check(job)
    secret = "" if job.nodes is None else trusted(job.nodes)
    folder = job.log_dir.resolve() if job.log_dir else Path(tempfile.mkdtemp(prefix="meshwright-"))
    records = Path(tempfile.mkdtemp(prefix="meshwright-"))  # which nobody else may read
    outcome = Outcome(0)
    heard: list[int] = []
    try:
        with _signals(heard), _party(job, secret, records, folder, heard) as party:
            outcome = _attempts(job, party, folder, records, heard)
    except Stopped:
        outcome = Outcome(128 + heard[0])
    finally:
        shutil.rmtree(records, ignore_errors=True)
        if job.log_dir is None and outcome.failure is None and outcome.log_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _party(job: Job, secret: str, records: Path, folder: Path, heard: list[int]) -> Alone | Member:
    """Who decides with whom this machine runs an attempt."""
    if job.nodes is None:
        return Alone(job.nproc, job.restarts)
    place = Place(job.nodes.host, job.nodes.port, Trust(secret, job.nodes.certificates))
    how = (job.nproc, job.restarts, job.on_failure)
    return Member(job.nodes, place, *how, records, folder, lambda: bool(heard))


def _attempts(job: Job, party: Alone | Member, folder: Path, records: Path, heard: list[int]) -> Outcome:
    """As many attempts as the job may have, until one succeeds."""
    run_id = f"meshwright-{uuid.uuid4().hex}"
    with reaper.guard(run_id, memory_folder(run_id)), Keeper(run_id, party.trust) as keeper:
        fresh, failures = True, 0
        check_joins()
        while True:
            for left in records.glob("*"):  # of an attempt before
                left.unlink()
            span = party.begin()
            (records / JOB).write_text(party.job, "utf-8")
            refused = None
            try:
                attempt_begins(span.attempt, span.nodes)
            except LaunchError as error:
                refused = error
            for rank in span.ranks if fresh else ():
                (folder / f"rank{rank}.log").unlink(missing_ok=True)
            fresh = False
            if refused is None:
                run = f"{run_id}-{span.attempt}"
                outcome = _attempt(job, party, keeper, span, run, folder, records, heard)
            else:
                outcome = Outcome(2, refused)
            outcome, again = party.end(outcome, final=refused is not None)
            if not again:  # what was said of failures names their logs
                return replace(outcome, log_dir=folder) if failures else outcome
            if outcome.failure is not None:
                failures += 1
                print(f"{outcome.failure}\nattempt {failures + 1} of {job.restarts + 1}:", file=sys.stderr)
            # a failed rank may have left children that hold ports, memory or a GPU
            reaper.sweep(run_id)


def _attempt(
    job: Job,
    party: Alone | Member,
    keeper: Keeper,
    span: Span,
    run_id: str,
    folder: Path,
    records: Path,
    heard: list[int],
) -> Outcome:
    goes_on = job.on_failure == "continue"
    elsewhere = None
    if isinstance(party, Member) and (span.places > 1 or goes_on):
        elsewhere = Elsewhere(party.place, span, party.machines)
    watch = Watch(records, folder, span.ranks, job.hang_seconds, run_id, elsewhere, goes_on)
    shared = {name: value for name, value in os.environ.items() if name != SECRET}
    shared["TORCHELASTIC_RUN_ID"] = run_id
    shown = _shown(job, span)
    with terminal.shown(folder / f"rank{shown}.log"), watch, Port(shared) as port:
        settings = _settings(job, span, folder, records, shown)
        command = (sys.executable, "-I", "-S", bootstrap.__file__, json.dumps(settings), *job.command)
        number = port.number if span.master is None else span.master
        envs = {rank: {**shared, **span.rank_env(rank - span.first, number)} for rank in span.ranks}
        ranks = Ranks({rank: (command, env) for rank, env in envs.items()}, records, folder)
        left = None
        if goes_on:
            left = Survivors(records, ranks, span.ranks, span.world, party, watch.hung)
        failed = ranks.failed if left is None else left.over
        with Departures(records, ranks, span, party.place, goes_on=goes_on) as departures:
            while not (failed() or heard or party.over() or departures.found) and (
                ranks.running() or party.undecided()
            ):
                port.look()
                keeper.look(records, span.address)
                if goes_on:
                    machines_are(span.attempt, party.present(span.nodes), party.away)
                party.pause(job.poll_seconds)
        vain = None if departures.found is None else watch.explained(departures.found, HINT, shown=0)
        if heard:
            ranks.stop(heard[0], job.grace_seconds, lambda: len(heard) > 1)
            party.stopped(128 + heard[0])
            raise Stopped
        survived = frozenset() if left is None else frozenset(left.lost)
        cut_short = (
            party.over() and vain is None and bool(ranks.running()) and not ranks.failed(besides=survived)
        )
        seconds = job.grace_seconds if party.grows() else min(job.grace_seconds, AFTER_FAILURE_SECONDS)
        ranks.stop(signal.SIGTERM, seconds)
    if heard:
        party.stopped(128 + heard[0])
        raise Stopped
    if vain is not None:
        return Outcome(1, vain, folder)
    outcome = _outcome(job, party, span, ranks, watch, departures, folder, cut_short, survived)
    return replace(outcome, log_dir=folder) if left is not None and left.said_where else outcome


def _outcome(
    job: Job,
    party: Alone | Member,
    span: Span,
    ranks: Ranks,
    watch: Watch,
    departures: Departures,
    folder: Path,
    cut_short: bool,
    survived: Collection[int],
) -> Outcome:
    """How an attempt has ended on this machine. `cut_short`: another one has ended it. `survived`: ranks without which
    the others went on."""
    ends = [end for end in ranks.failures() if end.rank not in survived]
    if cut_short:
        ends = [end for end in ends if failure.raised(end) and not failure.lost_a_peer(failure.tail(end.log))]
    if not ends:
        return Outcome(0, None, job.log_dir, cut_short=cut_short)
    if watch.found is not None:
        return Outcome(HANGS, watch.found, folder)
    end = failure.first(ends)
    error = failure.explain(end, ends, span.world, attempt=span.attempt + 1, shown=_shown(job, span))
    # Who is still on its way out when others notice is stopped by the launcher.
    stopped = {e.rank for e in ends if e.stopped and not failure.raised(e)}
    whole = set(span.ranks) - {e.rank for e in ends} | {r for r in stopped if watch.ended(r)}
    lost = failure.lost_a_peer(failure.tail(end.log))
    if lost and (early := departures.early(whole, party.over)):
        log = folder / f"rank{early[0].rank}.log" if early[0].rank in span.ranks else None
        error = failure.ended_early(error, leaving(early, span.world), log)
    # Who joined or was left has not begun the same collectives as the others.
    if job.on_failure != "continue" and (odd := watch.left_out()):
        error = LaunchError(
            error.what, why=f"{odd}\n         {error.why}", where=error.where, hint=error.hint
        )
    return Outcome(end.status, error, folder, peer_lost=lost)


def _shown(job: Job, span: Span) -> int:
    """The rank that is shown on the terminal, if it is one of this machine's."""
    return span.first if job.tail is None else job.tail


def _settings(job: Job, span: Span, folder: Path, records: Path, shown: int) -> dict[str, object]:
    """Return the settings of `bootstrap.py`."""
    bound = bind.cores_of_ranks(job.bind, job.nproc, bind.allowed(), bind.numa_nodes()) if job.bind else []
    return {
        "launcher": os.getpid(),
        "log_dir": str(folder),
        "records": str(records),
        "env": _default_env(span, bound),
        "fixed_env": {
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_RESTART_COUNT": str(span.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(job.restarts),
        },
        "shown": shown,
        "shown_env": terminal.shown_env(),
        "cores": [sorted(cores) for cores in bound],
    }


def _default_env(span: Span, bound: list[frozenset[int]]) -> dict[str, str]:
    """Return environment variables that a rank gets unless the user's environment sets them."""
    cores = min(map(len, bound)) if bound else len(bind.allowed()) // span.nproc
    env = {
        "OMP_NUM_THREADS": str(max(1, cores)),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a stack in the log
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if span.interface:  # the machine's name need not resolve, nor to an address that others reach
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), span.interface)
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
