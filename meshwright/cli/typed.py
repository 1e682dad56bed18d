"""What an error proposes, as it is typed on the command line: hints of `mw.plan` are written as in Python."""

from __future__ import annotations

import re

from meshwright.cli.arguments import OPTIMIZERS
from meshwright.errors import DoesNotFit

BY_STATES = {states: name for name, states in OPTIMIZERS.items()}
WORDS = re.compile(r"offload=\(([^)]*)\)")
TEXT = re.compile(r"(recompute)='(\w+)'")
SINGLE = re.compile(r"(?<![-\w])(micro_batches=\d+|slice_activation=true|recompute=\w+|offload=[\w+]+)")


def typed(text: str) -> str:
    """``offload=('optimizer',)`` → ``--with offload=optimizer``, ``optimizer_states=1`` → ``--optimizer momentum``."""

    def switch(match: re.Match[str]) -> str:
        name = BY_STATES.get(int(match[1]))
        return f"--optimizer {name}" if name else match[0]

    text = re.sub(r"optimizer_states=(\d+)", switch, text)
    text = WORDS.sub(lambda m: "offload=" + "+".join(re.findall(r"\w+", m[1])), text)
    text = TEXT.sub(r"\1=\2", text).replace("slice_activation=True", "slice_activation=true")
    return SINGLE.sub(r"--with \1", text)


def as_typed(error: DoesNotFit) -> DoesNotFit:
    """The error with what can be typed."""
    hint = typed(error.hint)
    return DoesNotFit(error.what, why=error.why, where=error.where, hint=hint, parts=error.parts)


__all__ = ["as_typed", "typed"]
