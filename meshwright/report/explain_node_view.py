"""Choices for a reader: a table of several, or a page of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.core.mesh import Mesh
from meshwright.report.alternatives import Alternative
from meshwright.report.diff import LEADING, cut_words
from meshwright.report.explain_node import Choice, Neighbour, folded
from meshwright.report.fit_table import FittedTable, Prose
from meshwright.report.units import show_seconds

MOST = 6  # alternatives of one operator that are worth reading
CHEAPER = (
    "− is cheaper by the sum of prices. The step may still take longer, as less overlaps, or more memory: to compare, "
    "plan with a pin."
)


def _plain(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def choices_table(found: Sequence[Choice], *, every: bool = True) -> Group:
    """Return a table with one line for each kind of operator, without empty columns."""
    rows = folded(found)
    shown = rows if every else [r for r in rows if r[2].operator in LEADING] or rows
    priced = any(c.seconds is not None for _, _, c in shown)
    notes = any(c.next for _, _, c in shown)
    why = any(c.why for _, _, c in shown)
    seconds = ("forward", "backward", "sent") if priced else ()
    more = (*(["why"] if why else []), *(["next best"] if notes else []))
    table = FittedTable(
        ("module", "operator", "sharding", *seconds, *more), frozenset(range(3, 3 + len(seconds)))
    )
    for module, count, c in shown:
        cells: list[Any] = [Text(module).append(f" ×{count}" if count > 1 else "", style="dim"), c.operator]
        cells.append(Text(c.cut, style="dim" if c.cut == "replicated" else ""))
        if priced:
            s = c.seconds
            values = (s.forward, s.backward, s.communication) if s else (0.0, 0.0, 0.0)
            cells += [show_seconds(v) if v else Text("–", style="dim") for v in values]
        cells += [Text(c.why, style="dim")] if why else []
        cells += [Text(c.next, style="dim")] if notes else []
        table.add_row(*cells)
    rest = sum(r[1] for r in rows) - sum(r[1] for r in shown)
    parts: list[Any] = [table]
    if rest:
        others = "operator follows" if rest == 1 else "operators follow"
        parts += [Text(""), Text(f"{rest} more {others} these (--all shows them)", style="dim")]
    return Group(*parts)


def choice_page(
    module: str,
    count: int,
    c: Choice,
    mesh: Mesh,
    others: Sequence[Alternative] = (),
    price_seconds: float = 0.0,
) -> Group:
    """Return all that is known of one operator (`count` are like it)."""
    head = Text(module, style="bold").append(f" ×{count}" if count > 1 else "", style="dim")
    head.append(f"   {c.operator}", style="bold").append(f"   %{c.node}", style="dim")
    parts: list[Any] = [head]
    if c.source:
        parts.append(Text(c.source, style="dim"))
    parts += [Text(""), _facts(c)]
    for incoming, title in ((True, "takes"), (False, "gives to")):
        edges = [e for e in c.neighbours if e.incoming is incoming]
        if edges:
            parts += [Text(""), _edges(title, edges)]
    if others:
        parts += [Text(""), _others(others, mesh, price_seconds, c.batch)]
        parts += [Text(CHEAPER, style="dim")] if any(o.more_seconds < 0 for o in others) else []
    return Group(*parts)


def _facts(c: Choice) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("sharding", c.cut)
    if c.factors:
        table.add_row("factors", "   ".join(f"{letter} {size}" for letter, size in c.factors))
    if c.why:
        table.add_row("why", Prose(c.why))
    if c.next:
        table.add_row("next best", Prose(c.next))
    if c.seconds is not None:
        s = c.seconds
        halves = (("forward", s.forward), ("backward", s.backward), ("sent for it", s.communication))
        table.add_row("price", "   ".join(f"{name} {show_seconds(v)}" for name, v in halves))
    return table


def _edges(title: str, edges: Sequence[Neighbour]) -> FittedTable:
    priced = any(e.seconds is not None for e in edges)
    headings = (title, "", "has" if edges[0].incoming else "as", "wants", "sends  → forward  ← backward")
    table = FittedTable((*headings, *([""] if priced else [])), frozenset({len(headings)}))
    for e in edges:
        arrows = (("→", e.moves[0]), ("←", e.moves[1]))
        sends = "\n".join(f"{arrow} {move}" for arrow, text in arrows for move in text.split(", ") if move)
        asks = Text("the same", style="dim") if e.asks == e.has else Text(e.asks)
        cells: list[Any] = [e.name, e.operator, e.has, asks, sends]
        table.add_row(*cells, *([show_seconds(e.seconds) if e.seconds else ""] if priced else []))
    return table


def _renamed(cut: str, batch: Sequence[str]) -> str:
    """Return a sharding with the letters that count examples named ``batch``."""
    for letter in batch:
        cut = re.sub(rf"(?<!\S){letter}=", "batch=", cut)
    return cut


def _others(others: Sequence[Alternative], mesh: Mesh, price_seconds: float, batch: Sequence[str]) -> Table:
    table = _plain("other shardings of it alone")
    table.add_column("price", justify="right", no_wrap=True)
    table.add_column("", justify="right", style="dim", no_wrap=True)
    for other in others[:MOST]:
        sign = "−" if other.more_seconds < 0 else "+"
        size = abs(other.more_seconds)
        share = f"{sign}{100 * size / price_seconds:.1f} %" if price_seconds else ""
        table.add_row(_renamed(cut_words(other.strategy, mesh), batch), f"{sign}{show_seconds(size)}", share)
    if len(others) > MOST:
        table.add_row(Text(f"{len(others) - MOST} more cost more", style="dim"), "", "")
    return table


def choice_data(module: str, count: int, c: Choice, others: Mapping[str, float]) -> dict[str, Any]:
    """Return a choice as plain data."""
    from dataclasses import asdict

    data = {"module": module, "count": count, **asdict(c)}
    return {**data, **({"otherwise": dict(others)} if others else {})}
