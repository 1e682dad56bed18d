"""`meshwright diff`: what differs between two plan files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def diff(
    first: Annotated[Path, typer.Argument(metavar="A.JSON", help="A plan file.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B.JSON", help="Another one.", show_default=False)],
    every: Annotated[
        bool, typer.Option("--all", help="Also operators that only follow their neighbours.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Show what differs between two plans: mesh, mode, shardings, layouts, time and memory.

    The exit code is 0 if they are equal and 1 if they differ.
    """
    from meshwright.cli.common import out
    from meshwright.plan.plan import Plan
    from meshwright.report.diff import difference
    from meshwright.report.diff_view import diff_view

    found = difference(Plan.load(first), Plan.load(second))
    if as_json:
        print(json.dumps({"equal": found.equal, **asdict(found)}, ensure_ascii=False, indent=2))
    elif found.equal:
        out().print("the plans are equal")
    else:
        names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
        out().print(diff_view(found, names, every=every))
    raise typer.Exit(0 if found.equal else 1)
