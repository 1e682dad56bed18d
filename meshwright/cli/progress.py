"""Progress of long verbs, on stderr: the stage, how far it is, the best answer so far and its bound."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from meshwright.report.units import show_seconds

FIRST_SECONDS = 2.0  # a search that takes longer says what it has


class Watch:
    """A progress bar with one line a stage. `seconds` remembers how long each stage took.

    An instance can be called as searches call their `progress`: ``(stage, price, bound)``.
    """

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._bar = Progress(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24, complete_style="cyan", finished_style="dim"),
            TextColumn("{task.fields[found]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._console, self._quiet = console, quiet
        self._began = time.perf_counter()
        self._told = False
        self._task = self._bar.add_task("", total=None, found="")
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """One stage of the work."""
        self._began = began = time.perf_counter()
        self._bar.reset(self._task, total=None, description=text, found="")
        try:
            yield
        finally:
            self.seconds[text] = time.perf_counter() - began

    def __call__(self, stage: str, price: float | None = None, bound: float | None = None) -> None:
        """Show the progress of a search. `price`: the best so far in seconds; `bound`: the lower bound in seconds."""
        best = below = ""
        if price is not None and math.isfinite(price):
            best = f"best about {show_seconds(price)}"  # estimated from a few layers until it is evaluated in full
            if bound is not None and 0 < bound <= price:
                below = f", bound {show_seconds(bound)}"  # of what is searched just now
        self._bar.update(self._task, description=f"searching: {stage}", found=best + below)
        self._first_answer(best)

    def count(self, done: int, total: int, what: str) -> None:
        """Show how many of so many things are done, and the one that comes."""
        self._bar.update(self._task, total=total, completed=done, found=what)

    def _first_answer(self, found: str) -> None:
        """Where no bar is drawn, one line says that an answer is there."""
        late = time.perf_counter() - self._began > FIRST_SECONDS
        if found and late and not self._told and self._bar.disable and not self._quiet:
            self._told = True
            self._console.print(f"first answer: {found}; the search goes on", style="dim")

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
