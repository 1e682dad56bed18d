"""`meshwright estimate`: estimates a plan with some properties changed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.core.cycles import rare_collection
from meshwright.errors import ClusterError, PlanError

if TYPE_CHECKING:
    from meshwright.capture import Captured
    from meshwright.cli.model import Opened
    from meshwright.cli.progress import Watch
    from meshwright.cost.cluster import Cluster
    from meshwright.ops.factors import Factors
    from meshwright.partition import Partition
    from meshwright.plan.plan import Plan
    from meshwright.report.estimate import Estimate


@dataclass(frozen=True)
class Base:
    """The plan, model and cluster that changes start from."""

    plan: Plan
    opened: Opened
    captured: Captured
    cluster: Cluster
    optimizer_states: int
    batch: int | None
    sequence: int | None
    measured: MeasuredHere | None = None

    def estimate(self, parts: Partition, cluster: Cluster) -> Estimate:
        """The estimate of a plan, with operators measured here if that was asked for."""
        from meshwright.report.estimate import estimate

        if self.measured is not None:
            cluster = self.measured(cluster, parts)
        return estimate(parts, cluster, self.optimizer_states)


class MeasuredHere:
    """Adds to clusters the seconds of plans' operators, each measured once on the device of this machine."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._calls = watch, dict[str, tuple[float, float]]()

    def __call__(self, cluster: Cluster, parts: Partition) -> Cluster:
        """The cluster with the seconds of a plan's operators. Raises ClusterError where its device is not here."""
        import torch

        from meshwright.calibrate.calls import alone, with_calls
        from meshwright.calibrate.quiet import LIMIT, unrest
        from meshwright.cli.common import err

        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        known = {**self._calls, **cluster.measured.calls}
        cluster = replace(cluster, measured=replace(cluster.measured, calls=known))
        with self._watch, self._watch.stage("measuring operators"):
            found = with_calls(cluster, parts, device, self._watch.count)
            busy = unrest(alone(device)) if device.type == "cpu" else 1.0
        if busy > LIMIT:
            err().print(
                f"other programs used the processor ({busy:.2f}): measured times may be too long",
                style="yellow",
            )
        self._calls = dict(found.measured.calls)
        return found


@rare_collection()
def answer(base: Base, changes: Mapping[str, str], asked: Mapping[str, Any]) -> tuple[Estimate, str, float]:
    """The estimate under changes of the shape and the ranks and under the techniques that are `asked` for, a remark,
    and the seconds that went into capturing. Raises PlanError."""
    from meshwright.cli.model import cut

    plan, opened, captured, cluster = base.plan, base.opened, base.captured, base.cluster
    if plan.own and "ranks" in changes:
        raise PlanError(
            f"ranks={changes['ranks']} for a plan whose stages have meshes of their own",
            why=f"its meshes are {plan.mesh_text}, and a number does not say which of them changes",
            hint="meshwright plan --mesh dp=8/dp=4,tp=2, a mesh for each rank of the pipeline",
        )
    remarks, capturing = [], 0.0
    if "batch" in changes or "seq" in changes:
        began = time.perf_counter()
        opened, captured = _other_shape(base, changes)
        capturing = time.perf_counter() - began
        if "ranks" not in changes:
            plan = _moved(plan, captured, changes)
    in_stages = not plan.stages and asked.get("pipeline", 1) > 1  # stages that the plan does not have
    if "ranks" in changes or in_stages:
        cluster = resized(cluster, int(changes.get("ranks", cluster.ranks)))
        plan, remark = _elsewhere(base, opened, captured, cluster, changes, asked if in_stages else {})
        remarks.append(remark)
    if asked and not in_stages:
        plan, remark = _with(base, plan, captured, cluster, asked)
        remarks += [remark] if remark else []
    found = base.estimate(cut(captured, plan, cluster), cluster)
    return found, "; ".join(remarks), capturing


def _with(
    base: Base, plan: Plan, captured: Captured, cluster: Cluster, asked: Mapping[str, Any]
) -> tuple[Plan, str]:
    from meshwright.planning.search_request import request_for
    from meshwright.predict.step_time import with_turns
    from meshwright.report.what_if import changed, changed_in_stages

    factors = _factors(captured)
    if plan.stages:
        request = request_for(cluster, optimizer_states=base.optimizer_states)
        return changed_in_stages(plan, captured.graph, factors, asked, request)
    plan, remark = changed(plan, captured.graph, factors, asked, cluster)
    return with_turns(captured.graph, plan, cluster, base.optimizer_states), remark


def _other_shape(base: Base, changes: Mapping[str, str]) -> tuple[Opened, Captured]:
    from meshwright.cli.model import open_model
    from meshwright.compile import captured_of
    from meshwright.errors import ModelError

    rows = int(changes["batch"]) if "batch" in changes else base.batch
    tokens = int(changes["seq"]) if "seq" in changes else base.sequence
    try:
        opened = open_model(base.opened.target, batch=rows, sequence=tokens)
    except ModelError:
        if "seq" in changes or "batch" not in changes:
            raise
        opened = replace(base.opened, batch=with_rows(base.opened.batch, int(changes["batch"])))
    return opened, captured_of(opened.model, opened.batch, opened.loss)


def with_rows(batch: Any, rows: int) -> Any:
    """The batch with another number of rows, by repeating its own, for a function that does not take `batch`."""
    from collections import Counter

    import torch

    from meshwright.capture.pytree import leaves, map_leaves

    leading = [x.shape[0] for _, x in leaves(batch) if x.dim()]
    if not leading:
        raise PlanError("the batch has no dim that counts rows", why="none of its tensors has a dim")
    size = Counter(leading).most_common(1)[0][0]
    index = torch.arange(rows) % size
    return map_leaves(batch, lambda x: x[index.to(x.device)] if x.dim() and x.shape[0] == size else x)


