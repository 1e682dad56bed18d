"""Tables on narrow screens: no word is broken where a reader does not expect it, and nothing is lost."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.report.fit_table import FittedTable, Prose, broken, pieces, widths

ROWS = (
    ("blocks.*.attention.out ×2", "linear", "batch=dp n=tp", "[48, 48/tp]", "→ all_reduce(dp,tp) 12 B"),
    ("(loss)", "cross_entropy", "batch=dp,tp", "", "→ inside: all_reduce(dp,tp) 12 kB\n← none"),
)


def printed(width: int) -> str:
    table = FittedTable(("module", "operator", "cut", "parameter", "sends"), frozenset({3}))
    for row in ROWS:
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def test_pieces_end_where_a_reader_expects_a_break():
    assert pieces("blocks.*.out ×2") == ["blocks.", "*.", "out ×2"]
    assert pieces("→ all_reduce(dp,tp) 12 kB") == ["→ ", "all_", "reduce(", "dp,", "tp) ", "12 kB"]
    assert pieces("none does not fit (62.8 MB) at +0.38 ms, 1.5 % more") == [
        *("none ", "does ", "not ", "fit ", "(62.8 MB) ", "at ", "+0.38 ms, ", "1.5 % ", "more")
    ]
    assert pieces("") == [""]


@pytest.mark.parametrize("width", [20, 30, 45])
def test_prose_in_a_column_keeps_numbers_with_their_units(width):
    text = "next best recompute='full' at +0.123 ms; none does not fit (62.84 MB), 12.5 % over"
    table = Table.grid()
    table.add_row(Prose(text))
    out = StringIO()
    Console(file=out, width=width).print(table)
    lines = out.getvalue().splitlines()
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(len(line.rstrip()) <= width for line in lines)
    assert all(any(whole in line for line in lines) for whole in ("+0.123 ms", "62.84 MB", "12.5 %"))


@pytest.mark.parametrize("width", [60, 80, 110, 140])
def test_a_table_is_no_wider_than_its_screen_and_breaks_between_pieces(width):
    text = printed(width)
    assert all(len(line) <= width for line in text.splitlines())
    known = {
        p.strip()
        for row in (*ROWS, ("module", "operator", "cut", "parameter", "sends"))
        for c in row
        for p in pieces(c)
    }
    for word in re.split(r"\s{2,}|\n", text):
        assert all(p.strip() in known for p in pieces(word.strip()) if "─" not in p), word


def test_a_wide_screen_breaks_nothing():
    assert all(cell in printed(140) for row in ROWS for line in row for cell in line.split("\n"))


def test_the_widest_column_gives_way_first_and_none_below_its_least():
    assert widths([20, 10, 5], [4, 10, 5], 30) == [15, 10, 5]
    assert widths([20, 12, 5], [4, 4, 5], 25) == [10, 10, 5]
    assert widths([20, 10], [18, 10], 5) == [18, 10]


def test_styles_stay_on_what_they_were_on():
    text = broken(Text("blocks.").append("out", style="dim"), 8)
    assert text.plain == "blocks.\nout"
    (span,) = text.spans
    assert text.plain[span.start : span.end] == "out" and span.style == "dim"
