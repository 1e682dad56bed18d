"""Reads the variables of every launcher into one record.

A launcher is a row of `LAUNCHERS`: the names of its variables, and where rank 0 is. Rows that are set must agree,
unless one is known to start the other (`torchrun` in a step of Slurm). Half of a row is refused, by the name of the
variable, before anything is connected.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launchers import hostlist, rank_table
from meshwright.launchers.interfaces import port_of
from meshwright.launchers.rank_table import VARIABLE

PORT = 29500  # where rank 0 waits unless something better is known, as torch's
PORTS = range(20000, 30000)  # of jobs that have a name: below those that systems give to outgoing connections
Environment = Mapping[str, str]
URI_ADDRESS = re.compile(r";tcp://([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Launched:
    """Rank `rank` of `world`. `launcher`: empty for a process that was started by hand. `local_rank` of `local_world`
    on this machine; 0 ranks where that is unknown. `address` and `port`: where rank 0 waits for the others; empty where
    all ranks are on this machine, or torch reads them itself. `dealt`: ranks go to machines in turn. `job`: its name,
    where it has one."""

    launcher: str = ""
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 0
    address: str = ""
    port: int = 0
    dealt: bool = False
    job: str = ""

    @property
    def alone(self) -> bool:
        """Return whether all ranks are on this machine."""
        return self.local_world == self.world


def _slurm_address(env: Environment) -> str:
    variable = "SLURM_STEP_NODELIST"
    return hostlist.hosts(env[variable], variable)[0] if env.get(variable) else ""


def _open_mpi_address(env: Environment) -> str:
    """The machine of mpirun, where its first rank is unless the hosts say otherwise; rank 0 checks it."""
    match = URI_ADDRESS.search(env.get("OMPI_MCA_orte_hnp_uri", ""))
    return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class Launcher:
    """`mark`: any of these says that the launcher was here. `within`: launchers that may have started it, with another
    rank and size. `job`: what together names the job."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    mark: tuple[str, ...]
    within: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    address: Callable[[Environment], str] = lambda env: ""


TORCHRUN = "torchrun"
DYNAMIC = "dynamic cluster"
ROLE = "MS_ROLE"  # of this process in a dynamic cluster
WORKERS = "MS_WORKER_NUM"  # of that cluster
LAUNCHERS = (
    Launcher(TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("RANK", "WORLD_SIZE")),
    Launcher(
        "Open MPI",
        *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        mark=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        within=("Slurm",),
        job=("PMIX_NAMESPACE",),
        address=_open_mpi_address,
    ),
    Launcher(  # and Intel MPI, Cray, srun --mpi=pmi2: all that speak PMI
        "MPICH",
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        mark=("PMI_RANK", "PMI_SIZE"),
        within=("Slurm",),
    ),
    Launcher(
        "Slurm",
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
        mark=("SLURM_STEP_NUM_TASKS",),  # of a step; the others are set in batch scripts, too
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        address=_slurm_address,
    ),
)


def launched(environment: Environment | None = None) -> Launched:
    """Which rank this process is, by the environment. Raises LaunchError with the name of the variable that is missing,
    no number, or contradicts another one."""
    env = {k: v for k, v in (os.environ if environment is None else environment).items() if v}
    rows = [row for row in LAUNCHERS if any(name in env for name in row.mark)]
    if rows and ROLE in env and "TORCHELASTIC_RUN_ID" not in env:
        raise LaunchError(
            f"two launchers at once: {rows[0].name} sets {rows[0].world}, and {ROLE} is {env[ROLE]}",
            hint=f"unset {ROLE}, or {rows[0].rank} and {rows[0].world}",
        )
    if not rows:
        if ROLE in env:
            return _of_cluster(env)
        if "PMIX_RANK" in env:
            raise LaunchError(
                f"PMIX_RANK is {env['PMIX_RANK']}, and no variable says how many ranks there are",
                hint="set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in what starts the ranks",
            )
        if WORKERS in env:
            raise LaunchError(
                f"{WORKERS} is set, {ROLE} is not",
                why="without it this process would be a job of one rank",
                hint=f"{ROLE}=MS_WORKER, or unset {WORKERS}",
            )
        if VARIABLE in env:
            return _of_table(env)
        if env.get("RANK_SIZE", "1") != "1":
            raise LaunchError(
                f"RANK_SIZE is {env['RANK_SIZE']:.40}, and {VARIABLE} is not set",
                why="without it this process would be a job of one rank",
                hint=f"{VARIABLE}=table.json, or unset RANK_SIZE",
            )
        return Launched()
    if rows[0].name == TORCHRUN and "TORCHELASTIC_RUN_ID" in env:  # whatever has started it
        rows = rows[:1]
    first, *others = [(row, _read(row, env)) for row in rows]
    found = first[1]
    for row, other in others:
        if (other.rank, other.world) == (found.rank, found.world):
            if not found.local_world:
                found = replace(found, local_rank=other.local_rank, local_world=other.local_world)
        elif row.name not in first[0].within:
            raise _two(first[0], row, env)
    agreed = [
        row for row, other in (first, *others) if (other.rank, other.world) == (found.rank, found.world)
    ]
    if first[0].name == TORCHRUN:
        return found
    known = next((a for a in (row.address(env) for row in agreed) if a), "")
    job = ".".join(env.get(name, "") for row in agreed for name in row.job).strip(".")
    return _placed(replace(found, dealt=_dealt(found, env)), known, job, env)


def one_of_several(env: Environment) -> Launched | None:
    """Which of several processes this one is, as MPI or Slurm has started it; None if that is not known."""
    for row in LAUNCHERS:
        if row.name != TORCHRUN and all(env.get(name) for name in (row.rank, row.world)):
            with contextlib.suppress(LaunchError):
                if (found := _read(row, env)).world > 1:
                    return found
    return None


