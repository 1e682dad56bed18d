"""The tasks of a step phase by phase, as the host issues them: each micro-batch forward and then backward.

Forward is the local program from top to bottom with blocking reshards, backward from bottom to top as in autograd.
Flights (`partition/overlap.py`) start where the program says so and are waited for at their first use. The reduction of
a loss that nothing reads is only started.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import DTYPES, START, TRANSFERS, WAIT, Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.ops.collectives import kernel_collectives
from meshwright.partition import RESHARD, Partition
from meshwright.partition.backward_demand import demand_within
from meshwright.partition.insert_reshards import backward_itemsize, parse_steps
from meshwright.partition.interleave import Interleaved, named, original
from meshwright.partition.localize import late_values
from meshwright.partition.overlap import members_of
from meshwright.partition.parameter_offload import is_fetch
from meshwright.predict.bucket_tasks import Arrival, Item, arrivals, sent
from meshwright.predict.offload_prices import copied_bytes, moved_values
from meshwright.predict.offload_tasks import LINK, ActivationTasks, FetchTasks
from meshwright.predict.price import NodePrice, node_prices, transfer_price
from meshwright.predict.timeline import COMPUTE, Task
from meshwright.redistribute import Reshard, Step
from meshwright.redistribute.prices import Prices
from meshwright.redistribute.steps import wire_bytes, wire_elements

ADDING = "adding up gradients"  # instead of an operator
HOST = "host"  # a stream: what the host runs; the device waits


class StepTasks:
    """The list of tasks of a step, built phase by phase."""

    def __init__(
        self,
        parts: Partition,
        local: Graph,
        mesh: Mesh,
        cluster: Cluster,
        turns: Interleaved | None = None,
        prices: dict[str, NodePrice] | None = None,
    ) -> None:
        """`turns`: the interleaved program.

        Operators take as long as in its first half-batch. `prices`: known `node_prices`.
        """
        self.parts, self.local, self.mesh, self.cluster = parts, local, mesh, cluster
        self.waited: Prices = cluster.prices
        self.hidden: Prices = cluster.hidden_prices
        self.nodes = node_prices(parts, local, mesh, cluster) if prices is None else prices
        self.again = demand_within(parts.again, local)  # what backward makes again → the node that asks first
        self.items: list[Item] = []
        self.late = late_values(local)
        self.stands: dict[str, str] = {}  # node of a copy → what it is in the program of one
        self._views, self._owed = [0, 0], 0.0  # since the last task: forward and backward, the host's seconds
        self._last = -1  # the last task that the host waited for
        self._under_way: dict[tuple[str, str], int] = {}  # (start, direction) → the task of its collective
        self._repeated: set[str] = set()  # starts that backward has launched again, and
        self._brought: set[str] = set()  # those of which it has read something
        self._repeats = [n for n in local.nodes if n.op == START and n.kwarg("again")]
        if turns is not None:
            self.local, self.late = turns.graph, frozenset()
            self.stands = {name: original(name, copy) for name, copy in turns.copy_of.items()}
        moved = moved_values(parts, local)
        self.fetches = FetchTasks(parts, self.local, mesh, cluster, self.items)
        self.activations = ActivationTasks(parts, moved, self.local, mesh, cluster, self.items, self._steps)

    def _of_one(self, node: Node) -> str:
        """Return the name of a half-batch's node in the program of one."""
        return self.stands.get(node.name, node.name)

    def _steps_of(self, node: Node) -> Reshard:
        return self.parts.resharded.pairs[self._of_one(node)]

    # -------------------------------------------------- one task

    def _compute(
        self, node: Node, seconds: float, kind: str, what: str = "", issue_seconds: float = 0.0
    ) -> None:
        if seconds > 0.0:
            self._last = len(self.items)
            about: dict[str, object] = {"module": node.module, "operator": what or node.op}
            if any(self._views):
                about["views"] = tuple(self._views)
            streams = (COMPUTE, HOST) if self.parts.on_host(node) else (COMPUTE,)
            issue_seconds += self._owed
            self._views, self._owed = [0, 0], 0.0
            self.items.append(Task(node.name, streams, seconds, (), kind, about, issue_seconds))
        elif not what:  # a view: nothing for the device, some time for the host
            self._views[kind == "backward"] += 1
            self._views[0] += kind == "backward" and self._of_one(node) in self.again
            self._owed += issue_seconds

    def _copy(self, node: Node, phase: str) -> None:
        """Add a transfer over the link to the host, for which the host waits."""
        one = self.parts.resharded.graph.producers[self._of_one(node)]
        there, back = transfer_price(self.parts, one, self.mesh, self.cluster)
        seconds = back if phase == "backward" else there
        if seconds > 0.0:
            self._last = len(self.items)
            sent = copied_bytes(self.parts, one.name, self.mesh)
            about = {"module": node.module, "operator": node.op, "bytes": sent}
            self.items.append(Task(node.name, (COMPUTE, LINK), seconds, (), phase, about))

    def _send(
        self,
        name: str,
        kind: str,
        axes: Sequence[str],
        sent_bytes: float,
        phase: str,
        module: str,
        *,
        wait: bool = True,
    ) -> int:
        """Add one collective, for which the compute stream may `wait`, and return its position."""
        here, prices = len(self.items), self.waited if wait else self.hidden
        after = None if wait else self._last
        self.items.append(sent(name, kind, axes, sent_bytes, phase, module, self.mesh, prices, after))
        if wait:
            self._last = here
        return here

    def _steps(
        self, node: Node, steps: Iterable[Step], phase: str, *, wait: bool = True, itemsize: int = 0
    ) -> None:
        for step in steps:
            if step.kind in COLLECTIVES:
                sent = wire_bytes(step, self.mesh, itemsize or DTYPES[node.outputs[0].dtype])
                self._send(node.name, step.kind, step.axes, sent, phase, node.module, wait=wait)

    def _talk(self, node: Node, phase: str) -> None:
        """Add the collectives of a kernel; once more in backward for a recomputed operator."""
        one = self.parts.stands_for(self._of_one(node))
        phases = (phase, "forward") if phase == "backward" and one in self.again else (phase,)
        for talk in kernel_collectives(node, self.local.types):
            if talk.phase in phases:
                sent = wire_elements(talk.kind, self.mesh.count(talk.axes), talk.payload_bytes, 0)
                self._send(node.name, talk.kind, talk.axes, sent, phase, node.module)

    # -------------------------------------------------- the phases

    def begin(self) -> None:
        """Begin a micro-batch: nothing of it is under way."""
        self._under_way, self._repeated, self._brought = {}, set(), set()

    def once(self, graph: Graph) -> None:
        """Add the reductions over all micro-batches."""
        for node in graph.nodes:
            if node.op == RESHARD:
                self._steps(node, parse_steps(node.args[1]), "forward")
            else:
                for talk in kernel_collectives(node, graph.types):
                    sent = wire_elements(talk.kind, self.mesh.count(talk.axes), talk.payload_bytes, 0)
                    self._send(node.name, talk.kind, talk.axes, sent, talk.phase, node.module)

    def forward(self) -> None:
        """Add the local program from top to bottom."""
        self.fetches.begin()
        for node in self.local.nodes:
            if node.name == self.activations.settled:
                self.activations.settle()
            self._onward(node)
            self.activations.forward(node, self._last)

    def _onward(self, node: Node) -> None:
        """Add one node, forward."""
        if node.op == RESHARD:
            steps = self._steps_of(node).forward
            late = node.name in self.late and [s.kind for s in steps] == ["all_reduce"]
            self._steps(node, steps, "forward", wait=not late)
            return
        if node.op == START:
            self._launch(node, members_of(self.local, node), "onward", "forward")
            return
        if node.op == WAIT:
            self._land(node, "onward", "forward")
            return
        if is_fetch(node):
            self._last = self.fetches.forward(node, self._last)
            return
        if node.op in TRANSFERS:
            self._copy(node, "forward")
            return
        self._talk(node, "forward")
        price = self.nodes.get(self._of_one(node))
        if price is not None:
            self._compute(node, price.forward_seconds, "forward", issue_seconds=price.forward_issue_seconds)

    def backward(self, pending: Iterable[str], held: Collection[str] = ()) -> None:
        """Add the local program from bottom to top, and the places where the `pending` gradients are complete.

        Gradients of the reshards in `held` are accumulated and not sent.
        """
        arrives = arrivals(self.local, pending)
        again = self._made_again()
        kept = {hub.name for hubs in again.values() for hub in hubs}
        for node in reversed(self.local.nodes):
            if not any(node.needs_grad):
                self._talk(node, "backward")  # a helper of what is computed again
                continue
            for hub in again.pop(node.name, ()):
                self._bring_again(hub, kept)
            self.activations.backward(node, self._last)
            self._last = self.fetches.backward(node, self._last)
            if node.name in held:
                self._arrived(arrives.get(node.name, ()))
                continue
            if node.op == RESHARD:
                steps, width = self._steps_of(node).backward, backward_itemsize(node)
                self._steps(node, steps, "backward", itemsize=width)
            elif node.op == WAIT:
                if not node.args[1]:  # the first of its flight: the last whose gradient comes
                    start = self.local.producers[node.uses[0]]
                    self._launch(start, members_of(self.local, start), "back", "backward")
            elif node.op == START:
                for member in members_of(self.local, node):
                    if member.name not in held:
                        self._land(member, "back", "backward")
            elif node.op in TRANSFERS:
                if not is_fetch(node):  # an offloaded parameter has no gradient transfer
                    self._copy(node, "backward")
            else:
                self._talk(node, "backward")
                price = self.nodes.get(self._of_one(node))
                if price is not None:
                    self._compute(
                        node, price.backward_seconds, "backward", issue_seconds=price.backward_issue_seconds
                    )
                    self._compute(node, price.adding_seconds, "backward", ADDING)
            self._arrived(arrives.get(node.name, ()))
        self.items.append(Arrival((), self._last, ends=True))

    def _arrived(self, names: Iterable[str]) -> None:
        if found := tuple(names):
            self.items.append(Arrival(found, self._last))

    # -------------------------------------------------- flights

    def _launch(self, start: Node, members: Sequence[Node], way: str, phase: str) -> None:
        """Start the first collective of a flight, which overlaps with computation."""
        first = [(m, s[0]) for m in members if (s := self._sent(m, way))]
        if first:
            node, step = first[0]
            width = backward_itemsize(node) if way == "back" else DTYPES[node.outputs[0].dtype]
            sizes = (wire_bytes(s, self.mesh, width) for _, s in first)
            place = self._send(node.name, step.kind, step.axes, sum(sizes), phase, node.module, wait=False)
            self._under_way[start.name, way] = place

    def _land(self, member: Node, way: str, phase: str) -> None:
        """Add the wait for a flight, and a member's steps after its first collective."""
        place = self._under_way.pop((member.uses[0], way), None)
        if place is not None:
            self._last = len(self.items)
            self.items.append(Task(member.name, (COMPUTE,), 0.0, (place,), "wait"))
        width = backward_itemsize(member) if way == "back" else 0
        self._steps(member, self._sent(member, way)[1:], phase, itemsize=width)

    def _sent(self, member: Node, way: str) -> list[Step]:
        pair = self._steps_of(member)
        return [s for s in (pair.backward if way == "back" else pair.forward) if s.kind in COLLECTIVES]

    def _bring_again(self, hub: Node, kept: Collection[str]) -> None:
        """Repeat a hub with the rest of its flight; those before it start after that."""
        wait = self.local.producers[hub.name]
        if wait.op != WAIT:
            self._steps(hub, self._steps_of(hub).forward, "backward")
            return
        start = self.local.producers[wait.uses[0]]
        self._repeat(start, kept)
        self._land(wait, "again", "backward")
        if start.name not in self._brought:
            before = self._repeats[: self._repeats.index(start)]
            for earlier in before[::-1][: start.kwarg("ahead", 1)]:
                self._repeat(earlier, kept)
        self._brought.add(start.name)

    def _repeat(self, start: Node, kept: Collection[str]) -> None:
        members = members_of(self.local, start)
        again = [members[index] for index in start.kwarg("again")]
        if start.name not in self._repeated and any(m.name in kept for m in again):
            self._repeated.add(start.name)
            sources = (start.uses[index] for index in start.kwarg("again"))
            self._last = self.fetches.again(sources, self._last)
            self._launch(start, again, "again", "backward")

    def _made_again(self) -> dict[str, list[Node]]:
        """Return, by node, the reshards that backward repeats there, in order; in a stage those that its own nodes
        need.
        """
        copies, found = self.parts.copies, dict[str, list[Node]]()
        for node in self.parts.resharded.graph.nodes:
            last = self.again.get(node.name, "") if node.op == RESHARD else ""
            if not last:
                continue
            if node.name in self.local.producers:  # shared by all copies: for the last that reads it
                found.setdefault(named(last, copies - 1) if copies > 1 else last, []).append(node)
            else:
                for copy in range(copies):
                    mine = self.local.producers[named(node.name, copy)]
                    found.setdefault(named(last, copy), []).append(mine)
        return found


__all__ = ["ADDING", "HOST", "StepTasks"]
