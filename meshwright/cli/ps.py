"""`meshwright ps`: what the parameter servers of a running job do, and how many of them have parameters."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.common import (
    CertificatesOption,
    InsecureOption,
    JsonOption,
    MasterOption,
    SecretOption,
)
from meshwright.errors import ServerError

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.servers.messages import Declare, Seen
    from meshwright.servers.sockets import Remote

app = typer.Typer(
    no_args_is_help=True, help="Look at the parameter servers of a running job, or change their number."
)
AWAY_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # for a server that is connected, and may be busy with an update
NO_MODEL = "this server has no model yet"
BEGIN_SECONDS = 30.0  # for the servers, and
DECLARED_SECONDS = 60.0  # for the workers of a job that has just begun
WIDTH = 80  # of a terminal: nothing here is wider


FolderArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FOLDER]",
        help="The job's MESHWRIGHT_SERVERS; may be left out if this user runs one job on this machine.",
        show_default=False,
    ),
]


@app.command()
def status(
    folder: FolderArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Print memory, updates, traffic and load of each server, and how far each worker is. Exit status 1: a server does
    not answer."""
    from msgspec import to_builtins

    from meshwright.servers import messages as m
    from meshwright.servers.asking import ask
    from meshwright.servers.meeting import meeting
    from meshwright.servers.sockets import Remote

    found = _found(folder)
    servers = Remote(meeting(found), away=AWAY_SECONDS, silent=ANSWER_SECONDS)
    seen: dict[int, Seen | str] = {}
    for number in servers.meeting.numbers():
        try:
            seen[number] = ask(servers, {number: (m.Look(), [])}, m.Seen)[number][0]
        except ServerError as error:
            seen[number] = error.what
    servers.close()
    if as_json:
        print(
            json.dumps(
                {number: to_builtins(_as_json(each), str_keys=True) for number, each in seen.items()},
                indent=2,
            )
        )
    else:
        _show(found, seen)
    if any(isinstance(each, str) and each != NO_MODEL for each in seen.values()):
        raise typer.Exit(1)


@app.command()
def spread(
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="How many servers shall have parameters.")],
    folder: FolderArgument = None,
    master: MasterOption = None,
    secret: SecretOption = None,
    certificates: CertificatesOption = None,
    insecure: InsecureOption = False,
    mover: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who moves them: one that was killed while it did may begin again under the same name.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Spread the parameters of a running job over N servers, while its workers train."""
    from meshwright.launch.servers import folder_of
    from meshwright.servers.meeting import meeting
    from meshwright.servers.moving import use_servers
    from meshwright.servers.shards import MOST_SERVERS
    from meshwright.servers.sockets import Remote

    if count > MOST_SERVERS:
        raise ServerError(f"{count} servers", why=f"a job has 1 to {MOST_SERVERS}")
    if master is not None and folder is not None:
        raise ServerError("a folder, and --master", why="which job?", hint="leave one of them out")
    at = _found(folder) if master is None else folder_of(master, secret, certificates, insecure=insecure)
    asked = Remote(meeting(at), away=BEGIN_SECONDS, silent=ANSWER_SECONDS)
    declare = _declared(asked)
    asked.close()
    servers = Remote(meeting(at))  # which waits for blocks, however long they take
    servers.meeting.want(count)
    new = use_servers(servers, declare, range(count), mover)
    servers.close()
    print(f"the parameters are on {len(new.servers)} server{'' if len(new.servers) == 1 else 's'}")


def _declared(servers: Remote) -> Declare:
    """What the workers of a job have declared. Raises ServerError if they have not for a while, and for a server that
    does not answer."""
    from meshwright.servers import messages as m
    from meshwright.servers.asking import ask

    end = time.monotonic() + DECLARED_SECONDS
    servers.meeting.count()
    while True:
        try:
            seen: Seen = ask(servers, {0: (m.Look(), [])}, m.Seen)[0][0]
            ask(servers, {number: (m.Look(), []) for number in seen.map.servers}, m.Seen)  # none hangs
            said = (seen.job, seen.parameters, seen.map, seen.bound, 1, seen.attempt, seen.shares)
            return m.Declare(*said, limit=seen.limit)
        except ServerError as error:
            if time.monotonic() > end or error.what != NO_MODEL:
                raise
        time.sleep(0.1)


def _found(folder: Path | None) -> Path:
    """The folder of a job of this machine."""
    from meshwright.servers.in_folder import the_job

    hint = "meshwright run --servers 2 …, or the folder in MESHWRIGHT_SERVERS of its workers"
    return the_job(folder, "there is no job to look at" if folder is None else f"{folder} is no job", hint)


def _as_json(seen: Seen | str) -> object:
    """A server without the parameters of its job."""
    if isinstance(seen, str):
        return seen
    left_out = ("attempt", "shares", "parameters", "map")
    return {name: getattr(seen, name) for name in seen.__struct_fields__ if name not in left_out}


def _show(folder: Path, seen: dict[int, Seen | str]) -> None:
    from rich.console import Console

    there = {number: each for number, each in seen.items() if not isinstance(each, str)}
    console = Console(width=max(Console().width, WIDTH))
    if there:
        bounds, oldest = [each.bound for each in there.values()], max(s.counts.oldest for s in there.values())
        bound = "without a bound" if bounds[0] is None else f"staleness {bounds[0]}"
        print(f"{folder}\n{bound}; the oldest value that was read was {oldest} steps behind")
        if ahead := sum(s.counts.prefetched_rows for s in there.values()):
            current = sum(s.counts.current_rows for s in there.values())
            print(
                f"{100 * current / ahead:.0f} % of {ahead:,} prefetched rows had not changed when they were used"
            )
        print()
    for table in tables(seen):
        console.print(table)
        print()


def tables(seen: Mapping[int, Seen | str]) -> list[Table]:
    """What is shown, at most `WIDTH` columns wide: the servers, those without an answer, copies, and the workers."""
    from meshwright.redistribute.steps import show_bytes

    there = [each for each in seen.values() if not isinstance(each, str)]
    servers, silent, copies, workers = [], [], [], []
    for number, each in seen.items():
        if isinstance(each, str):
            short = each.removeprefix(f"parameter server {number} ").removeprefix("this server ")
            silent.append((number, short))
            continue
        counts, (since, worked) = each.counts, each.seconds
        numbers = (each.blocks, counts.updates, each.waiting)
        sizes = (show_bytes(counts.pulled_bytes), show_bytes(counts.pushed_bytes))
        busy = f"{100 * worked / since:.0f} %" if since else ""
        servers.append((number, show_bytes(each.size_bytes), *numbers, *sizes, busy))
        if each.copied is not None:
            behind = each.copied.behind
            where = ("no other yet", "") if behind is None else (each.copied.server, behind)
            copies.append((number, *where, show_bytes(each.copies_bytes)))
    clocks = {worker: clock for each in there for worker, clock in each.clocks.items()}
    workers += [(w, clock, max(clocks.values()) - clock) for w, clock in sorted(clocks.items())]
    gone = {worker: clock for each in there for worker, clock in each.left.items()}
    workers += [(w, clock, "has left") for w, clock in sorted(gone.items()) if w not in clocks]
    heads = ("server", "memory", "blocks", "updates", "waiting", "pulled", "pushed", "busy")
    all_four = (
        (heads, servers),
        (("server", "state"), silent),
        (("server", "its copy is on server", "changes behind", "copies of others"), copies),
        (("worker", "steps", "behind"), workers),
    )
    return [_table(heads, rows) for heads, rows in all_four if rows]


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
