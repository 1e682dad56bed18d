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
# Loggers, with the lowest level that is shown: an operator that fails is our error, with the user's line.
TALKATIVE = {
    "torch.fx.experimental.symbolic_shapes": logging.ERROR,
    "torch._subclasses.fake_tensor": logging.CRITICAL,
}


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
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    for name, level in TALKATIVE.items():
        logging.getLogger(name).setLevel(level)
    try:
        with contextlib.redirect_stderr(_WithoutDumps(sys.stderr)):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


__all__ = ["without_dumps"]
