"""`meshwright explain`: explains a plan, a module, or a single operator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.common import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelOption,
    PlanArgument,
    SequenceOption,
)
from meshwright.core.rank_numbers import PipelineRank
from meshwright.errors import PlanError

if TYPE_CHECKING:
    from meshwright.cost.cluster import Cluster
    from meshwright.plan.plan import Plan

FEW = 3  # kinds of operators that are explained on a page each


def explain(
    plan: PlanArgument,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE]",
            help="A module such as 'blocks.*.up', or a node such as %linear_3.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="adamw, sgd or momentum.")
    ] = "adamw",
    every: Annotated[
        bool, typer.Option("--all", help="Also operators that only follow their neighbours.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain a plan: how each operator is sharded, why, what it costs, and what else there was.

    The plan file has shardings and reasons. --model adds the layouts of neighbours and what is sent; --cluster adds
    seconds.
    """
    from meshwright.cli.arguments import open_cluster, optimizer_states
    from meshwright.plan.plan import Plan

    loaded = Plan.load(plan)
    states = optimizer_states(optimizer)
    machine = open_cluster(cluster) if cluster is not None else None
    if machine is not None and model is None:
        raise PlanError(
            "--cluster needs --model",
            why="a plan file says how operators are sharded, not how large they are",
            hint=f"meshwright explain {plan} --model MODEL --cluster {cluster}",
        )
    if model is None:
        _from_file(loaded, what, every, as_json)
    else:
        _with_model(loaded, what, model, (batch, seq), machine, states, every, as_json)


def _from_file(loaded: Plan, what: str | None, every: bool, as_json: bool) -> None:
    from meshwright.report.explain_node import choices, folded, matching
    from meshwright.report.layers_of_file import narrowed

    names = matching(loaded, what) if what is not None else tuple(loaded.strategies)
    loaded, told = narrowed(loaded, what) if what is not None else (loaded, ())
    found = choices(loaded, names, None)
    if as_json:
        _print_json(loaded, [(m, n, c, {}) for m, n, c in folded(found)])
    else:
        _print(loaded, found, what, every, lambda c: (), lambda c: 0.0)
        _print_dim(told)


def _with_model(
    loaded: Plan,
    what: str | None,
    model: str,
    shape: tuple[int | None, int | None],
    machine: Cluster | None,
    states: int,
    every: bool,
    as_json: bool,
) -> None:
    from meshwright.cli.common import out
    from meshwright.cli.model import captured_model, cut, in_one
    from meshwright.pipeline.of_plan import place_of
    from meshwright.predict.price import program_price
    from meshwright.report.alternatives import Alternative, alternatives
    from meshwright.report.explain_node import Choice, choices, folded, matching
    from meshwright.report.plan_table import plan_view

    _, captured = captured_model(model, *shape)
    parts = cut(captured, loaded, machine)
    if what is None and machine is None and not as_json:
        out().print(plan_view(parts, every=every))
        _print_claims(loaded)
        return
    if what is not None:
        loaded = loaded.check(captured.graph)  # all layers, of which a file lists two
    names = matching(loaded, what) if what is not None else tuple(loaded.strategies)
    machines = () if machine is None else (machine,)
    if machine is not None and loaded.stages:  # operators are priced on the ranks that share a stage
        parts, machines = in_one(captured, loaded, machine)
    prices = [
        program_price(parts.of_place(PipelineRank(n)), there, states) for n, there in enumerate(machines)
    ]
    found = choices(loaded, names, parts, prices)

    def others(c: Choice) -> tuple[Alternative, ...]:
        if not machines:
            return ()
        place = place_of(loaded, c.node)
        return alternatives(captured.graph, parts.of_place(place), c.node, machines[place], states)

    def total(c: Choice) -> float:
        return prices[place_of(loaded, c.node)].total if prices else 0.0

    if as_json:
        few = len(folded(found)) <= FEW
        _print_json(
            loaded,
            [
                (m, n, c, {str(a.strategy): a.more_seconds for a in others(c)} if few else {})
                for m, n, c in folded(found)
            ],
        )
    else:
        _print(loaded, found, what, every, others, total)


# ---------------------------------------------------------------- answers


def _print(loaded: Plan, found: Any, what: str | None, every: bool, others: Any, total: Any) -> None:
    """`others`: a choice → its alternatives, `total` → the seconds of the step they are a part of."""
    from meshwright.cli.common import out
    from meshwright.pipeline.of_plan import plan_of
    from meshwright.report.explain_node import folded
    from meshwright.report.explain_node_view import choice_page, choices_table

    screen = out()
    if what is None:
        screen.print(choices_table(found, every=every))
        _print_stages(loaded)
        _print_claims(loaded)
        return
    rows = folded(found)
    pages = rows if len(rows) <= FEW else []
    if not pages:
        screen.print(choices_table(found))
        return
    for number, (module, count, c) in enumerate(pages):
        if number:
            screen.print()
            screen.rule(style="dim")
        mesh = plan_of(loaded, c.node).mesh
        screen.print(choice_page(module, count, c, mesh, others(c), total(c)))


def _print_stages(loaded: Plan) -> None:
    from meshwright.report.stages import plan_stage_lines

    _print_dim(plan_stage_lines(loaded))


def _print_dim(lines: Sequence[str]) -> None:
    """Print lines after an empty one."""
    from rich.text import Text

    from meshwright.cli.common import out

    screen = out()
    if lines:
        screen.print()
    for line in lines:
        screen.print(Text(line, style="dim"))


def _print_claims(loaded: Plan) -> None:
    from rich.text import Text

    from meshwright.cli.common import out
    from meshwright.report.claims import claim_lines, claims_table, technique_lines

    lines = [
        ("mesh", f"{loaded.mesh_text}   {loaded.ranks.size} ranks"),
        ("mode", loaded.mode),
        *technique_lines(loaded.techniques),
        *claim_lines(loaded.claims),
    ]
    screen = out()
    screen.print()
    screen.print(claims_table(lines))
    for note in loaded.notes:
        screen.print(Text(note, style="dim"))


def _print_json(loaded: Plan, rows: Any) -> None:
    from meshwright.report.explain_node_view import choice_data
    from meshwright.report.stages import drawing

    meshes = loaded.meshes or (loaded.mesh,)
    sizes = [{name: mesh.count(run) for name, run in mesh.names} for mesh in meshes]
    data = {
        "mesh": sizes[0] if len(sizes) == 1 else sizes,
        **({"schedule": drawing(loaded).splitlines()} if loaded.stages else {}),
        "mode": loaded.mode,
        "claims": dict(loaded.claims),
        "operators": [choice_data(m, n, c, o) for m, n, c, o in rows],
        "notes": list(loaded.notes),
    }
    print(json.dumps(data, ensure_ascii=False))
