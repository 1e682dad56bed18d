"""Decides whether to split a model into stages: makes the joint search's answer into a plan and predicts it as any
other."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace

from meshwright.core.folding import Folding
from meshwright.core.graph import Graph
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import OPTIMIZER, Techniques
from meshwright.cost.cluster import Cluster
from meshwright.cost.operator_tables import PRODUCTS
from meshwright.errors import DoesNotFit, PlanError
from meshwright.ops.analysis import factors_of
from meshwright.ops.batch import batch_rows, example_reducers
from meshwright.pipeline.meshes import AXIS
from meshwright.plan.plan import Plan
from meshwright.search.budget import STAGES, TECHNIQUES
from meshwright.search.compute_bound import Least
from meshwright.search.context import SearchContext
from meshwright.search.equal_layers import ties_of
from meshwright.search.in_one_stage import plan_in_one_stage
from meshwright.search.joint.dimensions import pieces_of
from meshwright.search.joint.front import Front
from meshwright.search.joint.pareto import stage_front
from meshwright.search.layer_groups import folded
from meshwright.search.modes import plan_found
from meshwright.search.pipeline.bounds import Bounds
from meshwright.search.pipeline.configurations import SEARCHED, Outer
from meshwright.search.pipeline.explain import explain_stages
from meshwright.search.pipeline.in_stages import plan_in_stages, split_as_found
from meshwright.search.pipeline.stages import Staged, stages
from meshwright.search.pipeline.uneven import Uneven
from meshwright.search.planner import Planner, Request
from meshwright.search.techniques.layers import layers_of
from meshwright.search.wanted import Wanted

# What a search chooses for stages.
CHOSEN = ("pipeline", "schedule", "micro_batches", "recompute", "slice_activation", "offload")


def may_have_stages(graph: Graph, request: Request, techniques: Techniques) -> bool:
    """True if stages are open: not fixed by the user, exact, and without options that the search for them cannot
    price."""
    return "pipeline" not in techniques.given and not _unpriced(graph, request, techniques)


def may_choose_beside_stages(techniques: Techniques) -> bool:
    """True if an option that accompanies the user's stages is open: their schedule, micro-batches, recompute."""
    if techniques.pipeline == 1 or {"schedule", "micro_batches", "recompute"} <= techniques.given:
        return False
    return techniques.schedule in ("", *SEARCHED)


def _unpriced(graph: Graph, request: Request, techniques: Techniques) -> str:
    """Why a search for stages does not know what a plan takes, if so."""
    if request.cluster.ranks == 1 or not request.simulate:
        return "there is nothing to simulate"
    if unpriced := sorted(set(techniques.offload) - {OPTIMIZER}):
        return f"the search for stages does not price offload={unpriced[0]!r}"
    if techniques.interleave > 1:
        return f"the search for stages does not price interleave={techniques.interleave}"
    if any("host" in n.marks for n in graph.nodes):
        return "the search for stages does not price operators on the host"
    if any(level.name.startswith(AXIS) for level in request.cluster.levels):
        return f"a level of the cluster is called as the axis of stages is, {AXIS}"
    if inexact := example_reducers(graph, factors_of(graph)):
        return f"%{inexact[0].name} ({inexact[0].op}) looks at all examples together, micro-batches would be inexact"
    return ""


def with_stages(wanted: Wanted) -> Plan:
    """The plan in one stage, or that in several where it alone fits or is quicker.

    Ended early it is the best so far. Raises the PlanError of one stage where neither fits.
    """
    request, techniques = _request(wanted), wanted.techniques
    made, refused = _tried(plan_in_one_stage, wanted)
    world = _World(wanted.graph, wanted.folding, replace(request, techniques=techniques))
    gaps = made.claims.get("gaps", {}) if made is not None else {}
    if made is not None and (
        request.stop.now(known=True) or min(gaps.get(k, 1.0) for k in ("joint", "step")) <= STAGES.near
    ):
        return world.bounded(made, made, solves=0)

    def refuse() -> Plan:
        assert refused is not None
        raise refused

    return _searched(wanted, world, made, made, refuse)


