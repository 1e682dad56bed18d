"""Bytes of a choice at three instants, as sums over its variables: never more than the peak that a simulation finds.

At the *loss* there are parameters, optimizer states, the buckets' buffers, gathered weights that are kept, everything
that autograd keeps, and what the loss reads; at the *update* parameters, gradients and states; when backward has passed
the last product (the *head*), what is kept before it, its weight's gradient and its input's. What lives only for a
moment beside these is left to the simulation (`predict/memory/step.py`), which decides whether a plan fits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.core.graph import DTYPES, Graph
from meshwright.core.placement import hosted_values
from meshwright.core.remembered import cached_on_first
from meshwright.cost.cluster import Cluster
from meshwright.cost.operators import PIECES, PRODUCTS, REPEATS, VIEWS
from meshwright.ops.saved import saved
from meshwright.partition.buckets import alone_bytes
from meshwright.redistribute.price_matrix import Value
from meshwright.search.solve import Memory
from meshwright.search.space.build import Space
from meshwright.search.space.wiring import Edge, Ties, Wiring, is_kept, keeps

INSTANTS = ("the loss", "the update", "the head's backward")


@dataclass(frozen=True)
class Elsewhere:
    """Saved activations and parameters that are offloaded or sliced. `sliced`: saved activations are sharded over the
    ranks that would replicate them. `stay`: operator whose results are offloaded → how many of those that it stands for
    stay on the device. `host_parameters`: parameters that are offloaded between their uses, and with `updated_there`
    during the update too."""

    sliced: bool = False
    stay: Mapping[str, int] = field(default_factory=dict)
    host_parameters: Collection[str] = ()
    updated_there: bool = False


HERE = Elsewhere()
Each = Sequence[float]  # bytes at each of the instants


@dataclass(frozen=True)
class Charge:
    """Bytes that a state of an operator takes: `each` at an instant for every element that a rank holds of `value` at a
    port, and for no more than `most` of them; times the share that it holds of the value at another port, if given."""

    node: str
    port: int
    value: str
    each: Each
    most: float = math.inf
    share: tuple[int, str] | None = None


@dataclass(frozen=True)
class Holding:
    """All that the bytes of a parameter depend on, besides how it is used and stored.

    `count`: how many of the model's parameters it stands for; `item`, `moments`: bytes of an element and of its
    moments; `kept`: backward reads the gathered value; `here`, `updated_here`: on the device between its uses, during
    the update; `head`: the last product reads it; `summed`: gradients of micro-batches are accumulated, `parted` in
    shards as they are stored. From `alone_bytes` on a gradient is in no bucket's buffer.
    """

    count: int
    item: int
    moments: int
    trained: bool
    kept: bool
    here: bool
    updated_here: bool
    head: bool
    alone_bytes: int
    summed: bool = False
    parted: bool = False

    def taken(
        self,
        elements: np.ndarray,
        kept_elements: np.ndarray,
        summed_elements: np.ndarray,
        waits: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """At each instant, for arrays of elements on a rank as stored, of those gathered until backward, of the
        gradient between micro-batches, and of whether its gradient waits in a bucket."""
        item, moments = self.item, self.moments
        buffered = waits & (elements * item < self.alone_bytes) & self.trained
        loss = self.count * elements * (item * self.here + moments + item * buffered)
        if self.summed:
            loss = loss + self.count * item * (elements if self.parted else summed_elements)
        if self.kept and self.trained:  # gathered ones are on the device, wherever the parts lie
            loss = loss + self.count * item * kept_elements
        weights = item * (self.here or (self.trained and self.updated_here))
        update = self.count * elements * (weights + item * self.trained + moments)
        head = loss + np.where(buffered, 0.0, elements * item) if self.head and self.trained else loss
        return loss, update, head


@dataclass(frozen=True)
class Demands:
    """All that the bytes of a choice depend on, besides its states: of operators, of parameters by name, and of the
    edges over which a reader itself gathers a weight that autograd saves: bytes of an element at each instant."""

    charges: Sequence[Charge]
    holdings: Mapping[str, Holding]
    gathers: Mapping[Edge, Each]

    def in_pieces(self, micro_batches: int, *, parted: bool = False) -> Demands:
        """With activations of a micro-batch, and gradients of those before, `parted` as they are stored."""
        if micro_batches == 1:
            return self
        charges = [replace(c, each=[a / micro_batches for a in c.each]) for c in self.charges]
        summed = {
            name: replace(h, summed=h.trained, parted=parted or not h.here)
            for name, h in self.holdings.items()
        }
        return Demands(charges, summed, self.gathers)


def demands_of(
    graph: Graph,
    values: Mapping[str, Value],
    ties: Ties,
    wiring: Wiring,
    cluster: Cluster,
    ranks: int,
    hosts: Collection[str],
    optimizer_states: int,
    again: Collection[str] = (),
    elsewhere: Elsewhere = HERE,
) -> Demands:
    """Compute the memory demands of a graph on one of `ranks` ranks. `hosts`: the nodes that the host runs;
    `optimizer_states`: moments of an element; `again`: values that backward recomputes."""
    hosted = hosted_values(graph, hosts)
    loss, head, late = _end(graph)
    found = _charges(graph, values, ties, ranks, hosts, again, elsewhere, (loss, head, late))
    parameters = [name for name in wiring.parameters if name not in hosted]
    holdings = _holdings(graph, parameters, wiring, cluster, head, optimizer_states, elsewhere)
    return Demands(list(found), holdings, dict(_gathers(graph, wiring, hosted, late)))


def memory_of(
    space: Space, optimizer_states: int, again: Collection[str] = (), elsewhere: Elsewhere = HERE
) -> Memory:
    """float64[states, 3] for every variable of a space, and what readers gather for themselves. `again`: values that
    backward computes again."""
    kept = _kept(space, frozenset(again), elsewhere.sliced, tuple(elsewhere.stay.items()))
    held = _held(space, optimizer_states, frozenset(elsewhere.host_parameters), elsewhere.updated_there)
    none = len(INSTANTS)
    amounts = [
        found if (found := held.get(v, kept.get(v))) is not None else np.zeros((parts.shape[1], none))
        for v, parts in enumerate(space.unary)
    ]
    return Memory(tuple(amounts), _gathered(space))


@cached_on_first
def _kept(
    space: Space, again: frozenset[str], sliced: bool, stay: tuple[tuple[str, int], ...]
) -> dict[int, np.ndarray]:
    """Return the bytes that operators keep: float64[states, 3] by variable."""
    graph, table, away = space.graph, space.table, Elsewhere(sliced, dict(stay))
    found: dict[int, np.ndarray] = {}
    charges = _charges(
        graph, space.values, space.ties, space.mesh.size, space.hosts, again, away, _end(graph)
    )
    for charge in charges:
        ports, variable = space.nodes[charge.node].ports, space.variable["node", charge.node]
        codes = ports[charge.port].forward
        held = np.minimum(table.local_elements(space.values[charge.value], codes), charge.most)
        if charge.share is not None:
            port, shared = charge.share[0], space.values[charge.share[1]]
            held = held * table.local_elements(shared, ports[port].forward) / whole_elements(shared)
        each = held[:, None] * np.array(charge.each)
        found[variable] = found[variable] + each if variable in found else each
    return found


@cached_on_first
def _held(
    space: Space, optimizer_states: int, host_parameters: frozenset[str], updated_there: bool
) -> dict[int, np.ndarray]:
    """Return the bytes of parameters: float64[states, 3] by variable."""
    away, (_, head, _) = (
        Elsewhere(host_parameters=host_parameters, updated_there=updated_there),
        _end(space.graph),
    )
    names = [name for name in space.wiring.parameters if name not in space.hosted]
    holdings = _holdings(space.graph, names, space.wiring, space.cluster, head, optimizer_states, away)
    found: dict[int, np.ndarray] = {}
    for name, holding in holdings.items():
        known = space.parameters[name]
        waits = np.any(known.use.grad & ~known.stored, axis=1)
        taken = holding.taken(known.elements, known.kept_elements, known.summed_elements, waits)
        found[space.variable["parameter", name]] = np.stack(taken, axis=1)
    return found


def _holdings(
    graph: Graph,
    names: Iterable[str],
    wiring: Wiring,
    cluster: Cluster,
    head: str,
    optimizer_states: int,
    elsewhere: Elsewhere,
) -> dict[str, Holding]:
    return {
        name: _holding(graph, name, wiring.owners[name], cluster, head, optimizer_states, elsewhere)
        for name in names
    }


def _charges(
    graph: Graph,
    values: Mapping[str, Value],
    ties: Ties,
    ranks: int,
    hosts: Collection[str],
    again: Collection[str],
    elsewhere: Elsewhere,
    end: tuple[str, str, Collection[str]],
) -> Iterator[Charge]:
    """Those of all operators, as often as they are in the model."""
    keepers, (loss, head, late) = _keepers(graph), end
    for node in graph.nodes:
        if node.name in hosts:
            continue
        first, times, past = ties.first(node.name), ties.times(node.name), float(node.name not in late)
        for port, name, share in keepers.get(node.name, ()):
            if name in again:
                continue
            value, maker = values[ties.first(name)], graph.producers[name].name
            sliced = elsewhere.sliced and graph.types[name].is_float
            most = whole_elements(value) / ranks if sliced else math.inf
            each = share * min(times, elsewhere.stay.get(maker, times)) * value.itemsize
            yield Charge(first, port, ties.first(name), (each, 0.0, past * each), most)
        if not node.uses:
            continue
        read = ties.first(node.uses[0])
        wanted = [u in graph.needs_grad for u in node.uses]
        kept = saved(node, graph.types, wanted)
        if kept.extra_bytes and not any(value in again for value in node.values):
            each, port = times * kept.extra_bytes / whole_elements(values[read]), kept.extra_port
            share = None if port is None else (port, ties.first(node.uses[port]))
            yield Charge(first, 0, read, (each, 0.0, past * each), share=share)
        each = float(values[read].itemsize)
        kept_too = any(port == 0 and name not in again for port, name, _ in keepers.get(node.name, ()))
        if node.name == loss and not kept_too:
            yield Charge(first, 0, read, (each, 0.0, 0.0))
        if node.name == head and wanted[0]:
            yield Charge(first, 0, read, (0.0, 0.0, each))


def _holding(
    graph: Graph,
    name: str,
    count: int,
    cluster: Cluster,
    head: str,
    optimizer_states: int,
    elsewhere: Elsewhere,
) -> Holding:
    item, trained = DTYPES[graph.types[name].dtype], name in graph.needs_grad
    here = name not in elsewhere.host_parameters
    return Holding(
        count,
        item,
        item * optimizer_states if trained else 0,  # torch keeps moments in the parameter's dtype
        trained,
        is_kept(graph, name),
        here,
        not elsewhere.updated_there,
        any(n.name == head for n, _ in graph.consumers[name]),
        alone_bytes(cluster.device_type),
    )


def _gathers(
    graph: Graph, wiring: Wiring, hosted: Collection[str], late: Collection[str]
) -> Iterator[tuple[Edge, Each]]:
    """Weights that a reader gathers for itself and autograd keeps, where they are not as it reads them: bytes of an
    element at each instant."""
    nodes = {node.name: node for node in graph.nodes}
    for edge, times in wiring.edges.items():
        source, _, target, port, name = edge
        if source[0] != "parameter" or name not in graph.needs_grad or name in hosted:
            continue
        node = nodes[target[1]]
        if keeps(graph, node, port):
            each = float(times * DTYPES[graph.types[name].dtype])
            yield edge, (each, 0.0, 0.0 if node.name in late else each)


@cached_on_first
def _gathered(space: Space) -> dict[tuple[int, int], np.ndarray]:
    """Return the bytes that readers gather for themselves: float64[3, states, states] for each pair."""
    _, _, late = _end(space.graph)
    found: dict[tuple[int, int], np.ndarray] = {}
    for (source, _, target, port, name), each in _gathers(space.graph, space.wiring, space.hosted, late):
        value = space.values[name]
        have, want = space.port(source, -1, gives=True), space.port(target, port, gives=False)
        held, wanted = (space.table.local_elements(value, p.forward) for p in (have, want))
        more = gathered_elements(held, wanted)
        if not more.any():
            continue
        u, v = space.variable[source], space.variable[target]
        block = np.array(each)[:, None, None] * more
        key = (u, v) if u < v else (v, u)
        block = block if u < v else block.transpose(0, 2, 1)
        found[key] = found[key] + block if key in found else block
    return found


def gathered_elements(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the elements that a reader gathers if it needs more than is there: [states, states of the reader, ...]."""
    return np.where(wanted[None, :] > held[:, None], wanted[None, :], 0.0)