def _moved(plan: Plan, captured: Captured, changes: Mapping[str, str]) -> Plan:
    from meshwright.report.what_if import transferred

    what = ", ".join(f"{k}={changes[k]}" for k in ("batch", "seq") if k in changes)
    return transferred(plan, captured.graph, _factors(captured), what)


def _factors(captured: Captured) -> Factors:
    from meshwright.ops.analysis import factors_of

    return factors_of(captured.graph)


def _elsewhere(
    base: Base,
    opened: Opened,
    captured: Captured,
    cluster: Cluster,
    changes: Mapping[str, str],
    asked: Mapping[str, Any],
) -> tuple[Plan, str]:
    """A plan for other ranks and how it came about: with the shardings of this one where they can be, which takes no
    time; planned again where they cannot, or where stages are asked for that this one does not have."""
    if asked:
        return _planned_again(base, opened, cluster, asked)
    try:
        return _same_cuts(base, captured, cluster, changes)
    except PlanError as error:
        plan, remark = _planned_again(base, opened, cluster, {})
        return plan, f"{remark}, since {error.what}"


def _same_cuts(
    base: Base, captured: Captured, cluster: Cluster, changes: Mapping[str, str]
) -> tuple[Plan, str]:
    from meshwright.core.mesh import Mesh
    from meshwright.pipeline.meshes import meshes
    from meshwright.report.reshape_plan import on_other_ranks

    sizes = scaled(base.plan, cluster.ranks, base.cluster)
    plan = base.plan if captured is base.captured else _moved(base.plan, captured, changes)
    mesh, world = cluster.mesh if sizes is None else cluster.place(Mesh.of(sizes)), None
    if plan.stages:
        staged = meshes(mesh, plan.techniques, total=False)
        mesh, world = staged.stage, staged.world
    found = on_other_ranks(plan, captured.graph, mesh, world)
    return found, "the same shardings; meshwright plan may find better ones for these ranks"


def _planned_again(
    base: Base, opened: Opened, cluster: Cluster, asked: Mapping[str, Any]
) -> tuple[Plan, str]:
    import meshwright as mw
    from meshwright.planning.log_remarks import shown_elsewhere

    given = {**base.plan.techniques.non_defaults(), **asked}
    stages = asked.get("pipeline", 1)  # on ranks of their own
    with shown_elsewhere():
        plan = mw.plan(
            opened.model,
            opened.batch,
            loss=opened.loss,
            mesh=scaled(base.plan, cluster.ranks, base.cluster, stages)
            or (cluster.mesh if stages == 1 else None),
            mode=base.plan.mode,
            pins=dict(base.plan.pins) or None,
            cluster=cluster,
            optimizer_states=base.optimizer_states,
            **given,
        )
    return plan, f"planned again by {plan.mode}"


def scaled(plan: Plan, ranks: int, cluster: Cluster, stages: int = 1) -> dict[str, int] | None:
    """The mesh of a plan for another number of ranks, or for so many `stages` on ranks of their own: its first axis
    (over the slowest links) takes the change; in a pipeline the first of those that share a stage.

    None for a plan on the cluster's own levels, which change with the cluster. Raises PlanError.
    """
    sizes = {name: plan.mesh.count(run) for name, run in plan.mesh.names}
    if not plan.stages and list(sizes) == [level.name for level in cluster.levels]:
        return None
    outer = {n: plan.ranks.count(run) for n, run in plan.ranks.names if n not in sizes}  # of the pipeline
    fixed = math.prod(outer.values()) * stages
    first, *others = sizes
    rest = fixed * (plan.mesh.size // sizes[first])
    if ranks % rest:
        raise PlanError(
            f"the mesh {plan.ranks} cannot have {ranks} ranks"
            + (f" in {stages} stages" if stages > 1 else ""),
            why=f"the axes {', '.join([*outer, *others])} have {rest}, and {ranks} is no multiple of it"
            if stages == 1
            else f"{stages} stages of the axes {', '.join(others) or first} have {rest} ranks at least",
            hint=f"ranks={max(1, ranks // rest) * rest}",
        )
    return {**outer, **sizes, first: ranks // rest}


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """The same machines, more or fewer of them: the outermost level takes the change, below one unit the next inner.

    Raises ClusterError for a number that does not fill units of a level.
    """
    from meshwright.core.mesh import MOST_RANKS

    if ranks > MOST_RANKS:
        raise ClusterError(f"{ranks:,} ranks", why=f"at most {MOST_RANKS:,} are planned for")
    levels = list(cluster.levels)
    for at in range(len(levels)):
        inner = cluster.ranks
        for level in levels[: at + 1]:
            inner //= level.size
        if ranks >= inner or at == len(levels) - 1:
            if ranks % inner:
                raise ClusterError(
                    f"{cluster.name} cannot have {ranks} ranks",
                    why=f"a {levels[at].name} has {inner}",
                    hint=f"ranks={max(1, ranks // inner) * inner}",
                )
            kept = [replace(levels[at], size=ranks // inner), *levels[at + 1 :]]
            return replace(cluster, levels=tuple(kept))
    raise AssertionError("a cluster has a level")


__all__ = ["Base", "MeasuredHere", "answer", "resized", "scaled", "with_rows"]
