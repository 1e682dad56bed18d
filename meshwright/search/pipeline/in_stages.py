"""The plan of a model in stages, of which the user or a search has said how many there are: that of the ranks which
share a stage, split into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import PipelineRank
from meshwright.core.techniques import Techniques
from meshwright.errors import MeshError
from meshwright.pipeline.actions import is_own, parse
from meshwright.pipeline.levels import along, mesh_over, part_of, taken_of, within_stage
from meshwright.pipeline.meshes import Meshes, check_chunks, meshes, own_meshes
from meshwright.pipeline.of_plan import in_flight
from meshwright.pipeline.own_meshes import check_own, check_pins, pins_on
from meshwright.pipeline.schedules import SCHEDULES
from meshwright.plan.plan import Plan
from meshwright.search.annotations import mesh_of_pins
from meshwright.search.in_one_stage import plan_in_one_stage
from meshwright.search.modes import within_limit
from meshwright.search.pipeline.assign import in_one_stage, staged
from meshwright.search.stop import Stop
from meshwright.search.techniques.apply import apply
from meshwright.search.wanted import Wanted, each_mesh, mesh_from


def plan_in_stages(wanted: Wanted) -> Plan:
    """The plan of a pipeline whose stages share one mesh. Raises PlanError for what cannot be."""
    graph, mesh, request, techniques = wanted.graph, wanted.mesh, wanted.request, wanted.techniques
    total = mesh is None or isinstance(mesh, int)
    if mesh is None and request is not None:
        mesh = request.cluster.ranks
    elif mesh is None and (found := mesh_of_pins(graph)) is not None:
        mesh, total = found, False
    world = meshes(mesh_from(mesh, graph), techniques, total=total)
    inside, places = request, world.places
    if request is not None:
        # The search sees the full model on the ranks of one stage, so as many times the memory.
        limit = None if request.memory_bytes is None else places * request.memory_bytes
        cluster = within_stage(request.cluster, taken_of(request.cluster, world))
        held = max(in_flight(techniques, places))
        inside = replace(
            request, cluster=cluster, memory_bytes=limit, places=places, in_flight=held, hard=False
        )
    stop = Stop() if request is None else request.stop
    with stop.answered_by(lambda made: _in_stages(wanted, made, world)):
        made = plan_in_one_stage(
            replace(wanted, mesh=world.stage, request=inside, techniques=in_one_stage(techniques))
        )
    return _in_stages(wanted, made, world)


def split_as_found(wanted: Wanted, inside: Plan, taken: tuple[int, ...], techniques: Techniques) -> Plan:
    """The plan of a pipeline from that of the ranks which share a stage, as a search over everything has found it.
    `taken`: how many ranks of each level of the cluster follow one another."""
    request = wanted.request
    assert request is not None
    world = meshes(mesh_over(request.cluster, taken), techniques, total=False)
    cluster = within_stage(request.cluster, taken)
    assert cluster.place(world.stage).axes == inside.mesh.axes, (world.stage, inside.mesh)
    made = wanted.finished(apply(wanted.graph, inside, inside.techniques, cluster))
    return _in_stages(replace(wanted, techniques=techniques), made, world)


def plan_on_own_meshes(wanted: Wanted, given: Sequence[Mesh | int | Mapping[str, int]]) -> Plan:
    """The plan of a pipeline whose places have meshes of their own: one for each, of which it runs its stages."""
    request = wanted.request
    world, techniques = own_world(given, wanted.techniques)
    check_own(wanted.graph, techniques)
    alone, known = in_one_stage(techniques), dict[Any, Plan]()
    own: list[Plan] = []
    stop = Stop() if request is None else request.stop
    for place, mesh in enumerate(world.own):
        inside, key = request, (mesh, "")
        if request is not None:
            share = world.world.size / mesh.size  # the search sees the full model on the ranks of one place
            limit = None if request.memory_bytes is None else share * request.memory_bytes
            cluster = part_of(request.cluster, world, PipelineRank(place))
            held = max(in_flight(techniques, world.places))
            inside = replace(
                request,
                cluster=cluster,
                memory_bytes=limit,
                places=world.places,
                in_flight=held,
                hard=False,
            )
            key = (mesh, str([level.size for level in cluster.levels]))
        if key not in known:
            stop.disarm()  # each place has a search of its own
            there = pins_on(mesh, world.own, wanted.pins)
            with stop.of_a_part():
                known[key] = plan_in_one_stage(
                    replace(wanted, mesh=mesh, pins=there, request=inside, techniques=alone)
                )
        own.append(known[key])
    # Equal layers may run on unlike places: a file says each of them.
    own = [replace(plan, folds=(), stand_ins={}) for plan in own]
    made = replace(own[0], own=tuple(own), pins=dict(wanted.pins or {}))
    if request is not None:
        world = along(request.cluster, world)
    made = _in_stages(replace(wanted, techniques=techniques), made, world)
    return made.with_notes(*check_pins(wanted.graph, made))


def own_world(
    given: Sequence[Mesh | int | Mapping[str, int]], techniques: Techniques
) -> tuple[Meshes, Techniques]:
    """The meshes of a pipeline from a list of them, one for each of its ranks, and the techniques with as many stages
    where nobody said how many."""
    for place, mesh in enumerate(given):
        if mesh is None or isinstance(mesh, list | tuple):
            raise MeshError(
                f"mesh[{place}]={mesh!r} is not a mesh",
                why="a list has the mesh of each rank of a pipeline",
                hint='mesh=[{"dp": 4}, {"dp": 2, "tp": 2}]',
            )
    world = own_meshes(each_mesh(given))
    if "pipeline" not in techniques.given:
        stages = world.places
        if is_own(techniques):
            stages = parse(techniques.schedule).stages
        elif techniques.schedule in SCHEDULES:
            stages *= SCHEDULES[techniques.schedule].least
        techniques = replace(techniques, pipeline=stages, given=techniques.given | {"pipeline"})
    check_chunks(techniques, world.places)
    return world, techniques


def _in_stages(wanted: Wanted, made: Plan, world: Meshes) -> Plan:
    """A plan of the ranks that share a stage, split into stages."""
    made = staged(wanted.graph, made, wanted.techniques, world, wanted.request)
    if wanted.request is not None:
        made = within_limit(made, wanted.request)
    return made


__all__ = ["own_world", "split_as_found", "plan_in_stages", "plan_on_own_meshes"]
