"""From a mode to a plan: what the user annotates, what is propagated, what is searched with a cost model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.core.cycles import rare_collection
from meshwright.core.folding import UNFOLDED, Folding
from meshwright.core.graph import Graph
from meshwright.core.layout import TensorLayout, verify
from meshwright.core.mesh import Mesh
from meshwright.core.other_systems import called_here
from meshwright.cost.local_machine import SHARED
from meshwright.errors import DoesNotFit, LayoutError, PlanError, StrategyError, did_you_mean
from meshwright.ops.analysis import expect_factors, factors_of
from meshwright.ops.strategy import UNSHARDED, Strategy
from meshwright.plan.file import MODES
from meshwright.plan.plan import Plan, fingerprint, plain_pins
from meshwright.redistribute.steps import enough_bytes, show_bytes
from meshwright.search.annotation_checks import check_annotated
from meshwright.search.annotation_seeds import mark_seeds
from meshwright.search.annotations import PinSpec, given_values, pin_specs, region
from meshwright.search.context import Assignment, SearchContext
from meshwright.search.cost_modes import SEARCHES, priced, search
from meshwright.search.data_parallel import assign_batch, check_batch
from meshwright.search.host_tables import with_tables
from meshwright.search.layer_groups import Folded, folded, unfolding, without_folds
from meshwright.search.next_best import next_best
from meshwright.search.pins import Seeds, check_pins, module_seeds, overlaps, pinned_kinds
from meshwright.search.planner import Planner, Request, SearchResult
from meshwright.search.propagation import propagate
from meshwright.search.remarks import repeated, uneven, unknown
from meshwright.search.solve import NoStates
from meshwright.search.to_plan import input_layouts, pass_gradients_back

NO_LIMIT = "no limit, to see the plan"
ANNOTATED = ("semi_auto", "sharding_propagation", *SEARCHES)  # modes that look at pins and annotations
Pins = Mapping[str, Mapping[str, Any]]


@rare_collection()
def make_plan(
    graph: Graph,
    mesh: Mesh,
    mode: str,
    pins: Mapping[str, Mapping[str, Any]] | None = None,
    folding: Folding = UNFOLDED,
    request: Request | None = None,
    micro_batches: int = 1,
) -> Plan:
    """The plan of a graph on a mesh under a mode. `pins`: module pattern → letter → axis.

    With a `folding` each kind of layer is planned once. `request` has the cluster that prices are of, and limits; the
    modes that search need it. Beside annotations the batch is split only so far that each rank has an example for each
    of `micro_batches`. Raises PlanError for an unknown mode, StrategyError for shardings that cannot be.
    """
    _check_mode(mode, mesh, pins, request)
    check_pins(pins or {})
    _check_sizes(graph)
    if request is not None:
        mesh = request.cluster.place(mesh)
    constraints = pins if mode in ANNOTATED and pins is not None else {}
    folds = (
        folded(graph, folding, pinned_kinds(graph, constraints)) if folding.blocks else without_folds(graph)
    )
    try:
        return _make_plan(folds, mesh, mode, pins or {}, constraints, request, micro_batches)
    except (StrategyError, LayoutError, PlanError) as error:
        # What no state of equal layers allows may be possible where each has its own.
        unlike = isinstance(error.__cause__, NoStates)
        if folds.is_whole or (isinstance(error, PlanError) and not unlike):
            raise
    # the error speaks of the full model
    return _make_plan(without_folds(graph), mesh, mode, pins or {}, constraints, request, micro_batches)


def _make_plan(
    folds: Folded,
    mesh: Mesh,
    mode: str,
    pins: Pins,
    constraints: Pins,
    request: Request | None,
    micro_batches: int,
) -> Plan:
    graph = folds.graph
    context = SearchContext(graph, factors_of(graph), mesh)
    specs = pin_specs(graph) if mode in ANNOTATED else []
    remarks = overlaps(context, constraints)
    hosts = frozenset(n.name for n in graph.nodes if "host" in n.marks)
    found: SearchResult | None = None
    if mode in SEARCHES and request is not None:
        seeds = _seeds(context, specs, constraints)

        def searched(hosts: frozenset[str], offload: bool = True) -> SearchResult:
            # Why tables on the host do not help is said to nobody.
            asked = replace(request, reasons=request.reasons and offload)
            return search(Planner(context, folds, seeds, asked, hosts), mode, offload=offload)

        with request.stop.answered_by(lambda offered: _offered(offered, mode, pins)):
            if mode == "auto":
                found, hosts, moved = with_tables(folds, hosts, request, searched)
            else:
                found, moved = searched(hosts), []
        remarks += moved
        assignment, reasons = dict(found.choice.strategies), {}
        check_layouts(context, assignment)
    else:
        assignment, reasons = _assign(context, mode, specs, constraints, micro_batches)
        pass_gradients_back(context, assignment)
        check_layouts(context, assignment)
        if request is not None:
            found = priced(Planner(context, folds, {}, request, hosts), assignment)
    notes = remarks + check_annotated(context, specs, assignment) + _unused(graph, mode)
    inputs = found.choice.inputs if found else input_layouts(context, assignment)
    plan = _unfolded(folds, context, mode, assignment, inputs, request, found)
    plan = replace(
        plan, reasons=folds.unfold(reasons) if reasons else {}, **_pins_and_hosts(folds, pins, hosts)
    )
    return plan.with_notes(*notes, *_remarks(folds, plan, request))


def _pins_and_hosts(folds: Folded, pins: Pins, hosts: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a plan for pins and for nodes on the host."""
    here = frozenset(name for name, stands in folds.nodes.items() if stands in hosts)
    return {"pins": plain_pins(pins), "hosts": here}


