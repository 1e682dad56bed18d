"""The stages of a plan for a reader: their operators, communication and seconds, and the schedule as a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.core.graph import DTYPES, MOVES
from meshwright.core.rank_numbers import PipelineRank
from meshwright.partition import Partition
from meshwright.pipeline.actions import Schedule
from meshwright.pipeline.draw import draw
from meshwright.pipeline.of_plan import holders, schedule_of
from meshwright.plan.plan import Plan
from meshwright.predict.pipeline_claims import claimed, claimed_stages
from meshwright.redistribute.steps import largest_size, show_bytes
from meshwright.report.units import show_seconds

WIDTH = 96  # columns of a drawing


def stage_lines(parts: Partition) -> list[str]:
    """Return a line for each stage, one for weights on several ranks, and the drawing; nothing without stages."""
    if not parts.plan.stages:
        return []
    schedule, told = schedule_of(parts.requested), claimed_stages(parts.requested)
    every, lines = parts, []
    for number, place in enumerate(schedule.ranks):
        parts = every.of_place(place)
        graph = parts.resharded.graph
        stage = parts.stages(graph)[number]
        mine = [n for n in graph.nodes if parts.plan.stages.get(n.name) == number and n.op not in MOVES]
        first, last = (n.module or f"%{n.name}" for n in (mine[0], mine[-1]))
        sent = sum(_bytes(parts, value) * len(later) for value, later in stage.gives.items())
        weights = sum(_bytes(parts, i.name) for i in graph.input_of("parameter") if i.name in stage.reads)
        text = _head(number, schedule, len(mine), first, last, parts.requested)
        text += f", parameters {show_bytes(weights)}"
        text += f", sends {show_bytes(sent)} forward for each micro-batch" if sent else ""
        lines.append(text + _seconds(told, number))
    held, graph = holders(every, schedule), every.resharded.graph
    tied = [i.target for i in graph.input_of("parameter") if i.needs_grad and len(held[i.name]) > 1]
    if tied:
        more = f" and {len(tied) - 3} more" if len(tied) > 3 else ""
        lines.append(f"on several ranks of the pipeline, gradients added up: {', '.join(tied[:3])}{more}")
    return [*lines, *drawing(every.requested).splitlines()]


def plan_stage_lines(plan: Plan) -> list[str]:
    """Return the lines from a plan without its model: operators and seconds of the stages, and the drawing."""
    if not plan.stages:
        return []
    schedule, told, lines = schedule_of(plan), claimed_stages(plan), list[str]()
    for number in range(schedule.stages):
        mine = [n for n, stage in plan.stages.items() if stage == number]
        first, last = (plan.about.get(n, ("", ""))[1] or f"%{n}" for n in (mine[0], mine[-1]))
        there = plan.of_place(schedule.ranks[number])
        lines.append(_head(number, schedule, len(mine), first, last, there) + _seconds(told, number))
    return [*lines, *drawing(plan).splitlines()]


def _head(number: int, schedule: Schedule, operators: int, first: str, last: str, plan: Plan) -> str:
    text = f"stage {number} on rank {schedule.ranks[number]} of the pipeline"
    text += f" (mesh {plan.mesh}): " if plan.meshes else ": "
    text += f"{operators} operator{'s' * (operators > 1)}, "
    return text + (first if first == last else f"{first} to {last}")


def _seconds(claims: Sequence[Mapping[str, Any]], number: int) -> str:
    if number >= len(claims):
        return ""
    ways = [f"{show_seconds(claims[number][way])} {way}" for way in ("forward", "backward")]
    return f"; {', '.join(ways)} of a micro-batch"


def drawing(plan: Plan) -> str:
    """Return the schedule as bars, by predicted seconds if the plan has them, else with equally long stages."""
    return draw(claimed(plan), WIDTH)


def run_at(parts: Partition, place: PipelineRank) -> frozenset[str]:
    """Return the nodes that the ranks at a place of the pipeline run, and the inputs they read."""
    ranks, found = schedule_of(parts.requested).ranks, set[str]()
    for at, stage in zip(ranks, parts.stages(parts.resharded.graph), strict=True):
        if at == place:
            found |= stage.reads | {n.name for n in stage.segment.graph.nodes}
    return frozenset(found)


def most_parameters(parts: Partition) -> int:
    """Return the bytes of parameters on the rank of the pipeline that holds most."""
    schedule = schedule_of(parts.requested)
    held = holders(parts, schedule)
    entries = parts.resharded.graph.input_of("parameter")
    return max(
        sum(_bytes(parts.of_place(place), i.name) for i in entries if place in held[i.name])
        for place in schedule.every_rank
    )


def _bytes(parts: Partition, value: str) -> int:
    """Return the bytes of a value on the rank that holds most of it."""
    size = largest_size(parts.resharded.layouts[value], parts.plan.mesh)
    return size * DTYPES[parts.resharded.graph.types[value].dtype]


__all__ = ["drawing", "most_parameters", "plan_stage_lines", "stage_lines"]
