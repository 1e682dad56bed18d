"""Checks and remarks for pipelines whose places have their own meshes: each place takes the pins whose axes it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.core.graph import Graph
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import Techniques, matches_module
from meshwright.errors import MeshError, PlanError
from meshwright.pipeline.of_plan import schedule_of
from meshwright.plan.plan import Plan

Pins = Mapping[str, Mapping[str, Any]]


def pins_on(mesh: Mesh, every: Sequence[Mesh], pins: Pins | None) -> Pins | None:
    """The pins that a mesh can take: those whose axes it has, and those whose axes no mesh has, so that it says so."""
    if not isinstance(pins, Mapping):
        return pins  # nothing, or what the planner of a mesh refuses
    return {
        pattern: splits
        for pattern, splits in pins.items()
        if _fits(splits, mesh) or not any(_fits(splits, other) for other in every)
    }


def _fits(splits: Mapping[str, Any], mesh: Mesh) -> bool:
    try:
        for axes in splits.values():
            for axis in (axes,) if isinstance(axes, str) else axes:
                mesh.resolve(axis)
    except (AttributeError, MeshError, TypeError):  # what the planner of a mesh refuses
        return False
    return True


def check_own(graph: Graph, techniques: Techniques) -> None:
    """Raise PlanError for what has no meaning where stages have meshes of their own, or does not run there yet."""
    if techniques.gradients != "mean":
        raise PlanError(
            f"gradients={techniques.gradients!r} with a mesh for each rank of the pipeline",
            why="they are of the loss times the number of ranks that share the batch, and that differs between stages",
            hint="leave it out, or give all stages one mesh",
        )
    there = next((node for node in graph.nodes if "host" in node.marks), None)
    if there is not None:
        raise PlanError(
            f"mw.on_host of {there.module or '%' + there.name} with a mesh for each rank of the pipeline",
            why="what passes between stages is sent from where ranks compute",
            where=there.where,
            hint="leave out mw.on_host, or give all stages one mesh",
        )


def check_pins(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Notes on pins that hold in some of the stages alone that have the modules they name."""
    ranks, found = schedule_of(plan).ranks, list[str]()
    for pattern, splits in plan.pins.items():
        mine = {
            plan.stages[n.name]
            for n in graph.nodes
            if n.name in plan.stages and matches_module(pattern, n.module.split("."))
        }
        lacking = sorted(s for s in mine if not _fits(splits, plan.meshes[ranks[s]]))
        if lacking:
            axes = ", ".join(str(a) for a in splits.values())
            stages = ", ".join(f"{s} (mesh {plan.meshes[ranks[s]]})" for s in lacking)
            found.append(
                f"the pin {pattern!r} ({axes}) does not hold in stage {stages}, whose mesh lacks the axis"
            )
    return tuple(found)


__all__ = ["check_own", "check_pins", "pins_on"]
