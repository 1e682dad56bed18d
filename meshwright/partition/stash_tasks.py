"""What is kept for backward elsewhere than where it lies, as tasks of a timeline: copies on the host's link beside what
is computed, gathers where backward asks for the value first. The order is that of `runtime/stashes.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from meshwright.cost.cluster import Cluster
from meshwright.cost.timeline import COMPUTE, Task
from meshwright.graph import Graph, Node
from meshwright.mesh import Mesh
from meshwright.partition import Partition
from meshwright.partition.bucket_tasks import Item
from meshwright.partition.interleave import in_copies
from meshwright.partition.stash_prices import host_seconds
from meshwright.partition.stashes import Stash, part_bytes, room_bytes, settled_before, stashed_in
from meshwright.redistribute import Step
from meshwright.redistribute.steps import origin

LINK = "host link"
Talk = Callable[
    [Node, Sequence[Step], str], None
]  # collectives that the compute stream waits for, in a phase


@dataclass(eq=False)
class _Run:
    """Values of one layer that go to the host one after the other: those that are still there, and their way back."""

    layer: str
    before: _Run | None
    there: list[str] = field(default_factory=list)
    back: dict[str, int] = field(default_factory=dict)
    opened: bool = False


class StashTasks:
    """Adds tasks to a list; `talk` adds collectives to the same. `moved`: the values of one copy that go (others are
    views, kept with what they lie in); `program`: of all copies that take turns."""

    def __init__(
        self,
        parts: Partition,
        moved: Collection[str],
        program: Graph,
        mesh: Mesh,
        cluster: Cluster,
        items: list[Item],
        talk: Talk,
    ) -> None:
        self.parts, self.mesh, self.cluster = parts, mesh, cluster
        self.items, self.talk = items, talk
        rank = mesh.rank(origin(mesh))
        stashes = stashed_in(parts.stashes, program, parts.copies)
        goes = in_copies(dict.fromkeys(moved, ""), parts.copies)
        self.moved = {v: s for v, s in stashes.items() if v in goes}
        self.sizes = {v: part_bytes(s, program, v, parts.plan.mesh, rank) for v, s in self.moved.items()}
        self.room = room_bytes(program, stashes, parts.plan.mesh, rank)
        self.settled = settled_before(program, stashes)
        self.asked: dict[str, list[str]] = {}  # node → what its backward is the first to ask for
        for value, stash in self.moved.items():
            self.asked.setdefault(stash.asked[0], []).append(value)
        self._leaving: deque[tuple[int, str]] = deque()  # (task, value)
        self._run: _Run | None = None
        self._runs: dict[str, _Run] = {}

    def forward(self, node: Node, last: int) -> None:
        """After a node, the task `last`: what it makes goes."""
        for value in node.values:
            stash = self.moved.get(value)
            if stash is None or not stash.host:
                continue
            if self._run is None or self._run.layer != stash.layer or self._run.opened:
                self._run = _Run(stash.layer, self._run)
            self._leaving.append((self._copy(value, "forward", last), value))
            self._run.there.append(value)
            self._runs[value] = self._run
            while len(self._leaving) > 1 and sum(self.sizes[v] for _, v in self._leaving) > self.room:
                self._settle_one()

    def settle(self) -> None:
        """All has left the device."""
        while self._leaving:
            self._settle_one()

    def backward(self, node: Node, last: int) -> None:
        """Before the backward of a node: what it is the first to ask for is brought."""
        for value in self.asked.get(node.name, ()):
            stash, run = self.moved[value], self._runs.get(value)
            if run is not None:
                self._bring(run, last)
                self._wait(value, run.back.pop(value))
            self.talk(self._maker(stash), stash.gather, "backward")
            if run is not None:
                if not run.opened and run.before is not None:
                    self._bring(run.before, self._last_task())
                run.opened = True

    def _bring(self, run: _Run, last: int) -> None:
        self.settle()
        for value in reversed(run.there):
            run.back[value] = self._copy(value, "backward", last)
        run.there = []

    def _last_task(self) -> int:
        """The place of the last task; where gradients arrive stands among them, and is none."""
        return next((n for n in reversed(range(len(self.items))) if isinstance(self.items[n], Task)), -1)

    def _maker(self, stash: Stash) -> Node:
        return self.parts.resharded.graph.producers[stash.value]

    def _copy(self, value: str, phase: str, last: int) -> int:
        """A copy beside computing; its place in the list. Where the device is the host's processor, it computes."""
        here, stash = len(self.items), self.moved[value]
        about = {
            "module": self._maker(stash).module,
            "operator": "kept on the host",
            "bytes": self.sizes[value],
        }
        streams = (LINK,) if self.cluster.host_bytes_per_s else (COMPUTE,)
        seconds = host_seconds(self.parts, stash, self.mesh, self.cluster)
        self.items.append(Task(value, streams, seconds, (last,) if last >= 0 else (), phase, about))
        return here

    def _settle_one(self) -> None:
        place, value = self._leaving.popleft()
        self._wait(value, place)

    def _wait(self, name: str, place: int) -> None:
        if self.cluster.host_bytes_per_s:
            self.items.append(Task(name, (COMPUTE,), 0.0, (place,), "wait"))


__all__ = ["LINK", "StashTasks"]
