"""What a rank table says in the place of options: machines, their ranks, which one this is, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launch.nodes import PORT, is_here
from meshwright.launchers.rank_table import VARIABLE, RankTable, Server, read

VISIBLE = "CUDA_VISIBLE_DEVICES"
OPTIONS = {"nproc": "--nproc", "nnodes": "--nnodes", "world": "--world-size"}


def with_table(
    path: Path | None,
    environment: MutableMapping[str, str],
    typed: Mapping[str, str | None],
    gpus: Path = Path("/dev"),
) -> dict[str, str | None]:
    """The options as typed, with those that a rank table gives; without a table, as they are. On a machine with GPUs
    the environment names its devices, in the order of ranks. Raises LaunchError."""
    option = "--rank-table" if path is not None else VARIABLE
    path = path or (Path(environment[VARIABLE]) if environment.get(VARIABLE) else None)
    if path is None:
        return dict(typed)
    table = read(path, option)
    for name, other in OPTIONS.items():
        if typed[name] is not None:
            raise LaunchError(
                f"{other} together with {option}", why=f"{path} has it already", hint="leave one of them out"
            )
    index = _own(table, option, typed["index"])
    _name_devices(table.server_list[index], option, environment, gpus)
    counts = ",".join(map(str, table.counts))
    if len(table.counts) == 1:
        return {**typed, "nproc": counts}
    first = table.server_list[0].address
    at = f"[{first}]:{PORT}" if ":" in first else f"{first}:{PORT}"
    told = environment.get("MESHWRIGHT_MASTER") or environment.get("MS_SCHED_HOST")
    master = typed["master_at"] or (None if told else at)
    return {
        **typed, "nproc": counts, "nnodes": str(len(table.counts)), "index": str(index), "master_at": master,
    }  # fmt: skip


def _own(table: RankTable, option: str, index: str | None) -> int:
    """Which server this machine is: by its address, unless it is typed."""
    if index is not None:
        if not index.isdecimal() or int(index) >= len(table.server_list):
            raise LaunchError(f"--node-rank is {index}", why=f"{option} has {len(table.server_list)} servers")
        return int(index)
    if len(table.server_list) == 1:
        return 0
    here = [n for n, server in enumerate(table.server_list) if is_here(server.address, PORT)]
    if len(here) != 1:
        which = ", ".join(table.server_list[n].address for n in here)
        raise LaunchError(
            f"{option} does not say which server this machine is",
            why=f"it has the addresses of several: {which}" if here else "it has the address of none",
            hint="--node-rank, from 0 in the order of ranks",
        )
    return here[0]


def _name_devices(server: Server, option: str, environment: MutableMapping[str, str], gpus: Path) -> None:
    known = {path.name.removeprefix("nvidia") for path in gpus.glob("nvidia[0-9]*")}
    if not known:
        return
    wanted = [str(int(device.device_id)) for device in server.device]
    if unknown := [id for id in wanted if id not in known]:
        raise LaunchError(
            f"{option}: this machine has no device {unknown[0]}",
            why=f"it has {', '.join(sorted(known, key=int))}",
            hint=f"device_id of server {server.server_id}",
        )
    named = ",".join(wanted)
    if environment.get(VISIBLE, named) != named:
        raise LaunchError(
            f"{VISIBLE} is {environment[VISIBLE]}, {option} says {named}", hint=f"unset {VISIBLE}"
        )
    environment[VISIBLE] = named


__all__ = ["with_table"]