def _of_cluster(env: Environment) -> Launched:
    from meshwright.launchers.dynamic_cluster import worker

    mine = worker(env)
    return Launched(DYNAMIC, mine.rank, mine.world, mine.local_rank, mine.local_world)


def _of_table(env: Environment) -> Launched:
    """The rank RANK_ID of a rank table, whose other ranks were started by hand, too."""
    if "RANK_ID" not in env:
        raise LaunchError(
            f"{VARIABLE} is set, RANK_ID is not",
            why="the table says where ranks are, and RANK_ID which one this is",
            hint=f"unset {VARIABLE}, or meshwright run --rank-table FILE, which starts them",
        )
    path = Path(env[VARIABLE])
    table = rank_table.read(path, VARIABLE)
    said = {name: env[name] for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID") if name in env}
    for name, text in said.items():
        if not text.isdecimal():
            raise LaunchError(f"{name} is {text!r:.40}", why="it must be a whole number, at least 0")
    rank = int(said["RANK_ID"])
    if rank >= table.world:
        raise LaunchError(f"RANK_ID is {rank}", why=f"{path} has ranks from 0 to {table.world - 1}")
    server, local = table.place(rank)
    device = int(server.device[local].device_id)
    for name, number in (("RANK_SIZE", table.world), ("DEVICE_ID", device)):
        if int(said.get(name, number)) != number:
            raise LaunchError(f"{name} is {said[name]}", why=f"{path} says {number} for rank {rank}")
    job = f"table{zlib.crc32(path.read_bytes())}"
    found = Launched("rank table", rank, table.world, device, len(server.device), job=job)
    return _placed(found, table.server_list[0].address, job, env)


def _read(row: Launcher, env: Environment) -> Launched:
    rank, world = _number(row, row.rank, env), _number(row, row.world, env)
    if not world or rank >= world:
        raise LaunchError(
            f"{row.rank} is {rank}, {row.world} is {world}",
            why="ranks are numbered from 0, so each is below their number",
        )
    local = _number(row, row.local_rank, env) if row.local_rank in env else 0
    here = _number(row, row.local_world, env) if row.local_world in env else 0
    if row.name == "Slurm":
        here = _slurm_here(world, env)
    if here and (local >= here or here > world):
        raise LaunchError(
            f"{row.local_rank} is {local}, {row.local_world or 'SLURM_STEP_TASKS_PER_NODE'} is {here}, "
            f"{row.world} is {world}",
            why="local ranks are numbered from 0, and a machine has at most all ranks",
        )
    return Launched(row.name, rank, world, local, here)


def _number(row: Launcher, name: str, env: Environment) -> int:
    text = env.get(name, "")
    if not text:
        there = next(mark for mark in (*row.mark, row.rank) if mark in env)
        raise LaunchError(
            f"{there} is set, {name} is not",
            why=f"{row.name} sets both",
            hint=f"unset {there}, or start all ranks with one launcher: meshwright run, torchrun, mpirun, srun",
        )
    if not text.isdecimal():
        raise LaunchError(f"{name} is {text!r:.40}", why="it must be a whole number, at least 0")
    return int(text)


def _slurm_here(world: int, env: Environment) -> int:
    """The tasks of this machine, once all of them are as many as the step has."""
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE"), env.get("SLURM_NODEID", "")
    if not text or not node.isdecimal():
        lacks = "SLURM_NODEID" if text else "SLURM_STEP_TASKS_PER_NODE"
        raise LaunchError(f"SLURM_STEP_NUM_TASKS is set, {lacks} is not", why="srun sets both")
    counts = hostlist.counts(text, "SLURM_STEP_TASKS_PER_NODE")
    if sum(counts) != world or int(node) >= len(counts):
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE is {text}, SLURM_NODEID {node}, SLURM_STEP_NUM_TASKS {world}",
            why="the counts of all machines must add up to the tasks of the step",
        )
    return counts[int(node)]


def _two(one: Launcher, other: Launcher, env: Environment) -> LaunchError:
    return LaunchError(
        f"two launchers at once: {one.name} says {one.rank}={env[one.rank]} of {env[one.world]}, "
        f"{other.name} {other.rank}={env[other.rank]} of {env[other.world]}",
        why="only one of them can have started this rank",
        hint=f"unset {one.rank} and {one.world}, or {other.rank} and {other.world}",
    )


def _placed(found: Launched, known: str, job: str, env: Environment) -> Launched:
    """With the place of rank 0, where it is needed. `known`: where the launcher says that it is."""
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if found.world == 1 or (found.alone and not address and not port):
        return found
    if not address:
        address = "127.0.0.1" if found.alone else known
    if not address:
        raise LaunchError(
            f"MASTER_ADDR is not set, and {found.launcher} does not say on which machine rank 0 is",
            hint="MASTER_ADDR=HOST, a name or an address by which all machines reach that of rank 0: "
            "mpirun -x MASTER_ADDR=… (Open MPI), mpirun -genv MASTER_ADDR … (MPICH)",
        )
    own = PORTS[zlib.crc32(job.encode()) % len(PORTS)] if job else PORT
    return replace(found, address=address, port=port_of(port, "MASTER_PORT") if port else own)


def _dealt(found: Launched, env: Environment) -> bool:
    if found.launcher != "Slurm":
        return False
    counts = hostlist.counts(env["SLURM_STEP_TASKS_PER_NODE"], "SLURM_STEP_TASKS_PER_NODE")
    return found.rank != sum(counts[: int(env["SLURM_NODEID"])]) + found.local_rank


__all__ = ["LAUNCHERS", "Launched", "launched", "one_of_several"]
