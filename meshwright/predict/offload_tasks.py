"""Offloaded activations and parameters as tasks of a timeline.

Copies run on the host's link beside computation, and gathers where backward needs the value first, in the order of
`runtime/activation_offload.py`. Parameters are copied a layer ahead of use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from meshwright.core.graph import START, Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.partition.activation_offload import (
    SavedActivation,
    activations_in,
    part_bytes,
    room_bytes,
    settled_before,
)
from meshwright.partition.backward_demand import demand_within
from meshwright.partition.interleave import in_copies, named
from meshwright.partition.parameter_offload import fetch_runs
from meshwright.predict.bucket_tasks import Item
from meshwright.predict.offload_prices import copied_bytes, fetch_seconds, host_seconds
from meshwright.predict.timeline import COMPUTE, Task
from meshwright.redistribute import Step
from meshwright.redistribute.steps import origin

LINK = "host link"
KEPT = "kept on the host"  # instead of an operator: a saved activation
# collectives that the compute stream waits for, in a phase
Talk = Callable[[Node, Sequence[Step], str], None]


@dataclass(eq=False)
class _Run:
    """Values of one layer that go to the host one after the other: those still there, and their tasks back."""

    layer: str
    before: _Run | None
    there: list[str] = field(default_factory=list)
    back: dict[str, int] = field(default_factory=dict)
    opened: bool = False


class ActivationTasks:
    """Adds tasks of stored activations to a list; `talk` adds collectives to the same list.

    `moved`: the values of one half-batch that are stored (others are views, saved with their base). `program`: that of
    all half-batches.
    """

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
        activations = activations_in(parts.activations, program, parts.copies)
        goes = in_copies(dict.fromkeys(moved, ""), parts.copies)
        self.moved = {v: s for v, s in activations.items() if v in goes}
        self.sizes = {v: part_bytes(s, program, v, parts.plan.mesh, rank) for v, s in self.moved.items()}
        self.room = room_bytes(program, activations, parts.plan.mesh, rank)
        self.settled = settled_before(program, activations)
        self.asked: dict[str, list[str]] = {}  # node → what its backward is the first to ask for
        for value, activation in self.moved.items():
            self.asked.setdefault(activation.needed_by[0], []).append(value)
        self._leaving: deque[tuple[int, str]] = deque()  # (task, value)
        self._run: _Run | None = None
        self._runs: dict[str, _Run] = {}

    def forward(self, node: Node, last: int) -> None:
        """Offload or shard the results of a node, after the task `last`."""
        for value in node.values:
            activation = self.moved.get(value)
            if activation is None or not activation.host:
                continue
            if self._run is None or self._run.layer != activation.layer or self._run.opened:
                self._run = _Run(activation.layer, self._run)
            self._leaving.append((self._copy(value, "forward", last), value))
            self._run.there.append(value)
            self._runs[value] = self._run
            while len(self._leaving) > 1 and sum(self.sizes[v] for _, v in self._leaving) > self.room:
                self._settle_one()

    def settle(self) -> None:
        """Wait until all values have left the device."""
        while self._leaving:
            self._settle_one()

    def backward(self, node: Node, last: int) -> None:
        """Bring back the values that the backward of a node needs first."""
        for value in self.asked.get(node.name, ()):
            activation, run = self.moved[value], self._runs.get(value)
            if run is not None:
                self._bring(run, last)
                self._wait(value, run.back.pop(value))
            self.talk(self._maker(activation), activation.gather, "backward")
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
        """Return the position of the last task, without arrivals of gradients."""
        return next((n for n in reversed(range(len(self.items))) if isinstance(self.items[n], Task)), -1)

    def _maker(self, activation: SavedActivation) -> Node:
        return self.parts.resharded.graph.producers[activation.value]

    def _copy(self, value: str, phase: str, last: int) -> int:
        """Add a copy beside computation and return its position. Without a link it runs on the compute stream."""
        here, activation = len(self.items), self.moved[value]
        about = {
            "module": self._maker(activation).module,
            "operator": KEPT,
            "bytes": self.sizes[value],
        }
        streams = (LINK,) if self.cluster.host_bytes_per_s else (COMPUTE,)
        seconds = host_seconds(self.parts, activation, self.mesh, self.cluster)
        self.items.append(Task(value, streams, seconds, (last,) if last >= 0 else (), phase, about))
        return here

    def _settle_one(self) -> None:
        place, value = self._leaving.popleft()
        self._wait(value, place)

    def _wait(self, name: str, place: int) -> None:
        if self.cluster.host_bytes_per_s:
            self.items.append(Task(name, (COMPUTE,), 0.0, (place,), "wait"))


class FetchTasks:
    """Adds tasks of offloaded parameters to a list. `program`: that of all half-batches, which share the copies."""

    def __init__(
        self, parts: Partition, program: Graph, mesh: Mesh, cluster: Cluster, items: list[Item]
    ) -> None:
        self.parts, self.mesh, self.cluster, self.items = parts, mesh, cluster, items
        self.runs = fetch_runs(program)
        self._run_of = {name: number for number, run in enumerate(self.runs) for name in run}
        last = parts.copies - 1
        fetched = {v: tuple(named(n, last) if last else n for n in at) for v, at in parts.fetched.items()}
        asked = demand_within(fetched, program)
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
        """Begin a forward pass."""
        self._ahead, self._left, self._opened = {}, set(self._run_of), set()
        self._still = set(self._wanted)

    def forward(self, node: Node, last: int) -> int:
        """Add a transfer of forward, after the task `last`; return the position of the wait for it."""
        run = self._run_of[node.name]
        first = self._left.issuperset(self.runs[run])
        self._start(run, last)
        self._left.discard(node.name)
        here = self._wait(node.name)
        if first and run + 1 < len(self.runs):
            self._start(run + 1, here)
        return here

    def backward(self, node: Node, last: int) -> int:
        """Fetch what the backward of a node needs first, after the task `last`."""
        return self.again(self._asked.get(node.name, ()), last)

    def again(self, names: Iterable[str], last: int) -> int:
        """Fetch the offloaded parameters among some values for backward, after the task `last`.

        Returns the position of the wait for them.
        """
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
        about = {
            "module": node.module,
            "operator": node.op,
            "bytes": copied_bytes(self.parts, name, self.mesh),
        }
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


__all__ = ["FetchTasks", "KEPT", "LINK", "ActivationTasks"]
