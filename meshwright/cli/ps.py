"""`meshwright ps status`: what the parameter servers of a running job do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.common import JsonOption
from meshwright.errors import ServerError

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.servers.messages import Seen

app = typer.Typer(no_args_is_help=True, help="Look at the parameter servers of a running job.")
AWAY_SECONDS = 2.0
WIDTH = 80  # of a terminal: nothing here is wider


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

    there = {number: each for number, each in seen.items() if not isinstance(each, str)}
    console = Console(width=max(Console().width, WIDTH))
    if there:
        bounds, oldest = [each.bound for each in there.values()], max(s.counts.oldest for s in there.values())
        bound = "without a bound" if bounds[0] is None else f"staleness {bounds[0]}"
        print(f"{folder}\n{bound}; the oldest value that was read was {oldest} steps behind\n")
    for table in tables(there):
        console.print(table)
        print()
    for text in seen.values():
        if isinstance(text, str):
            print(text)


def tables(seen: Mapping[int, Seen]) -> list[Table]:
    """What is shown: the servers, their copies if they have any, and the workers. At most `WIDTH` columns wide."""
    from meshwright.redistribute.steps import show_bytes

    servers, copies, workers = [], [], []
    for number, each in seen.items():
        counts, (since, worked) = each.counts, each.seconds
        numbers = (each.blocks, counts.updates, each.waiting)
        sizes = (show_bytes(counts.pulled_bytes), show_bytes(counts.pushed_bytes))
        busy = f"{100 * worked / since:.0f} %" if since else ""
        servers.append((number, show_bytes(each.size_bytes), *numbers, *sizes, busy))
        if each.copied is not None:
            behind = each.copied.behind
            where = ("no other yet", "") if behind is None else (each.copied.server, behind)
            copies.append((number, *where, show_bytes(each.copies_bytes)))
    clocks = {worker: clock for each in seen.values() for worker, clock in each.clocks.items()}
    workers += [(w, clock, max(clocks.values()) - clock) for w, clock in sorted(clocks.items())]
    gone = {worker: clock for each in seen.values() for worker, clock in each.left.items()}
    workers += [(w, clock, "has left") for w, clock in sorted(gone.items()) if w not in clocks]
    heads = ("server", "memory", "blocks", "updates", "waiting", "pulled", "pushed", "busy")
    all_three = (
        (heads, servers),
        (("server", "its copy is on server", "changes behind", "copies of others"), copies),
        (("worker", "steps", "behind"), workers),
    )
    return [_table(heads, rows) for heads, rows in all_three if rows]


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for head in heads:
        made.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*map(str, row))
    return made


__all__ = ["app", "tables"]
