"""The variables of each launcher as they were recorded from it, read into one record; what is half there is refused."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

import meshwright as mw
from meshwright.errors import LaunchError
from meshwright.launchers import Launched, launched
from meshwright.launchers.environment import one_of_several
from meshwright.launchers.hostlist import counts, hosts

OPEN_MPI = {  # 4.1.4: mpirun -n 2
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "294387712.0;tcp://192.0.2.2:50811;tcp6://[fd00::2]:58107",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "294387713",
    "PMIX_RANK": "1",
}
OVER_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "8"}
SLURM = {  # 22.05: srun -n 4 -N 2
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1,3",
}
BATCH = {"SLURM_JOB_ID": "8", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
PMI2 = {**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "7.0", "PMI_FD": "12"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Launched()),
        (BATCH, Launched()),  # a batch script has one process, whatever it may start
        (TORCHRUN, Launched("torchrun", 3, 8, 1, 2)),
        (OPEN_MPI, Launched("Open MPI", 1, 2, 1, 2)),
        (OVER_HOSTS, Launched("Open MPI", 1, 2, 0, 1, "192.0.2.2", 26144)),
        (MPICH, Launched("MPICH", 1, 4, 1, 4)),
        (SLURM, Launched("Slurm", 2, 4, 1, 3, "n1", 23719)),
        ({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "2000"}, Launched("Slurm", 2, 4, 1, 3, "a", 2000)),
        ({**SLURM, "SLURM_PROCID": "3"}, Launched("Slurm", 3, 4, 1, 3, "n1", 23719, dealt=True)),
        (PMI2, Launched("MPICH", 2, 4, 1, 3, "n1", 23719)),
        ({**SLURM, **ELASTIC}, Launched("torchrun", 3, 8, 1, 2)),  # srun torchrun …
        ({**OPEN_MPI, **ELASTIC}, Launched("torchrun", 3, 8, 1, 2)),
        ({**SLURM, **OPEN_MPI}, Launched("Open MPI", 1, 2, 1, 2)),  # mpirun in a job of Slurm
        ({**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2"}, Launched("torchrun", 1, 2, 1, 2)),  # a wrapper
    ],
)
def test_recorded_environments(environment: dict[str, str], found: Launched) -> None:
    assert launched(environment) == found


def test_a_launcher_that_another_one_has_started_is_one_of_several() -> None:
    for environment, name, world in ((OPEN_MPI, "Open MPI", 2), (MPICH, "MPICH", 4)):
        found = one_of_several(environment)
        assert found is not None
        assert (found.launcher, found.world) == (name, world)
    for environment in ({}, TORCHRUN, {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"}):
        assert one_of_several(environment) is None


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"RANK": "0"}, "RANK is set, WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, WORLD_SIZE is 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, "RANK_SIZE is 2, and RANK_TABLE_FILE is not set"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is 0, and no variable says how many"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "RANK is set, OMPI_COMM_WORLD_SIZE is not"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "LOCAL_SIZE is 3, OMPI_COMM_WORLD_SIZE is 2"),
        ({**MPICH, "MPI_LOCALNRANKS": "2"}, "MASTER_ADDR is not set, and MPICH"),
        ({**SLURM, "SLURM_PROCID": ""}, "SLURM_STEP_NUM_TASKS is set, SLURM_PROCID is not"),
        ({**SLURM, "SLURM_NODEID": ""}, "SLURM_NODEID is not"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,2"}, "SLURM_STEP_TASKS_PER_NODE is 1,2"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST is"),
        ({**SLURM, "MASTER_PORT": "80"}, "MASTER_PORT is '80'"),
        ({**OPEN_MPI, **MPICH}, "two launchers at once: Open MPI says .*RANK=1 of 2, MPICH PMI_RANK=1 of 4"),
        ({**OPEN_MPI, **TORCHRUN}, "two launchers at once: torchrun says RANK=3 of 8"),
    ],
)
def test_what_is_missing_or_contradicts_is_refused_by_name(environment: dict[str, str], what: str) -> None:
    with pytest.raises(LaunchError, match=what):
        launched(environment)


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"MASTER_PORT": "2000"}, "RANK and WORLD_SIZE are set, MASTER_ADDR is not"),
        ({"MASTER_ADDR": "127.0.0.1"}, "RANK and WORLD_SIZE are set, MASTER_PORT is not"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'"),
        ({"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "2000"}, "MASTER_ADDR: .* not known"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "taken"}, "MASTER_PORT is [0-9]+, and something else"),
    ],
)
def test_where_ranks_cannot_meet_they_make_no_group(
    environment: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if environment.get("MASTER_PORT") == "taken":
            environment = {**environment, "MASTER_PORT": str(listening.getsockname()[1])}
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **environment}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError, match=what):
            mw.world(2)
    assert not dist.is_initialized()


def test_lists_of_slurm() -> None:
    assert hosts("n[1-2,07],login,r[0-1]c[9-10]", "X") == (
        *("n1", "n2", "n07", "login"),
        *("r0c9", "r0c10", "r1c9", "r1c10"),
    )
    assert counts("2(x3),1", "X") == (2, 2, 2, 1)
    for text in ("", "n[", "n[2-1]", "n[a]", "n]"):
        with pytest.raises(LaunchError, match="X is"):
            hosts(text, "X")
    for text in ("", "2(x", "a", "1,,2"):
        with pytest.raises(LaunchError, match="X is"):
            counts(text, "X")