def beside_stages(wanted: Wanted) -> Plan:
    """The plan in as many stages as the user asked for, under the quickest of what is open beside them. That with
    nothing chosen is looked at where the user said the micro-batches, too, and is the answer where nothing else
    fits."""
    graph, request, techniques = wanted.graph, _request(wanted), wanted.techniques
    nothing = "auto chose no schedule, micro-batches or recompute for these stages"
    if why := _unpriced(graph, request, techniques):
        return plan_in_stages(wanted).with_notes(f"{nothing}: {why}")
    # What does not fit as it is may do with what is chosen.
    alone, refused = _tried(plan_in_stages, wanted) if "micro_batches" in techniques.given else (None, None)
    made = alone if alone is not None and _fits(alone, request) else None
    world = _World(
        graph,
        wanted.folding,
        replace(request, techniques=replace(techniques, pipeline=1, schedule="", stages=())),
    )
    world.layers = max(world.layers, techniques.pipeline)

    def as_asked() -> Plan:
        if refused is not None:
            raise refused
        return (alone or plan_in_stages(wanted)).with_notes(f"{nothing}: none of what it looked at fits")

    return _searched(wanted, world, made, None, as_asked)


def _request(wanted: Wanted) -> Request:
    assert wanted.request is not None
    return wanted.request


def _tried(plan: Callable[[Wanted], Plan], wanted: Wanted) -> tuple[Plan | None, PlanError | None]:
    """Return a plan, or the error that prevented it."""
    try:
        return plan(wanted), None
    except PlanError as error:
        return None, error


def _searched(
    wanted: Wanted,
    world: _World,
    made: Plan | None,
    alone: Plan | None,
    otherwise: Callable[[], Plan],
) -> Plan:
    """The best plan in stages, else what is `made`, with its bound; `alone` is the plan in one stage, `otherwise` gives
    the answer where there is none."""
    if made is None:
        world.request.stop.disarm()  # what was seen to fit is no answer
    else:
        world.request.stop.arm()
    chosen = _best(wanted, world, made) or made
    return otherwise() if chosen is None else world.bounded(chosen, alone)


def _best(wanted: Wanted, world: _World, made: Plan | None) -> Plan | None:
    """The best plan in stages that is worth it, if any is; ended early, the best so far. Where none fits after all, the
    search goes on below what it took them for."""
    best: Plan | None = None
    slow: dict[object, float] = {}
    for _ in range(STAGES.smaller_limits):
        over: list[float] = []
        best = _quickest(wanted, world, made, over, slow)
        if best is not None or not over or world.request.stop.now():
            break
        world = world.within((1 - STAGES.limit_step) * min(over))
    return best


