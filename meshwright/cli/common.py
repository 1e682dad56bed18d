"""Shared by several verbs: options, hints, and output. Loads without torch, for a quick `--help`.

Hints of errors are rewritten from Python to the command line. Answers go to stdout, progress and remarks to stderr,
neither of them wrapped.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwright.cli.arguments import OPTIMIZERS
from meshwright.core.techniques import TECHNIQUES
from meshwright.errors import DoesNotFit

BY_STATES = {states: name for name, states in OPTIMIZERS.items()}
NAMED = rf"(?<![-\w])(?<!--with )({'|'.join(TECHNIQUES)})"  # an option that is not typed already
WORDS = re.compile(rf"{NAMED}=\(([^)]*)\)")
TEXT = re.compile(rf"{NAMED}='(\w+)'")
SWITCH = re.compile(rf"{NAMED}=(True|False)\b")
SINGLE = re.compile(rf"{NAMED}=([\w+]+)")


def typed(text: str) -> str:
    """``offload=('optimizer',)`` → ``--with offload=optimizer``, ``optimizer_states=1`` → ``--optimizer momentum``."""

    def switch(match: re.Match[str]) -> str:
        name = BY_STATES.get(int(match[1]))
        return f"--optimizer {name}" if name else match[0]

    text = re.sub(r"optimizer_states=(\d+)", switch, text)
    text = WORDS.sub(lambda m: f"{m[1]}=" + "+".join(re.findall(r"\w+", m[2])), text)
    text = SWITCH.sub(lambda m: f"{m[1]}={m[2].lower()}", TEXT.sub(r"\1=\2", text))
    return SINGLE.sub(r"--with \1=\2", text)


def as_typed(error: DoesNotFit) -> DoesNotFit:
    """The error with what can be typed."""
    hint = typed(error.hint)
    return DoesNotFit(error.what, why=error.why, where=error.where, hint=hint, parts=error.parts)


MODEL_HELP = "file.py:function returning (model, batch, loss), hf:config.json, or zoo:name."

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="MODEL", help=MODEL_HELP)]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A plan file.", show_default=False)]
BatchOption = Annotated[int | None, typer.Option("--batch", metavar="N", min=1, help="Rows of the batch.")]
SequenceOption = Annotated[int | None, typer.Option("--seq", metavar="N", min=1, help="Tokens of a row.")]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="CLUSTER", help="cluster.yaml, or preset:h100:2x8 (nodes x ranks of a node)."
    ),
]
WithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="TECHNIQUES",
        help="Such as 'optimizer_parallel=3,micro_batches=4,recompute=full'. May be repeated.",
    ),
]
SEVERAL, TRUST = "Several machines", "Trust"
NodeRankOption = Annotated[
    str | None,
    typer.Option(
        metavar="I",
        help="The number of this machine, from 0; if left out, the order of arrival.",
        rich_help_panel=SEVERAL,
    ),
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where the scheduler is: machine 0, or that of meshwright scheduler. Also MESHWRIGHT_MASTER.",
        rich_help_panel=SEVERAL,
    ),
]
SecretOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The secret of the job; the scheduler's machine makes the file. Also MESHWRIGHT_SECRET_FILE, "
        "MESHWRIGHT_SECRET.",
        rich_help_panel=TRUST,
    ),
]
CertificatesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="ca.pem, cert.pem and key.pem for TLS; if left out, they are made for the job.",
        rich_help_panel=TRUST,
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="No secret and no TLS: anyone who reaches the port is trusted.",
        rich_help_panel=TRUST,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


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


__all__ = ["as_typed", "typed"]
