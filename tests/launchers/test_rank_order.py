"""The planner prices an axis by the link it runs over; the launchers number ranks so that it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.cost.cluster import Cluster
from meshwright.launchers import launched
from meshwright.launchers.rank_table import RankTable
from meshwright.scheduler.members import order
from meshwright.scheduler.messages import Node

CLUSTER = Cluster.preset("h100", nodes=2, ranks_per_node=4)


def of_agents() -> list[str]:
    """As `meshwright run --nnodes 2` numbers them: the second machine came first."""
    came = [Node("b", "host1", 4, 1), Node("a", "host0", 4, 0)]
    return [node.host for node in order(came, ()) for _ in range(node.nproc)]


def of_workers() -> list[str]:
    """As the workers of a dynamic cluster, by the numbers in MS_NODE_ID, however they came."""
    came = [Node(str(n), f"host{n // 4}", 1) for n in (5, 0, 7, 3, 1, 6, 2, 4)]
    return [node.host for node in order(came, ())]


def of_slurm() -> list[str]:
    """As `srun -N 2 -n 8` numbers them in blocks."""
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "host[0-1]",
    }
    hosts = []
    for rank in range(8):
        node, local = divmod(rank, 4)
        task = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        assert not launched({**step, **task}).dealt
        hosts.append(f"host{node}")
    return hosts


def of_a_table() -> list[str]:
    table = RankTable.of({"host0": range(4), "host1": range(4)})
    return [table.place(rank)[0].address for rank in range(8)]


@pytest.mark.parametrize("hosts", [of_agents, of_workers, of_slurm, of_a_table])
def test_the_outer_axis_crosses_hosts_and_the_others_stay_within(hosts: Callable[[], list[str]]) -> None:
    host, mesh = hosts(), CLUSTER.mesh
    assert [axis.link for axis in mesh.axes] == ["node", "gpu", "gpu"]
    for axis in mesh.axes:
        for rank in range(mesh.size):
            group = mesh.group(rank, [axis.name])
            assert len({host[r] for r in group}) == (2 if axis.link == "node" else 1)
