"""`meshwright estimate`: time and memory of a plan, now and if one thing were otherwise."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.common import BatchOption, JsonOption, PlanArgument, SequenceOption
from meshwright.core.techniques import TECHNIQUES, techniques_from
from meshwright.errors import MeshwrightError, PlanError, did_you_mean

if TYPE_CHECKING:
    from meshwright.report.estimate import Estimate

KEYS = {
    "batch": "rows of the batch",
    "seq": "tokens of a row",
    "ranks": "so many ranks: with the same shardings, or planned again in the same mode where they do not fit",
    **{name: technique.says for name, technique in TECHNIQUES.items() if technique.estimated},
}
SHAPES = ("batch", "seq", "ranks")
Changes = dict[str, str]


def estimate(
    plan: PlanArgument,
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="The model that the plan is for.")],
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="CLUSTER", help="cluster.yaml, or preset:h100:2x8.")
    ],
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CHANGES",
            help="batch=…, seq=…, ranks=…, or a technique as mw.plan takes it: optimizer_parallel=0…3, "
            "micro_batches=…, recompute=full, fusion=…; changes that apply together are "
            "separated by commas. May be repeated.",
        ),
    ] = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="adamw, sgd or momentum.")
    ] = "adamw",
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Before estimating, measure the plan's operators on this machine's first GPU (or its processor), with "
            "the shapes of one rank. The device must be of the cluster's type.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Estimate the time and the memory of a plan's step, now and after a change.

    Shows what the seconds are spent on, and the highest peak memory of a rank. The plan file is not changed.
    """
    from meshwright.cli.arguments import open_cluster, optimizer_states

    requests = [parsed(text) for text in what_if or ()]
    states = optimizer_states(optimizer)
    machine = open_cluster(cluster)

    from meshwright.cli.common import err
    from meshwright.cli.model import captured_model, cut
    from meshwright.cli.progress import Watch
    from meshwright.cli.what_if import Base, MeasuredHere, answer
    from meshwright.plan.plan import Plan

    loaded = Plan.load(plan)
    opened, captured = captured_model(model, batch, seq)
    measured = MeasuredHere(Watch(err(), quiet=as_json)) if measure else None
    base = Base(loaded, opened, captured, machine, states, batch, seq, measured)
    now = base.estimate(cut(captured, loaded, machine), machine)
    columns, remarks, refused = [("now", now)], [], []
    for text, changes in zip(what_if or (), requests, strict=True):
        began = time.perf_counter()
        try:
            found, remark, capturing = answer(base, changes, options(changes))
        except MeshwrightError as error:
            refused.append((text, error))
            continue
        columns.append((text, found))
        remarks.append(_remark(text, remark, time.perf_counter() - began - capturing, capturing))
    if as_json:
        print(json.dumps(_data(columns, refused), ensure_ascii=False))
    else:
        _show(columns, remarks, refused)
    raise typer.Exit(2 if refused else 0)


def parsed(text: str) -> Changes:
    """``batch=16,seq=2048`` → changes. Raises PlanError."""
    found: Changes = {}
    for part in text.split(","):
        key, equals, value = (x.strip() for x in part.partition("="))
        if key not in KEYS or not equals:
            raise PlanError(
                f"--what-if {text!r}: {part.strip()!r} is not a change that can be priced",
                why="; ".join(f"{k}: {v}" for k, v in KEYS.items()),
                hint=did_you_mean(key, KEYS) if key not in KEYS else f"{key}=…",
            )
        if key in SHAPES and (not value.isdigit() or int(value) < 1):
            raise PlanError(f"{key}={value!r} is not a number that {key} can be", hint=f"{key}: {KEYS[key]}")
        found[key] = value
    techniques_from(options(found))
    return found


def options(changes: Changes) -> dict[str, Any]:
    """The techniques among changes, as `mw.plan` takes them."""
    from meshwright.cli.arguments import value_of

    return {key: value_of(key, value) for key, value in changes.items() if key not in SHAPES}


# ---------------------------------------------------------------- what is shown


def _remark(text: str, remark: str, seconds: float, capturing: float) -> str:
    from meshwright.report.units import show_seconds

    took = f"answered in {show_seconds(seconds)}"
    took += f" after a capture of {show_seconds(capturing)}" if capturing else ""
    return f"{text}: " + "; ".join(t for t in (remark, took) if t)


def _data(columns: list[tuple[str, Estimate]], refused: list[tuple[str, Any]]) -> dict[str, Any]:
    (_, now), *others = columns
    found = {"now": asdict(now), "what_if": {name: asdict(e) for name, e in others}}
    if refused:
        found["refused"] = {text: str(error) for text, error in refused}
    return found


def _show(columns: list[tuple[str, Estimate]], remarks: list[str], refused: list[tuple[str, Any]]) -> None:
    from rich.text import Text

    from meshwright.cli.common import err, out
    from meshwright.report.estimate import EstimateTable

    screen = out()
    screen.print(EstimateTable(columns))
    if remarks:
        screen.print()
    for remark in remarks:
        screen.print(Text(remark, style="dim"))
    for text, error in refused:
        err().print(Text(f"{text} has no answer: {error}"))
