"""`meshwright verify`: the proof of a plan file, on simulated ranks in this process."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.common import MODEL_HELP, BatchOption, JsonOption, PlanArgument, SequenceOption

if TYPE_CHECKING:
    import torch

    from meshwright.verify import Report


def verify(
    plan: PlanArgument,
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help=MODEL_HELP)],
    batch: BatchOption = None,
    seq: SequenceOption = None,
    single: Annotated[
        bool, typer.Option("--float32", help="In float32, to 1e-5, instead of float64 and 1e-12.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove a plan: loss, gradients and three steps on simulated ranks against one device.

    Needs weights, which may be random (those of hf:config.json are), and memory for a copy of the model for each rank.
    The exit code is 0 if all values are equal and 1 if something differs.
    """
    import torch

    import meshwright as mw
    from meshwright.cli.common import err
    from meshwright.cli.model import captured_model, open_model
    from meshwright.cli.progress import Watch
    from meshwright.plan.plan import Plan

    loaded = Plan.load(plan)
    opened, captured = captured_model(model, batch, seq)
    loaded.check(captured.graph)
    dtype = torch.float32 if single else torch.float64
    if model.startswith("hf:"):  # which has shapes alone
        _check_room(opened.model, dtype)
        torch.manual_seed(0)
        opened = open_model(model, batch=batch, sequence=seq, device="cpu")
    with Watch(err(), quiet=as_json) as watch, watch.stage("proving"):
        report = mw.verify(opened.model, opened.batch, loss=opened.loss, plan=loaded, dtype=dtype)
    print(json.dumps(_data(report), ensure_ascii=False) if as_json else report)
    raise typer.Exit(0 if report.ok else 1)


def _check_room(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Raise ModelError where weights, gradients and the states of an optimizer, on one device and divided over ranks,
    take more than there is of memory."""
    from meshwright.errors import ModelError

    needs = 8 * sum(p.numel() for p in model.parameters()) * dtype.itemsize
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needs > room:
        raise ModelError(
            f"a proof of this model takes {needs / 1e9:.0f} GB, and this machine has {room / 1e9:.0f} GB",
            why="it computes steps on one device and on all ranks of the plan",
            hint="a configuration with fewer layers and a plan of it, or --float32",
        )


def _data(report: Report) -> dict[str, Any]:
    """Collect the output of `--json`."""
    return {
        "equal": report.ok,
        "dtype": str(report.dtype).removeprefix("torch."),
        "tolerance": report.tolerance,
        "compared": len(report.differences),
        "worst": {"what": report.worst.what, "error": report.worst.error},
        "inexact": list(report.inexact),
        "first": report.first,
    }