def _offered(offered: tuple[Planner, SearchResult], mode: str, pins: Pins) -> Plan:
    """The plan of the best choice by the time the search had to end."""
    planner, found = offered
    plan = replace(
        plan_found(planner, found), mode=mode, **_pins_and_hosts(planner.folds, pins, planner.hosts)
    )
    if planner.folds.is_whole or (found.evaluation is not None and found.evaluation.timed_in_full):
        return plan
    return plan.with_notes("seconds and bytes are estimated from a few layers")


def plan_found(planner: Planner, found: SearchResult) -> Plan:
    """The plan of a choice that a search over everything has found, for the planner's mesh."""
    folds, context, assignment = planner.folds, planner.context, dict(found.choice.strategies)
    check_layouts(context, assignment)
    plan = _unfolded(folds, context, "auto", assignment, found.choice.inputs, planner.request, found)
    return plan.with_notes(*_remarks(folds, plan, planner.request))


def _unfolded(
    folds: Folded,
    context: SearchContext,
    mode: str,
    assignment: Assignment,
    inputs: Mapping[str, TensorLayout],
    request: Request | None,
    found: SearchResult | None,
) -> Plan:
    """The plan of the full graph: what was chosen for each kind of layer, for all of them."""
    full = folds.full
    plan = Plan(
        context.mesh,
        mode,
        fingerprint(full),
        folds.unfold(assignment),
        folds.unfold_inputs(inputs),
        about={n.name: (n.op, n.module) for n in full.nodes},
        prices=request.cluster.prices if request else None,
    )
    if not folds.is_whole:
        expect_factors(full, unfolding(folds, context.factors))
    return plan if found is None else _with_choice(plan, folds, found)


def _remarks(folds: Folded, plan: Plan, request: Request | None) -> list[str]:
    """List the remarks on how a plan shards the full graph."""
    full, mesh, splits = folds.full, plan.mesh, plan.strategies
    rough = (*_rough(request), *_shared(request)) if request is not None else ()
    return [*rough, *unknown(full, mesh, plan), *repeated(full, mesh, splits), *uneven(full, mesh, splits)]


def _with_choice(plan: Plan, folds: Folded, found: SearchResult) -> Plan:
    """The plan with hubs, storage and claims of a search, for every layer of the full graph."""
    names = {**folds.values, **folds.inputs}
    hubs = {name: found.choice.hubs[here] for name, here in names.items() if here in found.choice.hubs}
    again = frozenset(name for name, here in names.items() if here in found.choice.again)
    others, first = next_best(found), found.space.ties.first
    nexts = {name: others[first(here)] for name, here in folds.nodes.items() if first(here) in others}
    claims = {k: v for k, v in found.claims.items() if k != "choices"}
    plan = replace(plan, hubs=hubs, again=again, claims=claims, nexts=nexts, techniques=found.techniques)
    return plan.with_notes(*found.claims.get("choices", ()))


