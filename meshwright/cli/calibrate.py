"""`meshwright calibrate`: measure this machine, with all its ranks at once, and write its cluster file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.common import (
    SEVERAL,
    CertificatesOption,
    InsecureOption,
    MasterOption,
    NodeRankOption,
    SecretOption,
)
from meshwright.errors import ClusterError, LaunchError


def calibrate(
    nproc: Annotated[
        str,
        typer.Option(
            "--nproc", "-n", metavar="N", help="How many ranks; default: the GPUs, or 2.", show_default=False
        ),
    ] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="The cluster file to write.")] = Path(
        "cluster.yaml"
    ),
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Few sizes, measured once: to try the command in seconds, not for planning."
        ),
    ] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for the logs of the ranks.")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="A file for every time that was measured, as lines of JSON.")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="How many machines to measure, with N ranks each; start the command on each of them.",
            rich_help_panel=SEVERAL,
            show_default="1",
        ),
    ] = None,
    node_rank: NodeRankOption = None,
    master: MasterOption = None,
    secret: SecretOption = None,
    certificates: CertificatesOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Measure this machine with N ranks at once and write its cluster file.

    With --nnodes, the links between machines are measured, too, and the machine of rank 0 writes the file. It takes
    about a minute. Keep the machine quiet: rows that other programs disturbed are void, and listed.
    """
    from meshwright.launch.job import Job, check, count
    from meshwright.launch.nodes import placed

    for file in filter(None, (output, rows)):
        _check_writable(file)
    ranks = count(nproc, "--nproc") if nproc else default_ranks()
    check_crowd(ranks)
    typed = {
        "nproc": str(ranks),
        "nnodes": nnodes,
        "world": None,
        "index": node_rank,
        "master_at": master,
        "id": None,
    }
    nodes, _ = placed(os.environ, **typed, secret=secret, certificates=certificates, insecure=insecure)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        events = Path(folder) / "events.jsonl"
        arguments = (str(events), "quick" if quick else "full", repr(time.time()))
        job = check(
            Job(
                nproc=ranks,
                target="meshwright.calibrate.worker",
                module=True,
                args=arguments,
                log_dir=log_dir,
                nodes=nodes,
            )
        )

        from meshwright.launch import launch

        with progress(events):
            outcome = launch(job)
        if outcome.failure is not None:
            print(f"{type(outcome.failure).__name__}: {outcome.failure}", file=sys.stderr)
            print(f"nothing was written to {output}", file=sys.stderr)
        if rows is not None and events.exists():
            rows.write_bytes(events.read_bytes())
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)
        found = list(read(events))
    if nodes is not None and not found:
        print("measured; the machine of rank 0 writes the cluster file")
        return
    _write(found, output, quick)


MOST_OF_A_CORE = 8  # ranks that take turns on it


def check_crowd(ranks: int) -> None:
    """Before that many processes start. Raises LaunchError."""
    from meshwright.cost import local_machine as local

    cores = local.cores()
    if ranks > MOST_OF_A_CORE * cores:
        raise LaunchError(
            f"--nproc is {ranks}, on {cores} cores",
            why=f"more than {MOST_OF_A_CORE} ranks on a core would measure how they take turns",
            hint=f"--nproc {cores}; for a cluster that is not this machine, Cluster.preset or a file",
        )


def default_ranks() -> int:
    """The GPUs of this machine, or 2."""
    import torch

    return torch.cuda.device_count() or 2


def _check_writable(path: Path) -> None:
    """Before a minute of measuring. Raises ClusterError."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.resolve().parent}"
        raise ClusterError(f"the cluster file cannot be written to {path}", why=why, hint="-o cluster.yaml")


def read(events: Path) -> Iterator[dict[str, Any]]:
    """Yield the events so far; an incomplete last line is left for the next call."""
    if not events.exists():
        return
    for line in events.read_text("utf-8").split("\n")[:-1]:
        yield json.loads(line)


@contextmanager
def progress(events: Path) -> Iterator[None]:
    """A bar that follows the events until the block ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    stop = threading.Event()
    columns = (
        TextColumn("calibrating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def follow() -> None:
            while not stop.wait(0.1):
                found = list(read(events))
                if found:
                    begun = [e["begin"] for e in found if "begin" in e]
                    bar.update(
                        task,
                        total=len(found[0]["rows"]),
                        completed=len({e["row"] for e in found if "row" in e}),
                        description=begun[-1] if begun else "",
                    )

        thread = threading.Thread(target=follow, name="progress of calibrate", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _write(events: list[dict[str, Any]], output: Path, quick: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from meshwright.calibrate.plan import MeasuredRow
    from meshwright.calibrate.result import calibration, count

    if not events or "end" not in events[-1]:
        raise LaunchError(
            "the ranks ended before all rows were measured",
            hint="meshwright calibrate --log-dir logs, and look there",
        )
    machine = events[0]["machine"]
    rows = {
        e["row"]: MeasuredRow.of(e) for e in events if "row" in e
    }  # of a row that was measured again, the last
    found = calibration(machine, list(rows.values()))
    note = found.note + ("\nA quick look: not for planning." if quick else "")
    table = Table(
        title=f"{count(machine['ranks'], 'rank')} at once: {machine['device']}, {machine['backend']}"
    )
    for heading in ("row", "fit", "error", "quiet"):
        table.add_column(heading)
    for line in found.lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if found.fit:
        print(found.fit)
    found.cluster.save(output, note)
    print(f"{output} written after {events[-1]['seconds']:.0f} s")
    if left_out := events[-1]["left_out"]:
        print(f"left out for want of time: {', '.join(left_out)}")
    if found.void:
        print(f"void, because the machine was not quiet (measure again): {', '.join(found.void)}")
