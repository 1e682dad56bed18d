"""Suppress what torch prints when an export fails, beside our error with the user's line."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

DUMP = "def forward(self"  # how the program begins that torch.export prints up to the operator that it cannot export
TALKATIVE = "torch.fx.experimental.symbolic_shapes"


class _WithoutDumps(io.TextIOBase):
    """A stream that drops dumps of programs, and the ends of their lines."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.after = stream, False

    def write(self, text: str, /) -> int:
        left_out = DUMP in text or (self.after and text == "\n")
        self.after = DUMP in text
        return len(text) if left_out else self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextlib.contextmanager
def without_dumps() -> Iterator[None]:
    """Drop dumps from standard error and torch's log, unless ``TORCH_LOGS`` asks for more."""
    if "TORCH_LOGS" in os.environ:
        yield
        return
    logger = logging.getLogger(TALKATIVE)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(_WithoutDumps(sys.stderr)):
            yield
    finally:
        logger.setLevel(level)


__all__ = ["without_dumps"]
