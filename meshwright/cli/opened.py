"""A plan file together with its model: captured once, and cut as the plan says."""

from __future__ import annotations

from dataclasses import replace

from meshwright.capture import Captured
from meshwright.cli.model import open_model
from meshwright.cli.progress import Watch
from meshwright.cli.screen import err
from meshwright.compile import captured_of, lower
from meshwright.cost.cluster import Cluster
from meshwright.errors import ClusterError
from meshwright.partition import Partition, partition
from meshwright.partition.price import on_cluster
from meshwright.plan import Plan


def captured_model(target: str, batch: int | None = None, sequence: int | None = None) -> Captured:
    """The program of MODEL, with a bar while it takes. Raises ModelError and CaptureError."""
    with Watch(err(), quiet=False) as watch:
        with watch.stage("opening the model"):
            opened = open_model(target, batch=batch, sequence=sequence)
        with watch.stage("capturing"):
            return captured_of(opened.model, opened.batch, opened.loss)


def cut(captured: Captured, plan: Plan, cluster: Cluster | None = None) -> Partition:
    """What ranks run of a program under a plan, with the ways that are cheapest on a cluster. Raises PlanError for a
    plan of another model, ClusterError for one of another size."""
    if cluster is None:
        return lower(captured, plan)
    if plan.mesh.size != cluster.ranks:
        raise ClusterError(
            f"the plan is for {plan.mesh.size} ranks, the cluster has {cluster.ranks}",
            why=f"mesh {plan.mesh}; {cluster.name}: {' x '.join(f'{v.size} {v.name}' for v in cluster.levels)}",
            hint="a cluster of the plan's size, or --what-if ranks=… to plan again",
        )
    return partition(captured.graph, replace(plan, mesh=on_cluster(plan.mesh, cluster)), cluster.prices)
