"""Start early, wait late: reshards whose communication goes on beside computation, and which of them go together.

What all ranks agree on is a list of *flights*: reshards that start as one, and the place where they start. It follows
from the program before it is cut into ranks (`flights`); `overlapped` writes it into the program of one rank, where a
reshard becomes the wait for its flight. A start and its waits are two nodes of autograd, so in backward the gradient's
communication starts where forward waited, and is waited for where forward started.

- Parameters that are gathered for their use are taken in stretches: one layer, or less where a layer is larger than a
  bucket. A stretch starts when the program enters the one before it, so at most one is there before it is needed. Its
  equal reshards go as one collective. What they send of parked parameters has come from the host by then.
- Other values start right after they are made (at most a layer early), where something is computed before they are
  read. Neighbours that can start together, and are small, go together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.folding import layer_of
from meshwright.core.graph import MOVES, PIN, RESHARD, START, WAIT, Graph, Node, Ref, TensorType, verify
from meshwright.partition.bucket_sizes import sizes
from meshwright.partition.buckets import BUCKET_BYTES
from meshwright.partition.insert_reshards import Resharded, local_type
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.recompute import VIEWS
from meshwright.plan.plan import Plan
from meshwright.redistribute import Step
from meshwright.redistribute.steps import origin

TOKEN = TensorType("f32", (0,))  # what a start gives: only its waits can read it


@dataclass(frozen=True)
class Flight:
    """Reshards that start together, right after the node `after` (by default at the beginning of the program).
    `members` are in the order of their first uses."""

    members: tuple[str, ...]
    after: str = ""

    @property
    def name(self) -> str:
        """The name of the start."""
        return f"{self.members[0]}_start"


def flights(resharded: Resharded, plan: Plan) -> tuple[Flight, ...]:
    """The flights of a program. The same on every rank."""
    work = _Schedule(resharded, plan)
    return (*work.of_parameters(), *work.of_values())


def overlapped(local: Graph, schedule: Sequence[Flight]) -> Graph:
    """The program of a rank with its flights: each reshard of one becomes a wait, under the name it had. What brings a
    parked parameter for one stands right before its start."""
    if not schedule:
        return local
    nodes = {n.name: n for n in local.nodes}
    place = {name: number for number, name in enumerate(nodes)}
    members = {name for flight in schedule for name in flight.members}
    moved: set[str] = set()
    waits: dict[str, Node] = {}
    after: dict[str, list[Node]] = {}
    for flight in schedule:
        start = _start(flight, [nodes[name] for name in flight.members])
        for index, name in enumerate(flight.members):
            waits[name] = replace(nodes[name], op=WAIT, args=(Ref(start.name), index))
        fetched = [nodes[u] for u in start.uses if u in nodes and is_fetch(nodes[u]) and u not in moved]
        begun = place.get(flight.after, -1)
        brought = [
            n
            for n in fetched
            # What others read of a tied parameter, as it comes, may be before the start.
            if place[n.name] > begun or all(c.name in members for c, _ in local.consumers[n.name])
        ]
        moved.update(n.name for n in brought)
        after.setdefault(flight.after, []).extend((*brought, start))
    made = list(after.get("", ()))
    for node in local.nodes:
        if node.name not in moved:
            made.append(waits.get(node.name, node))
        made += after.get(node.name, ())
    return verify(replace(local, nodes=tuple(made)))


def _start(flight: Flight, members: Sequence[Node]) -> Node:
    sources = tuple(Ref(n.uses[0]) for n in members)
    halves = (tuple(n.args[1] for n in members), tuple(n.args[2] for n in members))
    again = tuple(index for index, n in enumerate(members) if n.kwarg("again"))
    graded, first = any(flag for n in members for flag in n.needs_grad), members[0]
    wire = first.kwarg("wire")  # the dtype in which their gradients are added up: one, or they were apart
    kwargs = ((("again", again),) if again else ()) + ((("wire", wire),) if wire else ())
    return Node(
        flight.name, START, (sources, *halves), kwargs, (TOKEN,), (graded,), first.module, first.source
    )


class _Schedule:
    """The flights of a program while they are found."""

    def __init__(self, resharded: Resharded, plan: Plan) -> None:
        self.resharded, self.graph, self.plan = resharded, resharded.graph, plan
        self.enough = sizes(plan)
        self.place = {n.name: number for number, n in enumerate(self.graph.nodes)}
        self.stored = {i.name: i for i in self.graph.inputs if i.role in ("parameter", "buffer")}
        self.computes = [n.op not in VIEWS and n.op not in (*MOVES, PIN) for n in self.graph.nodes]

    # ------------------------------------------------------------ parameters

    def of_parameters(self) -> Iterator[Flight]:
        """A stretch starts after the first wait of the one before it, which has taken that one out of its buffers."""
        entered = ""
        for stretch in sorted(self._stretches(), key=lambda s: self.place[s[0].name]):
            for members in self._together(stretch):
                yield Flight(tuple(n.name for n in members), entered)
            entered = stretch[0].name

    def _stretches(self) -> list[list[Node]]:
        """Reshards of parameters by layer, a layer larger than a bucket in parts; the user's groups as they are."""
        found: list[list[Node]] = []
        groups: dict[int, list[Node]] = {}
        stretch: list[Node] = []
        filled, unit = 0, ""
        for node in self.graph.nodes:
            entry = self.stored.get(stored_in(self.graph, node)) if node.op == RESHARD else None
            if entry is None or not _sent(self._pair(node)[0]) or not self.graph.consumers[node.name]:
                continue
            group = self.plan.techniques.fusion_group(entry.target, *entry.ties)
            if group >= 0:
                groups.setdefault(group, []).append(node)
                continue
            here = layer_of(self.graph.consumers[node.name][0][0].module)
            if stretch and (here != unit or filled >= self._limit(node)):
                found.append(stretch)
                stretch, filled = [], 0
            unit = here
            stretch.append(node)
            filled += self._bytes(node)
        return [*found, *([stretch] if stretch else []), *groups.values()]

    def _together(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """The nodes apart by what can be one collective."""
        found: dict[Hashable, list[Node]] = {}
        for node in nodes:
            found.setdefault(self._key(node), []).append(node)
        return list(found.values())

    # ------------------------------------------------------------ other values

    def of_values(self) -> list[Flight]:
        """Those between whose making and reading something is computed, and those that go with a neighbour."""
        found: list[_Open] = []
        latest: dict[Hashable, _Open] = {}
        changes = self._changes()
        for node in self.graph.nodes:
            producer = self.graph.producers.get(stored_in(self.graph, node)) if node.op == RESHARD else None
            if producer is None or not any(node.needs_grad) or not self.graph.consumers[node.name]:
                continue
            # What backward makes again it makes from what is kept, blocking.
            if node.kwarg("again") or not any(_sent(half) for half in self._pair(node)):
                continue
            here, key, size = self.place[node.name], self._key(node), self._bytes(node)
            anchor = self._anchor(self.place[producer.name], here, changes)
            flight = latest.get(key)
            if flight is not None and flight.takes(anchor, size, self._limit(node)):
                after = max(flight.after, anchor)
                if self._hides(after, flight.first) or not self._hides(flight.after, flight.first):
                    flight.members.append(node.name)
                    flight.after, flight.size_bytes = after, flight.size_bytes + size
                    continue
            latest[key] = _Open([node.name], anchor, here, size)
            found.append(latest[key])
        kept = [f for f in found if len(f.members) > 1 or self._hides(f.after, f.first)]
        return [Flight(tuple(f.members), after=self.graph.nodes[f.after].name) for f in kept]

    def _anchor(self, made: int, read: int, changes: Sequence[int]) -> int:
        """The node after which a value may start: what makes it, or a later one where that is over a layer away."""
        # What needs no gradient may have been moved to the front of a rank's program.
        nodes, least = self.graph.nodes, changes[read] - 1
        near = (n for n in range(made, read) if changes[n] >= least and any(nodes[n].needs_grad))
        return next(near, made)

    def _hides(self, after: int, read: int) -> bool:
        """Return whether something is computed, forward and backward, between two places."""
        between = range(after + 1, read)
        return any(self.computes[n] and any(self.graph.nodes[n].needs_grad) for n in between)

    def _changes(self) -> list[int]:
        """Per node how often the layer has changed before it."""
        found, count, layer = [], 0, None
        for node in self.graph.nodes:
            here = layer_of(node.module)
            count += layer is not None and here != layer
            layer = here
            found.append(count)
        return found

    # ------------------------------------------------------------ one reshard

    def _pair(self, node: Node) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        pair = self.resharded.pairs[node.name]
        return pair.forward, pair.backward if any(node.needs_grad) else ()

    def _key(self, node: Node) -> Hashable:
        """Reshards of equal keys can be one collective: they send in one way, forward and backward."""
        halves = tuple(_sent(half) for half in self._pair(node))
        flat = all(len(half) <= 1 and all(COLLECTIVES[s.kind].fuses for s in half) for half in halves)
        if not flat or not halves[0] or not self._enough(node):
            return node.name
        sent = tuple((s.kind, s.axes) for half in halves for s in half)
        host = node.name in self.resharded.hosted
        return (sent, node.outputs[0].dtype, node.needs_grad, node.kwarg("wire"), host)

    def _enough(self, node: Node) -> int:
        step = next(s for half in self._pair(node) for s in _sent(half))
        return self.enough(step.kind, step.axes)

    def _limit(self, node: Node) -> int:
        return self._enough(node) or BUCKET_BYTES

    def _bytes(self, node: Node) -> int:
        """Bytes of the result on the rank that holds most, so that all ranks count alike."""
        mesh = self.plan.mesh
        layout = self.resharded.layouts[node.name]
        return local_type(node.outputs[0], layout, mesh, mesh.rank(origin(mesh))).size_bytes


@dataclass
class _Open:
    """A flight that may still take members: `after` and `first` are places of nodes."""

    members: list[str]
    after: int
    first: int
    size_bytes: int

    def takes(self, after: int, size_bytes: int, limit: int) -> bool:
        """Return whether a value may start before the first wait of the flight, and is small enough."""
        return after < self.first and self.size_bytes + size_bytes <= limit


def stored_in(graph: Graph, reshard: Node) -> str:
    """What a reshard brings in another layout: of a parked parameter itself, not its copy on the device."""
    source = graph.producers.get(reshard.uses[0])
    return reshard.uses[0] if source is None or not is_fetch(source) else source.uses[0]


def _sent(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(s for s in steps if s.kind in COLLECTIVES)


def members_of(local: Graph, start: Node) -> tuple[Node, ...]:
    """The waits of a start, in the order of its members."""
    waits: Mapping[int, Node] = {int(n.args[1]): n for n, _ in local.consumers[start.name]}
    return tuple(waits[index] for index in range(len(start.args[0])))


__all__ = ["Flight", "flights", "members_of", "overlapped", "stored_in"]