def gathered_bytes(space: Space, name: str) -> np.ndarray:
    """Return the bytes that a micro-batch keeps of a parameter from forward to backward, besides its storage:
    float64[states]."""
    found, kind = space.parameters[name], space.graph.types[name]
    if name in space.hosted or name not in space.graph.needs_grad or not is_kept(space.graph, name):
        return np.zeros(len(found.elements))
    return space.owners(name) * DTYPES[kind.dtype] * found.kept_elements


def summed_bytes(space: Space, name: str, *, parted: bool = False) -> np.ndarray:
    """Return the bytes of a parameter's accumulated gradient between micro-batches: float64[states]. `parted`: sharded
    as it is stored."""
    found = space.parameters[name]
    elements = found.elements if parted else found.summed_elements
    return space.owners(name) * DTYPES[space.graph.types[name].dtype] * elements


def fixed_bytes(space: Space) -> float:
    """Bytes of what no choice changes: the batch, buffers and constants."""
    given = (i for i in space.graph.inputs if i.role != "parameter" and i.name not in space.hosted)
    return float(sum(i.type.size_bytes for i in given))


@cached_on_first
def _end(graph: Graph) -> tuple[str, str, frozenset[str]]:
    """The node that reads most of what makes the loss, the last product, and the nodes after that."""
    graded = [n for n in graph.nodes if any(n.needs_grad)]
    place = next((i for i in reversed(range(len(graded))) if graded[i].op in PRODUCTS), -1)
    late = graded[place + 1 :]
    losses = [n for n in late if n.uses and n.uses[0] in graph.needs_grad]
    # the last of them
    loss = max(reversed(losses), key=lambda n: graph.types[n.uses[0]].size_bytes, default=None)
    head = graded[place].name if place >= 0 else ""
    return loss.name if loss else "", head, frozenset(n.name for n in late)


