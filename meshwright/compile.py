"""The stages, one a line: capture, plan, partition. Everything public above them is in `train` and `verify`."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from meshwright.asked import check_function, check_model, folder_from
from meshwright.capture import Captured
from meshwright.capture import capture as capture_graph
from meshwright.capture.batch import leaves
from meshwright.cost.cluster import Cluster
from meshwright.cycles import seldom_collected
from meshwright.errors import CaptureError, ClusterError, DoesNotFit, MeshError, a_type
from meshwright.fewer_rows import with_batch_that_fits
from meshwright.guards import Guards
from meshwright.hollow import as_shapes
from meshwright.mesh import Mesh
from meshwright.ops.table import register
from meshwright.partition import Partition, partition
from meshwright.partition.micro_batches import nothing_to_hide
from meshwright.pipeline.actions import is_own, parse
from meshwright.pipeline.levels import along, mesh_over, part_of, taken_of, within_stage
from meshwright.pipeline.meshes import Meshes, check_chunks, meshes, own_meshes
from meshwright.pipeline.of_plan import in_flight
from meshwright.pipeline.own_meshes import check_own, check_pins, pins_on
from meshwright.pipeline.schedules import SCHEDULES
from meshwright.plan import Plan
from meshwright.predict.step_time import with_turns
from meshwright.remarks import log_remarks
from meshwright.report.plan_table import plan_text
from meshwright.request import request_for
from meshwright.search.annotations import mesh_of_pins, renumber
from meshwright.search.cost_modes import SEARCHES
from meshwright.search.deadline import Deadline
from meshwright.search.evaluate import claims_of
from meshwright.search.modes import make_plan, within_limit
from meshwright.search.pipeline.assign import check_alone, check_axis, in_one_stage, staged
from meshwright.search.pipeline.choose import (
    CHOSEN,
    beside_stages,
    may_choose_beside_stages,
    may_have_stages,
    with_stages,
)
from meshwright.search.planner import Progress, Request
from meshwright.search.techniques.apply import apply
from meshwright.techniques import NONE, Options, Techniques, techniques_from

FIRST = 1e-3  # seconds of a search whose first answer is enough
Loss = Callable[[Any, Any], torch.Tensor]
Pins = Mapping[str, Mapping[str, Any]]
OneMesh = Mesh | int | Mapping[str, int] | None
MeshLike = OneMesh | Sequence[Mesh | int | Mapping[str, int]]


NO_LOSS = "no loss was given, so it is model(batch), or model(**batch).loss of a mapping"
GIVE_LOSS = (
    "loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), or what yours is; for the command line: "
    "return model, batch, loss"
)


def default_loss(model: Any, batch: Any) -> torch.Tensor:
    """``model(**batch).loss`` for a mapping (as Hugging Face models return it), else ``model(batch)``."""
    if isinstance(batch, Mapping):
        result = model(**batch)
        return result.loss if hasattr(result, "loss") else result
    return model(batch)


def plan(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss = default_loss,
    mesh: MeshLike = None,
    mode: str | None = None,
    pins: Pins | None = None,
    cluster: Cluster | None = None,
    memory: float | None = None,
    optimizer_states: int = 2,
    space: str = "",
    inner: str = "exact",
    progress: Progress | None = None,
    time_limit: float | None = None,
    cache: str | Path | None = None,
    **techniques: Unpack[Options],
) -> Plan:
    """Choose how to cut a model. No process group is needed, and meta tensors are fine.

    `mesh`: a `Mesh`, axis sizes (``{"dp": 2, "tp": 2}``) or a number of ranks; by default that of the layouts in the
    model, else the cluster's own, else the number of launched ranks. A list of meshes is of a pipeline whose ranks have
    meshes of their own, in their order. `mode`: by default ``auto`` with a `cluster`,
    ``data_parallel`` without. `pins` cut the operators of modules by letter, ``{"blocks.*.up": {"n": "tp"}}``,
    and parameters by dim, ``{"blocks.*.up.weight": {"0": "tp"}}``.

    With a cluster the plan says what it costs (`Plan.claims`). `memory` is the limit in bytes per rank (by default the
    device's); `optimizer_states` counts the moments per parameter (2 for Adam). `space` (``a``, ``b``, ``c``) is what
    ``dynamic_programming`` searches and `inner` (``exact``, ``greedy``) how ``recursive_programming`` solves one axis.
    `progress` is told (stage, best price in seconds so far, bound). After `time_limit` seconds a search ends with the
    best so far, as it does by Ctrl-C; without any that fits by then it goes on to the first that does. `techniques`:
    see `meshwright.techniques`, as in ``optimizer_parallel=3, micro_batches=4``. Raises a subclass of MeshwrightError
    that names the operator and the line. What the plan remarks is logged: ``logging.getLogger("meshwright")``.
    """
    asked = techniques_from(techniques)
    captured = captured_of(model, batch, loss, cache)
    request = request_for(cluster, memory, optimizer_states, space, inner, progress, time_limit)
    began = time.perf_counter()
    try:
        made = plan_captured(captured, mesh, mode, pins, request, asked)
        if "search_seconds" in made.claims:  # all of it, as a user waits for it
            made = replace(made, claims={**made.claims, "search_seconds": time.perf_counter() - began})
        if request is not None and request.deadline.over:
            made = made.with_notes(
                f"the search was ended after {time_limit:g} s: this is the best plan found by then"
            )
        return log_remarks(made)
    except DoesNotFit as error:
        known = _captured.get(model)

        def planned(fewer: Any) -> Plan:  # any plan will do: it ends with the first
            again = request_for(cluster, memory, optimizer_states, space, inner, progress, FIRST)
            again = replace(again, any_fits=True) if again is not None else None
            return plan_captured(captured_of(model, fewer, loss), mesh, mode, pins, again, asked)

        told = with_batch_that_fits(error, captured.graph, batch, planned)
        if known is not None:
            _captured[model] = known
        raise told from None


@seldom_collected()
def plan_captured(
    captured: Captured,
    mesh: MeshLike,
    mode: str | None,
    pins: Pins | None,
    request: Request | None = None,
    techniques: Techniques = NONE,
) -> Plan:
    """The plan of a captured program. It keeps the capture, so that it can explain itself and take more pins."""
    if request is not None:
        request.deadline.begin()
    if isinstance(mesh, list | tuple):
        return _plan_own(captured, mesh, mode, pins, request, techniques)
    if techniques.pipeline == 1:
        check_alone(techniques)
        if mesh is not None:
            check_axis(mesh_from(mesh), techniques)
    given = _plan_staged if techniques.pipeline > 1 else _plan_in_one
    if request is None or not _is_open(captured, mesh, mode, pins, request, techniques):
        return given(captured, mesh, mode, pins, request, techniques)
    search = beside_stages if techniques.pipeline > 1 else with_stages
    return search(
        captured.graph,
        captured.folding,
        request,
        techniques,
        lambda: given(captured, None, mode, pins, request, techniques),
        lambda inside, asked, taken: _plan_chosen(captured, inside, taken, request, asked),
    )


def _is_open(
    captured: Captured,
    mesh: MeshLike,
    mode: str | None,
    pins: Pins | None,
    request: Request,
    techniques: Techniques,
) -> bool:
    """Whether a search over everything may cut the model into stages, or choose what goes with those asked for."""
    if mode not in (None, "auto") or mesh is not None or pins or mesh_of_pins(captured.graph) is not None:
        return False
    if techniques.pipeline > 1:
        return may_choose_beside_stages(techniques)
    return may_have_stages(captured.graph, request, techniques)


def _plan_in_one(
    captured: Captured,
    mesh: MeshLike,
    mode: str | None,
    pins: Pins | None,
    request: Request | None,
    techniques: Techniques,
) -> Plan:
    """The plan in one stage."""
    if mesh is None and request is not None:
        mesh = mesh_of_pins(captured.graph) or request.cluster.mesh
    chosen = mesh_from(mesh, captured)
    if mode is None:
        mode = "auto" if request is not None else "data_parallel"
    if request is not None:
        request = replace(request, techniques=techniques)
    made = make_plan(captured.graph, chosen, mode, pins, captured.folding, request)
    techniques = made.techniques if mode in SEARCHES else techniques
    cluster = request.cluster if request is not None else None
    made = apply(captured.graph, made, techniques, cluster)
    if request is not None:
        made = with_turns(captured.graph, made, request.cluster, request.optimizer_states)
    # The sums of a search are those of its space, which knows nothing of what was asked for beside it.
    summed = request if techniques.asked() or not made.claims else None
    if techniques.pieces > 1 or summed is not None:
        parts = partition(captured.graph, made)
        if techniques.pieces > 1:
            made = made.with_notes(*nothing_to_hide(parts))
        if summed is not None:
            joint = ("bound_seconds", "gaps", "space") if "joint" in made.claims.get("gaps", ()) else ()
            kept = {k: v for k, v in made.claims.items() if k in ("chosen", "search_seconds", *joint)}
            claims = claims_of(parts, summed.cluster, summed.optimizer_states)
            made = replace(made, claims={**claims, **kept})
    if request is not None:
        made = within_limit(made, request)
    return _of_captured(captured, made, request)


def _of_captured(captured: Captured, made: Plan, request: Request | None) -> Plan:
    """The plan with its equal layers folded, the remarks of the capture, and what it was made from."""
    made = made.folded(captured.graph, [(b.start, b.length, b.repeats) for b in captured.folding.blocks])
    return with_origin(made.with_notes(*captured.notes), captured, request)


def _plan_staged(
    captured: Captured,
    mesh: MeshLike,
    mode: str | None,
    pins: Pins | None,
    request: Request | None,
    techniques: Techniques,
) -> Plan:
    """The plan of a pipeline: that of the ranks which share a stage, cut into stages."""
    total = mesh is None or isinstance(mesh, int)
    if mesh is None and request is not None:
        mesh = request.cluster.ranks
    elif mesh is None and (found := mesh_of_pins(captured.graph)) is not None:
        mesh, total = found, False
    world = meshes(mesh_from(mesh, captured), techniques, total=total)
    inside, places = request, world.places
    if request is not None:
        # The search sees the whole model on the ranks of one stage, so as many times the memory.
        limit = None if request.memory_bytes is None else places * request.memory_bytes
        cluster = within_stage(request.cluster, taken_of(request.cluster, world))
        held = max(in_flight(techniques, places))
        inside = replace(
            request, cluster=cluster, memory_bytes=limit, places=places, in_flight=held, hard=False
        )
    made = plan_captured(captured, world.stage, mode, pins, inside, in_one_stage(techniques))
    return _in_stages(captured, made, world, request, techniques)


def _plan_chosen(
    captured: Captured, inside: Plan, taken: tuple[int, ...], request: Request, techniques: Techniques
) -> Plan:
    """The plan of a pipeline from that of the ranks which share a stage, as a search over everything has found it."""
    world = meshes(mesh_over(request.cluster, taken), techniques, total=False)
    cluster = within_stage(request.cluster, taken)
    assert cluster.place(world.stage).axes == inside.mesh.axes, (world.stage, inside.mesh)
    made = _of_captured(captured, apply(captured.graph, inside, inside.techniques, cluster), request)
    return _in_stages(captured, made, world, request, techniques)


def _plan_own(
    captured: Captured,
    given: Sequence[Mesh | int | Mapping[str, int]],
    mode: str | None,
    pins: Pins | None,
    request: Request | None,
    techniques: Techniques,
) -> Plan:
    """The plan of a pipeline whose places have meshes of their own: one for each, of which it runs its stages."""
    world, techniques = own_world(given, techniques)
    check_own(captured.graph, techniques)
    alone, known = in_one_stage(techniques), dict[Any, Plan]()
    own: list[Plan] = []
    for place, mesh in enumerate(world.own):
        inside, key = request, (mesh, "")
        if request is not None:
            share = world.world.size / mesh.size  # the search sees the whole model on the ranks of one place
            limit = None if request.memory_bytes is None else share * request.memory_bytes
            cluster = part_of(request.cluster, world, place)
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
            there = pins_on(mesh, world.own, pins)
            known[key] = plan_captured(captured, mesh, mode, there, inside, alone)
        own.append(known[key])
    # Equal layers may run on unlike places: a file says each of them.
    own = [replace(plan, origin=None, folds=(), stand_ins={}) for plan in own]
    made = replace(own[0], own=tuple(own), pins=dict(pins or {}))
    if request is not None:
        world = along(request.cluster, world)
    made = _in_stages(captured, made, world, request, techniques)
    return made.with_notes(*check_pins(captured.graph, made))


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
    world = own_meshes([mesh_from(mesh) for mesh in given])
    if "pipeline" not in techniques.given:
        stages = world.places
        if is_own(techniques):
            stages = parse(techniques.schedule).stages
        elif techniques.schedule in SCHEDULES:
            stages *= SCHEDULES[techniques.schedule].least
        techniques = replace(techniques, pipeline=stages, given=techniques.given | {"pipeline"})
    check_chunks(techniques, world.places)
    return world, techniques


def _in_stages(
    captured: Captured, made: Plan, world: Meshes, request: Request | None, techniques: Techniques
) -> Plan:
    """A plan of the ranks that share a stage, cut into stages."""
    made = staged(captured.graph, made, techniques, world, request)
    if request is not None:
        made = within_limit(made, request)
    return with_origin(made, captured, request)


def with_origin(plan: Plan, captured: Captured, request: Request | None = None) -> Plan:
    """The plan together with the program it was made for."""
    if request is not None:  # a plan that takes more pins begins a search of its own
        request = replace(request, deadline=Deadline(request.deadline.seconds))
    return replace(plan, origin=_Origin(captured, request))


@dataclass(frozen=True)
class _Origin:
    captured: Captured
    request: Request | None = None

    def explain(self, plan: Plan) -> str:
        return plan_text(lower(self.captured, plan))

    def pinned(self, plan: Plan, pins: Pins) -> Plan:
        given = _with_chosen(plan, plan.techniques.as_given())
        return plan_captured(self.captured, plan.meshes or plan.ranks, plan.mode, pins, self.request, given)

    def staged(self, plan: Plan, techniques: Techniques) -> Plan:
        mesh, asked = plan.meshes or plan.ranks, _with_chosen(plan, techniques)
        return plan_captured(self.captured, mesh, plan.mode, plan.pins, self.request, asked)


def _with_chosen(plan: Plan, given: Techniques) -> Techniques:
    """What was asked for, with what a search chose for the stages of a plan: it stays where the plan is made again on
    its mesh, on which nothing is chosen."""
    if not plan.stages:
        return given
    found = {k: getattr(plan.techniques, k) for k in CHOSEN if k not in given.given}
    found = {k: value for k, value in found.items() if value != getattr(given, k)}
    return replace(given, **found, given=given.given | set(found))


def rule(op: str, line: str) -> None:
    """Give an operator of your own its rule: ``mw.rule("mylib::swish", "... ~> ...")`` (`docs/add-an-op.md`).

    Every rank gives the same rules before it plans. Raises RuleError for a line that does not parse.
    """
    register(op, line)


@seldom_collected()
def lower(captured: Captured, plan: Plan) -> Partition:
    """What the ranks run under a plan."""
    return partition(captured.graph, plan)


def check_size(plan: Plan, cluster: Cluster) -> None:
    """Raise ClusterError for a cluster of another size than the plan's mesh."""
    if plan.ranks.size != cluster.ranks:
        levels = " x ".join(f"{level.size} {level.name}" for level in cluster.levels)
        raise ClusterError(
            f"the plan is for {plan.ranks.size} ranks, the cluster has {cluster.ranks}",
            why=f"the plan's mesh is {plan.ranks}; {cluster.name} is {levels}",
            hint="a cluster of the plan's size; `meshwright estimate --what-if ranks=…` plans for another",
        )


def mesh_from(mesh: MeshLike, captured: Captured | None = None) -> Mesh:
    """A mesh from what the user gave. Raises MeshError."""
    if isinstance(mesh, list | tuple):
        mesh = own_meshes([mesh_from(one) for one in mesh]).world
    match mesh:
        case Mesh():
            return mesh
        case Mapping() if mesh:
            return Mesh.of(mesh)
        case bool():
            pass  # True is an int, and no number of ranks
        case int():
            return Mesh.of(ranks=mesh)
        case None:
            found = mesh_of_pins(captured.graph) if captured is not None else None
            return found or Mesh.of(ranks=int(os.environ.get("WORLD_SIZE", "1")))
    empty = "no axes" if isinstance(mesh, Mapping) else f"{a_type(mesh)}"
    raise MeshError(
        f"mesh={mesh!r} is not a mesh",
        why=f"it is {empty}; a mesh is a number of ranks, or the sizes of named axes",
        hint='mesh=4, or mesh={"dp": 2, "tp": 2}',
    )


_captured: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Captured, Guards]] = (
    weakref.WeakKeyDictionary()
)


