"""`meshwright ps status`: what the parameter servers of a running job do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.common import JsonOption
from meshwright.errors import ServerError

if TYPE_CHECKING:
    from meshwright.servers.messages import Seen

app = typer.Typer(no_args_is_help=True, help="Look at the parameter servers of a running job.")
AWAY_SECONDS = 2.0


@app.callback()
def _ps() -> None:
    pass


@app.command()
def status(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="The job's MESHWRIGHT_SERVERS; if left out, the newest job of this machine and user.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print memory, updates, traffic and load of each server, and how far each worker is."""
    from msgspec import to_builtins

    from meshwright.servers import messages as m
    from meshwright.servers.meeting import meeting, running
    from meshwright.servers.sockets import Remote
    from meshwright.servers.worker import ask

    jobs = [folder] if folder is not None else running()
    if not jobs:
        raise ServerError(
            "no job with parameter servers runs here",
            hint="meshwright run --servers 2 …, or the folder in MESHWRIGHT_SERVERS of its workers",
        )
    servers = Remote(meeting(jobs[0]), away=AWAY_SECONDS)
    seen: dict[int, Seen | str] = {}
    for number in range(servers.meeting.count()):
        try:
            seen[number] = ask(servers, {number: (m.Look(), [])}, m.Seen)[number][0]
        except ServerError as error:
            seen[number] = error.what
    servers.close()
    if as_json:
        print(
            json.dumps({number: to_builtins(each, str_keys=True) for number, each in seen.items()}, indent=2)
        )
    else:
        _show(jobs[0], seen)


def _show(folder: Path, seen: dict[int, Seen | str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from meshwright.redistribute.steps import show_bytes

    there = [each for each in seen.values() if not isinstance(each, str)]
    console = Console()
    if there:
        bound = "without a bound" if there[0].bound is None else f"staleness {there[0].bound}"
        oldest = max(each.counts.oldest for each in there)
        print(f"{folder}: {bound}; the oldest value that was read was {oldest} steps behind")
    silent: list[str] = []
    copied = any(each.copied is not None for each in there)
    heads = ("server", "memory", "blocks", "updates", "waiting", "pulled", "pushed", "busy")
    servers = Table(*heads, *(("copies", "copied to") if copied else ()))
    for number, each in seen.items():
        if isinstance(each, str):
            silent.append(each)
            continue
        counts, (since, worked) = each.counts, each.seconds
        numbers = (each.blocks, counts.updates, each.waiting)
        sizes = (show_bytes(counts.pulled_bytes), show_bytes(counts.pushed_bytes))
        busy = f"{100 * worked / since:.0f} %" if since else ""
        where = (show_bytes(each.copies_bytes), _copied(each)) if copied else ()
        servers.add_row(str(number), show_bytes(each.size_bytes), *map(str, numbers), *sizes, busy, *where)
    if there:
        console.print(servers)
    for text in silent:
        print(text)
    clocks = {worker: clock for each in there for worker, clock in each.clocks.items()}
    workers = Table("worker", "steps", "behind")
    for worker, clock in sorted(clocks.items()):
        workers.add_row(str(worker), str(clock), str(max(clocks.values()) - clock))
    for worker, clock in sorted({w: c for each in there for w, c in each.left.items()}.items()):
        if worker not in clocks:
            workers.add_row(str(worker), str(clock), "has left")
    if workers.rows:
        console.print(workers)


def _copied(seen: Seen) -> str:
    """Where the copy of a server is, and whether it is complete."""
    if seen.copied is None or seen.copied.behind is None:
        return "no other yet"
    return str(seen.copied.server) + (f", {seen.copied.behind} behind" if seen.copied.behind else "")


__all__ = ["app"]
