"""Explains each dimension of a chosen pipeline: its value, and the cost of the next best value, by the sums that ranked
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.search.joint.explain import chosen, later, shown
from meshwright.search.pipeline.stages import Staged

SPARING = ("slice_activation", "offload")  # looked at where nothing else fits

DIMENSIONS: dict[str, Callable[[Staged], Any]] = {
    "pipeline": lambda one: one.outer.stages,
    "schedule": lambda one: one.outer.schedule.name,
    "micro_batches": lambda one: one.found.techniques.micro_batches,
    "recompute": lambda one: one.found.techniques.recompute,
    "slice_activation": lambda one: one.found.techniques.slice_activation,
    "offload": lambda one: one.found.techniques.offload,
    "ranks of each level": lambda one: one.outer.taken,
}


def explain_stages(best: Staged, found: Sequence[Staged], given: frozenset[str] = frozenset()) -> list[str]:
    """A line for each dimension that was open: `found` are the pipelines that were simulated and fit, `best` the one of
    them that was taken, and the user has `given` what is not told."""
    lines: list[str] = []
    nothing = "nothing else fits and is quicker than one stage, of what was simulated"
    if "pipeline" in given:
        nothing = "nothing else that was simulated fits" + " and is quicker" * ("micro_batches" in given)
    for name, value_of in DIMENSIONS.items():
        mine = value_of(best)
        if name in given or (name == "ranks of each level" and len(mine) == 1):
            continue
        others = [one for one in found if value_of(one) != mine]
        if name in SPARING and not mine and not others:
            continue
        said = f"auto chose {chosen(name, mine)}"
        if others:
            other = min(others, key=lambda one: one.seconds)
            said += f"; next best {shown(value_of(other))} at about {later(other.seconds - best.seconds)}"
        else:
            said += f"; {nothing}"
        lines.append(said)
    return lines


__all__ = ["explain_stages"]
