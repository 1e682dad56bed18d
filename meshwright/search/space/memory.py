"""Bytes of a choice at a few instants, as sums over its variables: never more than the peak that a simulation finds.

At the *loss* there are parameters, optimizer states, the buckets' buffers, gathered weights that are kept, everything
that autograd keeps, and what the loss reads; at the *update* parameters, gradients, states, and the copies of an
optimizer that updates all parameters at once; when backward has passed the last product (the *head*), what is kept
before it, its weight's gradient and its input's; and where layers are computed again in full, when that is done of
the last one (the *layer*), what is kept before it, the gradients of the head and of its own result, and all that it
keeps. What lives only for a moment beside these is left to the simulation (`predict/memory/step.py`), which decides
whether a plan fits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.core.graph import DTYPES, Graph
from meshwright.core.placement import hosted_values
from meshwright.core.remembered import cached_on_first
from meshwright.cost.cluster import Cluster
from meshwright.cost.operator_tables import PRODUCTS, SHARING, root_of
from meshwright.ops.saved import saved_in
from meshwright.partition.buckets import alone_bytes
from meshwright.predict.memory.allocator import optimizer_on
from meshwright.redistribute.price_matrix import Value
from meshwright.search.solve import Memory
from meshwright.search.space.build import Space
from meshwright.search.space.demands import Charge, Demands, Each, Holding
from meshwright.search.space.parameters import ParameterStates
from meshwright.search.space.wiring import Edge, Ties, Wiring, is_kept, keeps
from meshwright.search.techniques.elsewhere import HERE, Elsewhere
from meshwright.search.techniques.layers import Layer, layers_of

INSTANTS = ("the loss", "the update", "the head's backward", "a layer that is computed again")


@dataclass(frozen=True)
class _End:
    """Where forward ends: the node that reads most of what makes the loss, the last product (the head), and the nodes
    after that. `layer`: the last layer, where layers are computed again in full."""

    loss: str
    head: str
    late: frozenset[str]
    layer: Layer | None = None
    in_layer: frozenset[str] = field(default_factory=frozenset)

    def each(self, loss: float = 0.0, head: float = 0.0, layer: float = 0.0) -> Each:
        """Bytes at each of the instants but the update."""
        return (loss, 0.0, head, layer) if self.layer else (loss, 0.0, head)


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
    layered: bool = False,
) -> Demands:
    """Compute the memory demands of a graph on one of `ranks` ranks. `hosts`: the nodes that the host runs;
    `optimizer_states`: moments of an element; `again`: values that backward recomputes, and with `layered` one layer
    after the other in full."""
    hosted = hosted_values(graph, hosts)
    end = _end(graph, layered)
    found = _charges(graph, values, ties, ranks, hosts, again, elsewhere, end)
    parameters = [name for name in wiring.parameters if name not in hosted]
    holdings = _holdings(graph, parameters, wiring, cluster, end, optimizer_states, elsewhere)
    return Demands(list(found), holdings, dict(_gathers(graph, wiring, hosted, end)))


def memory_of(
    space: Space,
    optimizer_states: int,
    again: Collection[str] = (),
    elsewhere: Elsewhere = HERE,
    layered: bool = False,
) -> Memory:
    """float64[states, instants] for every variable of a space, and what readers gather for themselves. `again`: values
    that backward computes again, and with `layered` one layer after the other in full."""
    kept = _kept(space, frozenset(again), elsewhere.sliced, tuple(elsewhere.stay.items()), layered)
    away = frozenset(elsewhere.host_parameters)
    held = _held(space, optimizer_states, away, elsewhere.updated_there, layered)
    none = instants(space.graph, layered)
    amounts = [
        found if (found := held.get(v, kept.get(v))) is not None else np.zeros((parts.shape[1], none))
        for v, parts in enumerate(space.unary)
    ]
    return Memory(tuple(amounts), _gathered(space, layered))


def instants(graph: Graph, layered: bool = False) -> int:
    """Return how many of the instants there are."""
    return len(_end(graph, layered).each())


@cached_on_first
def _kept(
    space: Space, again: frozenset[str], sliced: bool, stay: tuple[tuple[str, int], ...], layered: bool
) -> dict[int, np.ndarray]:
    """Return the bytes that operators keep: float64[states, instants] by variable."""
    graph, table, away = space.graph, space.table, Elsewhere(sliced, dict(stay))
    found: dict[int, np.ndarray] = {}
    end = _end(graph, layered)
    charges = _charges(graph, space.values, space.ties, space.mesh.size, space.hosts, again, away, end)
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
    space: Space, optimizer_states: int, host_parameters: frozenset[str], updated_there: bool, layered: bool
) -> dict[int, np.ndarray]:
    """Return the bytes of parameters: float64[states, instants] by variable."""
    away = Elsewhere(host_parameters=host_parameters, updated_there=updated_there)
    end = _end(space.graph, layered)
    names = [name for name in space.wiring.parameters if name not in space.hosted]
    holdings = _holdings(space.graph, names, space.wiring, space.cluster, end, optimizer_states, away)
    found: dict[int, np.ndarray] = {}
    for name, holding in holdings.items():
        known = space.parameters[name]
        taken = holding.taken(known.elements, known.kept_elements, known.summed_elements, _waits(known))
        found[space.variable["parameter", name]] = np.stack(taken, axis=1)
    return found


def _holdings(
    graph: Graph,
    names: Iterable[str],
    wiring: Wiring,
    cluster: Cluster,
    end: _End,
    optimizer_states: int,
    elsewhere: Elsewhere,
) -> dict[str, Holding]:
    return {
        name: _holding(graph, name, wiring.owners[name], cluster, end, optimizer_states, elsewhere)
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
    end: _End,
) -> Iterator[Charge]:
    """Those of all operators, as often as they are in the model."""
    keepers, saves = _keepers(graph), saved_in(graph)
    for node in graph.nodes:
        if node.name in hosts:
            continue
        first, times, past = ties.first(node.name), ties.times(node.name), float(node.name not in end.late)
        here = node.name in end.in_layer
        for port, name, share, own in keepers.get(node.name, ()):
            value = values[ties.first(name)]
            if name in again:
                if here:  # of all layers one is there at a time
                    yield Charge(first, port, ties.first(name), end.each(layer=share * value.itemsize))
                continue
            maker = graph.producers[name].name
            sliced = elsewhere.sliced and not own and graph.types[name].is_float
            most = whole_elements(value) / ranks if sliced else math.inf
            stay = times if own else min(times, elsewhere.stay.get(maker, times))
            each = share * stay * value.itemsize
            yield Charge(first, port, ties.first(name), end.each(each, past * each, past * each), most)
        for number, name in enumerate(node.values) if here else ():
            if end.layer is not None and name in end.layer.ends and name in graph.needs_grad:
                gradient = end.each(layer=float(values[ties.first(name)].itemsize))
                yield Charge(first, len(node.uses) + number, ties.first(name), gradient)
        if not node.uses:
            continue
        read = ties.first(node.uses[0])
        kept = saves[node.name]
        remade = any(value in again for value in node.values)
        if kept.extra_bytes and (here or not remade):
            each, port = kept.extra_bytes / whole_elements(values[read]), kept.extra_port
            share = None if port is None else (port, ties.first(node.uses[port]))
            every = times * each
            amounts = end.each(layer=each) if remade else end.each(every, past * every, past * every)
            yield Charge(first, 0, read, amounts, share=share)
        each = float(values[read].itemsize)
        kept_too = any(port == 0 and name not in again for port, name, *_ in keepers.get(node.name, ()))
        if node.name == end.loss and not kept_too:
            yield Charge(first, 0, read, end.each(loss=each))
        if node.name == end.head and node.uses[0] in graph.needs_grad:
            yield Charge(first, 0, read, end.each(head=each))


def _holding(
    graph: Graph,
    name: str,
    count: int,
    cluster: Cluster,
    end: _End,
    optimizer_states: int,
    elsewhere: Elsewhere,
) -> Holding:
    item, trained = DTYPES[graph.types[name].dtype], name in graph.needs_grad
    here = name not in elsewhere.host_parameters
    optimizer = optimizer_on(cluster.device_type, optimizer_states)
    return Holding(
        count,
        item,
        item * optimizer_states if trained else 0,  # torch keeps moments in the parameter's dtype
        item * optimizer.temporaries if trained and optimizer.at_once else 0,
        trained,
        is_kept(graph, name),
        here,
        not elsewhere.updated_there,
        any(n.name == end.head for n, _ in graph.consumers[name]),
        alone_bytes(cluster.device_type),
        layered=end.layer is not None,
    )


def _gathers(graph: Graph, wiring: Wiring, hosted: Collection[str], end: _End) -> Iterator[tuple[Edge, Each]]:
    """Weights, or views of them, that a reader gathers for itself and autograd keeps, where they are not as it reads
    them: bytes of an element at each instant."""
    nodes = {node.name: node for node in graph.nodes}
    weights = {i.name for i in graph.input_of("parameter")} - set(hosted)
    for edge, times in wiring.edges.items():
        _, _, target, port, name = edge
        if target[0] != "node" or name not in graph.needs_grad or root_of(graph, name) not in weights:
            continue
        node = nodes[target[1]]
        if keeps(graph, node, port):
            each = float(times * DTYPES[graph.types[name].dtype])
            past = 0.0 if node.name in end.late else each
            yield edge, end.each(each, past, past)


@cached_on_first
def _gathered(space: Space, layered: bool) -> dict[tuple[int, int], np.ndarray]:
    """Return the bytes that readers gather for themselves: float64[instants, states, states] for each pair."""
    found: dict[tuple[int, int], np.ndarray] = {}
    rows = _gathers(space.graph, space.wiring, space.hosted, _end(space.graph, layered))
    for (source, out, target, port, name), each in rows:
        value = space.values[name]
        have, want = space.port(source, out, gives=True), space.port(target, port, gives=False)
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


@cached_on_first
def gathered_bytes(space: Space, name: str) -> np.ndarray:
    """Return the bytes that a micro-batch keeps of a parameter from forward to backward, besides its storage:
    float64[states]."""
    found, kind = space.parameters[name], space.graph.types[name]
    if name in space.hosted or name not in space.graph.needs_grad or not is_kept(space.graph, name):
        return np.zeros(len(found.elements))
    return space.owners(name) * DTYPES[kind.dtype] * found.kept_elements


@cached_on_first
def summed_bytes(space: Space, name: str, *, parted: bool = False) -> np.ndarray:
    """Return the bytes of a parameter's accumulated gradient between micro-batches, if it is in no bucket's buffer:
    float64[states]. `parted`: sharded as it is stored."""
    found, item = space.parameters[name], DTYPES[space.graph.types[name].dtype]
    elements = found.elements if parted else found.summed_elements
    buffered = _waits(found) & (found.elements * item < alone_bytes(space.cluster.device_type))
    return space.owners(name) * item * np.where(buffered & (elements == found.elements), 0.0, elements)


def _waits(known: ParameterStates) -> np.ndarray:
    """Return whether a gradient waits in a bucket until it is reduced: bool[states]."""
    return np.any(known.use.grad & ~known.stored, axis=1)


def fixed_bytes(space: Space) -> float:
    """Bytes of what no choice changes: the batch, buffers and constants."""
    given = (i for i in space.graph.inputs if i.role != "parameter" and i.name not in space.hosted)
    return float(sum(i.type.size_bytes for i in given))


@cached_on_first
def _end(graph: Graph, layered: bool) -> _End:
    graded = [n for n in graph.nodes if any(n.needs_grad)]
    place = next((i for i in reversed(range(len(graded))) if graded[i].op in PRODUCTS), -1)
    late = graded[place + 1 :]
    losses = [n for n in late if n.uses and n.uses[0] in graph.needs_grad]
    # the last of them
    loss = max(reversed(losses), key=lambda n: graph.types[n.uses[0]].size_bytes, default=None)
    head = graded[place].name if place >= 0 else ""
    numbers = {n.name: number for number, n in enumerate(graph.nodes)}
    layers = layers_of(graph) if layered else ()
    last = max(layers, key=lambda layer: numbers[layer.nodes[0].name], default=None)
    inside = frozenset(n.name for n in last.nodes) if last else frozenset[str]()
    return _End(loss.name if loss else "", head, frozenset(n.name for n in late), last, inside)


def whole_elements(value: Value) -> float:
    """The elements of a value on one rank that has all of it."""
    return float(math.prod(sum(map(math.prod, item)) for item in value.sizes))


@cached_on_first
def _keepers(graph: Graph) -> dict[str, list[tuple[int, str, float, bool]]]:
    """Node → (port, value, share, own) of what autograd keeps. Those that keep one tensor, or views of it, share it
    equally. `own`: the operator that makes it keeps it, so that it stays on the device in full.

    Where all of them have it in one layout that is its size. Where not there are several tensors, and the mean of their
    sizes is less than any way to hold them all; but no more than a share is saved by the one that takes a smaller part.
    """
    inputs = {i.name for i in graph.inputs}
    root: dict[str, str] = {}
    for node in graph.nodes:
        for value in node.values:
            base = node.uses[0] if node.op in SHARING and node.uses else value
            root[value] = root.get(base, base)
    kept: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
    saves = saved_in(graph)
    for node in graph.nodes:
        found = saves[node.name]
        own = [(port, node.uses[port]) for port in dict.fromkeys(found.inputs)]
        own += [(len(node.uses) + number, node.values[number]) for number in found.outputs]
        for port, name in own:
            if (base := root.get(name, name)) not in inputs:
                kept[base].append((node.name, port, name))
    shares: dict[str, list[tuple[int, str, float, bool]]] = defaultdict(list)
    for base, keepers in kept.items():
        stays = any(node == graph.producers[base].name for node, _, _ in keepers)
        for node, port, name in keepers:
            shares[node].append((port, name, 1 / len(keepers), stays))
    return shares
