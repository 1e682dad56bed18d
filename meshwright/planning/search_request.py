"""The request of a search on a cluster: limits that are checked before anything begins."""

from __future__ import annotations

import math

from meshwright.core.type_guards import is_number
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError, a_type
from meshwright.search.planner import Progress, Request
from meshwright.search.stop import Stop


def request_for(
    cluster: Cluster | None,
    memory: float | None = None,
    optimizer_states: int = 2,
    space: str = "",
    inner: str = "exact",
    progress: Progress | None = None,
    time_limit: float | None = None,
) -> Request | None:
    """Build the request of a search; None without a cluster. Raises PlanError for impossible limits."""
    limits = {"memory": memory, "time_limit": time_limit}
    if cluster is None and (given := {name: value for name, value in limits.items() if value is not None}):
        raise PlanError(
            " and ".join(f"{name}={value!r}" for name, value in given.items()) + " without a cluster",
            why="limits apply to predictions, which need a cluster",
            hint='add cluster=mw.Cluster.preset("h100", nodes=2) or mw.Cluster.load("cluster.yaml")',
        )
    if cluster is None:
        return None
    if not isinstance(cluster, Cluster):
        raise PlanError(
            f"the cluster is {cluster!r}",
            why=f"it is {a_type(cluster)}, not a Cluster",
            hint='mw.Cluster.load("cluster.yaml") reads one from a file, mw.Cluster.preset("h100", nodes=2) knows some',
        )
    given = cluster.device.memory_bytes if memory is None else memory
    limit = float(given) if is_number(given) else 0.0
    if not 0 < limit < float("inf"):
        raise PlanError(
            f"memory={memory!r} is not a limit",
            why="it must be a number of bytes per rank",
            hint="memory=70e9 for 70 GB",
        )
    if (
        isinstance(optimizer_states, bool)
        or not isinstance(optimizer_states, int)
        or not 0 <= optimizer_states <= 8
    ):
        raise PlanError(
            f"optimizer_states={optimizer_states!r}",
            why="it must be the number of values that an optimizer keeps per parameter element",
            hint="2 for Adam, 1 for momentum, 0 for plain SGD",
        )

    seconds = math.inf if time_limit is None else time_limit
    if not is_number(seconds) or not seconds > 0:
        raise PlanError(
            f"time_limit={time_limit!r}",
            why="it must be the number of seconds after which a search ends with the best so far",
            hint="time_limit=30, or leave it out",
        )

    if progress is not None and not callable(progress):
        raise PlanError(
            f"progress={progress!r:.80}",
            why=f"it is {a_type(progress)}, which cannot be called",
            hint="progress=print, or a function of (stage, best price in seconds, bound)",
        )

    told = progress or _silent
    return Request(
        cluster,
        limit,
        optimizer_states,
        space,
        inner,
        told,
        simulate=True,
        hard=memory is not None,
        stop=Stop(float(seconds)),
    )


def _silent(stage: str, price: float | None, bound: float | None) -> None:
    pass


__all__ = ["request_for"]
