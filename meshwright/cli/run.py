"""`meshwright run`: start the ranks of a script on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

# What stands after the script is the script's own, options too.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def run(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module, to run.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Passed on to the script.", show_default=False),
    ] = None,
    nproc: Annotated[
        str, typer.Option("--nproc", "-n", metavar="N", help="How many ranks to start on this machine.")
    ] = "1",
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in python -m.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rank0.log, rank1.log, …; if left out, a temporary one, kept when a rank fails."
        ),
    ] = None,
    max_restarts: Annotated[
        str, typer.Option(metavar="N", help="Start all ranks again after a failure, so many times.")
    ] = "0",
    monitor_interval: Annotated[
        str, typer.Option(metavar="SECONDS", help="Time between two looks at the ranks.")
    ] = "0.1",
    grace: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="How long a rank may take to stop before it is killed; at most 2 after a failure of another.",
        ),
    ] = "5",
    hang_after: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            envvar="MESHWRIGHT_HANG_AFTER",
            help="When no rank has moved for so long: say which one hangs, where, and what the others wait for, and "
            "end the attempt. 0: never.",
        ),
    ] = "600",
) -> None:
    """Start N ranks of a script on this machine.

    Rank 0 is shown, all are logged, and none outlives the launcher.
    The exit code is that of the rank that failed first.
    """
    from meshwright.launch.job import Job, check, count, duration

    job = Job(
        nproc=count(nproc, "--nproc"),
        target=target,
        args=tuple(args or ()),
        module=module,
        log_dir=log_dir,
        restarts=count(max_restarts, "--max-restarts"),
        poll_seconds=duration(monitor_interval, "--monitor-interval"),
        grace_seconds=duration(grace, "--grace"),
        hang_seconds=duration(hang_after, "--hang-after"),
    )
    check(job)  # before torch is imported: a typing error is answered at once

    from meshwright.launch import launch

    outcome = launch(job)
    if outcome.failure is not None:
        print(f"{type(outcome.failure).__name__}: {outcome.failure}", file=sys.stderr)
    elif outcome.exit_code:
        print(f"stopped by {signal.Signals(outcome.exit_code - 128).name}: no rank is left", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)
