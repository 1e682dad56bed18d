"""A job over several machines as data, as one of them sees it. Refuses what cannot be, and starts nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.core.type_guards import is_whole
from meshwright.errors import LaunchError
from meshwright.launchers.interfaces import resolve
from meshwright.scheduler.link import at
from meshwright.scheduler.trust import find_secret

PORT = 8118  # of the scheduler, where none is named: that of the reference system
WAIT_SECONDS = 600.0  # until all nodes are there
SILENT_SECONDS = 30.0  # for which a machine may be silent
LAST_CALL_SECONDS = 30.0  # for more nodes than there have to be: that of torch
BRACKETED = re.compile(r"\[(?P<host>[^\]]*)\](:(?P<port>.*))?")
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Nodes:
    """`count` machines, or up to `most`, with `world` ranks in all (0: whatever the nodes have); this one is number
    `index` (-1: any place), called `id`. The scheduler is at `host` and `port`. `secret`: a file; without one, and none
    in the environment, `insecure` has to be said. `wait_seconds`: for the other nodes, negative for ever.
    `last_call_seconds`: so long the start waits for more nodes than `count`. `stops_alone`: a signal to this one does
    not end the job, which waits for it to come again, as often as it may restart. `silent_seconds`: after which one
    is lost, to a scheduler that machine 0 starts. `starts_scheduler`: if this machine is the one to have it."""

    count: int
    host: str
    port: int = PORT
    world: int = 0
    index: int = -1
    id: str = ""
    secret: Path | None = None
    insecure: bool = False
    certificates: Path | None = None
    wait_seconds: float = WAIT_SECONDS
    stops_alone: bool = False
    most: int = 0
    last_call_seconds: float = LAST_CALL_SECONDS
    silent_seconds: float = SILENT_SECONDS
    starts_scheduler: bool = True

    @property
    def master(self) -> str:
        return at(self.host, self.port)


def master(text: str, option: str = "--master") -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[v6]:port`` or a bare address of IPv6."""
    hint = f"{option} node0:29400, or {option} [fd00::1]:29400"
    bracketed = BRACKETED.fullmatch(text)
    if bracketed:
        host, port = bracketed["host"], bracketed["port"]
    elif text.count(":") > 1:
        host, port = text, None
    else:
        host, colon, after = text.partition(":")
        port = after if colon else None
    if not host or any(c.isspace() or c in "/@" for c in host):
        raise LaunchError(f"{option} is {text!r}", why="it has no host", hint=hint)
    return host, PORT if port is None else port_number(port, f"{option} {text}")


def port_number(text: str | int, option: str) -> int:
    """A port that a user typed."""
    number = int(text) if str(text).isdecimal() else -1
    if not 1024 <= number <= 65535:
        raise LaunchError(f"{option}: {text!r} is not a port", why="a port is a number from 1024 to 65535")
    return number


def ranks_of_nodes(text: str) -> tuple[int, ...]:
    """``8`` of each node, or ``8,8,4``: of each its own."""
    words = text.split(",")
    if not all(re.fullmatch(r"\s*[+-]?\d+\s*", word) for word in words):
        raise LaunchError(
            f"--nproc is {text!r}", why="it must be a whole number of processes", hint="--nproc 4"
        )
    return tuple(map(int, words))


def nproc_of(counts: Sequence[int], nodes: Nodes) -> Nodes:
    """The nodes with their number of ranks in all. Raises LaunchError where that is not the sum of `counts`."""
    if len(counts) > 1:
        if len(counts) != nodes.count:
            raise LaunchError(
                f"--nproc has {len(counts)} numbers for {nodes.count} nodes",
                hint="one number, or one for each node",
            )
        if nodes.index < 0:
            raise LaunchError(
                "--nproc says how many ranks each node has",
                why="without --node-rank, the place of this node in the list is not known",
                hint="--node-rank",
            )
        if nodes.world not in (0, sum(counts)):
            raise LaunchError(
                f"--nproc {','.join(map(str, counts))} is {sum(counts)} ranks, --world-size {nodes.world}"
            )
        if nodes.index >= len(counts):
            raise LaunchError(f"--node-rank is {nodes.index}", why=f"--nproc has {len(counts)} numbers")
        return replace(nodes, world=sum(counts))
    return nodes