def captured_of(model: torch.nn.Module, batch: Any, loss: Loss, cache: str | Path | None = None) -> Captured:
    """The captured program; the last one of each model is remembered, so that plan, verify and train_step share it."""
    check_model(model)
    check_function("loss", loss, "lambda model, batch: model(batch).mean()")
    folder = folder_from(cache)
    key = (
        tuple((path, tuple(x.shape), x.dtype, x.layout) for path, x in leaves(batch)),
        loss,
        tuple(m.training for m in model.modules()),
        tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters()),
    )
    known = _captured.get(model)
    if known is not None and known[0] == key and not known[2].changed(batch):
        return known[1]
    try:
        with as_shapes(model):
            raw = capture_graph(model, batch, loss, cache=folder)
    except CaptureError as error:
        if loss is default_loss and ("scalar" in error.what or "return model(batch)" in error.where):
            raise CaptureError(error.what, why=f"{NO_LOSS}; {error.why}", hint=GIVE_LOSS) from error
        raise
    captured = Captured(renumber(raw.graph), raw.constants, raw.folding, raw.notes, raw.shape)
    _captured[model] = (key, captured, Guards.of(model, loss, batch))
    return captured


def values_of(
    model: torch.nn.Module, captured: Captured, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Input name → tensor, for parameters, buffers and constants."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, torch.Tensor] = {}
    for entry in captured.graph.inputs:
        match entry.role:
            case "parameter":
                found[entry.name] = parameters[entry.target]
            case "buffer":
                found[entry.name] = buffers[entry.target]
            case "constant":
                constant = captured.constants[entry.target]
                found[entry.name] = constant.to(device) if device is not None else constant
    return found
