"""A pipeline may run along any level of a cluster: its mesh, what its messages cross, and what its ranks compute."""

from __future__ import annotations

import pytest

import meshwright as mw
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import techniques_from
from meshwright.cost.cluster import Cluster, Level
from meshwright.errors import PlanError
from meshwright.pipeline.levels import link_between, mesh_over, taken_of, within_stage
from meshwright.pipeline.meshes import Meshes, meshes
from tests.search.planned import GPU, built

LEVELS = (Level("node", 6, 1e9, 1e-5), Level("gpu", 4, 1e10, 1e-6))
CLUSTER = Cluster("six of four", GPU, LEVELS, 1 << 36, 1e10)


def world_of(mesh: Mesh, stages: int) -> Meshes:
    return meshes(mesh, techniques_from({"pipeline": stages}), total=False)


@pytest.mark.parametrize("taken", [(2, 1), (3, 1), (6, 1), (1, 2), (1, 4), (2, 2), (3, 4), (6, 4)])
def test_the_mesh_over_some_levels_takes_those_and_leaves_the_rest(taken: tuple[int, int]) -> None:
    places = taken[0] * taken[1]
    world = world_of(mesh_over(CLUSTER, taken), places)
    assert (world.world.size, world.places, world.stage.size) == (24, places, 24 // places)
    assert taken_of(CLUSTER, world) == taken
    inside = within_stage(CLUSTER, taken)
    assert [v.size for v in inside.levels] == [6 // taken[0], 4 // taken[1]]
    links = {a.name: a.link for a in CLUSTER.place(world.world).axes}
    for axis in inside.place(world.stage).axes:  # what shares a stage is as near as on the whole cluster
        assert axis.size == 1 or axis.link == links[axis.name]
    assert link_between(CLUSTER, taken).name == ("node" if taken[0] > 1 else "gpu")


def test_neighbours_in_a_pipeline_inside_of_nodes_are_in_one_node() -> None:
    world = world_of(mesh_over(CLUSTER, (1, 2)), 2)
    for within in range(world.stage.size):
        assert world.at(0, within) // 4 == world.at(1, within) // 4


def test_a_mesh_that_does_not_fit_the_levels_is_refused() -> None:
    with pytest.raises(PlanError, match="4 pipeline ranks over the levels"):
        taken_of(CLUSTER, world_of(Mesh.of(pp=4, dp=6), 4))
    with pytest.raises(PlanError, match="has 12 ranks, the cluster 24"):
        taken_of(CLUSTER, world_of(Mesh.of(pp=2, dp=6), 2))
    # Axes of a stage may span levels as they like.
    assert taken_of(CLUSTER, world_of(Mesh.of(pp=2, dp=4, tp=3), 2)) == (2, 1)


@pytest.mark.parametrize("order", [{"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}])
def test_messages_are_priced_by_the_links_that_the_axis_crosses(order: dict[str, int]) -> None:
    model, batch, loss = built("gpt")
    levels = (Level("node", 2, 1e6, 1e-3), Level("gpu", 2, 1e12, 1e-9))
    cluster = Cluster("far apart", GPU, levels, 1 << 36, 1e10)
    plan = mw.plan(model, batch, loss=loss, mesh=order, pipeline=2, micro_batches=2, cluster=cluster)
    assert (max(s["message"] for s in plan.claims["stages"]) > 1e-3) == (next(iter(order)) == "pp")
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_auto_lays_stages_along_the_slow_links_wherever_they_are() -> None:
    model, batch, loss = built("sequence")
    levels = (Level("node", 2, 1e10, 1e-7), Level("gpu", 2, 1e7, 1e-4))
    cluster = Cluster("slow inside", GPU, levels, 1 << 36, 0.0)
    plan = mw.plan(model, batch, loss=loss, cluster=cluster, mode="auto")
    assert plan.techniques.pipeline == 2
    world = Meshes(plan.ranks, plan.mesh)
    assert taken_of(cluster, world) == (1, 2)
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()
