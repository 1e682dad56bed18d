"""Whether a model is better cut into stages: the joint search's answer, made into a plan and predicted as any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.blocks import Folding
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.graph import Graph
from meshwright.ops.analysis import factors_of
from meshwright.ops.batch import by_micro_batch
from meshwright.pipeline.meshes import AXIS
from meshwright.plan import Plan
from meshwright.search.folded import folded, whole
from meshwright.search.joint.stages import Staged, stages
from meshwright.search.options import Scene
from meshwright.search.planner import Planner, Request
from meshwright.search.techniques.layers import layers_of
from meshwright.techniques import Techniques

NEAR = 0.1  # of the bound: a plan that is nearer is not looked at again
PLANNED = 3  # pipelines that are planned and predicted in full
WORTH = 0.05  # of the step: what stages must save


def may_have_stages(graph: Graph, request: Request, techniques: Techniques) -> bool:
    """Whether stages are open: not said by the user, exact, and beside nothing that the search for them does not
    price."""
    if "pipeline" in techniques.given or request.cluster.ranks == 1 or request.judge is None:
        return False
    unpriced = techniques.offload or techniques.slice_activation or techniques.interleave > 1
    if unpriced or any("host" in n.marks for n in graph.nodes):
        return False
    if any(level.name.startswith(AXIS) for level in request.cluster.levels):
        return False  # their axes would have the names of the pipeline's
    return not by_micro_batch(graph, factors_of(graph))


def with_stages(
    graph: Graph,
    folding: Folding,
    request: Request,
    techniques: Techniques,
    plain: Callable[[], Plan],
    in_stages: Callable[[Techniques, tuple[int, ...]], Plan],
) -> Plan:
    """The plan in one stage, or that in several where it alone fits or is quicker. `plain` makes the first, `in_stages`
    the other for techniques that say how many, and for how many ranks of each level of the cluster follow one another.

    Raises the PlanError of `plain` where neither fits.
    """
    made: Plan | None = None
    refused: PlanError | None = None
    try:
        made = plain()
    except PlanError as error:
        refused = error
    if made is not None and min(made.claims.get("gaps", {}).get(k, 1.0) for k in ("joint", "step")) <= NEAR:
        return made
    enough = (1 - WORTH) * made.claims["step_seconds"] if made is not None else float("inf")
    request = replace(request, techniques=techniques)
    before = f"{enough / (1 - WORTH):.4g} s in one stage" if made is not None else "nothing fits in one stage"
    best: Plan | None = None
    several: dict[tuple[Techniques, tuple[int, ...]], Staged] = {}
    for found in _searched(graph, folding, request, enough):
        several.setdefault((_asked(found, techniques), found.outer.taken), found)
    for (asked, taken), found in list(several.items())[:PLANNED]:
        try:
            other = in_stages(asked, taken)
        except PlanError:
            continue
        if _better(other, request, best.claims["step_seconds"] if best is not None else enough):
            given = replace(other.techniques, given=techniques.given)
            note = f"auto chose {other.techniques.pipeline} stages, {found.outer.schedule.name}: {before}"
            best = replace(other, techniques=given).with_notes(note)
    if best is not None:
        return best
    if made is None:
        assert refused is not None
        raise refused
    return made


def _searched(graph: Graph, folding: Folding, request: Request, enough: float) -> list[Staged]:
    folds = folded(graph, folding) if folding.blocks else whole(graph)
    factors = factors_of(folds.graph)

    def planner(cluster: Cluster) -> Planner:
        inside = replace(request, cluster=cluster)
        return Planner(Scene(folds.graph, factors, cluster.mesh), folds, {}, inside)

    layers = len({layer.name for layer in layers_of(graph)})
    return stages(request.cluster, planner, layers, enough=enough)


def _asked(found: Staged, techniques: Techniques) -> Techniques:
    """The techniques that say what was found."""
    chosen = found.found.techniques
    said = {
        "pipeline": found.outer.stages,
        "schedule": found.outer.schedule.name,
        "micro_batches": chosen.micro_batches,
        "recompute": chosen.recompute,
    }
    return replace(techniques, **said, given=techniques.given | set(said))


def _better(plan: Plan, request: Request, enough: float) -> bool:
    limit = request.memory_bytes
    fits = limit is None or plan.claims["peak_bytes"] <= limit
    return fits and plan.claims["step_seconds"] < enough


__all__ = ["may_have_stages", "with_stages"]
