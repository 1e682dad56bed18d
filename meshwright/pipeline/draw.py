"""A played schedule as bars of text: a line for each rank, time to the right."""

from __future__ import annotations

from meshwright.pipeline.actions import COMPUTE
from meshwright.pipeline.check import Played


def draw(played: Played, width: int = 100) -> str:
    """Each rank's actions in time: ``F0`` is forward of micro-batch 0, ``B`` backward, ``I`` and ``W`` are its halves;
    dots where a rank waits. Names that do not fit into their bar are cut."""
    columns = width / played.end if played.end else 0.0
    lines = [
        f"{played.schedule.name}: {played.schedule.stages} stages, {played.schedule.micro_batches} micro-batches, "
        f"bubble {100 * played.bubble:.1f} %"
    ]
    for rank, times in enumerate(played.times):
        bar = ["·"] * width
        for action, begin, end in times:
            left, right = round(begin * columns), round(end * columns)
            if action.kind not in COMPUTE or right <= left:
                continue
            name = action.short[: right - left].ljust(right - left, "─" if right - left > 2 else " ")
            bar[left:right] = list(name[:-1] + " " if right - left > len(action.short) else name)
        lines.append(f"rank {rank:>3} │{''.join(bar)}│ at most {played.peaks[rank]} in memory")
    return "\n".join(lines)
