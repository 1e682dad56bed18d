"""A difference of two plans as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from rich.console import Group
from rich.text import Text

from meshwright.report.diff import ABSENT, Change, Difference
from meshwright.report.fit_table import FittedTable


def diff_view(found: Difference, names: tuple[str, str], *, every: bool = False) -> Group:
    """Return the difference as tables, to print with rich; with `every`, also the operators that follow."""
    leading = [c for c in found.nodes if c.leading]
    shown = list(found.nodes) if every or not leading else leading
    only = not any(getattr(found, f.name) for f in fields(found) if f.name != "remarks")
    parts: list[Any] = []
    for title, changes in (
        ("", (*found.facts, *found.claims)),
        ("operators", shown),
        ("inputs", found.inputs),
        ("hubs", found.hubs),
        ("updates", found.states),
        ("saved for backward", found.keeps),
        ("stages", found.stages),
        ("remarks", found.remarks if every or only else ()),
    ):
        if changes:
            parts += [Text("")] if parts else []
            parts.append(_table(title, changes, names))
    rest = sum(c.count for c in found.nodes) - sum(c.count for c in shown)
    if rest:
        more = "operator follows" if rest == 1 else "operators follow"
        parts += [Text(""), Text(f"{rest} more {more} these (--all shows them)", style="dim")]
    if found.remarks and not every and not only:
        parts += [Text(f"{len(found.remarks)} reasons and notes differ, too (--all shows them)", style="dim")]
    return Group(*parts)


def _table(title: str, changes: Iterable[Change], names: tuple[str, str]) -> FittedTable:
    changes = list(changes)
    operators = any(c.operator for c in changes)
    notes = any(c.note for c in changes)
    table = FittedTable((title, *([""] if operators else []), *names, *([""] if notes else [])))
    for c in changes:
        what = Text(c.what).append(f" ×{c.count}" if c.count > 1 else "", style="dim")
        cells: list[Text | str] = [what, *([c.operator] if operators else [])]
        cells += [Text(x, style="dim" if x in ("replicated", ABSENT) else "") for x in (c.before, c.after)]
        table.add_row(*cells, *([Text(c.note, style="dim")] if notes else []))
    return table
