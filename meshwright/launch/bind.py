"""Binding ranks to cores: which cores each rank of this machine may use. Reads what the machine has, binds nothing."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from meshwright.errors import LaunchError

NUMA = Path("/sys/devices/system/node")
HINT = '--bind numa, --bind cores, or --bind \'{"0": "0-7", "1": "8-15"}\''


def parse_cores(text: str) -> frozenset[int]:
    """``0-3,8`` as numbers of cores."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(f"--bind: {text!r} names no cores", why="write it as 0-3,8", hint=HINT)
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def allowed() -> frozenset[int]:
    """The cores that this process may use."""
    known = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(known)


def numa_nodes() -> list[frozenset[int]]:
    """The cores of each NUMA node that has some; all of them as one where the machine does not say."""
    paths = sorted(NUMA.glob("node[0-9]*/cpulist"), key=lambda p: int(p.parent.name[4:]))
    texts = [path.read_text().strip() for path in paths]
    return [parse_cores(text) for text in texts if text] or [allowed()]


def cores_of_ranks(
    spec: str, nproc: int, usable: frozenset[int], nodes: Sequence[frozenset[int]]
) -> list[frozenset[int]]:
    """The cores of each of this machine's ranks: ``cores`` gives each its own, as many as there are for all; ``numa``
    those of a NUMA node, neighbours sharing one; a map names them by local rank, "0" or "device0". Raises
    LaunchError."""
    if spec == "cores":
        return _dealt(sorted(usable), nproc)
    if spec == "numa":
        groups = [node & usable for node in nodes if node & usable]
        return [groups[rank * len(groups) // nproc] for rank in range(nproc)]
    return _mapped(spec, nproc, usable)


def _dealt(cores: Sequence[int], nproc: int) -> list[frozenset[int]]:
    if nproc > len(cores):
        raise LaunchError(
            f"--bind cores: {nproc} ranks, {len(cores)} cores",
            why="each rank has cores of its own",
            hint=HINT,
        )
    bounds = [rank * len(cores) // nproc for rank in range(nproc + 1)]
    return [frozenset(cores[a:b]) for a, b in itertools.pairwise(bounds)]


def _mapped(spec: str, nproc: int, usable: frozenset[int]) -> list[frozenset[int]]:
    try:
        told = msgspec.json.decode(spec, type=dict[str, str | list[str]])
    except msgspec.DecodeError as error:
        raise LaunchError(f"--bind is {spec!r:.80}", why=str(error), hint=HINT) from None
    by_rank: Mapping[str, str | list[str]] = {
        key.removeprefix("device"): value for key, value in told.items()
    }
    unknown = sorted(set(by_rank) - {str(rank) for rank in range(nproc)})
    missing = [rank for rank in range(nproc) if str(rank) not in by_rank]
    if unknown or missing or len(by_rank) != len(told):
        why = f"there is no local rank {unknown[0]}" if unknown else f"it lacks local rank {missing[:1]}"
        raise LaunchError(f"--bind is for {len(by_rank)} ranks, this machine has {nproc}", why=why, hint=HINT)
    texts = [by_rank[str(rank)] for rank in range(nproc)]
    sets = [parse_cores(text if isinstance(text, str) else ",".join(text)) for text in texts]
    for rank, cores in enumerate(sets):
        if cores - usable:
            core = min(cores - usable)
            raise LaunchError(
                f"--bind: local rank {rank} is to have core {core}", why="this machine does not offer it"
            )
    return sets


__all__ = ["allowed", "cores_of_ranks", "numa_nodes"]