def _quickest(
    wanted: Wanted,
    world: _World,
    made: Plan | None,
    over: list[float],
    slow: dict[object, float],
    hurried: bool = True,
) -> Plan | None:
    """The best plan in stages within the limit of a world; `over` gets what was expected of those that do not fit, and
    `slow` how many times as long as predicted each configuration takes. `hurried`: whether the search for
    configurations may end before any of them is planned."""
    if made is None and world.least_bytes > world.limit:
        return None
    enough = (1 - STAGES.worth) * made.claims["step_seconds"] if made is not None else float("inf")
    before = "nothing fits in one stage"
    if made is not None:
        before = f"{made.claims['step_seconds']:.4g} s in one stage"
    best: Plan | None = None
    several: dict[tuple[Techniques, tuple[int, ...]], Staged] = {}
    request, techniques, stop = world.request, wanted.techniques, world.request.stop
    pipelines = stages(
        request.cluster,
        world.front,
        world.layers,
        enough=enough,
        limit=world.limit,
        least=world.bounds.mean,
        uneven=world.uneven_share,
        examples=min(batch_rows(world.folds.graph), default=TECHNIQUES.micro_batches),
        schedules=(techniques.schedule,) if techniques.schedule else tuple(SEARCHED),
        asked=techniques.pipeline if "pipeline" in techniques.given else 0,
        ended=lambda known: stop.now(known and hurried),
    )
    for found in pipelines:
        several.setdefault((_asked(found, techniques), found.outer.taken), found)
    planned, fitting = 0, list[tuple[Staged, float]]()
    most = STAGES.planned_of_small if len(world.folds.full.nodes) <= STAGES.small_nodes else STAGES.planned
    late: dict[str, float] = {}  # by how much the search predicted too little of others under this schedule
    for (asked, taken), found in several.items():
        # Those that do not fit after all are no answer: there may be one further on, as a smaller limit would show.
        if best is not None and found.seconds >= best.claims["step_seconds"]:
            break
        if stop.now() or (planned >= most and (best is not None or made is not None)):
            break
        name, shape = found.outer.schedule.name, (found.outer, asked.micro_batches)
        if made is not None and found.seconds * late.get(name, slow.get(shape, 1.0)) >= enough:
            continue
        planned += 1
        try:
            inside = plan_found(world.planner(found.outer.inside(request.cluster)), found.found)
            other = split_as_found(wanted, inside, taken, asked)
        except DoesNotFit:
            over.append(found.peak_bytes)
            continue
        except PlanError:
            continue
        step = other.claims["step_seconds"]
        lag = step / found.seconds
        late[name] = min(lag, late.get(name, lag))
        slow[shape] = min(lag, slow.get(shape, lag))
        if not _fits(other, _request(wanted)):
            over.append(found.peak_bytes)
            continue
        if step >= enough:
            continue
        fitting.append((found, step))
        if best is None or step < best.claims["step_seconds"]:
            given = replace(other.techniques, given=techniques.given)
            note = f"auto chose {asked.pipeline} stages, {name}: {before}"
            notes = [] if "pipeline" in techniques.given else [note]
            # Those planned so far are known from their plans; one that does not fit after all is no next best.
            known = [replace(one, seconds=found.seconds + (each - step)) for one, each in fitting]
            rest = [*known, *list(several.values())[planned:]]
            told = explain_stages(found, rest, techniques.given)
            best = replace(other, techniques=given).with_notes(*notes, *told, *_unseen(techniques, request))
            stop.offer(step, best)
            request.report(f"{other.techniques.pipeline} stages", best.claims["step_seconds"], None)
    if best is None and made is None and hurried and stop.now(known=True):
        return _quickest(wanted, world, made, over, slow, hurried=False)  # none of those found by then fits
    return best


