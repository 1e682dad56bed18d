"""The order in which the ranks of a plan take their stages: one of ours by its name, or the user's own by its text.

Where in a pipeline the inputs of a program are: parameters, buffers, constants and the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

from meshwright.core.graph import MOVES
from meshwright.core.other_systems import called_here
from meshwright.core.rank_numbers import PipelineRank
from meshwright.core.techniques import Techniques
from meshwright.errors import PlanError, did_you_mean
from meshwright.partition import Partition
from meshwright.partition.localize import counted
from meshwright.partition.time_axis import early_values
from meshwright.pipeline.actions import FORWARD, MESSAGES, Schedule, is_own, parse
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.play import play
from meshwright.pipeline.schedules import SCHEDULES, make
from meshwright.plan.plan import Plan

END = ("reduce", "update")
TRAINING = tuple(name for name in SCHEDULES if name != "forward")


def forward_only(schedule: Schedule) -> Schedule:
    """Drop backward from a schedule, for inference: each rank runs its forwards in the same order. It cannot deadlock
    if the schedule does not, since forwards only wait for forwards."""
    lists = tuple(tuple(a for a in actions if a.kind == FORWARD) for actions in schedule.actions)
    return replace(schedule, actions=lists)


def schedule_of(plan: Plan) -> Schedule:
    """The order in which the ranks of a plan with stages take them."""
    return schedule_for(plan.techniques, meshes_of(plan).places)


def place_of(plan: Plan, name: str) -> PipelineRank:
    """The place in a pipeline that runs an operator, where places have meshes of their own; else 0."""
    return schedule_of(plan).ranks[plan.stages.get(name, 0)] if plan.own else PipelineRank(0)


def plan_of(plan: Plan, name: str) -> Plan:
    """The plan by which an operator runs: that of its place in a pipeline, where places have meshes of their own."""
    return plan.of_place(place_of(plan, name))


@functools.lru_cache(maxsize=64)
def schedule_for(techniques: Techniques, places: int) -> Schedule:
    """The schedule that is asked for, without messages. Raises PlanError for one that does not fit, or cannot run."""
    stages, count, asked = techniques.pipeline, techniques.micro_batches, techniques.schedule or "1f1b"
    if asked not in SCHEDULES and not is_own(techniques):
        raise PlanError(
            f"there is no schedule {asked!r}",
            why=f"schedules that train: {', '.join(TRAINING)}, or one of your own",
            hint=called_here(asked) or did_you_mean(asked.lower(), TRAINING)
            if asked.lower() not in TRAINING
            else f"schedule={asked.lower()!r}",
        )
    if asked in SCHEDULES:
        found = make(asked, places, count, stages // places)
    else:
        found = parse(asked)
        fits = (found.stages, len(found.actions), found.micro_batches)
        if fits != (stages, places, count):
            raise PlanError(
                f"the schedule {found.name} is of {fits[0]} stages on {fits[1]} ranks with {fits[2]} micro-batches",
                why=f"requested are {stages} on {places} with {count}",
                hint=f"pipeline={fits[0]}, micro_batches={fits[2]}",
            )
    if not found.has_backward:
        raise PlanError(
            f"the schedule {found.name} has no backward",
            why="a training step needs one",
            hint='schedule="1f1b"',
        )
    play(found)
    for rank, actions in enumerate(found.actions):
        if rank not in found.ranks:
            raise PlanError(
                f"rank {rank} of the schedule {found.name} holds no stage",
                why=f"its {found.stages} stages are on {', '.join(map(str, sorted(set(found.ranks))))}",
                hint="lists for as many ranks as hold stages",
            )
        last = tuple(a.kind for a in actions[-2:])
        early = next((a.kind for a in actions[:-2] if a.kind in END), "")
        if last != END or early:
            raise PlanError(
                f"the schedule {found.name} "
                + (f"has {early} before its end" if last == END else f"ends with {', '.join(last)}"),
                where=f"rank {rank}",
                why="gradients are reduced when all of them are there, and weights updated after that",
                hint="reduce, update as the last two actions of each rank, and nowhere else",
            )
    plain = tuple(tuple(a for a in actions if a.kind not in MESSAGES) for actions in found.actions)
    return replace(found, actions=plain)


def in_flight(techniques: Techniques, places: int) -> tuple[float, ...]:
    """Of how many micro-batches each place of a pipeline holds at most what backward needs of all its stages: halves
    where some of the stages do. Raises PlanError as `schedule_for` does."""
    schedule = schedule_for(techniques, places)
    return tuple(peak * places / schedule.stages for peak in play(schedule).peaks)


def holders(parts: Partition, schedule: Schedule) -> dict[str, tuple[PipelineRank, ...]]:
    """Input of the program → the places in the pipeline that have it: those whose stages read it. What the sums before
    the first forward are made from is everywhere; what nobody reads is at the first place, so that a checkpoint has it.
    """
    graph = parts.resharded.graph
    found: dict[str, set[PipelineRank]] = {entry.name: set() for entry in graph.inputs}
    for number, stage in enumerate(parts.stages(graph)):
        for name in stage.reads:
            found[name].add(schedule.ranks[number])
    early = early_values(graph, graph.nodes)
    fixed = {i.name for i in graph.inputs if i.role != "batch" and i.name in early}
    for node in graph.nodes:
        used: Collection[str] = ()
        if early.issuperset(node.values):
            used = node.uses
        elif node.op not in MOVES and not fixed.isdisjoint(node.uses):
            used = counted(parts.resharded, parts.factors, parts.plan, node, early)
        for use in found.keys() & used:
            found[use].update(schedule.ranks)
    return {name: tuple(sorted(places)) or (PipelineRank(0),) for name, places in found.items()}


__all__ = ["forward_only", "holders", "in_flight", "place_of", "plan_of", "schedule_for", "schedule_of"]
