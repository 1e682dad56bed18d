"""What parameter servers cost a step: rows that workers pull and push, and the memory of servers.

A cluster file does not describe servers: they are processes of our own, whose rates depend on the host's processor. The
constants are those of `python -m bench ps` and of rows of 16 to 512 numbers on one core of a shared server, rounded to
the slow side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost.cluster import Cluster
from meshwright.cost.host import transfer_seconds

REQUEST_SECONDS = 0.4e-3  # of a pull or a push of a few rows
BYTES_PER_S = 0.9e9  # rows pulled from one server, or pushed to it
ROW_SECONDS = 0.15e-6  # beside its bytes, of a row that is pulled or pushed
ID_SECONDS = 0.1e-6  # to sort an id that is looked up, in the worker
MOMENT_SECONDS = 1.2e-9  # to update a byte of a moment of rows that were pushed
MEMORY = 1.1  # times tables and moments
PROCESS_BYTES = 330e6  # of a server without tables
MOST_SERVERS = 64
NEAR = 1.05  # times the quickest: fewer servers are enough


@dataclass(frozen=True)
class Rows:
    """The lookups of one table by one worker in a step: `lookups` of `ids` in all, which are `rows` different rows of
    `row_bytes`."""

    lookups: int
    ids: float
    rows: float
    row_bytes: float


def exchange_seconds(
    rows: Sequence[Rows], servers: int, cluster: Cluster, optimizer_states: int = 2
) -> float:
    """Return the seconds of a step in which every rank pulls rows and pushes their gradients, and servers update them.

    Nothing of it overlaps with the computation. Where the device is the host's processor, servers share its cores with
    the ranks.
    """
    ranks, size = cluster.ranks, bytes_of(rows)
    each = sum(r.rows for r in rows) * ROW_SECONDS + size / BYTES_PER_S
    served = 2 * each + optimizer_states * size * MOMENT_SECONDS
    ends = 1 if cluster.host_bytes_per_s else 2  # of a message, which then take turns
    requests = sum(r.lookups for r in rows) + 1
    slowest = max(level.latency_seconds for level in cluster.levels) if len(cluster.levels) > 1 else 0.0
    copies = 2 * float(transfer_seconds(size, cluster))
    return (
        requests * (REQUEST_SECONDS + slowest)
        + sum(r.ids for r in rows) * ID_SECONDS
        + ends * max(1.0, ranks / servers) * served
        + _link_seconds(2 * size, servers, cluster)
        + copies
    )


def bytes_of(rows: Sequence[Rows]) -> float:
    """The bytes of the rows that a worker pulls in a step."""
    return sum(r.rows * r.row_bytes for r in rows)


def enough_servers(rows: Sequence[Rows], cluster: Cluster, optimizer_states: int = 2) -> int:
    """Return the number of servers beyond which more help little."""
    most = min(MOST_SERVERS, max(1, cluster.ranks))
    counts = [n for n in (2**k for k in range(most.bit_length())) if n <= most]
    seconds = {n: exchange_seconds(rows, n, cluster, optimizer_states) for n in counts}
    return next(n for n in counts if seconds[n] <= NEAR * min(seconds.values()))


def server_bytes(table_bytes: float, servers: int, optimizer_states: int = 2) -> float:
    """Return the bytes of all servers together, for tables with their moments."""
    return MEMORY * (1 + optimizer_states) * table_bytes + servers * PROCESS_BYTES


def _link_seconds(size_bytes: float, servers: int, cluster: Cluster) -> float:
    """Seconds between machines for what one rank sends or receives: over its share of its machine's link, and over the
    links of the machines with servers, which all ranks share."""
    if len(cluster.levels) < 2:
        return 0.0
    rate, inside = cluster.levels[0].bytes_per_s, cluster.levels[-1].size
    machines = min(servers, cluster.ranks // inside)
    return size_bytes / rate * max(1.0, cluster.ranks / (machines * inside))


__all__ = ["Rows", "bytes_of", "enough_servers", "exchange_seconds", "server_bytes"]
