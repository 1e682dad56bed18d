"""Where the verbs print: answers on stdout, progress and remarks on stderr, both without wrapping into a mess."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 160  # a file or a pipe has no width of its own, and a table should not be folded there


def out() -> Console:
    """The answer's console."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _piped())


def err() -> Console:
    """The console of progress and remarks."""
    return Console(stderr=True, highlight=False)


def _piped() -> int | None:
    import os

    return None if os.environ.get("COLUMNS") else PIPED_WIDTH
