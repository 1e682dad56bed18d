"""What backward comes to when: gradients that are complete, buckets that start then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from meshwright.graph import Graph
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


__all__ = ["Started", "arrivals"]
