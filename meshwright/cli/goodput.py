"""`meshwright goodput`: how much of a job's time trains when ranks fail, and how often to save."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.common import ClusterOption, JsonOption
from meshwright.errors import PlanError

if TYPE_CHECKING:
    from meshwright.plan.plan import Plan
    from meshwright.predict.goodput import Failures, Goodput, Running

SAYS = {
    "continue": "the remaining replicas continue",
    "replan": "the remaining ranks get a new plan",
    "restart": "all restart from a checkpoint",
}


def goodput(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN.JSON]", help="A plan file.")] = None,
    cluster: ClusterOption = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of ranks, instead of the plan's.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Data-parallel replicas; by default the plan's outermost axis."
        ),
    ] = None,
    interruptions: Annotated[
        float,
        typer.Option(metavar="N", min=0, help="Failures seen in --days on --on ranks; by default Llama 3's."),
    ] = 419,
    days: Annotated[float, typer.Option(metavar="DAYS", min=1e-6)] = 54,
    on: Annotated[int, typer.Option(metavar="RANKS", min=1)] = 16_384,
    fatal: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0, max=1, help="Share of interruptions that end all ranks."),
    ] = 54 / 419,
    save: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Pause of training for a save.")] = 10,
    restart: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Until all ranks train again.")
    ] = 300,
    replan: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Until the remaining ranks train under a new plan."),
    ] = 30,
    go_on: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Until the remaining replicas train.")
    ] = 10,
    repair: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Until a lost machine is back.")
    ] = 7200,
    copy: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0, help="Share of a step for copies to a neighbour (replan)."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate failures: the share of time spent training for each way to recover, and how often to save.

    Ranks and replicas are those of a plan, or of --cluster and --replicas. A closed formula is shown for comparison.
    """
    from meshwright.predict.goodput import TIERS, Failures
    from meshwright.predict.goodput import goodput as simulated

    job = _running(plan, cluster, ranks, replicas)
    job = replace(
        job, save=save, restart=restart, replan=replan, going_on=go_on, repair=repair, copy_share=copy
    )
    failures = Failures(interruptions / (days * 86_400 * on), fatal)
    if not interruptions:
        raise PlanError("--interruptions is 0", why="without failures all tiers are equal")
    found = [simulated(job, failures, tier) for tier in TIERS]
    if as_json:
        print(json.dumps({"job": asdict(job), "tiers": [_plain(f) for f in found]}, indent=2))
    else:
        _show(job, failures, found)


def _running(plan: Path | None, cluster: str | None, ranks: int | None, replicas: int | None) -> Running:
    """The job as plan, cluster and options describe it. Raises PlanError."""
    from meshwright.cli.arguments import open_cluster
    from meshwright.plan.plan import Plan
    from meshwright.predict.goodput import Running

    node_ranks, step = 8, 10.0
    if cluster is not None:
        machine = open_cluster(cluster)
        ranks, node_ranks = ranks or machine.ranks, machine.levels[-1].size
    if plan is not None:
        loaded = Plan.load(plan)
        ranks = ranks or loaded.ranks.size
        replicas = replicas or _replicas(loaded)
        step = loaded.claims.get("step_seconds") or step
    if ranks is None:
        raise PlanError(
            "the number of ranks is not known", hint="a plan file, --cluster preset:h100:2048x8, or --ranks"
        )
    if replicas is None or ranks % replicas:
        raise PlanError(
            f"--replicas is {replicas}",
            why=f"the {ranks:,} ranks must form this many equal groups, each with the full model",
            hint="--replicas 128",
        )
    return Running(ranks, replicas, node_ranks=min(node_ranks, ranks), step=step)


def _replicas(plan: Plan) -> int:
    """How many groups of ranks hold all of the state: one where optimizers or stages share it."""
    if plan.stages or plan.techniques.optimizer_parallel:
        return 1
    return plan.ranks.size if plan.mode == "data_parallel" else plan.mesh.axes[0].size


def _plain(found: Goodput) -> dict[str, object]:
    """As JSON has it, which knows no infinity."""
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in asdict(found).items()}


def _show(job: Running, failures: Failures, found: list[Goodput]) -> None:
    from rich.table import Table

    from meshwright.cli.common import out
    from meshwright.report.units import show_seconds

    rate = failures.per_rank_s * job.ranks
    table = Table("after a failure", "goodput", "closed form", "save every", "Young")
    for one in found:
        shown = (show_seconds(s) if math.isfinite(s) else "never" for s in (one.interval, one.young))
        table.add_row(SAYS[one.tier], f"{one.simulated:.2%}", f"{one.predicted:.2%}", *shown)
    out().print(
        f"{job.ranks:,} ranks, {job.replicas} replicas, nodes of {job.node_ranks}; an interruption every "
        f"{show_seconds(1 / rate)}, {failures.fatal:.1%} of them end all ranks; seconds: step {job.step:g}, "
        f"save {job.save:g}, restart {job.restart:g}, replan {job.replan:g}, go on {job.going_on:g}, "
        f"repair {job.repair:g}"
    )
    out().print(table)
