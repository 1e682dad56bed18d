"""`meshwright plan`: choose how to shard a model for a cluster, on any machine and without its devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.common import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelArgument,
    SequenceOption,
    WithOption,
)
from meshwright.errors import PlanError

if TYPE_CHECKING:
    from meshwright.capture import Captured
    from meshwright.cli.model import Opened
    from meshwright.cli.progress import Watch
    from meshwright.cost.cluster import Cluster
    from meshwright.partition import Partition
    from meshwright.plan.plan import Plan

OPENING, CAPTURING, SEARCHING = "opening the model", "capturing", "searching"
PRICED = ("auto", "dynamic_programming", "recursive_programming")
PINNED = "sharding_propagation"


def plan(
    model: ModelArgument,
    cluster: ClusterOption = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            help="auto, dynamic_programming, recursive_programming, sharding_propagation, semi_auto, data_parallel; "
            "by default auto for a cluster, else data_parallel.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory limit of a rank, such as 70GB; by default the device's."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="SIZES",
            help="dp=2,tp=4; dp=4/dp=2,tp=2 for each rank of a pipeline; by default the cluster's own levels.",
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin",
            metavar="PIN",
            help="A sharding hint, such as 'blocks.*.up:n=tp' or 'head:n=node+gpu'. May be repeated.",
        ),
    ] = None,
    techniques: WithOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            metavar="NAME",
            help="adamw, sgd or momentum: decides the memory of optimizer states.",
        ),
    ] = "adamw",
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            help="End the search after this time, with the best plan so far.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PLAN.JSON", help="Where the plan is written.")
    ] = Path("plan.json"),
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="TRACE.JSON", help="Write the predicted step for chrome://tracing or Perfetto."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every operator, also those that only follow.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan how to shard MODEL over a cluster, and write the plan to a file.

    Needs no devices and no weights. Ctrl-C, or --time-limit, ends the search with the best plan
    found so far; a second Ctrl-C interrupts it.
    """
    from meshwright.cli.arguments import (
        mesh_sizes,
        open_cluster,
        optimizer_states,
        pins_of,
        size_bytes,
        techniques_of,
    )
    from meshwright.cli.common import as_typed, err
    from meshwright.cli.progress import Watch
    from meshwright.errors import DoesNotFit

    states = optimizer_states(optimizer)
    limit, sizes, pins = size_bytes(memory), mesh_sizes(mesh), pins_of(pin or ())
    asked = techniques_of(techniques or ())
    machine = open_cluster(cluster) if cluster is not None else None
    mode = mode or ("auto" if machine else PINNED if pins else "data_parallel")
    check_needs(mode, machine, limit=limit, trace=trace, mesh=sizes, time_limit=time_limit)
    check_folders(output, trace)

    try:
        with Watch(err(), quiet=as_json) as watch:
            made, parts, about = make(
                model, batch, seq, machine, sizes, mode, pins, limit, states, watch, asked, time_limit
            )
    except KeyboardInterrupt:
        err().print("stopped before a plan was found")
        raise typer.Exit(130) from None
    except DoesNotFit as error:
        raise as_typed(error) from None
    made.save(output)
    if trace is not None and machine is not None:
        write_trace(trace, parts, machine, states)
    if as_json:
        print(json.dumps(claims_json(made, about, watch.seconds, output, trace), ensure_ascii=False))
    else:
        show(made, parts, about, watch.seconds, output, trace, every)


def check_needs(
    mode: str,
    machine: Cluster | None,
    *,
    limit: int | None,
    trace: Path | None,
    mesh: Any,
    time_limit: float | None = None,
) -> None:
    """Refuse, before torch is loaded, what cannot be answered. Raises PlanError."""
    asked = [f"--mode {mode}"] if mode in PRICED else []
    asked += ["--memory"] if limit is not None else []
    asked += ["--time-limit"] if time_limit is not None else []
    asked += ["--trace"] if trace is not None else []
    if asked and machine is None:
        raise PlanError(
            f"{asked[0]} needs a cluster",
            why="seconds and bytes are those of a machine",
            hint="--cluster preset:h100:2x8, or --cluster cluster.yaml (meshwright calibrate -o cluster.yaml)",
        )
    if machine is None and mesh is None:
        raise PlanError("over how many ranks?", hint="--mesh dp=2,tp=4, or --cluster preset:h100:2x8")


