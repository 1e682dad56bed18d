"""Where numbers go: lines of JSON, TensorBoard, a bar on the screen. All are called on a thread of their own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meshwright.errors import RunError, path_from, shown_path

Record = Mapping[str, Any]


class Writer(Protocol):
    """Takes records, and is closed at the end."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One line of JSON for each record, behind what the file has already."""

    def __init__(self, path: str | Path) -> None:
        what, hint = f"path={shown_path(path)} cannot take metrics", 'path="runs/metrics.jsonl"'
        self.path = path_from(path, what, RunError, hint)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunError(what, why=error.strerror or str(error), hint=hint) from None

    def write(self, record: Record) -> None:
        """A line, on the disk as soon as the system writes it."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing comes any more."""
        self._file.close()


class TensorBoard:
    """Scalars in TensorBoard's files. Raises RunError where the package is missing."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError(
                "tensorboard= needs the package tensorboard",
                why=str(error),
                hint='pip install "meshwright[tensorboard]", or only path="metrics.jsonl"',
            ) from None
        self._writer = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Each number under its name."""
        for name, value in record.items():
            if name not in ("step", "time", "rank") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"], walltime=record["time"])

    def close(self) -> None:
        """Nothing comes any more."""
        self._writer.close()


class Bar:
    """A progress bar on stderr, where that is a terminal; four times a second at most."""

    def __init__(self, total: int | None, console: Console | None = None) -> None:
        console = console or Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=total, said="")
        self._bar.start()
        self._shown = 0.0

    def write(self, record: Record) -> None:
        """Where the run is."""
        said = f"loss {record['loss']:.4g}"
        for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
            if record.get(name):
                said += f"  {record[name]:,.0f} {unit}"
                break
        now = time.monotonic()
        self._bar.update(self._task, completed=record["step"], said=said, refresh=now - self._shown > 0.25)
        self._shown = now if now - self._shown > 0.25 else self._shown

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._bar.refresh()
        self._bar.stop()
