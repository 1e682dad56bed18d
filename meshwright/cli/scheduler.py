"""`meshwright scheduler`: the scheduler of a job over several machines, as a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import CertificatesOption, InsecureOption, SecretOption


def scheduler(
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; nodes pass it as --master. Also MESHWRIGHT_MASTER, MS_SCHED_HOST and _PORT.",
            show_default=False,
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="How many machines the job has; if left out, the machines say it."),
    ] = None,
    world_size: Annotated[
        str | None, typer.Option(metavar="N", help="How many ranks the job has in all. Also MS_WORKER_NUM.")
    ] = None,
    max_restarts: Annotated[
        str,
        typer.Option(metavar="N", help="How often nodes may start all ranks again after a failure."),
    ] = "0",
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the state of the scheduler; when started again, it continues from there.",
        ),
    ] = None,
    node_time_out: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="How long a node may be silent before it is lost.",
            envvar="MS_NODE_TIMEOUT",
        ),
    ] = "30",
    secret: SecretOption = None,
    certificates: CertificatesOption = None,
    insecure: InsecureOption = False,
    stay: Annotated[bool, typer.Option("--stay", help="Keep running when the job has ended.")] = False,
) -> None:
    """Keep the members, keys and values of a job on several machines.

    Workers may join in any order, and rejoin. It ends when the job ends.
    """
    from meshwright.launch.job import count, duration
    from meshwright.launch.scheduler_process import run, settings

    told = settings(
        os.environ,
        listen=listen,
        nodes=count(nnodes or 0, "--nnodes"),
        world=count(world_size or os.environ.get("MS_WORKER_NUM") or 0, "--world-size"),
        restarts=count(max_restarts, "--max-restarts"),
        state=str(state or ""),
        certificates=str(certificates or ""),
        node_seconds=duration(node_time_out, "--node-time-out"),
        stays=stay,
    )
    from meshwright.launch.nodes import Nodes, trusted

    key = trusted(Nodes(told.nodes, told.host, told.port, index=0, secret=secret, insecure=insecure))
    raise typer.Exit(run(told, key))
