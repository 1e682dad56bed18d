"""What a scheduler knows of its job and keeps in a file."""

from __future__ import annotations

import msgspec

from meshwright.scheduler.messages import Node, Ranks, Report, State
from meshwright.scheduler.state import Kept
from meshwright.scheduler.survival import Survival

MEMBERS, RANKS = "members", "ranks of "  # names of facts in the file: of all, and of each node


class Facts(msgspec.Struct):
    """State that outlives the process. `nodes`, `world`, `restarts`: of the job; 0 nodes or ranks while unknown.
    `order`: the nodes of the newest attempt. `reports`: by node, how it has ended. `lost`: nodes that nobody waits for.
    `grows`: the attempt ends for another node to take part. `survival`: of an attempt in which ranks go on without
    those that fail, `away`: the nodes without which they do."""

    nodes: int = 0
    world: int = 0
    restarts: int = 0
    attempt: int = 0
    order: tuple[Node, ...] = ()
    running: bool = False
    reports: dict[str, Report] = msgspec.field(default_factory=dict)
    verdict: State = State(0)
    most: int = 0
    failures: int = 0  # of attempts
    lost: tuple[str, ...] = ()
    grows: bool = False
    on_failure: str = ""
    survival: Survival | None = None
    away: tuple[str, ...] = ()

    def node(self, id: str) -> Node | None:
        """A node of the newest attempt."""
        return next((node for node in self.order if node.id == id), None)

    def ranks_of(self, id: str) -> range:
        """The ranks of a node in the newest attempt."""
        first = 0
        for node in self.order:
            if node.id == id:
                return range(first, first + node.nproc)
            first += node.nproc
        return range(0)


def earlier(kept: Kept) -> Facts | None:
    """What an earlier process has kept; None if there was none."""
    data = kept.facts.get(MEMBERS)
    if data is None:
        return None
    facts = msgspec.msgpack.decode(data, type=Facts)
    for node in facts.order if facts.survival is not None else ():
        last = kept.facts.get(RANKS + node.id)
        said = None if last is None else msgspec.msgpack.decode(last, type=Ranks)
        if said is not None and said.attempt == facts.attempt and facts.survival is not None:
            facts.survival.note(said.ranks)
    return facts


def order(nodes: list[Node], before: tuple[Node, ...]) -> tuple[Node, ...]:
    """Nodes in the order of their ranks: by the place that they ask for, that they had before, a number as their id,
    and then as they came."""
    had = {node.id: place for place, node in enumerate(before)}
    wanted = {
        n.id: n.index if n.index >= 0 else had.get(n.id, int(n.id) if n.id.isdecimal() else -1) for n in nodes
    }
    placed = {wanted[n.id]: n for n in nodes if 0 <= wanted[n.id] < len(nodes)}
    rest = [n for n in nodes if n not in placed.values()]
    return tuple(placed.get(place) or rest.pop(0) for place in range(len(nodes)))


__all__ = ["MEMBERS", "RANKS", "Facts", "earlier", "order"]
