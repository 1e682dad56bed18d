"""What backward comes to when: gradients that are complete, buckets that start then, values that it needs again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from meshwright.cost.saved import saved
from meshwright.graph import TRANSFERS, Graph, Node
from meshwright.partition import RESHARD, Partition
from meshwright.partition.again import VIEWS
from meshwright.redistribute.buckets import Group


class Started:
    """Which buckets start when: in order, each when its last gradient is there."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.missing = [{g.name for g in group.members} for group in groups]
        self.place = {g.name: number for number, group in enumerate(groups) for g in group.members}
        self.next = 0

    def arrived(self, names: Collection[str]) -> list[tuple[int, Group]]:
        """The buckets that start when these gradients are there."""
        for name in names:
            self.missing[self.place[name]].discard(name)
        return self._ready()

    def rest(self) -> list[tuple[int, Group]]:
        """Those that are left at the end of backward: no gradient has reached some of their parameters."""
        self.missing = [set() for _ in self.groups]
        return self._ready()

    def _ready(self) -> list[tuple[int, Group]]:
        first = self.next
        while self.next < len(self.groups) and not self.missing[self.next]:
            self.next += 1
        return [(n, self.groups[n]) for n in range(first, self.next)]


def arrivals(local: Graph, names: Iterable[str]) -> dict[str, list[str]]:
    """Node → the parameters whose gradient is complete after its backward: those it is the first to use."""
    found: dict[str, list[str]] = {}
    for name in names:
        user = next((node for node, _ in local.consumers[name] if any(node.needs_grad)), None)
        if user is not None:
            found.setdefault(user.name, []).append(name)
    return found


def keepers(parts: Partition, hub: Node) -> set[str]:
    """The nodes for which autograd keeps a hub, or what lies in its memory."""
    graph, todo, seen = parts.resharded.graph, [hub.name], set[str]()
    found: set[str] = set()
    while todo:
        for node, port in graph.consumers[todo.pop()]:
            if node.op in TRANSFERS:
                view = True
            elif node.op == RESHARD:
                view = {s.kind for s in parts.resharded.pairs[node.name].forward} <= {"slice"}
            else:
                view = node.op in VIEWS
                wanted = [use in graph.needs_grad for use in node.uses]
                if any(node.needs_grad) and port in saved(node, graph.types, wanted).inputs:
                    found.add(node.name)
            if view and node.name not in seen:
                seen.add(node.name)
                todo += node.values
    return found


__all__ = ["Started", "arrivals", "keepers"]
