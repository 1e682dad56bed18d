"""What is brought of parked parameters, as tasks of a timeline: copies on the host's link, a layer ahead of use."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.cost.cluster import Cluster
from meshwright.cost.timeline import COMPUTE, Task
from meshwright.graph import START, Graph, Node
from meshwright.mesh import Mesh
from meshwright.partition import Partition
from meshwright.partition.asked import asked_within
from meshwright.partition.bucket_tasks import Item
from meshwright.partition.fetch_prices import fetch_seconds
from meshwright.partition.fetches import fetch_runs
from meshwright.partition.interleave import named
from meshwright.partition.stash_tasks import LINK


class FetchTasks:
    """Adds tasks to a list. `program`: of all copies that take turns, which share what is brought."""

    def __init__(
        self, parts: Partition, program: Graph, mesh: Mesh, cluster: Cluster, items: list[Item]
    ) -> None:
        self.parts, self.mesh, self.cluster, self.items = parts, mesh, cluster, items
        self.runs = fetch_runs(program)
        self._run_of = {name: number for number, run in enumerate(self.runs) for name in run}
        last = parts.copies - 1
        fetched = {v: tuple(named(n, last) if last else n for n in at) for v, at in parts.fetched.items()}
        asked = asked_within(fetched, program)
        self._wanted = frozenset(asked)
        self._asked: dict[str, list[str]] = {}  # node → what its backward is the first to ask for
        flown = {use for n in program.nodes if n.op == START for use in n.uses}
        for name, node in asked.items():
            if name not in flown:  # else its flight asks, when it starts again
                self._asked.setdefault(node, []).append(name)
        self._ahead: dict[str, int] = {}  # brought, and not taken yet → its task
        self._left: set[str] = set()
        self._still: set[str] = set()  # what backward has not brought yet
        self._opened: set[int] = set()

    def begin(self) -> None:
        """A forward pass begins."""
        self._ahead, self._left, self._opened = {}, set(self._run_of), set()
        self._still = set(self._wanted)

    def forward(self, node: Node, last: int) -> int:
        """A transfer of forward, after the task `last`; the place of the wait for it."""
        run = self._run_of[node.name]
        first = self._left.issuperset(self.runs[run])
        self._start(run, last)
        self._left.discard(node.name)
        here = self._wait(node.name)
        if first and run + 1 < len(self.runs):
            self._start(run + 1, here)
        return here

    def backward(self, node: Node, last: int) -> int:
        """Before the backward of a node, after the task `last`: what it is the first to ask for."""
        return self.again(self._asked.get(node.name, ()), last)

    def again(self, names: Iterable[str], last: int) -> int:
        """Those of some values that are parked parameters are brought for backward, after the task `last`; the place of
        the wait for them."""
        for name in names:
            if name not in self._wanted:
                continue
            run = self._run_of[name]
            self._restart(run, last)
            last = self._wait(name)
            if run not in self._opened and run:
                self._restart(run - 1, last)
            self._opened.add(run)
        return last

    def _start(self, run: int, last: int) -> None:
        for name in self.runs[run]:
            if name in self._left and name not in self._ahead:
                self._copy(name, "forward", last)

    def _restart(self, run: int, last: int) -> None:
        for name in reversed(self.runs[run]):
            if name in self._still:
                self._still.discard(name)
                self._copy(name, "backward", last)

    def _copy(self, name: str, phase: str, last: int) -> None:
        node = self.parts.resharded.graph.producers[name]
        about = {"module": node.module, "operator": node.op, "bytes": node.outputs[0].size_bytes}
        streams = (LINK,) if self.cluster.host_bytes_per_s else (COMPUTE,)
        seconds = fetch_seconds(self.parts, name, self.mesh, self.cluster)
        self._ahead[name] = len(self.items)
        self.items.append(Task(name, streams, seconds, (last,) if last >= 0 else (), phase, about))

    def _wait(self, name: str) -> int:
        place = self._ahead.pop(name)
        if not self.cluster.host_bytes_per_s:
            return place
        self.items.append(Task(name, (COMPUTE,), 0.0, (place,), "wait"))
        return len(self.items) - 1


__all__ = ["FetchTasks"]