def whole_elements(value: Value) -> float:
    """The elements of a value on one rank that has all of it."""
    return float(math.prod(sum(map(math.prod, item)) for item in value.sizes))


def _keepers(graph: Graph) -> dict[str, list[tuple[int, str, float]]]:
    """Node → (port, value, share) of what autograd keeps. Those that keep one tensor, or views of it, share it equally.

    Where all of them have it in one layout that is its size. Where not there are several tensors, and the mean of their
    sizes is less than any way to hold them all; but no more than a share is saved by the one that takes a smaller part.
    """
    views = VIEWS | REPEATS | PIECES
    inputs = {i.name for i in graph.inputs}
    root: dict[str, str] = {}
    for node in graph.nodes:
        for value in node.values:
            base = node.uses[0] if node.op in views and node.uses else value
            root[value] = root.get(base, base)
    kept: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
    for node in graph.nodes:
        found = saved(node, graph.types, [u in graph.needs_grad for u in node.uses])
        own = [(port, node.uses[port]) for port in dict.fromkeys(found.inputs)]
        own += [(len(node.uses) + number, node.values[number]) for number in found.outputs]
        for port, name in own:
            if (base := root.get(name, name)) not in inputs:
                kept[base].append((node.name, port, name))
    shares: dict[str, list[tuple[int, str, float]]] = defaultdict(list)
    for keepers in kept.values():
        for node, port, name in keepers:
            shares[node].append((port, name, 1 / len(keepers)))
    return shares
