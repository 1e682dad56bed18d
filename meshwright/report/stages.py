"""The stages of a plan for a reader: what each holds and sends, what it takes, and the schedule drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.graph import DTYPES, MOVES
from meshwright.partition import Partition
from meshwright.pipeline.actions import Action
from meshwright.pipeline.check import play
from meshwright.pipeline.draw import draw
from meshwright.pipeline.held import holders
from meshwright.pipeline.order import schedule_of
from meshwright.redistribute.steps import largest_size, show_bytes
from meshwright.report.quantities import show_seconds

WIDTH = 96  # columns of a drawing


def stage_lines(parts: Partition) -> list[str]:
    """A line for each stage, one for weights that several ranks have, and the drawing; none without stages."""
    if not parts.plan.stages:
        return []
    schedule, graph = schedule_of(parts.asked), parts.resharded.graph
    claimed: Sequence[Mapping[str, Any]] = parts.plan.claims.get("stages", ())
    lines = []
    for number, stage in enumerate(parts.stages(graph)):
        mine = [n for n in graph.nodes if parts.plan.stages.get(n.name) == number and n.op not in MOVES]
        first, last = (n.module or f"%{n.name}" for n in (mine[0], mine[-1]))
        sent = sum(_bytes(parts, value) * len(later) for value, later in stage.gives.items())
        weights = sum(_bytes(parts, i.name) for i in graph.input_of("parameter") if i.name in stage.reads)
        text = f"stage {number} on rank {schedule.ranks[number]} of the pipeline: "
        text += f"{len(mine)} operator{'s' * (len(mine) > 1)}, "
        text += first if first == last else f"{first} to {last}"
        text += f", parameters {show_bytes(weights)}"
        text += f", sends {show_bytes(sent)} forward for each micro-batch" if sent else ""
        if number < len(claimed):
            seconds = claimed[number]
            told = [f"{show_seconds(seconds[way])} {way}" for way in ("forward", "backward")]
            text += f"; {', '.join(told)} of a micro-batch"
        lines.append(text)
    held = holders(parts, schedule)
    tied = [i.target for i in graph.input_of("parameter") if i.needs_grad and len(held[i.name]) > 1]
    if tied:
        more = f" and {len(tied) - 3} more" if len(tied) > 3 else ""
        lines.append(f"on several ranks of the pipeline, gradients added up: {', '.join(tied[:3])}{more}")
    return [*lines, *drawing(parts).splitlines()]


def drawing(parts: Partition, width: int = WIDTH) -> str:
    """The schedule as bars: by predicted seconds where the plan has them, else as if all stages took equally long."""
    schedule = schedule_of(parts.asked)
    claimed = parts.plan.claims.get("stages")
    if not claimed:
        return draw(play(schedule), width)

    def seconds(action: Action) -> float:
        stage = claimed[action.stage]
        whole, later = stage["backward"], stage["weights"]
        found = {"forward": stage["forward"], "backward": whole, "backward_input": whole - later}
        return float({**found, "backward_weight": later}.get(action.kind, 0.0))

    return draw(play(schedule, seconds, parts.plan.claims.get("message_seconds", 0.0)), width)


def most_parameters(parts: Partition) -> int:
    """Bytes of parameters on the rank of the pipeline that holds most."""
    schedule = schedule_of(parts.asked)
    held = holders(parts, schedule)
    entries = parts.resharded.graph.input_of("parameter")
    return max(
        sum(_bytes(parts, i.name) for i in entries if place in held[i.name])
        for place in range(len(schedule.actions))
    )


def _bytes(parts: Partition, value: str) -> int:
    """Bytes of a value on the rank that holds most of it."""
    size = largest_size(parts.resharded.layouts[value], parts.plan.mesh)
    return size * DTYPES[parts.resharded.graph.types[value].dtype]


__all__ = ["drawing", "most_parameters", "stage_lines"]
