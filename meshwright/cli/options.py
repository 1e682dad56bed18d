"""Options that several verbs share. Loads without torch, for a quick `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        help="As 'optimizer_parallel=3,micro_batches=4,recompute=full'. May be repeated.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
