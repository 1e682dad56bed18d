"""The stages of a plan: where each operator goes, by predicted seconds and the user's constraints, and in what order
the ranks take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meshwright.core.graph import STAGE_MARK, Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import TECHNIQUES, Techniques, matches_module
from meshwright.errors import PlanError, did_you_mean
from meshwright.partition import Partition, partition
from meshwright.pipeline.actions import Schedule, is_own, parse
from meshwright.pipeline.levels import link_of
from meshwright.pipeline.meshes import AXIS, Meshes
from meshwright.pipeline.of_plan import schedule_for
from meshwright.pipeline.play import play
from meshwright.pipeline.split import Split, split
from meshwright.plan.plan import Plan
from meshwright.predict.pipeline_step import claims_of, peaks_of
from meshwright.predict.split_costs import costs_of, stage_room
from meshwright.search.budget import STAGES
from meshwright.search.planner import Request


def staged(
    graph: Graph,
    plan: Plan,
    techniques: Techniques,
    world: Meshes,
    request: Request | None,
) -> Plan:
    """The plan of a stage's mesh, or those of the places that have meshes of their own, split into stages. The seconds
    of its program balance them, and its bytes must fit into what `request` says of a rank. With a request the plan
    claims what it costs.

    Raises PlanError for constraints that cannot be met, for a schedule that does not fit, and for techniques that do
    not go together with stages."""
    schedule = schedule_for(techniques, world.places)
    pins = _pinned_stages(graph, techniques)
    # What was claimed is of the full model on the ranks of one stage.
    made = _each(
        plan,
        lambda one: replace(
            one,
            world=world.world,
            meshes=tuple(p.mesh for p in plan.own),
            techniques=replace(one.techniques, **_asked(techniques), given=techniques.given),
            claims={},
        ),
    )

    def cut(of: Mapping[str, int]) -> Plan:
        return _each(made, lambda one: replace(one, stages=dict(of)))

    known: dict[str, Partition] = {}

    def program(of: Mapping[str, int]) -> Partition:
        key = str(of)
        if key not in known:
            known.clear()  # a program is large
            known[key] = partition(graph, cut(of))
        return known[key]

    in_one = partition(graph, plan)
    found = _within_memory(graph, in_one, pins, schedule, program, request, world)
    made = cut(found.of)
    if request is not None:
        said = claims_of(program(dict(found.of)), request.cluster, request.optimizer_states)
        made = replace(made, claims=said)
    share = max(found.seconds) * len(found.seconds) / sum(found.seconds) if sum(found.seconds) else 1.0
    played = play(schedule)
    ranks, pieces = world.places, techniques.micro_batches
    notes = [
        f"pipeline: {techniques.pipeline} stages on {ranks} rank{'s' * (ranks > 1)}, {schedule.name} with "
        f"{pieces} micro-batch{'es' * (pieces > 1)}, a bubble of {100 * played.bubble:.0f} % if all stages took "
        f"equally long; the slowest takes {100 * (share - 1):.0f} % more than their mean"
    ]
    if pieces < ranks:
        notes.append(
            f"{pieces} micro-batch{'es are' if pieces > 1 else ' is'} too few for {ranks} ranks to work at once: "
            f"micro_batches={2 * ranks} or more keeps them busy"
        )
    return made.with_notes(*notes)


def _within_memory(
    graph: Graph,
    parts: Partition,
    pins: dict[str, int],
    schedule: Schedule,
    in_stages: Callable[[dict[str, int]], Partition],
    request: Request | None,
    world: Meshes,
) -> Split:
    """The stages that the ranks have memory for, if any do; else those that need least of what was looked at.

    What a split adds up knows nothing of what lives for a moment only. So the peaks of its programs are compared with
    the limit, and what they are over it is kept free in the next try.
    """
    if request is None:
        each = parts.for_places(world.places, lambda one: costs_of(one, None))
        return split(graph, schedule.stages, [each[place] for place in schedule.ranks], pins=pins)
    link = link_of(request.cluster, world)
    cluster, states = request.cluster, request.optimizer_states
    each = parts.for_places(world.places, lambda one: costs_of(one, cluster, states, link))
    costs = [each[place] for place in schedule.ranks]
    limit = math.inf if request.memory_bytes is None else request.memory_bytes
    room, in_flight = stage_room(parts, schedule, limit)
    found: list[tuple[float, Split]] = []
    while room > 0 and len(found) < STAGES.splits:
        try:
            cut = split(graph, schedule.stages, costs, pins=pins, limit_bytes=room, in_flight=in_flight)
        except PlanError:
            break  # nothing fits, or nothing is as the user wants it, which the last split tells
        if max(cut.memory) < STAGES.far_below * room:
            return cut
        over = max(peaks_of(in_stages(dict(cut.of)), cluster, states)) - limit
        if over <= 0:
            return cut
        found.append((over, cut))
        room = max(cut.memory) - over
    if not found:
        return split(graph, schedule.stages, costs, pins=pins)
    return min(found, key=lambda one: one[0])[1]


def _each(plan: Plan, change: Callable[[Plan], Plan]) -> Plan:
    """A plan with a change, made in those of its places too."""
    return replace(change(plan), own=tuple(map(change, plan.own)))


def _asked(techniques: Techniques) -> dict[str, Any]:
    """Select the technique options that concern stages."""
    return {name: getattr(techniques, name) for name in ("pipeline", "schedule", "stages")}


def in_one_stage(techniques: Techniques) -> Techniques:
    """Return the techniques within each stage, with the choices closed that cannot accompany stages."""
    closed = {name for name, technique in TECHNIQUES.items() if not technique.within_stages}
    return replace(techniques, pipeline=1, schedule="", stages=(), given=techniques.given | closed)


def check_alone(techniques: Techniques) -> None:
    """Raise PlanError for options of stages where there is one stage."""
    if is_own(techniques):
        own = parse(techniques.schedule)
        raise PlanError(
            f"the schedule {own.name} without pipeline=",
            why="without pipeline= the model is one stage",
            hint=f"pipeline={own.stages}, micro_batches={own.micro_batches}",
        )
    for name in ("schedule", "stages"):
        if getattr(techniques, name):
            raise PlanError(
                f"{name}={getattr(techniques, name)!r} without pipeline=",
                why="without pipeline= the model is one stage",
                hint=f"pipeline=2, or leave out {name}",
            )


def check_axis(mesh: Mesh, techniques: Techniques) -> None:
    """Raise PlanError for a mesh with a pipeline's axis where nobody said how many stages there are."""
    if (
        dict(mesh.names).get(AXIS)
        and mesh.count(dict(mesh.names)[AXIS]) > 1
        and "pipeline" not in techniques.given
    ):
        count = mesh.count(dict(mesh.names)[AXIS])
        raise PlanError(
            f"the mesh has an axis {AXIS}={count}, and pipeline= is not given",
            why="this axis is for pipeline stages; without stages the batch would be split over it",
            hint=f"pipeline={count}, micro_batches={2 * count}; or pipeline=1 for an axis like any other",
        )


