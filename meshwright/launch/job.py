"""A launch as data: a script or a module, the number of processes, and where their output goes. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.core.type_guards import is_number, is_whole
from meshwright.errors import LaunchError, a_type, did_you_mean, path_from
from meshwright.launch import bind
from meshwright.launch.nodes import Nodes, check_nodes

HANG_SECONDS = 600.0  # as long as NCCL waits for a collective
ON_FAILURE = ("restart", "continue", "stop")
MOST_PROCESSES = 4096  # beyond, a machine ends before the job begins


@dataclass(frozen=True, slots=True)
class Job:
    """Runs `nproc` ranks of ``python target *args``, or of ``python -m target *args`` if `module` is set.

    `log_dir`: by default a temporary folder, kept only if a rank fails. `restarts`: complete new attempts after a
    failure; each has its own store and port. `poll_seconds`: time between two checks of the ranks. `grace_seconds`:
    time that a rank has to stop before it is killed; at most two seconds after the failure of another rank, since
    nothing that it waits for will come. `on_failure`: "restart" (all ranks, as often as `restarts`), "stop", or
    "continue": ranks that hold all of the model go on, and `restarts` counts lost ranks that are started again.
    `hang_seconds`: time without any progress after which a hang is diagnosed, 0 for never. `nodes`: the machines, None
    for this one alone; `counts`: the ranks of each, where that is known. `bind`: ``numa``, ``cores`` or a map of cores
    as JSON. `tail`: the rank that is shown, by default the first of this machine.
    """

    nproc: int
    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    log_dir: Path | None = None
    restarts: int = 0
    poll_seconds: float = 0.1
    grace_seconds: float = 5.0
    on_failure: str = "restart"
    hang_seconds: float = HANG_SECONDS
    nodes: Nodes | None = None
    counts: tuple[int, ...] = ()
    bind: str = ""
    tail: int | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """The command of each rank, with the launching interpreter rather than one that PATH happens to name."""
        return (sys.executable, *(("-m",) if self.module else ()), self.target, *self.args)

    @property
    def label(self) -> str:
        return f"-m {self.target}" if self.module else self.target


def check(job: Job) -> Job:
    """The job itself, or a `LaunchError` that says what keeps it from starting."""
    if not isinstance(job, Job):
        raise LaunchError(
            f"the job is {a_type(job)}",
            why="a mw.Job says what is started, and how often",
            hint='mw.launch(mw.Job(4, "train.py"))',
        )
    _check_count(job.nproc, "--nproc", least=1, unit="ranks", hint="meshwright run --nproc 4 train.py")
    if job.nproc > MOST_PROCESSES:
        raise LaunchError(
            f"--nproc is {job.nproc:,}",
            why=f"each rank is a process of this machine; at most {MOST_PROCESSES:,} are started",
            hint="plans for more ranks need none of them: meshwright plan",
        )
    _check_count(
        job.restarts, "--max-restarts", least=0, unit="restarts", hint="0 gives up at the first failure"
    )
    if job.on_failure not in ON_FAILURE:
        raise LaunchError(
            f"--on-failure is {job.on_failure!r}",
            why=f"it must be one of {', '.join(ON_FAILURE)}",
            hint=did_you_mean(str(job.on_failure), ON_FAILURE) or "--on-failure continue",
        )
    if job.on_failure == "stop" and job.restarts:
        raise LaunchError(
            f"--on-failure stop together with --max-restarts {job.restarts}",
            why="a job that stops at its first failure restarts nothing",
            hint="leave one of them out",
        )
    every = (
        (job.poll_seconds, "--monitor-interval"),
        (job.grace_seconds, "--grace"),
        (job.hang_seconds, "--hang-after"),
    )
    for seconds, option in every:
        if not is_number(seconds):
            raise LaunchError(
                f"{option} is {seconds!r}", why="it must be a time in seconds", hint=f"{option} 60"
            )
    for seconds, option in every[:2]:
        if not 0 < seconds <= 3600:
            raise LaunchError(
                f"{option} is {seconds:g} seconds", why="it must be more than 0, and at most an hour"
            )
    if not (job.hang_seconds == 0 or 1 <= job.hang_seconds <= 86400):
        raise LaunchError(
            f"--hang-after is {job.hang_seconds:g} seconds",
            why="it must be a time, from a second to a day",
            hint="--hang-after 0 never looks who hangs",
        )
    job = _with_words(job)
    if job.bind:
        bind.cores_of_ranks(job.bind, job.nproc, bind.allowed(), bind.numa_nodes())
    if job.nodes is not None:
        job = replace(job, nodes=check_nodes(job.nodes, job.nproc))
    world = job.nproc if job.nodes is None else job.nodes.world
    if job.tail is not None and (not is_whole(job.tail) or job.tail < 0 or (world and job.tail >= world)):
        raise LaunchError(
            f"--tail is {job.tail!r}", why=f"ranks count from 0 to {world - 1}", hint="--tail 0"
        )
    (_check_module if job.module else _check_script)(job.target)
    if job.log_dir is not None:
        _check_log_dir(job.log_dir)
    return job


def count(text: str | int, option: str) -> int:
    """A whole number that a user typed."""
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{option} is {text!r}", why="it must be a whole number of processes", hint=f"{option} 4"
        ) from None


def duration(text: str | float, option: str) -> float:
    """Seconds that a user typed."""
    try:
        return float(text)
    except ValueError:
        raise LaunchError(
            f"{option} is {text!r}", why="it must be a number of seconds", hint=f"{option} 60"
        ) from None


def _check_count(value: int, option: str, *, least: int, unit: str, hint: str) -> None:
    if not is_whole(value) or value < least:
        raise LaunchError(f"{option} is {value!r}", why=f"a job has at least {least} {unit}", hint=hint)


def _with_words(job: Job) -> Job:
    """The job with its paths, once they and the words for the script can be such. Raises LaunchError."""
    hint = 'mw.Job(4, "train.py", ("--epochs", "3"))'
    if not isinstance(job.target, str | os.PathLike) or not str(job.target):
        raise LaunchError(
            f"target={job.target!r} is nothing that could be started",
            why=f"it is {a_type(job.target)}; a job has a script, or the name of a module",
            hint=hint,
        )
    words = [str(job.target), *job.args] if isinstance(job.args, tuple | list) else None
    if words is None or not all(isinstance(word, str) for word in words):
        raise LaunchError(
            f"args={job.args!r:.80} are not arguments for the script",
            why=f"it is {a_type(job.args)}" if words is None else "one of them is not a string",
            hint=hint,
        )
    if wrong := [word for word in words if "\0" in word]:
        raise LaunchError(
            f"{wrong[0]!r:.80} contains a NUL character",
            why="no argument of a command may have one",
            hint=hint,
        )
    if not job.module:
        path_from(job.target, f"target={job.target!r:.80}", LaunchError, hint)
    if job.log_dir is not None:
        hint = 'log_dir="logs", or leave it out'
        job = replace(job, log_dir=path_from(job.log_dir, f"log_dir={job.log_dir!r:.80}", LaunchError, hint))
    return replace(job, target=words[0], args=tuple(words[1:]))


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir():
        hint = (
            f"{path / '__main__.py'}"
            if (path / "__main__.py").exists()
            else did_you_mean(target, _scripts(path))
        )
        raise LaunchError(f"{target} is a directory", why="a rank runs one Python file", hint=hint)
    if not path.exists():
        looks_like_module = "." in target and not target.endswith(".py") and os.sep not in target
        hint = (
            f"meshwright run -m {target}"
            if looks_like_module
            else did_you_mean(target, _scripts(path.parent))
        )
        where = str(path.parent.resolve())
        raise LaunchError(
            f"there is no script {target}", why="the file does not exist", where=where, hint=hint
        )
    if not os.access(path, os.R_OK):
        raise LaunchError(f"the script {target} cannot be read", where=str(path.resolve()))


def _scripts(folder: Path) -> list[str]:
    """The Python files of a folder, written as a user would."""
    return [str(folder / p.name) for p in folder.glob("*.py")] if folder.is_dir() else []


def _check_module(target: str) -> None:
    # Only the top-level name: looking further would run the package's own code here.
    top = target.partition(".")[0]
    here = Path.cwd()
    if (here / top).is_dir() or (here / f"{top}.py").exists():
        return
    try:
        found = top != "" and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        local = [p.stem for p in here.glob("*.py")] + [p.parent.name for p in here.glob("*/__init__.py")]
        hint = "leave out -m to run a file" if target.endswith(".py") else did_you_mean(target, local)
        raise LaunchError(
            f"there is no module {target}", why=f"{top!r} cannot be imported", where=str(here), hint=hint
        )


def _check_log_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = error.strerror or str(error)
        hint = "--log-dir with a folder that you own, or leave it out: logs of a failed job are kept anyway"
        raise LaunchError(f"cannot write logs to {folder}", why=why, hint=hint) from None
