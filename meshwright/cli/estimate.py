"""`meshwright estimate`: time and memory of a plan, now and if one thing were otherwise."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import BatchOption, JsonOption, PlanArgument, SequenceOption
from meshwright.errors import ClusterError, MeshwrightError, PlanError, did_you_mean
from meshwright.techniques import techniques_from

if TYPE_CHECKING:
    from meshwright.capture import Captured
    from meshwright.cli.model import Opened
    from meshwright.cost.cluster import Cluster
    from meshwright.ops.factors import Factors
    from meshwright.plan import Plan
    from meshwright.report.estimate import Estimate

KEYS = {
    "batch": "rows of the batch",
    "seq": "tokens of a row",
    "ranks": "plan again, in the same mode, for so many ranks",
    "optimizer_parallel": "0 to 3",
    "shard_size": "ranks among which it splits",
    "threshold_kb": "KiB below which a parameter stays whole",
    "micro_batches": "pieces of the batch",
    "interleave": "copies of the batch that take turns",
    "recompute": "full, selective, none, or bytes of kept activations",
    "fusion": "auto, bytes of a bucket, or 0",
    "offload": "optimizer, activations, activations:4, parameters, or none",
    "reduce_dtype": "in which gradients are added up: f32, bf16, f16, f64",
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
            "micro_batches=…, recompute=full, fusion=…; those of one option together. May be repeated.",
        ),
    ] = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="adamw, sgd or momentum.")
    ] = "adamw",
    as_json: JsonOption = False,
) -> None:
    """Estimate the time and the memory of a plan's step, now and if something were otherwise.

    Shows seconds by what they are spent on, and the peak of the rank that has most. The plan file stays as it is.
    """
    from meshwright.cli.arguments import open_cluster, optimizer_states

    wishes = [parsed(text) for text in what_if or ()]
    states = optimizer_states(optimizer)
    machine = open_cluster(cluster)

    from meshwright.cli.opened import captured_model, cut
    from meshwright.plan import Plan
    from meshwright.report.estimate import estimate as estimated

    loaded = Plan.load(plan)
    opened, captured = captured_model(model, batch, seq)
    now = estimated(cut(captured, loaded, machine), machine, states)
    columns, remarks, refused = [("now", now)], [], []
    base = Base(loaded, opened, captured, machine, states, batch, seq)
    for text, changes in zip(what_if or (), wishes, strict=True):
        began = time.perf_counter()
        try:
            found, remark, capturing = answer(base, changes)
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
                f"--what-if {text!r}: {part.strip()!r} is no change that can be priced",
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
    return {key: _option(key, value) for key, value in changes.items() if key not in SHAPES}


def _option(key: str, value: str) -> Any:
    if key in ("recompute", "offload") and value == "none":
        return "" if key == "recompute" else ()
    if value.isdigit():
        return int(value)
    try:
        return float(value)
    except ValueError:
        return value


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class Base:
    """What changes start from."""

    plan: Plan
    opened: Opened
    captured: Captured
    cluster: Cluster
    optimizer_states: int
    batch: int | None
    sequence: int | None


def answer(base: Base, changes: Changes) -> tuple[Estimate, str, float]:
    """The estimate under some changes, a remark, and the seconds that went into capturing. Raises PlanError."""
    from meshwright.cli.opened import cut
    from meshwright.partition.turns import with_turns
    from meshwright.partition.weighed import weighed
    from meshwright.report.estimate import estimate as estimated
    from meshwright.report.whatif import changed

    plan, opened, captured, cluster = base.plan, base.opened, base.captured, base.cluster
    remarks, capturing = [], 0.0
    if "batch" in changes or "seq" in changes:
        began = time.perf_counter()
        opened, captured = _other_shape(base, changes)
        capturing = time.perf_counter() - began
        if "ranks" not in changes:
            plan = _moved(plan, captured, changes)
    if "ranks" in changes:
        cluster = resized(cluster, int(changes["ranks"]))
        plan = _planned_again(base, opened, cluster)
        remarks.append(f"planned again by {plan.mode}")
    asked = options(changes)
    if asked:
        weigh = functools.partial(weighed, cluster=cluster)
        plan, remark = changed(plan, captured.graph, _factors(captured), asked, weigh)
        plan = with_turns(captured.graph, plan, cluster, base.optimizer_states)
        remarks += [remark] if remark else []
    found = estimated(cut(captured, plan, cluster), cluster, base.optimizer_states)
    return found, "; ".join(remarks), capturing


def _other_shape(base: Base, changes: Changes) -> tuple[Opened, Captured]:
    from meshwright.cli.model import open_model
    from meshwright.compile import captured_of
    from meshwright.errors import ModelError

    rows = int(changes["batch"]) if "batch" in changes else base.batch
    tokens = int(changes["seq"]) if "seq" in changes else base.sequence
    try:
        opened = open_model(base.opened.target, batch=rows, sequence=tokens)
    except ModelError:
        if "seq" in changes or "batch" not in changes:
            raise
        opened = replace(base.opened, batch=with_rows(base.opened.batch, int(changes["batch"])))
    return opened, captured_of(opened.model, opened.batch, opened.loss)


def with_rows(batch: Any, rows: int) -> Any:
    """The batch with another number of rows, by repeating its own, for a function that does not take `batch`."""
    from collections import Counter

    import torch

    from meshwright.capture.batch import leaves, map_leaves

    leading = [x.shape[0] for _, x in leaves(batch) if x.dim()]
    if not leading:
        raise PlanError("the batch has no dim that counts rows", why="none of its tensors has a dim")
    size = Counter(leading).most_common(1)[0][0]
    index = torch.arange(rows) % size
    return map_leaves(batch, lambda x: x[index.to(x.device)] if x.dim() and x.shape[0] == size else x)


def _moved(plan: Plan, captured: Captured, changes: Changes) -> Plan:
    from meshwright.report.whatif import transferred

    what = ", ".join(f"{k}={changes[k]}" for k in ("batch", "seq") if k in changes)
    return transferred(plan, captured.graph, _factors(captured), what)


def _factors(captured: Captured) -> Factors:
    from meshwright.ops.analysis import factors_of

    return factors_of(captured.graph)


def _planned_again(base: Base, opened: Opened, cluster: Cluster) -> Plan:
    import meshwright as mw

    return mw.plan(
        opened.model,
        opened.batch,
        loss=opened.loss,
        mesh=scaled(base.plan, cluster.ranks, base.cluster) or cluster.mesh,
        mode=base.plan.mode,
        pins=dict(base.plan.pins) or None,
        cluster=cluster,
        optimizer_states=base.optimizer_states,
        **base.plan.techniques.asked(),
    )


def scaled(plan: Plan, ranks: int, cluster: Cluster) -> dict[str, int] | None:
    """The mesh of a plan for another number of ranks: its first axis (over the slowest links) takes the change.

    None for a plan on the cluster's own levels, which change with the cluster. Raises PlanError.
    """
    sizes = {name: plan.mesh.count(run) for name, run in plan.mesh.names}
    if list(sizes) == [level.name for level in cluster.levels]:
        return None
    first, *others = sizes
    rest = plan.mesh.size // sizes[first]
    if ranks % rest:
        raise PlanError(
            f"the mesh {plan.mesh} cannot have {ranks} ranks",
            why=f"the axes {', '.join(others)} have {rest}, and {ranks} is no multiple of it",
            hint=f"ranks={max(1, ranks // rest) * rest}",
        )
    return {**sizes, first: ranks // rest}


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """The same machines, more or fewer of them: the outermost level takes the change, below one unit the next inner.

    Raises ClusterError for a number that does not fill units of a level.
    """
    levels = list(cluster.levels)
    for at in range(len(levels)):
        inner = cluster.ranks
        for level in levels[: at + 1]:
            inner //= level.size
        if ranks >= inner or at == len(levels) - 1:
            if ranks % inner:
                raise ClusterError(
                    f"{cluster.name} cannot have {ranks} ranks",
                    why=f"a {levels[at].name} has {inner}",
                    hint=f"ranks={max(1, ranks // inner) * inner}",
                )
            kept = [replace(levels[at], size=ranks // inner), *levels[at + 1 :]]
            return replace(cluster, levels=tuple(kept))
    raise AssertionError("a cluster has a level")


# ---------------------------------------------------------------- what is shown


def _remark(text: str, remark: str, seconds: float, capturing: float) -> str:
    from meshwright.report.quantities import show_seconds

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

    from meshwright.cli.screen import err, out
    from meshwright.report.estimate import estimate_table

    screen = out()
    screen.print(estimate_table(columns))
    if remarks:
        screen.print()
    for remark in remarks:
        screen.print(Text(remark, style="dim"))
    for text, error in refused:
        err().print(Text(f"{text} has no answer: {error}"))
