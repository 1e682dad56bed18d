"""Overlap reshards with computation: start early, wait late, and fuse neighbours.

All ranks share a list of *flights*: reshards that start together, and the place where they start. `flights` computes it
from the global program. `overlapped` writes it into the program of one rank, where a reshard becomes the wait for its
flight. A start and its waits are nodes of autograd, so in backward the gradient's communication starts where forward
waited and ends where forward started.

- Parameters that are gathered for their use go in groups: one layer, or less if more than a bucket of a layer was read
  before. A group starts when the program enters the one before it (prefetch), so at most one is there before it is
  needed. Equal reshards of a group are one collective, up to a bucket. Offloaded parameters have come from the host by
  then.
- Other values start right after they are computed (at most a layer early), if something is computed before they are
  read. Small neighbours that can start together are fused.
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

TOKEN = TensorType("f32", (0,))  # the result of a start: only its waits can read it


@dataclass(frozen=True)
class Flight:
    """Reshards that start together, right after the node `after` (by default at the beginning of the program).

    `members` are in the order of their first uses. `ahead`: how many flights before it backward launches after it.
    """

    members: tuple[str, ...]
    after: str = ""
    ahead: int = 1

    @property
    def name(self) -> str:
        """The name of the start."""
        return f"{self.members[0]}_start"


def flights(resharded: Resharded, plan: Plan) -> tuple[Flight, ...]:
    """Return the flights of a program. They are the same on every rank."""
    work = _Schedule(resharded, plan)
    return (*work.of_parameters(), *work.of_values())


def overlapped(local: Graph, schedule: Sequence[Flight]) -> Graph:
    """Return the program of a rank with its flights.

    Each reshard of a flight becomes a wait of the same name. Transfers of offloaded parameters precede its start.
    """
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
            # Other readers of a tied parameter, in its stored layout, may precede the start.
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
    wire = first.kwarg("wire")  # the dtype in which gradients are reduced; members of a flight share it
    kwargs = ((("again", again),) if again else ()) + ((("wire", wire),) if wire else ())
    kwargs += (("ahead", flight.ahead),) if again and flight.ahead != 1 else ()
    return Node(
        flight.name, START, (sources, *halves), kwargs, (TOKEN,), (graded,), first.module, first.source
    )


class _Schedule:
    """The computation of the flights of a program."""

    def __init__(self, resharded: Resharded, plan: Plan) -> None:
        self.resharded, self.graph, self.plan = resharded, resharded.graph, plan
        self.enough, self.ahead = sizes(plan), plan.techniques.prefetch
        self.place = {n.name: number for number, n in enumerate(self.graph.nodes)}
        self.stored = {i.name: i for i in self.graph.inputs if i.role in ("parameter", "buffer")}
        self.computes = [n.op not in VIEWS and n.op not in (*MOVES, PIN) for n in self.graph.nodes]

    # ------------------------------------------------------------ parameters

    def of_parameters(self) -> Iterator[Flight]:
        """Yield the flights of parameters.

        A group starts after the first wait of the group `prefetch` before it, which frees that one's buffers; without
        prefetch right before its own wait.
        """
        stretches = sorted(self._stretches(), key=lambda s: self.place[s[0].name])
        repeated, begins = 0, list[int]()  # flights that backward repeats: so far, and before each group
        for number, stretch in enumerate(stretches):
            before = max(0, number - self.ahead)
            begins.append(repeated)
            if self.ahead:
                after = stretches[before][0].name if number >= self.ahead else ""
            else:
                place = self.place[stretch[0].name]
                after = self.graph.nodes[place - 1].name if place else ""
            for members in self._together(stretch):
                yield Flight(tuple(n.name for n in members), after, repeated - begins[before])
                repeated += any(n.kwarg("again") for n in members)

    def _stretches(self) -> list[list[Node]]:
        """Return the reshards of parameters by layer, by parts of a layer, or by the user's groups.

        A part ends once operators have read a bucket of it: what one operator reads is in one part.
        """
        found: list[list[Node]] = []
        groups: dict[int, list[Node]] = {}
        stretch: list[Node] = []
        unit = ""
        for node in self.graph.nodes:
            entry = self.stored.get(stored_in(self.graph, node)) if node.op == RESHARD else None
            if entry is None or not _sent(self._pair(node)[0]) or not self.graph.consumers[node.name]:
                continue
            group = self.plan.techniques.fusion_group(entry.target, *entry.ties)
            if group >= 0:
                groups.setdefault(group, []).append(node)
                continue
            here = layer_of(self.graph.consumers[node.name][0][0].module)
            if stretch and (here != unit or self._read_bytes(stretch, node) >= self._limit(node)):
                found.append(stretch)
                stretch = []
            unit = here
            stretch.append(node)
        return [*found, *([stretch] if stretch else []), *groups.values()]

    def _read_bytes(self, stretch: Sequence[Node], until: Node) -> int:
        """Return the bytes of the reshards that an operator reads before a node."""
        return sum(self._bytes(n) for n in stretch if self._read(n) < self.place[until.name])

    def _read(self, node: Node) -> int:
        """Return the place of the first operator that reads a value or a view of it."""
        readers = [n for n, _ in self.graph.consumers.get(node.name, ())]
        places = (self.place[n.name] if self.computes[self.place[n.name]] else self._read(n) for n in readers)
        return min(places, default=len(self.graph.nodes))

    def _together(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Group nodes by what can be one collective, of no more than a bucket before its last member."""
        found: list[list[Node]] = []
        latest: dict[Hashable, list[Node]] = {}
        for node in nodes:
            key = self._key(node)
            members = latest.get(key)
            if members is None or sum(map(self._bytes, members)) >= self._limit(node):
                found.append(members := [])
            members.append(node)
            latest[key] = members
        return found

    # ------------------------------------------------------------ other values

    def of_values(self) -> list[Flight]:
        """Return the flights of other values: those with computation before their first use, fused with neighbours."""
        found: list[_Open] = []
        latest: dict[Hashable, _Open] = {}
        changes = self._changes()
        for node in self.graph.nodes:
            source = stored_in(self.graph, node) if node.op == RESHARD else ""
            producer = self.graph.producers.get(source)
            if producer is None or source not in self.graph.needs_grad or not self.graph.consumers[node.name]:
                continue
            # Backward recomputes values from saved ones, with blocking reshards.
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
        """Return the node after which a value may start: its producer, or a later one if that is over a layer away."""
        # A value that needs no gradient may have been moved to the front of a rank's program.
        nodes, least = self.graph.nodes, changes[read] - 1
        near = (n for n in range(made, read) if changes[n] >= least and any(nodes[n].needs_grad))
        return next(near, made)

    def _hides(self, after: int, read: int) -> bool:
        """Return whether something is computed, forward and backward, between two places."""
        between = range(after + 1, read)
        return any(self.computes[n] and any(self.graph.nodes[n].needs_grad) for n in between)

    def _changes(self) -> list[int]:
        """Return for each node how often the layer has changed before it."""
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
        """Return a key. Reshards of equal keys can be one collective, forward and backward."""
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
        """Return the bytes of the largest shard of the result, so that all ranks count equally."""
        mesh = self.plan.mesh
        layout = self.resharded.layouts[node.name]
        return local_type(node.outputs[0], layout, mesh, mesh.rank(origin(mesh))).size_bytes


@dataclass
class _Open:
    """A flight that may still take members: `after` and `first` are positions of nodes."""

    members: list[str]
    after: int
    first: int
    size_bytes: int

    def takes(self, after: int, size_bytes: int, limit: int) -> bool:
        """Return whether a value may start before the first wait of the flight, and is small enough."""
        return after < self.first and self.size_bytes + size_bytes <= limit


def stored_in(graph: Graph, reshard: Node) -> str:
    """Return the value that a reshard reads; of an offloaded parameter the parameter, not its copy on the device."""
    source = graph.producers.get(reshard.uses[0])
    return reshard.uses[0] if source is None or not is_fetch(source) else source.uses[0]


def _sent(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(s for s in steps if s.kind in COLLECTIVES)


def members_of(local: Graph, start: Node) -> tuple[Node, ...]:
    """Return the waits of a start, in the order of its members."""
    waits: Mapping[int, Node] = {int(n.args[1]): n for n, _ in local.consumers[start.name]}
    return tuple(waits[index] for index in range(len(start.args[0])))


__all__ = ["Flight", "flights", "members_of", "overlapped", "stored_in"]