def _assign(
    context: SearchContext, mode: str, specs: Sequence[PinSpec], constraints: Pins, micro_batches: int
) -> tuple[Assignment, dict[str, str]]:
    """The strategy of each node, and for each why it was chosen."""
    graph = context.graph
    reasons: dict[str, str] = {}
    axes = tuple(a.name for a in context.mesh.axes if a.size > 1)
    seeds = _seeds(context, specs, constraints)
    if seeds:  # without any, all ranks are data parallel, and have too few examples
        context = replace(context, micro_batches=micro_batches)
    states = context.option_tables.start()
    pinned_axes = {a for a, nodes in seeds.items() if any(s != UNSHARDED for s in nodes.values())}
    given = given_values(graph, specs)
    match mode:
        case "data_parallel":
            check_batch(context, axes)
            assign_batch(context, states, axes, graph.nodes)
        case "semi_auto":
            inside = region(graph, specs) | {n for nodes in seeds.values() for n in nodes}
            for axis in axes:
                propagate(context, states, axis, seeds.get(axis, {}), within=inside, given=given)
            outside = tuple(n for n in graph.nodes if n.name not in inside)
            assign_batch(context, states, axes, outside)
            reasons = {n.name: "annotated" if n.name in inside else "data parallel" for n in graph.nodes}
        case "sharding_propagation":
            for pinned, run in itertools.groupby(axes, key=pinned_axes.__contains__):
                if not pinned:
                    assign_batch(context, states, tuple(run), graph.nodes)
                    continue
                for axis in run:
                    wanted = {n: s for n, s in seeds[axis].items() if s != UNSHARDED}
                    propagate(context, states, axis, wanted, given=given)
            seeded = {n for axis in pinned_axes for n, s in seeds[axis].items() if s != UNSHARDED}
            reasons = {n.name: "annotated" if n.name in seeded else "propagated" for n in graph.nodes}
    return context.option_tables.strategies(states), reasons


def _seeds(context: SearchContext, specs: Sequence[PinSpec], constraints: Pins) -> Seeds:
    return _joined(mark_seeds(context, specs), module_seeds(context, constraints))


def _check_sizes(graph: Graph) -> None:
    for entry in graph.input_of("batch"):
        if 0 in entry.type.shape:
            raise PlanError(
                f"the batch is empty: {entry.target or 'it'} is {entry.type}",
                why="a plan is made for the shapes of an example",
                hint="an example with at least one element in every dim",
            )


def within_limit(plan: Plan, request: Request) -> Plan:
    """The plan, with what a reader must know where its claimed peak, or what it has on the host, is over the limit.

    Raises DoesNotFit where the user gave that limit.
    """
    notes: list[str] = []
    peak, limit = plan.claims.get("peak_bytes"), request.memory_bytes
    searches = (
        f'mode="{plan.mode}" searches nothing that would, mode="auto" does'
        if plan.mode not in SEARCHES
        else "stages, or techniques that were requested, take more than the search knew"
    )
    asked = plan.techniques
    places = plan.ranks.size // plan.mesh.size  # of a pipeline, each of which may have several stages
    words = [f"micro_batches={2 * places}"] * (places > max(1, asked.micro_batches))
    words += ['recompute="full"'] * (asked.pipeline > 1 and asked.recompute != "full")
    less = [f"less is taken with {', '.join(words)}"] if words else []
    other = ['mode="auto"'] if plan.mode != "auto" else []
    if peak and limit and peak > limit:
        if request.hard:
            raise DoesNotFit(
                f"the plan does not fit into {show_bytes(limit)} per rank",
                why=f"{show_bytes(peak)} at {plan.claims.get('peak_where', 'its peak')}; {searches}",
                hint="; or ".join([*less, *other, enough := f"{enough_bytes(peak)} per rank", NO_LIMIT]),
                changes={enough: {"memory": peak}},
            )
        notes.append(f"does not fit: {show_bytes(peak)} on a rank, of {show_bytes(limit)}; {searches}")
        notes += less
    held, room = plan.claims.get("host_bytes"), request.cluster.host_memory_bytes
    if held and room and held > room:  # 0 where the cluster's file does not say
        notes.append(f"does not fit: {show_bytes(held)} of a rank on its host, of {show_bytes(room)}")
    return plan.with_notes(*notes)


