"""A plan file together with its model: captured once, and cut as the plan says."""

from __future__ import annotations

from dataclasses import replace

from meshwright.capture import Captured
from meshwright.cli.model import Opened, open_model
from meshwright.cli.progress import Watch
from meshwright.cli.screen import err
from meshwright.compile import captured_of, lower
from meshwright.cost.cluster import Cluster
from meshwright.errors import ClusterError
from meshwright.partition import Partition
from meshwright.partition.price import on_cluster
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
    if cluster is not None and plan.ranks.size != cluster.ranks:
        levels = " x ".join(f"{level.size} {level.name}" for level in cluster.levels)
        raise ClusterError(
            f"the plan is for {plan.ranks.size} ranks, the cluster has {cluster.ranks}",
            why=f"the plan's mesh is {plan.ranks}; {cluster.name} is {levels}",
            hint="a cluster of the plan's size; `meshwright estimate --what-if ranks=…` plans for another",
        )
    if (
        cluster is not None and plan.prices is None
    ):  # made without a cluster: move values as is cheapest on this one
        plan = replace(plan, mesh=on_cluster(plan.mesh, cluster), prices=cluster.prices)
    return lower(captured, plan)
