"""Buckets of gradients as tasks of a timeline, and the tasks after the last of them.

A step is first listed without its buckets (`tasks.py`), with the places where gradients are complete. The buckets
follow from the order and sizes of gradients alone, so one list can be filled for any number of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.machine import step_issue_seconds, update_issue_seconds
from meshwright.partition.buckets import Group
from meshwright.predict.timeline import COMPUTE, Task
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.steps import wire_elements

HOST_ENDS = "host ends"  # a task: what the host does beside issuing the others


@dataclass(frozen=True, slots=True)
class Arrival:
    """The place where the gradients of some parameters are complete.

    `ends`: a backward ends here. `after`: the position of the last task the host waited for; -1 for none.
    """

    names: tuple[str, ...]
    after: int
    ends: bool = False


Item = Task | Arrival  # what a task waits for are places in the list of these


@dataclass(frozen=True, slots=True)
class Pass:
    """The buckets of one backward; `waits`: the host waits for all of them before it goes on."""

    groups: Sequence[Group]
    waits: bool = False


def sent(
    name: str,
    kind: str,
    axes: Sequence[str],
    sent_bytes: float,
    phase: str,
    module: str,
    mesh: Mesh,
    prices: Prices,
    after: int | None = None,
) -> Task:
    """Return one collective, for which the compute stream waits.

    With `after` it is only started, after that task (-1 for none).
    """
    seconds = prices.seconds(kind, mesh, axes, sent_bytes)
    shown = mesh.show(mesh.sort(axes))
    about = {"module": module, "collective": kind, "axes": shown, "sent_bytes": sent_bytes}
    if after is None:
        return Task(name, (COMPUTE, shown), seconds, (), phase, about)
    return Task(name, (shown,), seconds, (after,) if after >= 0 else (), phase, about)


class BucketTasks:
    """The tasks of a step, with its buckets."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.tasks: list[Task] = []
        self.ends: list[int] = []  # how many tasks there are at the end of each backward
        self._last = -1  # what the host waited for last
        self._reductions: list[int] = []
        self._scattered: int | None = None  # the bucket under way of which every rank gets its part

    def fill(self, items: Sequence[Item], passes: Iterable[Pass]) -> None:
        """Add items, and the buckets of each backward among them."""
        places: list[int] = []  # of each item among the tasks
        # item → a later wait, which is what the host waited for last from there on
        waits: dict[int, int] = {}
        left = iter(passes)
        now = next(left, Pass(()))
        started = Started(now.groups)
        for item in items:
            places.append(len(self.tasks))
            if isinstance(item, Task):
                after = tuple(waits[a] if a in waits else places[a] for a in item.after)
                self.tasks.append(item if after == item.after else replace(item, after=after))
                continue
            self._last = waits.get(item.after, places[item.after] if item.after >= 0 else -1)
            before = self._last
            asked = [name for name in item.names if name in started.place]
            self._reduce(started.rest() if item.ends else started.arrived(asked))
            if item.ends:
                if now.waits:
                    self._wait()
                self.ends.append(len(self.tasks))
                now = next(left, Pass(()))
                started = Started(now.groups)
            if self._last != before:
                waits[item.after] = self._last

    def _reduce(self, groups: Iterable[tuple[int, Group]]) -> None:
        for number, group in groups:
            name = f"bucket {number}"
            if group.parted:
                self._scatter(name, group)
                continue
            size = wire_elements("all_reduce", self.mesh.count(group.axes), group.wire_bytes, 0)
            self._start(name, "all_reduce", group.axes, size, self._last)

    def _scatter(self, name: str, group: Group) -> None:
        """Add a bucket that is reduce-scattered. The host waits for the one before it, to free it."""
        if self._scattered is not None:
            self._last = len(self.tasks)
            self.tasks.append(Task(f"{name}, room", (COMPUTE,), 0.0, (self._scattered,), "reduce"))
        part, after = group.wire_bytes / self.mesh.count(group.cut), self._last
        if group.cut:
            size = wire_elements("reduce_scatter", self.mesh.count(group.cut), group.wire_bytes, part)
            after = self._scattered = self._start(name, "reduce_scatter", group.cut, size, after)
        if group.summed:
            size = wire_elements("all_reduce", self.mesh.count(group.summed), part, 0)
            self._start(name, "all_reduce", group.summed, size, after)

    def _start(self, name: str, kind: str, axes: Sequence[str], size: float, after: int) -> int:
        place, prices = len(self.tasks), self.cluster.hidden_prices
        self.tasks.append(sent(name, kind, axes, size, "reduce", "", self.mesh, prices, after))
        self._reductions.append(place)
        return place

    def _wait(self) -> None:
        """Add the wait for the reduce-scatters of a backward that is not the last."""
        self._last = len(self.tasks)
        self.tasks.append(Task("parts of gradients", (COMPUTE,), 0.0, tuple(self._reductions), "wait"))
        self._reductions, self._scattered = [], None

    def update(self, seconds: float, parameters: int = 0) -> None:
        """Add the wait for the buckets, and the optimizer of so many parameters."""
        if seconds > 0.0 or self._reductions:
            issue = parameters * update_issue_seconds(self.cluster.device, self.cluster.measured)
            after = tuple(self._reductions)
            self.tasks.append(Task("update", (COMPUTE,), seconds, after, "update", issue_seconds=issue))

    def end(self) -> None:
        """Add what the host does in a step beside issuing it, where that counts."""
        seconds = step_issue_seconds(self.cluster.device, self.cluster.measured)
        if seconds > 0.0:
            self.tasks.append(Task(HOST_ENDS, (COMPUTE,), 0.0, (), "wait", issue_seconds=seconds))

    def gather(self, groups: Sequence[Group]) -> None:
        """Add the all-gathers of weights with sharded updates."""
        for number, group in enumerate(groups):
            part = group.size_bytes / self.mesh.count(group.axes)
            size = wire_elements("all_gather", self.mesh.count(group.axes), part, 0)
            name, prices = f"weights {number}", self.cluster.prices
            self.tasks.append(sent(name, "all_gather", group.axes, size, "update", "", self.mesh, prices))


class Started:
    """The order in which buckets start: each when its last gradient is complete and those before it have started."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.missing = [{g.name for g in group.members} for group in groups]
        self.place = {g.name: number for number, group in enumerate(groups) for g in group.members}
        self.next = 0

    def arrived(self, names: Collection[str]) -> list[tuple[int, Group]]:
        """Return the buckets that start when these gradients are complete."""
        for name in names:
            self.missing[self.place[name]].discard(name)
        return self._ready()

    def rest(self) -> list[tuple[int, Group]]:
        """Return the buckets left at the end of backward: no gradient has reached some of their parameters."""
        self.missing = [set() for _ in self.groups]
        return self._ready()

    def _ready(self) -> list[tuple[int, Group]]:
        first = self.next
        while self.next < len(self.groups) and not self.missing[self.next]:
            self.next += 1
        return [(n, self.groups[n]) for n in range(first, self.next)]


def arrivals(local: Graph, names: Iterable[str]) -> dict[str, list[str]]:
    """Return, by node, the parameters whose gradients are complete after its backward: those it is the first to use."""
    found: dict[str, list[str]] = {}
    for name in names:
        user = next((node for node, _ in local.consumers[name] if any(node.needs_grad)), None)
        if user is not None:
            found.setdefault(user.name, []).append(name)
    return found


__all__ = ["Arrival", "BucketTasks", "Item", "Pass", "Started", "arrivals", "sent"]