def even_share(nodes: Nodes) -> int:
    """The ranks of each node where --world-size alone is given."""
    if not nodes.count or nodes.world % nodes.count:
        raise LaunchError(
            f"--world-size {nodes.world} is not divisible by --nnodes {nodes.count}",
            why="without --nproc each node has the same number of ranks",
            hint="--nproc of this node, or of each: --nproc 8,8,4",
        )
    return nodes.world // nodes.count


def placed(
    environment: Mapping[str, str],
    *,
    nproc: str | None,
    nnodes: str | None,
    world: str | None,
    index: str | None,
    master_at: str | None,
    id: str | None,
    **more: Any,
) -> tuple[Nodes | None, tuple[int, ...]]:
    """The machines of a job as typed, None for this one alone; and the ranks of this one, or of each. `more`: fields of
    `Nodes`. Raises LaunchError."""
    counts = ranks_of_nodes(nproc) if nproc is not None else ()
    told, name = from_environment(environment)
    given = {"--nnodes": nnodes, "--world-size": world, "--node-rank": index, "--master": master_at}
    several = {option: text for option, text in given.items() if text is not None}
    if not several:
        if len(counts) > 1:
            raise LaunchError(
                f"--nproc is {nproc!r}",
                why="a list is for several machines",
                hint="--nnodes, --node-rank, --master",
            )
        return None, counts or (1,)
    least, most = nodes_of(several.get("--nnodes", "0"))
    number = {o: whole(t, o) for o, t in several.items() if o not in ("--master", "--nnodes")}
    number |= {"--nnodes": least} if "--nnodes" in several else {}
    if most > least:
        _check_elastic(several, counts, least, most)
    if (
        number.get("--nnodes") == most == 1
        and set(several) <= {"--nnodes", "--node-rank"}
        and not number.get("--node-rank")
    ):
        return None, counts or (1,)
    at = master_at or told
    if not at:
        raise LaunchError(
            f"{next(iter(several))} is for several machines",
            why="the machines need a place to meet",
            hint="--master HOST:PORT",
        )
    host, port = master(at)
    nodes = Nodes(
        count=number.get("--nnodes", 0),
        host=host,
        port=port,
        world=number.get("--world-size", 0),
        index=number.get("--node-rank", -1),
        id=id or name,
        most=most,
        **more,
    )
    if not counts:
        counts = (even_share(nodes) if nodes.world else 1,)
    return nproc_of(counts, nodes), counts


def nodes_of(text: str) -> tuple[int, int]:
    """``4``, or ``2:4``: the least and the greatest number of nodes."""
    least, colon, most = text.partition(":")
    found = whole(least, "--nnodes"), whole(most if colon else least, "--nnodes")
    if colon and not 1 <= found[0] <= found[1]:
        raise LaunchError(
            f"--nnodes is {text!r}",
            why="it must be the least and the greatest number of nodes",
            hint="--nnodes 2:4",
        )
    return found


def _check_elastic(several: Mapping[str, str], counts: Sequence[int], least: int, most: int) -> None:
    """Raise LaunchError for numbers that a changing number of nodes has not."""
    wrong = "--world-size" if "--world-size" in several else "--nproc of each node" if len(counts) > 1 else ""
    if wrong:
        raise LaunchError(
            f"--nnodes {least}:{most} together with {wrong}",
            why="the number of ranks follows from the nodes that are there",
            hint="--nproc for this node only",
        )


def whole(text: str, option: str) -> int:
    """A whole number that a user typed."""
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{option} is {text!r}", why="it must be a whole number", hint=f"{option} 2"
        ) from None


