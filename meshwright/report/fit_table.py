"""A table that fits its screen: the widest columns shrink first, and words break where a reader expects it.

rich shrinks the columns that may wrap in proportion, and then breaks words in the middle. Here a column is never
narrower than its longest piece, and a cell breaks after a space, a point, a comma or an underscore.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

GAP = 3  # columns of the screen between two cells
# A piece ends after white space or one of .,(=_ but numbers are not broken and keep their units, and counts their ×.
UNIT = r"(?<=\d) (?=(?:[kMGT]?B|[mµn]?s)\b|%)"
INSIDE = rf"{UNIT}|(?<=\d)\.(?=\d)|(?<!\S)\(| (?=×)|[^\s.,(=_]"
PIECE = re.compile(rf"(?:{INSIDE})*(?:[.,(=_]+\s*|\s+(?!×)|$)")


@dataclass
class FittedTable:
    """Rows of texts under `headings`; columns in `right` are aligned right."""

    headings: Sequence[str]
    right: frozenset[int] = frozenset()
    rows: list[list[Text]] = field(default_factory=list)

    def add_row(self, *cells: Text | str) -> None:
        """Add a row, with a cell for each heading."""
        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = [[Text(h), *(row[n] for row in self.rows)] for n, h in enumerate(self.headings)]
        natural = [max(line.cell_len for cell in column for line in cell.split()) for column in columns]
        least = [max(len(p.rstrip()) for cell in column for p in pieces(cell.plain)) for column in columns]
        given = widths(natural, least, options.max_width - GAP * (len(columns) - 1))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
        for number, (heading, width) in enumerate(zip(self.headings, given, strict=True)):
            justify = "right" if number in self.right else "left"
            table.add_column(broken(Text(heading), width), width=width, overflow="fold", justify=justify)
        for row in self.rows:
            table.add_row(*(broken(cell, width) for cell, width in zip(row, given, strict=True)))
        yield table


@dataclass(frozen=True)
class Prose:
    """A text that takes the available width, and breaks where the cells of a `FittedTable` do."""

    text: Text | str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield broken(self._text, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        least = max(len(piece.rstrip()) for piece in pieces(self._text.plain))
        most = max((line.cell_len for line in self._text.split()), default=1)
        return Measurement(min(least, most), most).with_maximum(options.max_width)

    @property
    def _text(self) -> Text:
        return Text(self.text) if isinstance(self.text, str) else self.text


def pieces(text: str) -> list[str]:
    """Return the unbreakable pieces of a text: ``blocks.``, ``*.``, ``attention.``, ``out ×2``."""
    return [m[0] for m in PIECE.finditer(text) if m[0]] or [""]


def widths(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the width of each column. The widest shrink first, none below its least, until all fit or nothing can."""
    found = [max(1, n) for n in natural]
    for _ in range(sum(found) - room):
        able = [n for n, width in enumerate(found) if width > max(1, least[n])]
        if not able:
            break
        found[max(able, key=lambda n: found[n])] -= 1
    return found


def broken(text: Text, width: int) -> Text:
    """Return a text with lines no longer than `width`, if its pieces allow that; styles stay."""
    return Text("\n").join(part for line in text.split() for part in _lines(line, width))


def _lines(line: Text, width: int) -> Iterable[Text]:
    parts = pieces(line.plain)
    ends = list(accumulate(map(len, parts)))
    splits: list[int] = []
    start = 0
    for part, end in zip(parts, ends, strict=True):
        begin = end - len(part)
        if end - (len(part) - len(part.rstrip())) - start > width and begin > start:
            splits.append(begin)
            start = begin
    divided = list(line.divide(splits))
    for part in divided:
        part.rstrip()
    return divided
