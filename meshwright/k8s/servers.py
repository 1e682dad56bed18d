"""What to do next for the parameter servers of a job, as `decide` does for all of it.

They come before the workers and end after them. A lost server is replaced where a copy or a folder has its values; else
all pods are made anew. For another number of servers, a pod of its own moves the parameters: it ends when they have
moved, and then servers that have none any more go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.records import DONE, Action, CreateMove, CreateServer, Delete, Job, Pod

MOVE = "move"
Servers = Mapping[int, Pod]  # by index


def begun(spec: r.Spec, status: r.Status) -> r.Status:
    """The status at the start of a round. Servers that keep their values in a volume stay as many as they were."""
    of = spec.servers
    if of is None:
        return replace(status, servers=r.ServersStatus())
    if of.state and status.servers.first:
        return status
    return replace(status, servers=r.ServersStatus(first=of.replicas, spread=of.replicas))


def of_round(own: Sequence[Pod]) -> tuple[dict[int, Pod], Pod | None]:
    """The servers among the pods of a round, and the one that moves parameters."""
    servers = {pod.index: pod for pod in own if pod.role == r.SERVER.lower()}
    return servers, next((pod for pod in own if pod.role == MOVE), None)


def moved(status: r.Status, move: Pod | None) -> r.Status:
    """The status after a move has ended well."""
    if move is None or move.phase != "Succeeded" or not status.servers.moving:
        return status
    return replace(status, servers=replace(status.servers, spread=move.index, moving=0))


def needed(spec: r.Spec, status: r.Status) -> int:
    """How many servers there shall be. Workers that come look for all those that the job began with."""
    of = status.servers
    return 0 if spec.servers is None else max(of.first, of.spread, of.moving, spec.servers.replicas)


def lost(spec: r.Spec, status: r.Status, servers: Servers, workers: Mapping[int, Pod], gone: set[str]) -> str:
    """Why all pods have to be made anew; empty if they have not."""
    of = spec.servers
    if of is None or of.state or not (workers or status.servers.moving):
        return ""  # nothing is lost, or there was nothing to lose
    had = max(status.servers.first, status.servers.spread, status.servers.moving)
    away = [
        index
        for index in range(had)
        if index not in servers or _ends(servers[index]) or servers[index].uid in gone
    ]
    if len(away) <= of.copies:
        return ""
    kept = (
        "servers.copies is 1, and more are lost"
        if of.copies
        else "neither servers.copies nor servers.state is set"
    )
    return f"server {away[0]} is lost: {kept}"


def _ends(pod: Pod) -> bool:
    return pod.phase == "Failed" or pod.deleting


def changed(
    job: Job,
    spec: r.Spec,
    status: r.Status,
    place: p.Place,
    servers: Servers,
    move: Pod | None,
    taken: set[str],
    up: bool,
) -> tuple[r.Status, list[Action]]:
    """The status and what to do within a round. `taken`: names of pods. `up`: all workers run."""
    if spec.servers is None:
        return status, []
    name, wanted, count = job.owner.name, spec.servers.replicas, needed(spec, status)
    actions: list[Action] = [
        CreateServer(
            status.round, index, place, fresh=index >= max(status.servers.first, status.servers.spread)
        )
        for index in range(count)
        if p.server_name(name, index) not in taken
    ]
    if move is not None and move.phase in DONE:
        return status, [*actions, Delete(move.name, move.uid)]
    actions += [
        Delete(pod.name, pod.uid)
        for index, pod in servers.items()
        if index >= count and not pod.deleting and move is None and not status.servers.moving
    ]
    target = status.servers.moving or wanted  # one move after another
    moves = status.servers.moving or status.servers.spread != wanted
    if moves and move is None and up and _run(servers, count) and p.move_name(name) not in taken:
        status = replace(status, servers=replace(status.servers, moving=target))
        actions.append(CreateMove(status.round, target, place))
    return status, actions


def _run(servers: Servers, count: int) -> bool:
    return all(
        index in servers and servers[index].phase == "Running" and not servers[index].deleting
        for index in range(count)
    )


def ready(spec: r.Spec, status: r.Status, servers: Servers) -> bool:
    """Return whether workers can find all servers that the job begins with."""
    return spec.servers is None or _run(servers, status.servers.first)


__all__ = ["MOVE", "begun", "changed", "lost", "moved", "needed", "of_round", "ready"]