def check_nodes(nodes: Nodes, nproc: int) -> Nodes:
    """The nodes with a name for this one. Raises LaunchError for what cannot be, an unknown host included."""
    whole = ((nodes.count, "--nnodes", 0), (nodes.world, "--world-size", 0), (nodes.index, "--node-rank", -1))
    for number, option, least in whole:
        if not is_whole(number) or number < least:
            raise LaunchError(f"{option} is {number!r}", why=f"it must be a whole number, at least {least}")
    if not nodes.count and not nodes.world:
        raise LaunchError(
            "the number of nodes is not known",
            why="neither --nnodes nor --world-size says it",
            hint="--nnodes 2",
        )
    most = max(nodes.count, nodes.most)
    if most and nodes.index >= most:
        raise LaunchError(f"--node-rank is {nodes.index}", why=f"{most} nodes count from 0 to {most - 1}")
    if not 0 <= nodes.last_call_seconds <= 86400:
        raise LaunchError(
            f"--last-call is {nodes.last_call_seconds:g} seconds", why="it must be a time, at most a day"
        )
    if not 1 <= nodes.silent_seconds <= 86400:
        raise LaunchError(
            f"--node-time-out is {nodes.silent_seconds:g} seconds",
            why="it is a time from a second to a day",
        )
    least = nproc + max(0, nodes.count - 1)
    if nodes.world and nodes.world < least:
        raise LaunchError(
            f"--world-size is {nodes.world}",
            why=f"this node alone has {nproc} ranks, and each other at least one",
        )
    if nodes.id and NAME.fullmatch(nodes.id) is None:
        raise LaunchError(
            f"--node-id is {nodes.id!r:.140}", why="only letters, digits and . _ : - are allowed"
        )
    if nodes.wait_seconds != nodes.wait_seconds or 0 <= nodes.wait_seconds < 1:
        raise LaunchError(
            f"--cluster-time-out is {nodes.wait_seconds:g} seconds",
            why="it must be at least 1, or negative to wait for ever",
        )
    resolve(nodes.host, nodes.port, "--master")
    return nodes if nodes.id else replace(nodes, id=_own_id(nodes))


def _own_id(nodes: Nodes) -> str:
    """A name that stays when the launcher starts again on this machine: the place, else the host's name and the process
    where several nodes may be on one machine."""
    return f"node{nodes.index}" if nodes.index >= 0 else f"{socket.gethostname()}-{os.getpid()}"


def is_here(host: str, port: int) -> bool:
    """Return whether a host is this machine."""
    for family, address in resolve(host, port, "--master"):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def has_scheduler(nodes: Nodes) -> bool:
    """Return whether this machine starts the scheduler: it is number 0, or has no number and the address."""
    here = nodes.index == 0 or (nodes.index < 0 and is_here(nodes.host, nodes.port))
    return nodes.starts_scheduler and here


def trusted(nodes: Nodes) -> str:
    """The secret of the job; empty where the user has said that there is none. Raises LaunchError without either."""
    secret = find_secret(nodes.secret, make=has_scheduler(nodes))
    if not secret and not nodes.insecure:
        raise LaunchError(
            "several machines, and no secret",
            why=f"whoever reaches port {nodes.port} of {nodes.host} could take part in the job, or end it",
            hint="--secret job.key (node 0 makes the file, copy it to the others), or MESHWRIGHT_SECRET; in a network "
            "that nobody else reaches: --insecure",
        )
    if secret and nodes.insecure:
        raise LaunchError(
            "--insecure together with a secret", why="they exclude each other", hint="leave one of them out"
        )
    return secret


def from_environment(environment: Mapping[str, str]) -> tuple[str, str]:
    """The scheduler as ``host:port`` and the name of this node, as variables of ours or of the reference system say;
    empty where none does. Raises LaunchError for half of a scheduler."""
    given = environment.get("MESHWRIGHT_MASTER", "")
    host, port = environment.get("MS_SCHED_HOST", ""), environment.get("MS_SCHED_PORT", "")
    if bool(host) != bool(port) and not given:
        there, lacks = ("MS_SCHED_HOST", "MS_SCHED_PORT") if host else ("MS_SCHED_PORT", "MS_SCHED_HOST")
        raise LaunchError(f"{there} is set, {lacks} is not", hint="both, or --master HOST:PORT")
    theirs = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if host else ""
    if given and theirs and master(given, "MESHWRIGHT_MASTER") != master(theirs, "MS_SCHED_HOST"):
        raise LaunchError(
            f"MESHWRIGHT_MASTER is {given}, MS_SCHED_HOST and MS_SCHED_PORT say {theirs}", hint="unset one"
        )
    ids = [environment[n] for n in ("MESHWRIGHT_NODE_ID", "MS_NODE_ID") if environment.get(n)]
    if len(set(ids)) > 1:
        raise LaunchError(f"MESHWRIGHT_NODE_ID is {ids[0]}, MS_NODE_ID is {ids[1]}", hint="unset one")
    return given or theirs, ids[0] if ids else ""


__all__ = [
    "Nodes",
    "check_nodes",
    "from_environment",
    "is_here",
    "master",
    "nproc_of",
    "placed",
    "ranks_of_nodes",
    "trusted",
]
