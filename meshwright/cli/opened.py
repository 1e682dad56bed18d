"""A plan file together with its model: captured once, and cut as the plan says."""

from __future__ import annotations

from dataclasses import replace

from meshwright.capture import Captured
from meshwright.cli.model import Opened, open_model
from meshwright.cli.progress import Watch
from meshwright.cli.screen import err
from meshwright.compile import captured_of, check_size, lower
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.partition.price import on_cluster
from meshwright.pipeline.levels import along, part_of, taken_of, within_stage
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.planned import in_one_stage
from meshwright.plan import Plan


def captured_model(
    target: str, batch: int | None = None, sequence: int | None = None
) -> tuple[Opened, Captured]:
    """MODEL and its program, with a bar while it takes. Raises ModelError and CaptureError."""
    with Watch(err(), quiet=False) as watch:
        with watch.stage("opening the model"):
            opened = open_model(target, batch=batch, sequence=sequence)
        with watch.stage("capturing"):
            return opened, captured_of(opened.model, opened.batch, opened.loss)


def cut(captured: Captured, plan: Plan, cluster: Cluster | None = None) -> Partition:
    """What ranks run of a program under a plan.

    Raises PlanError for a plan of another model, ClusterError for a cluster of another size.
    """
    if cluster is not None:
        check_size(plan, cluster)
    if (
        cluster is not None and plan.prices is None
    ):  # made without a cluster: move values as is cheapest on this one
        plan = _priced(plan, cluster)
    return lower(captured, plan)


def _priced(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the links and prices of a cluster."""
    if not plan.own:
        return replace(plan, mesh=on_cluster(plan.mesh, cluster), prices=cluster.prices)
    world = meshes_of(plan)
    own = [_priced(one, part_of(cluster, world, place)) for place, one in enumerate(plan.own)]
    shared = {
        "meshes": tuple(one.mesh for one in own),
        "prices": cluster.prices,
        "world": along(cluster, world).world,
    }
    return replace(plan, mesh=own[0].mesh, own=tuple(replace(one, **shared) for one in own), **shared)


def in_one(captured: Captured, plan: Plan, cluster: Cluster) -> tuple[Partition, tuple[Cluster, ...]]:
    """The program of a plan with stages before it is cut into them, and the part of the cluster that runs a stage.
    Where places have meshes of their own, those of each: the program has the places' as its own."""
    world, alone = meshes_of(plan), {"stages": {}, "world": None, "techniques": in_one_stage(plan.techniques)}
    if not plan.own:
        inside = within_stage(cluster, taken_of(cluster, world))
        return cut(captured, replace(plan, **alone), inside), (inside,)
    check_size(plan, cluster)
    clusters = tuple(part_of(cluster, world, place) for place in range(world.places))
    each = tuple(
        cut(captured, replace(one, meshes=(), **alone), inside)
        for one, inside in zip(plan.own, clusters, strict=True)
    )
    return replace(each[0], own=each), clusters