# ---------------------------------------------------------------- constraints


def _pinned_stages(graph: Graph, techniques: Techniques) -> dict[str, int]:
    """Operator → the stage that the user wants it in: what the model says, and before that patterns of modules."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        marks = sorted({int(m.removeprefix(STAGE_MARK)) for m in node.marks if m.startswith(STAGE_MARK)})
        if len(marks) > 1:
            raise PlanError(
                f"mw.stage puts {node.module or '%' + node.name} into stages {', '.join(map(str, marks))}",
                why="an operator belongs to one stage",
                where=node.where,
                hint="name the parts of a module, not the module around them too",
            )
        found.update(dict.fromkeys([node.name], marks[0]) if marks else {})
    for stage in sorted({s for s in found.values() if s >= techniques.pipeline}):
        raise PlanError(
            f"mw.stage asks for stage {stage}",
            why=f"there are {techniques.pipeline}, from 0 to {techniques.pipeline - 1}",
            hint=f"pipeline={stage + 1}",
        )
    for pattern, stage in techniques.stages:
        mine = [n for n in graph.nodes if any(matches_module(pattern, m.split(".")) for m in _around(n))]
        if not mine:
            modules = sorted({m for n in graph.nodes for m in _around(n)})
            raise PlanError(
                f"no module of the model matches {pattern!r} of stages",
                why=f"{len(modules)} modules have operators",
                hint=did_you_mean(pattern, modules),
            )
        found.update(dict.fromkeys([n.name for n in mine], stage))
    return found


def _around(node: Node) -> list[str]:
    """A node's module and those around it."""
    parts = node.module.split(".") if node.module else []
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


__all__ = ["check_alone", "in_one_stage", "staged"]
