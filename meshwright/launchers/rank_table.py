"""Rank tables: JSON files that say which rank has which device of which server, as those of MindSpore and HCCL.

Fields that say nothing about ranks (`host_nic_ip`, `numa_id`) are left alone. A table with gaps, duplicates or ranks
that do not follow one another within a server is refused when it is read.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError

VERSION = "1.0"
VARIABLE = "RANK_TABLE_FILE"


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """`dpu_ip`: its address for other clusters."""

    device_id: str
    rank_id: str
    device_ip: str = ""
    dpu_ip: str = ""

    @property
    def rank(self) -> int:
        return int(self.rank_id)


class Server(msgspec.Struct, frozen=True, omit_defaults=True):
    """`server_id` is an address where there is no `server_ip`."""

    server_id: str
    device: tuple[Device, ...]
    server_ip: str = ""

    @property
    def address(self) -> str:
        return self.server_ip or self.server_id


class Member(msgspec.Struct, frozen=True):
    server_id: str


class Cluster(msgspec.Struct, frozen=True, omit_defaults=True):
    """Servers with a network of their own, among others."""

    cluster_id: str
    server_list: tuple[Member, ...]
    network_type: str = ""
    az_id: str = ""
    region_id: str = ""


class RankTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """Servers in the order of their ranks. `cluster_list`: empty where there is one cluster."""

    version: str
    server_count: str
    server_list: tuple[Server, ...]
    cluster_list: tuple[Cluster, ...] = ()
    status: str = ""

    @property
    def counts(self) -> tuple[int, ...]:
        """The ranks of each server."""
        return tuple(len(server.device) for server in self.server_list)

    @property
    def world(self) -> int:
        return sum(self.counts)

    def place(self, rank: int) -> tuple[Server, int]:
        """The server of a rank, and which of the server's ranks it is."""
        for server in self.server_list:
            for local, device in enumerate(server.device):
                if device.rank == rank:
                    return server, local
        raise LaunchError(f"there is no rank {rank}", why=f"the rank table counts from 0 to {self.world - 1}")

    @classmethod
    def of(cls, devices: Mapping[str, Iterable[int]]) -> RankTable:
        """A table of servers by address, with the numbers of their devices; ranks count through them."""
        servers, rank = [], 0
        for address, ids in devices.items():
            own = [Device(str(id), str(rank + n)) for n, id in enumerate(ids)]
            rank += len(own)
            servers.append(Server(address, tuple(own)))
        return _checked(cls(VERSION, str(len(servers)), tuple(servers), status="completed"), "the rank table")

    def save(self, path: Path) -> None:
        """Write the table as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read(path: Path, option: str) -> RankTable:
    """The table in a file. Raises LaunchError, with `option` as who named the file."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=RankTable)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"{option}: cannot read the rank table {path}", why=why) from None
    return _checked(table, f"{option}: {path}")


def _checked(table: RankTable, what: str) -> RankTable:
    def refuse(why: str, hint: str = "") -> LaunchError:
        return LaunchError(f"{what} is not a rank table that can be started", why=why, hint=hint)

    if table.version != VERSION:
        raise refuse(f"its version is {table.version!r}; {VERSION} is known")
    servers = [server.server_id for server in table.server_list]
    if table.server_count != str(len(servers)):
        raise refuse(f"server_count is {table.server_count}, server_list has {len(servers)}")
    if twice := _twice([*servers]):
        raise refuse(f"server {twice} occurs twice")
    for server in table.server_list:
        if not server.device:
            raise refuse(f"server {server.server_id} has no device")
        for device in server.device:
            for name, text in (("device_id", device.device_id), ("rank_id", device.rank_id)):
                if not text.isdecimal():
                    raise refuse(f"{name} {text!r} of server {server.server_id} is no number")
        if twice := _twice([str(int(d.device_id)) for d in server.device]):
            raise refuse(f"device_id {twice} of server {server.server_id} occurs twice")
    ranks = [device.rank for server in table.server_list for device in server.device]
    if not ranks:
        raise refuse("it has no ranks")
    if twice := _twice([str(rank) for rank in ranks]):
        raise refuse(f"rank_id {twice} occurs twice")
    if gaps := sorted(set(range(len(ranks))) - set(ranks)):
        raise refuse(f"rank_id {gaps[0]} is missing: {len(ranks)} ranks count from 0 to {len(ranks) - 1}")
    table = _sorted(table)
    for server in table.server_list:
        first = server.device[0].rank
        if [d.rank for d in server.device] != list(range(first, first + len(server.device))):
            raise refuse(
                f"the ranks of server {server.server_id} do not follow one another",
                "number ranks server by server, so that inner axes of a mesh stay within one",
            )
    _check_clusters(table, servers, refuse)
    return table


def _check_clusters(table: RankTable, servers: list[str], refuse: Callable[[str], LaunchError]) -> None:
    if not table.cluster_list:
        return
    listed = [member.server_id for cluster in table.cluster_list for member in cluster.server_list]
    if twice := _twice(listed) or _twice([cluster.cluster_id for cluster in table.cluster_list]):
        raise refuse(f"{twice} occurs twice in cluster_list")
    if odd := sorted(set(listed) ^ set(servers)):
        raise refuse(f"server {odd[0]} is in one of server_list and cluster_list, and not in the other")


def _sorted(table: RankTable) -> RankTable:
    """The table with devices and servers in the order of their ranks."""
    replace = msgspec.structs.replace
    servers = [replace(s, device=tuple(sorted(s.device, key=lambda d: d.rank))) for s in table.server_list]
    return replace(table, server_list=tuple(sorted(servers, key=lambda s: s.device[0].rank)))


def _twice(texts: list[str]) -> str:
    return next((text for text, count in collections.Counter(texts).items() if count > 1), "")


__all__ = ["RankTable", "read"]