def _rough(request: Request) -> tuple[str, ...]:
    """List the remarks on claims that rest on disturbed measurements."""
    if not (void := request.cluster.measured.void):
        return ()
    measured = request.cluster.measured.rates
    if measured and set(void) >= set(measured):
        return (
            f"seconds are worth nothing: no operator of {request.cluster.name} was measured while the machine was "
            f"quiet ({len(void)} void rows); calibrate again before this plan is compared with another",
        )
    return (
        f"seconds are rough: {len(void)} rows of the calibration of {request.cluster.name} were measured while the "
        "machine was not quiet; calibrate again",
    )


def _shared(request: Request) -> tuple[str, ...]:
    """List the remark on ranks that share the cores of this machine (`Cluster.local`)."""
    device = request.cluster.device.name
    if not (SHARED in device and device.endswith("ranks")):
        return ()
    return (f"shared cores: {device}; more ranks compute no more together, so fewer may be quicker",)


def _check_mode(mode: str, mesh: Mesh, pins: Any, request: Request | None) -> None:
    if mode in SEARCHES and request is None:
        raise PlanError(
            f"mode={mode!r} needs a cluster",
            why="it compares seconds and bytes, which depend on the devices and the links between them",
            hint='cluster=mw.Cluster.local(4), mw.Cluster.preset("h100", nodes=2), or mw.Cluster.load("cluster.yaml")',
        )
    if request is not None and request.cluster.ranks != mesh.size:
        raise PlanError(
            f"the mesh has {mesh.size} ranks, the cluster {request.cluster.ranks}",
            why=f"mesh: {mesh}; levels of {request.cluster.name}: "
            + ", ".join(f"{level.name}={level.size}" for level in request.cluster.levels),
            hint="leave out mesh= to use the cluster's own, or make the sizes agree",
        )
    if mode == "manual":
        raise PlanError(
            'mode="manual" has no plan',
            why="the model shards itself and calls its own collectives",
            hint="mw.manual_step(model, optimizer, loss=…, mesh=…)",
        )
    if mode == "parameter_server":
        raise PlanError(
            'mode="parameter_server" has no plan',
            why="the model runs eagerly, and servers hold its parameters",
            hint='mw.train_step(model, optimizer, batch, loss=…, mode="parameter_server"), or mw.parameter_server(…) '
            "(docs/how-to/use-parameter-servers.md)",
        )
    known = (*MODES, "parameter_server")
    if mode not in MODES:
        raise PlanError(
            f"there is no mode {mode!r}",
            why="modes: " + ", ".join(known),
            hint=called_here(mode) or did_you_mean(str(mode), known),
        )
    if mode == "stand_alone" and mesh.size != 1:
        raise PlanError(
            f'mode="stand_alone" runs on one rank, the mesh has {mesh.size}',
            why=f"mesh: {mesh}",
            hint='mesh=1, or mode="data_parallel"',
        )
    if mode == "data_parallel" and pins:
        raise PlanError(
            'mode="data_parallel" takes no pins',
            why=f"it splits the batch over all {mesh.size} ranks ({mesh}), which leaves none for "
            + ", ".join(map(repr, pins)),
            hint='mode="sharding_propagation" or mode="semi_auto" with the same pins',
        )


def _unused(graph: Graph, mode: str) -> list[str]:
    names = dict.fromkeys(s.name for s in pin_specs(graph) if s.constrains)
    if not names or mode != "data_parallel":
        return []
    return [
        f'mode="data_parallel" does not look at annotations: {", ".join(names)}; '
        'mode="semi_auto" or mode="sharding_propagation" does'
    ]


def check_layouts(context: SearchContext, strategies: Mapping[str, Strategy]) -> None:
    """Verify every port of every node against the laws. Raises LayoutError with the operator and its line."""
    seen: set[int] = set()  # nodes of one signature and strategy have the same ports
    for node in context.graph.nodes:
        ports = context.ports(node, strategies[node.name])
        if id(ports) not in seen:
            seen.add(id(ports))
            for layout in (*ports.inputs, *ports.outputs):
                verify(layout, context.mesh, f"%{node.name} ({node.op})")


def _joined(*many: Seeds) -> Seeds:
    result: Seeds = {}
    for seeds in many:
        for axis, nodes in seeds.items():
            result.setdefault(axis, {}).update(nodes)
    return result