def check_folders(*paths: Path | None) -> None:
    """Refuse, before any work, to write where there is no folder. Raises PlanError."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise PlanError(f"{str(path)!r} cannot be written", why="there is no such folder")


def make(
    model: str,
    batch: int | None,
    seq: int | None,
    machine: Cluster | None,
    sizes: Any,
    mode: str,
    pins: Any,
    limit: int | None,
    states: int,
    watch: Watch,
    techniques: Any,
    time_limit: float | None = None,
) -> tuple[Plan, Partition, str]:
    """The plan, the program it gives, and what was planned. Raises a MeshwrightError; `watch` shows how it goes."""
    with watch.stage(OPENING):
        import meshwright as mw
        from meshwright.cli.model import open_model
        from meshwright.compile import captured_of, lower
        from meshwright.planning.log_remarks import shown_elsewhere

        opened = open_model(model, batch=batch, sequence=seq)
    with watch.stage(CAPTURING):
        captured = captured_of(opened.model, opened.batch, opened.loss)
    priced: dict[str, Any] = {}
    if machine is not None:
        priced = {"cluster": machine, "memory": limit, "optimizer_states": states, "progress": watch}
        priced["time_limit"] = time_limit
    with watch.stage(SEARCHING), shown_elsewhere():
        made = mw.plan(
            opened.model,
            opened.batch,
            loss=opened.loss,
            mesh=sizes,
            mode=mode,
            pins=pins,
            **priced,
            **techniques,
        )
    if "search_seconds" in made.claims:  # one figure, whoever asks for it
        watch.seconds[SEARCHING] = made.claims["search_seconds"]
    return made, lower(captured, made), about_model(opened, captured)


def about_model(opened: Opened, captured: Captured) -> str:
    """Which model it is and on what batch, which nobody may have said: ``LlamaForCausalLM, input_ids i64[8, 1024]``."""
    tensors = (f"{i.target or 'batch'} {i.type}" for i in captured.graph.input_of("batch"))
    return ", ".join([type(opened.model).__name__, *tensors])


def write_trace(path: Path, parts: Partition, machine: Cluster, states: int) -> None:
    """The predicted step as a Chrome trace: that of a rank, or of all ranks of a pipeline."""
    from meshwright.predict.pipeline_step import predict
    from meshwright.predict.tasks import simulate
    from meshwright.report.chrome_trace import save, save_trace, written
    from meshwright.report.schedule_trace import played_processes

    if not parts.plan.stages:
        save_trace(simulate(parts, machine, states), path)
        return
    found = predict(parts, machine, states)
    summary = {"step_seconds": found.step_seconds, "bubble": found.bubble}
    save(written(played_processes(found.played, found.prologue), summary), path)


# ---------------------------------------------------------------- answers


def claims_json(
    made: Plan, about: str, seconds: dict[str, float], output: Path, trace: Path | None
) -> dict[str, Any]:
    """Collect the output of `--json`."""
    return {
        "plan": str(output),
        **({"trace": str(trace)} if trace is not None else {}),
        "model": about,
        "mode": made.mode,
        "mesh": {name: made.ranks.count(run) for name, run in made.ranks.names},
        "ranks": made.ranks.size,
        "operators": len(made.strategies),
        "claims": dict(made.claims),
        "notes": list(made.notes),
        "seconds": {k: round(v, 4) for k, v in spent(seconds).items()},
    }


def spent(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds of this command by what they went into."""
    names = {OPENING: "open", CAPTURING: "capture", SEARCHING: "search"}
    return {short: seconds[name] for name, short in names.items() if name in seconds}


def show(
    made: Plan,
    parts: Partition,
    about: str,
    seconds: dict[str, float],
    output: Path,
    trace: Path | None,
    every: bool,
) -> None:
    """The plan's table, what it claims, and where it went."""
    from meshwright.cli.common import out
    from meshwright.report.claims import claim_lines, claims_table, technique_lines
    from meshwright.report.plan_table import plan_view
    from meshwright.report.units import show_seconds

    lines = [("model", about), ("mesh", f"{made.mesh_text}   {made.ranks.size} ranks"), ("mode", made.mode)]
    lines += [*technique_lines(made.techniques), *claim_lines(made.claims)]
    lines.append(("took", ", ".join(f"{k} {show_seconds(v)}" for k, v in spent(seconds).items())))
    lines.append(("written", f"{output}" + (f", {trace}" if trace else "")))
    screen = out()
    screen.print(plan_view(parts, every=every))
    screen.print()
    screen.print(claims_table(lines))
