"""`meshwright run`: start the ranks of a script, on this machine or as one of several."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import (
    SEVERAL,
    CertificatesOption,
    InsecureOption,
    MasterOption,
    NodeRankOption,
    SecretOption,
)

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
        str | None,
        typer.Option(
            "--nproc",
            "--workers",
            "-n",
            metavar="N",
            help="How many ranks to start on this machine, 1 if left out; 8,8,4 for each of three machines.",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in python -m.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rank0.log, rank1.log, …; if left out, a temporary one, kept when a rank fails."
        ),
    ] = None,
    tail: Annotated[
        str | None,
        typer.Option(
            metavar="RANK", help="The rank whose output is shown; if left out, the first of this machine."
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help='Bind ranks to cores: numa, cores, or a map by local rank, {"0": "0-7", "1": "8-15"}.',
            show_default=False,
        ),
    ] = "",
    background: Annotated[
        bool, typer.Option("--background/--join", help="Return at once; the job writes only to --log-dir.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what each machine would start, and start nothing.")
    ] = False,
    max_restarts: Annotated[
        str, typer.Option(metavar="N", help="How often to start all ranks again after a failure.")
    ] = "0",
    on_failure: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="restart: all ranks, as --max-restarts allows. continue: data-parallel ranks go on without lost ranks "
            "and machines, and --max-restarts counts lost ranks that are started again and join. stop: end the job.",
        ),
    ] = "restart",
    monitor_interval: Annotated[
        str, typer.Option(metavar="SECONDS", help="Time between two checks of the ranks.")
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
            help="If no rank makes progress for so long, report which one hangs, where, and what the others wait "
            "for, and end the attempt, or with --on-failure continue that rank alone. 0: never.",
        ),
    ] = "600",
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many parameter servers to start on this machine. Give it on each of several machines; 0 starts "
            "none there.",
            show_default=False,
        ),
    ] = None,
    server_state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the state of parameter servers: a killed one restarts from it, and nothing is lost.",
        ),
    ] = None,
    resume_state: Annotated[
        bool,
        typer.Option(
            "--resume-state",
            help="Go on from what parameter servers of a job on this machine have left in --server-state: its launcher "
            "was killed. This needs all parameters on servers.",
        ),
    ] = False,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="How many other parameter servers, 0 or 1, have a copy of each one, on another machine if there is "
            "one: a server that is lost with its folder loses nothing.",
        ),
    ] = "0",
    add_to: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Start more workers of a job that runs with parameter servers: the folder in its MESHWRIGHT_SERVERS, "
            "newest of this machine, or HOST:PORT of its scheduler. They end on their own; with --node-rank, they take "
            "the place of those before them.",
            show_default=False,
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many machines the job has; with MIN:MAX (2:4) it runs on those that are there.",
            rich_help_panel=SEVERAL,
            show_default="1",
        ),
    ] = None,
    world_size: Annotated[
        str | None,
        typer.Option(metavar="N", help="How many ranks the job has in all.", rich_help_panel=SEVERAL),
    ] = None,
    node_rank: NodeRankOption = None,
    master: MasterOption = None,
    node_id: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The name under which this machine may rejoin. Also MESHWRIGHT_NODE_ID.",
            rich_help_panel=SEVERAL,
        ),
    ] = None,
    no_scheduler: Annotated[
        bool,
        typer.Option(
            "--no-scheduler",
            help="Never start the scheduler: wait for the one that meshwright scheduler starts at --master.",
            rich_help_panel=SEVERAL,
        ),
    ] = False,
    stop_alone: Annotated[
        bool,
        typer.Option(
            "--stop-alone",
            help="A signal ends only this machine: the others wait until it rejoins, as --max-restarts allows.",
            rich_help_panel=SEVERAL,
        ),
    ] = False,
    rank_table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A rank table in MindSpore's JSON format, with machines and ranks. Also RANK_TABLE_FILE.",
            rich_help_panel=SEVERAL,
        ),
    ] = None,
    secret: SecretOption = None,
    certificates: CertificatesOption = None,
    insecure: InsecureOption = False,
    cluster_time_out: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="How long to wait for the other machines; -1: for ever.",
            rich_help_panel=SEVERAL,
        ),
    ] = "600",
    node_time_out: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="How long a machine may be silent before it is lost: 30, or 9 with --replicas, whose copies take "
            "over. Of machine 0, if it starts the scheduler.",
            envvar="MS_NODE_TIMEOUT",
            rich_help_panel=SEVERAL,
        ),
    ] = "",
    last_call: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="With --nnodes MIN:MAX: how long to wait at the start for more than MIN.",
            rich_help_panel=SEVERAL,
        ),
    ] = "30",
) -> None:
    """Start N ranks of a script on this machine, or on each of several.

    The output of rank 0 is shown, that of all ranks is logged. All ranks end with the launcher.
    The exit code is that of the rank that failed first.
    """
    from meshwright.errors import LaunchError
    from meshwright.launch.from_table import with_table
    from meshwright.launch.job import Job, check, count, duration
    from meshwright.launch.nodes import placed
    from meshwright.launchers.environment import one_of_several

    index = node_rank if add_to is None else None
    typed = {
        "nproc": nproc, "nnodes": nnodes, "world": world_size, "index": index, "master_at": master, "id": node_id
    }  # fmt: skip
    nodes, counts = placed(
        os.environ,
        **with_table(rank_table, os.environ, typed),
        secret=secret,
        certificates=certificates,
        insecure=insecure,
        wait_seconds=duration(cluster_time_out, "--cluster-time-out"),
        last_call_seconds=duration(last_call, "--last-call"),
        silent_seconds=duration(node_time_out or ("30" if replicas in ("", "0") else "9"), "--node-time-out"),
        stops_alone=stop_alone,
        starts_scheduler=not no_scheduler,
    )
    for option, given in (("--stop-alone", stop_alone), ("--no-scheduler", no_scheduler)):
        if given and nodes is None:
            raise LaunchError(
                f"{option} on one machine", why="it is about several machines", hint="leave it out"
            )
    if nodes is None and add_to is None and (outer := one_of_several(os.environ)) is not None:
        print(
            f"{outer.launcher} has started {outer.world} launchers, and each runs a job of its own; for one job: "
            "--nnodes and --master, or the script without meshwright run",
            file=sys.stderr,
        )
    server_count = None if servers is None else count(servers, "--servers")
    job = Job(
        nproc=counts[nodes.index if nodes is not None and len(counts) > 1 else 0],
        target=target,
        args=tuple(args or ()),
        module=module,
        log_dir=log_dir,
        restarts=count(max_restarts, "--max-restarts"),
        on_failure=on_failure,
        poll_seconds=duration(monitor_interval, "--monitor-interval"),
        grace_seconds=duration(grace, "--grace"),
        hang_seconds=duration(hang_after, "--hang-after"),
        nodes=nodes,
        counts=counts if len(counts) > 1 else (),
        bind=bind,
        tail=None if tail is None else count(tail, "--tail"),
    )
    job = check(job)  # before torch is imported: a typing error is answered at once
    if dry_run or background:
        from meshwright.launch import detached

        print(detached.described(job) if dry_run else detached.start(job, sys.argv))
        return

    from meshwright.launch import launch
    from meshwright.launch.servers import added, started

    copies = count(replicas, "--replicas")
    if copies and server_count is None:
        raise LaunchError(
            "--replicas without --servers", why="replicas are copies of parameter servers", hint="--servers 2"
        )
    if resume_state and server_count is None:
        raise LaunchError(
            "--resume-state without --servers", why="it is about parameter servers", hint="--servers 2"
        )
    if add_to is not None and (server_count is not None or job.nodes is not None):
        raise LaunchError(
            "--add-to with servers or machines", why="the running job has them already", hint="leave them out"
        )
    if add_to is None:
        beside = started(server_count, server_state, job.nodes, copies, resumes=resume_state)
    else:
        place = None if node_rank is None else job.nproc * count(node_rank, "--node-rank")
        beside = added(add_to, place, secret, certificates, insecure=insecure)
    with beside:
        outcome = launch(job)
    if outcome.failure is not None:
        print(f"{type(outcome.failure).__name__}: {outcome.failure}", file=sys.stderr)
    elif outcome.exit_code:
        print(f"stopped by {signal.Signals(outcome.exit_code - 128).name}: no rank is left", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)