class _World:
    """State that searches for stages share: planners of the parts of a cluster, and bounds."""

    def __init__(self, graph: Graph, folding: Folding, request: Request) -> None:
        self.request = replace(request, in_stages=True)
        self.limit = request.memory_bytes or math.inf
        self.folds = folded(graph, folding)
        self.factors = factors_of(self.folds.graph)
        products = sum(n.op in PRODUCTS and any(n.needs_grad) for n in graph.nodes)
        self.layers = len({layer.name for layer in layers_of(graph)}) or products
        self._planners: dict[tuple[int, ...], Planner] = {}
        self._fronts: dict[Planner, Front] = {}

    def within(self, memory_bytes: float) -> _World:
        """The same with another limit: what was found of the parts of the cluster stays."""
        other = copy.copy(self)
        other.limit = memory_bytes
        return other

    def planner(self, cluster: Cluster) -> Planner:
        """The planner of the ranks that share a stage."""
        sizes = tuple(level.size for level in cluster.levels)
        if sizes not in self._planners:
            # Without axes of one rank, as the mesh of a plan's stages is.
            axes = {level.name: level.size for level in cluster.levels if level.size > 1}
            mesh = cluster.place(Mesh.of(axes or {"ranks": 1}))
            context = SearchContext(self.folds.graph, self.factors, mesh)
            request, like = replace(self.request, cluster=cluster), next(iter(self._planners.values()), None)
            self._planners[sizes] = Planner(context, self.folds, {}, request, like=like)
        return self._planners[sizes]

    def front(self, cluster: Cluster) -> Front:
        """The choices of the ranks that share a stage, and what was simulated of them."""
        planner = self.planner(cluster)
        if planner not in self._fronts:
            self._fronts[planner] = stage_front(planner)
        return self._fronts[planner]

    @property
    def least_bytes(self) -> float:
        """What the busiest rank of no pipeline has less of: its share of the weights, which stay on the devices."""
        weights = self.folds.full.input_of("parameter")
        return sum(entry.type.size_bytes for entry in weights) / self.request.cluster.ranks

    @functools.cached_property
    def bounds(self) -> Bounds:
        """Bounds of all configurations of stages."""
        request, graph = self.request, self.folds.graph
        least = Least(graph, self.factors, ties_of(self.folds), request.cluster, request.optimizer_states)
        asked = request.techniques
        pieces: tuple[int, ...] = (asked.micro_batches,)
        if "micro_batches" not in asked.given:
            pieces = pieces_of(graph, self.factors, asked.interleave).values
        return Bounds(request.cluster, self.layers, pieces, least, self.planner)

    def uneven_share(self, outer: Outer, micro_batches: int) -> float:
        """Return about how much longer the slowest rank of a pipeline computes than the mean of them.

        The stages of an interleaved rank even each other out, but ranks have different numbers of layers. A zero-bubble
        V has no idle time in which a rank could wait for the slower of its two.
        """
        parts = outer.stages if outer.schedule.name == "zero_bubble_v" else outer.ranks
        return self._uneven.share(parts, self.request.cluster.ranks // outer.ranks * micro_batches)

    @functools.cached_property
    def _uneven(self) -> Uneven:
        return Uneven(self.folds, self.bounds.least)

    def bounded(self, plan: Plan, alone: Plan | None, solves: int = STAGES.bound_solves) -> Plan:
        """The plan with how far from the least of all configurations it is; `alone`: the plan in one stage; `solves`:
        chains of shardings that are solved for it, none where the search was ended early."""
        solves = 0 if self.request.stop.now() else solves
        bounds, asked = self.bounds, self.request.techniques
        floor = bounds.least.in_one(1)
        if alone is not None:
            floor = max(floor, alone.claims.get("bound_seconds", 0.0))
        if "interleave" not in asked.given and 2 in pieces_of(self.folds.graph, self.factors, 1).values:
            floor = min(floor, bounds.least.in_one(2))  # copies that take turns hide what others wait for
        step = plan.claims["step_seconds"]
        found = bounds.all(floor, step, solves)
        kept = {"sum", "memory", "step"} if plan is alone else {"sum", "memory"}
        gaps = {k: v for k, v in plan.claims.get("gaps", {}).items() if k in kept}
        gaps["joint"] = max(0.0, step / found.seconds - 1)
        told = [(alone or plan).claims.get("space", "")]
        if found.configurations:
            told += [
                f"{found.configurations:,} configurations of stages, levels, schedules and micro-batches"
            ]
        space = "; ".join(filter(None, told))
        claims = {**plan.claims, "bound_seconds": found.seconds, "gaps": gaps, "space": space}
        return replace(plan, claims=claims)


def _unseen(techniques: Techniques, request: Request) -> list[str]:
    """Remark on open options that the search for stages left out."""
    if "offload" in techniques.given or not request.cluster.host_bytes_per_s:
        return []
    return ["auto looked at stages without activations and parameters on the host"]


def _asked(found: Staged, techniques: Techniques) -> Techniques:
    """The techniques that say what was found."""
    chosen = found.found.techniques
    said = {
        "pipeline": found.outer.stages,
        "schedule": found.outer.schedule.name,
        "micro_batches": chosen.micro_batches,
        "recompute": chosen.recompute,
        "slice_activation": chosen.slice_activation,
        "offload": chosen.offload,
    }
    return replace(techniques, **said, given=techniques.given | set(said))


def _fits(plan: Plan, request: Request) -> bool:
    return request.memory_bytes is None or plan.claims["peak_bytes"] <= request.memory_bytes


__all__ = ["CHOSEN", "beside_stages", "may_choose_beside_stages", "may_have_stages", "with_stages"]
