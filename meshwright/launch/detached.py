"""Describe as text what a job would start, and run a launcher in the background."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from meshwright.errors import LaunchError
from meshwright.launch import bind
from meshwright.launch.job import Job

BACKGROUND = "--background"


def described(job: Job) -> str:
    """Return as text what each machine would start: its ranks, their cores and the command."""
    command = shlex.join(job.command)
    nodes = job.nodes
    if nodes is None:
        lines = [f"this machine: {_ranks(0, job.nproc)} of {job.nproc}"]
    else:
        counts = job.counts or (job.nproc,) * nodes.count
        world = nodes.world or sum(counts)
        guard = "no secret, no TLS" if nodes.insecure else "TLS and a secret"
        lines = [f"scheduler at {nodes.master}: {guard}"]
        if nodes.most > nodes.count:
            lines.append(f"{nodes.count} to {nodes.most} nodes take part, as many as there are")
        first = 0
        for place, nproc in enumerate(counts):
            own = " (this machine)" if place == nodes.index else ""
            lines.append(f"node {place}{own}: {_ranks(first, nproc)} of {world}")
            first += nproc
        if nodes.index < 0:
            lines.append("nodes are numbered in the order in which they come")
        if first != world:
            lines.append(f"{world - first} ranks more, on nodes with another --nproc")
    lines += [f"each rank: {command}"]
    if job.bind:
        bound = bind.cores_of_ranks(job.bind, job.nproc, bind.allowed(), bind.numa_nodes())
        lines += [f"local rank {r}: cores {','.join(map(str, sorted(c)))}" for r, c in enumerate(bound)]
    return "\n".join(lines)


def _ranks(first: int, nproc: int) -> str:
    return f"rank {first}" if nproc == 1 else f"ranks {first} to {first + nproc - 1}"


def start(job: Job, argv: Sequence[str]) -> str:
    """Start the same launcher without `--background`, in a session of its own; what to tell about it. `argv`: the
    command line of this process. Raises LaunchError without a folder for logs."""
    if job.log_dir is None:
        raise LaunchError(
            "--background has no --log-dir", why="nobody would see how the job ends", hint="--log-dir logs"
        )
    words = list(argv[1:])
    words.remove(BACKGROUND)
    log = job.log_dir.resolve() / "launcher.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.cli", *words],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    return f"launcher {process.pid} writes {log}; stop the job with: kill {process.pid}"


__all__ = ["described", "start"]
