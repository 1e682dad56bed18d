"""What Kueue does with groups of plain pods, after its documentation and its pod controller (August 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DONE = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Seen:
    """A pod in a queue. `group`: empty for one that is alone. `made`: orders pods by their creation. `placed`: it has a
    node, or may get one."""

    uid: str
    group: str
    count: int
    made: int
    phase: str
    deleting: bool
    held: bool
    placed: bool

    @property
    def active(self) -> bool:
        return self.phase != "Failed" and not (self.deleting and not self.placed)


@dataclass
class Kueue:
    """`room`: for how many pods there is quota. `state`: of each group that has had all of its pods once: queued,
    admitted or finished."""

    room: int
    state: dict[str, str] = field(default_factory=dict)
    excess: list[str] = field(default_factory=list)  # pods that were more than their group has

    def look(self, pods: Sequence[Seen]) -> tuple[set[str], set[str]]:
        """The pods that lose the finalizer, and those that lose the gate."""
        released: set[str] = set()
        groups: dict[str, list[Seen]] = {}
        for pod in sorted(pods, key=lambda pod: pod.made):
            groups.setdefault(pod.group or pod.uid, []).append(pod)
        self.state = {group: state for group, state in self.state.items() if group in groups}
        for group, members in groups.items():
            released |= self._look_at(group, members)
        used = sum(groups[g][0].count for g, state in self.state.items() if state == "admitted")
        for group, state in self.state.items():
            count = groups[group][0].count
            if state == "queued" and used + count <= self.room and _actives(groups[group]) == count:
                self.state[group], used = "admitted", used + count
        admitted = {
            pod.uid
            for group, members in groups.items()
            if self.state.get(group) == "admitted"
            for pod in members
            if pod.active and pod.uid not in released
        }
        return released, admitted

    def _look_at(self, group: str, members: list[Seen]) -> set[str]:
        first, inactive = members[0], [pod for pod in members if not pod.active]
        if not first.group and first.deleting:
            return {first.uid}
        if group not in self.state:
            if len(members) - len(inactive) >= first.count:
                self.state[group] = "queued"
            return {pod.uid for pod in inactive}
        if self.state[group] == "finished":
            return {pod.uid for pod in members}
        active = [pod for pod in members if pod.active]
        self.excess += [pod.uid for pod in active[first.count :]]
        replaced = min(len(inactive), len(members) - first.count)
        if all(pod.phase in DONE for pod in members):  # each is annotated so that nothing is retried then
            self.state[group] = "finished"
        return {pod.uid for pod in inactive[: max(0, replaced)]}


def _actives(members: list[Seen]) -> int:
    return sum(pod.active for pod in members)


__all__ = ["Kueue", "Seen"]
