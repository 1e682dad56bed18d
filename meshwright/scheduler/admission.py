"""Why a node may not take part in a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.scheduler.facts import Facts
from meshwright.scheduler.messages import Join, Node, Refused

SKEW_SECONDS = 300.0


def why_not(join: Join, facts: Facts, here: Mapping[str, Node], alive: bool, clock: float) -> Refused | None:
    """Why a node may not take part; None if it may, and then `facts` have what it says of the job. `here`: the nodes
    that wait for others. `alive`: one of its name is in the job. `clock`: the scheduler's."""
    same = here.get(join.node.id) or facts.node(join.node.id)
    return (
        _otherwise(join, facts, here)
        or _skewed(join, clock)
        or _taken(join.node, here, same if alive else None)
    )


def _otherwise(join: Join, facts: Facts, here: Mapping[str, Node]) -> Refused | None:
    """Return whether a node describes the job as the nodes before it did."""
    for name, option in (
        ("nodes", "--nnodes"),
        ("most", "--nnodes, at most"),
        ("world", "--world-size"),
        ("restarts", "--max-restarts"),
        ("on_failure", "--on-failure"),
    ):
        mine, theirs = getattr(join, name), getattr(facts, name)
        if mine and not theirs:
            setattr(facts, name, mine)
        elif mine and mine != theirs:
            return Refused(
                f"node {join.node.id} ({join.node.host}) has {option} {mine}, the job has {theirs}",
                why="all nodes of a job agree on it" + (f"; here: {names_of(here.values())}" if here else ""),
            )
    if not facts.nodes and not facts.world:
        return Refused(
            f"neither node {join.node.id} nor any before it said how many nodes the job has",
            hint="--nnodes, or --world-size, of the scheduler or of a node",
        )
    most = max(facts.nodes, facts.most)
    if most and join.node.index >= most:
        return Refused(
            f"node {join.node.id} ({join.node.host}) has --node-rank {join.node.index}",
            why=f"{most} nodes count from 0 to {most - 1}",
        )
    return None


def _skewed(join: Join, clock: float) -> Refused | None:
    ahead = join.clock - clock
    if abs(ahead) <= SKEW_SECONDS:
        return None
    way = "ahead of" if ahead > 0 else "behind"
    return Refused(
        f"the clock of node {join.node.id} ({join.node.host}) is {abs(ahead):,.0f} s {way} the scheduler's",
        why=f"clocks decide which checkpoint is the newest; {SKEW_SECONDS:.0f} s are allowed",
        hint="set it: chronyc makestep, or timedatectl set-ntp true",
    )


def _taken(node: Node, here: Mapping[str, Node], same: Node | None) -> Refused | None:
    """Return whether the id and the place of a node are free. `same`: the node of this id."""
    for other in here.values():
        if other.index == node.index >= 0 and other.id != node.id:
            return Refused(
                f"nodes {other.id} ({other.host}) and {node.id} ({node.host}) both have --node-rank {node.index}",
                hint="each node has a number of its own, from 0",
            )
    if same is not None and same.host != node.host:
        return Refused(
            f"the node id {node.id} is taken",
            why=f"it is that of {same.host}, which is here; {node.host} wants it, too",
            hint="each machine has a --node-rank, or a --node-id (MESHWRIGHT_NODE_ID), of its own",
        )
    return None


def names_of(nodes: Iterable[Node]) -> str:
    """Nodes as people write them."""
    return ", ".join(f"{n.id} ({n.host})" for n in nodes)


__all__ = ["names_of", "why_not"]
