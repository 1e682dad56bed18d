"""The price of a plan, added up from the program that the ranks will run: its operators, collectives and kernels.

It knows nothing of the search that chose the plan, so it can be held against the search's own price. Everything is of
the rank at the origin, which holds the largest blocks, in these conventions:

- an operator of the model is priced once, as what it is on one device, with the sizes of its letters on the rank. The
  nodes it became there (a kernel in its place, helpers ``_k0`` for counts, masks and divisions) have no price of
  their own, but what they send has;
- an operator that backward computes again costs its forward there once more;
- a reshard costs its steps, forward and backward; one whose value is made again in backward costs forward twice;
- what is kept for backward in slices costs their gather there, on the host the copies there and back;
- a transfer to or from the host costs what it copies there and, of the gradient, back;
- of micro-batches, and of copies that take turns, each costs what the first does, which is the largest; sums over
  them are sent once, what copies share is brought once for all of them, and gradients that are added up first
  (`partition/accumulation.py`) are sent once;
- gradients of parameters cost their share of full buckets (`cost/gradients.py`);
- gradients of a micro-batch are added to those before it (`predict/accumulated.py`), where an operator's backward ends;
- the update is priced parameter by parameter. Marks are free, inputs are there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import DTYPES, MOVES, RESHARD, TRANSFERS, Graph, Node, map_refs
from meshwright.core.mesh import IN_TIME, Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.gradients import reduction_seconds
from meshwright.cost.host import place, transfer_seconds
from meshwright.cost.machine import seconds, update_seconds
from meshwright.cost.operators import Amount, work
from meshwright.ops.collectives import KernelCollective, kernel_collectives
from meshwright.ops.factors import Site
from meshwright.ops.local.sharded_node import ShardedNode
from meshwright.ops.strategy import Ports
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time, scattered_each_time, summed_first
from meshwright.partition.backward_demand import asked_within
from meshwright.partition.bucket_sizes import sizes
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.insert_reshards import backward_itemsize, parse_steps
from meshwright.partition.micro_batches import MicroBatches, first_micro_batch, how_often
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.sharded_update import gathered, update_layout
from meshwright.partition.stages import check_one_stage
from meshwright.predict.accumulated import added_seconds
from meshwright.predict.offload_prices import fetch_seconds, stash_prices
from meshwright.redistribute.prices import Prices, total_seconds
from meshwright.redistribute.steps import largest_size, origin, wire_elements


@dataclass(frozen=True, slots=True)
class NodePrice:
    """Seconds of one operator of the model: what it computes, what its kernels send, and what adding the gradients of
    its parameters to those of micro-batches before takes."""

    forward_seconds: float
    backward_seconds: float
    forward_talk_seconds: float = 0.0
    backward_talk_seconds: float = 0.0
    adding_seconds: float = 0.0

    def times(self, count: int) -> NodePrice:
        """That of so many micro-batches."""
        return NodePrice(*(count * getattr(self, name) for name in self.__slots__))

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.forward_seconds
            + self.backward_seconds
            + self.forward_talk_seconds
            + self.backward_talk_seconds
            + self.adding_seconds
        )


@dataclass(frozen=True)
class Price:
    """Seconds of a training step if nothing overlaps, apart by what they are spent on; `total` is their sum.

    `by_node`: operator → its price. `by_reshard`: reshard, transfer, or value that is kept in slices or on the host →
    seconds (forward, backward). `by_parameter`:
    parameter → seconds (reduction of its gradient and gathering of what was updated in parts, update).
    """

    compute: float
    forward_communication: float
    backward_communication: float
    reduction: float
    update: float
    by_node: Mapping[str, NodePrice]
    by_reshard: Mapping[str, tuple[float, float]]
    by_parameter: Mapping[str, tuple[float, float]]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return (
            self.compute
            + self.forward_communication
            + self.backward_communication
            + self.reduction
            + self.update
        )


def program_price(parts: Partition, cluster: Cluster, optimizer_states: int = 2) -> Price:
    """The price of what the rank at the origin runs. `optimizer_states`: moments per parameter (2 for Adam)."""
    check_one_stage(parts.plan, "the price")
    mesh = on_cluster(parts.plan.mesh, cluster)
    rank, times = mesh.rank(origin(mesh)), parts.micro_batches
    programs = first_micro_batch(parts, rank) if times > 1 else None
    local = parts.local(rank) if programs is None else programs.programs[0]
    by_node = node_prices(parts, local, mesh, cluster)
    by_reshard = reshard_prices(parts, mesh, cluster)
    kept = stash_prices(parts, local, mesh, cluster)
    if programs is not None:
        by_node = {name: price.times(times) for name, price in by_node.items()}
        count, held = how_often(parts, programs), reshard_prices(parts, mesh, cluster, summed_first(parts))
        by_reshard = {
            name: (count(name) * f, b + (count(name) - 1) * held[name][1])
            for name, (f, b) in by_reshard.items()
        }
        by_reshard |= once_prices(programs, mesh, cluster)
        kept = {name: (times * f, times * b) for name, (f, b) in kept.items()}
    for name, (f, b) in kept.items():
        there, back = by_reshard.get(name, (0.0, 0.0))
        by_reshard[name] = there + f, back + b
    by_parameter = parameter_prices(parts, mesh, cluster, optimizer_states)
    nodes, reshards, parameters = by_node.values(), by_reshard.values(), by_parameter.values()
    return Price(
        compute=math.fsum(n.forward_seconds + n.backward_seconds + n.adding_seconds for n in nodes),
        forward_communication=math.fsum(
            [*(f for f, _ in reshards), *(n.forward_talk_seconds for n in nodes)]
        ),
        backward_communication=math.fsum(
            [*(b for _, b in reshards), *(n.backward_talk_seconds for n in nodes)]
        ),
        reduction=math.fsum(r for r, _ in parameters),
        update=math.fsum(u for _, u in parameters),
        by_node=by_node,
        by_reshard=by_reshard,
        by_parameter=by_parameter,
    )


def on_cluster(mesh: Mesh, cluster: Cluster) -> Mesh:
    """The mesh with links of the cluster; one that has them already stays as it is."""
    levels = {level.name for level in cluster.levels} | {IN_TIME}
    if all(a.link in levels for a in mesh.axes):
        return mesh
    if not mesh.time:
        return cluster.place(mesh)
    ranks = tuple(a for a in mesh.axes if a.name not in mesh.time)
    names = tuple((name, run) for name, run in mesh.names if not set(run) & set(mesh.time))
    count = mesh.count(mesh.time)
    return cluster.place(Mesh(ranks, names, mesh.order[: mesh.size // count])).in_time(count)


# ---------------------------------------------------------------- operators


def node_prices(
    parts: Partition, local: Graph, mesh: Mesh, cluster: Cluster, of: Collection[str] | None = None
) -> dict[str, NodePrice]:
    """The price of every operator of the model, or of those `of` it, in the order of the model."""
    graph, sites, at = parts.resharded.graph, parts.factors.sites, origin(mesh)
    sent: dict[str, list[KernelCollective]] = {}
    for node in local.nodes:
        if talk := kernel_collectives(node, local.types):
            sent.setdefault(parts.stands_for(node.name), []).extend(talk)
    found: dict[str, NodePrice] = {}
    again = asked_within(parts.again, local)
    known: dict[
        Hashable, tuple[Amount, Amount]
    ] = {}  # copies of a layer share their layouts and their seconds
    for name, site in sites.items():
        if of is not None and name not in of:
            continue
        ports = parts.resharded.ports[name]
        wanted = [u in graph.needs_grad for u in site.node.uses]
        host = name in parts.plan.hosts
        kind = (_kind_of(site.node, graph), site.signature, id(ports), tuple(wanted), host)
        if kind not in known:
            done = work(site.node, site.rule, letter_sizes(site, ports, mesh, at), graph.types, wanted)
            known[kind] = seconds(done, *place(cluster, host))
        forward, backward = known[kind]
        talk = sent.get(name, ())
        sends, back = (
            talk_seconds((t for t in talk if t.phase == phase), mesh, cluster.prices)
            for phase in ("forward", "backward")
        )
        if name in again:
            backward, back = backward + forward, back + sends
        adding = added_seconds(parts, name, cluster)
        found[name] = NodePrice(float(forward), float(backward), sends, back, adding)
    return found


def _kind_of(node: Node, graph: Graph) -> Hashable:
    """All of a node, beside its rule and layouts, that its work depends on."""
    literals = map_refs((node.args, node.kwargs), lambda _: None)
    return (node.op, literals, node.outputs, node.needs_grad, tuple([graph.types[u] for u in node.uses]))


def letter_sizes(site: Site, ports: Ports, mesh: Mesh, at: Mapping[str, int]) -> dict[str, int]:
    """How many elements of each letter of an operator (and of each part of a concatenation) a rank holds."""
    cut = ShardedNode(site, ports, mesh, at)
    return {**site.rule.sizes, **{letter: cut.size(letter) for letter in cut.letters}}


def talk_seconds(talk: Iterable[KernelCollective], mesh: Mesh, prices: Prices) -> float:
    """Seconds of what kernels send, one after the other."""
    return sum(
        prices.seconds(t.kind, mesh, t.axes, wire_elements(t.kind, mesh.count(t.axes), t.payload_bytes, 0))
        for t in talk
    )


# ---------------------------------------------------------------- reshards and parameters


def reshard_prices(
    parts: Partition, mesh: Mesh, cluster: Cluster, held: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """Seconds of every reshard and of every transfer, forward and backward. The gradients of `held` are not sent."""
    found: dict[str, tuple[float, float]] = {}
    prices = cluster.prices
    for node in parts.resharded.graph.nodes:
        if node.op not in MOVES:
            continue
        if is_fetch(node):
            once = fetch_seconds(parts, node.name, mesh, cluster)
            found[node.name] = (once, once if node.name in parts.fetched else 0.0)
            continue
        if node.op in TRANSFERS:
            found[node.name] = transfer_price(parts, node, mesh, cluster)
            continue
        pair, itemsize = parts.resharded.pairs[node.name], DTYPES[node.outputs[0].dtype]
        if any(s.kind in COLLECTIVES and not set(mesh.time).isdisjoint(s.axes) for s in pair.forward):
            continue  # a sum over micro-batches: `once_prices`
        forward = total_seconds(pair.forward, mesh, itemsize, prices)
        backward = (
            total_seconds(pair.backward, mesh, backward_itemsize(node), prices)
            if any(node.needs_grad) and node.name not in held
            else 0.0
        )
        found[node.name] = (forward, backward + (forward if made_again(node) else 0.0))
    return found


def transfer_price(parts: Partition, node: Node, mesh: Mesh, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a transfer over the link to the host, forward and backward."""
    elements = math.prod(parts.resharded.layouts[node.name].local_shape(mesh, origin(mesh)))
    once = float(transfer_seconds(elements * DTYPES[node.outputs[0].dtype], cluster))
    return once, once if any(node.needs_grad) else 0.0


def once_prices(programs: MicroBatches, mesh: Mesh, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Seconds of the sums over all micro-batches, which are sent once in a step."""
    found: dict[str, tuple[float, float]] = {}
    for graph in (*(r.sums for r in programs.rounds), programs.late):
        for node in graph.nodes:
            if node.op == RESHARD:
                steps, itemsize = parse_steps(node.args[1]), DTYPES[node.outputs[0].dtype]
                found[node.name] = (total_seconds(steps, mesh, itemsize, cluster.prices), 0.0)
            else:
                talk = kernel_collectives(node, graph.types)
                found[node.name] = (talk_seconds(talk, mesh, cluster.prices), 0.0)
    return found


def made_again(node: Node) -> bool:
    """Return whether backward makes the result of a reshard again instead of keeping it."""
    return bool(node.kwarg("again", False))


def parameter_prices(
    parts: Partition, mesh: Mesh, cluster: Cluster, optimizer_states: int
) -> dict[str, tuple[float, float]]:
    """Seconds to reduce the gradient of each trained parameter in a bucket (and to gather it again in one, where it is
    updated in parts), and to update what the rank updates of it."""
    at, bucket = origin(mesh), sizes(parts.plan)

    def sent_in(kind: str, size: float, axes: tuple[str, ...]) -> float:
        # What is gathered after the update is waited for, the rest goes on beside backward.
        prices = cluster.prices if kind == "all_gather" else cluster.hidden_prices
        return reduction_seconds(size, axes, mesh, prices, bucket(kind, axes), kind) if axes else 0.0

    sent: dict[str, float] = {}
    for g in pending_gradients(parts):
        size, rest = float(g.wire_bytes), g.axes
        sent[g.name] = 0.0
        if g.parted:
            rest = tuple(a for a in g.axes if a not in g.cut)
            sent[g.name] = sent_in("reduce_scatter", size, g.cut)
            size = float(largest_size(parts.plan.states[g.name], mesh) * DTYPES[g.wire or g.dtype])
        sent[g.name] += sent_in("all_reduce", size, rest)
    if scattered_each_time(parts):
        parted = [g.name for g in pending_gradients(parts) if g.parted]
        sent |= {name: sent[name] * programs_in_time(parts) for name in parted}
    for weight in gathered(parts):
        whole = float(weight.size_bytes)
        sent[weight.name] = sent.get(weight.name, 0.0) + sent_in("all_gather", whole, weight.axes)
    found: dict[str, tuple[float, float]] = {}
    for entry in parts.resharded.graph.input_of("parameter"):
        if entry.needs_grad:
            elements = math.prod(update_layout(parts, entry).local_shape(mesh, at))
            offloaded = "optimizer" in parts.plan.techniques.offload
            there = place(cluster, offloaded or entry.name in parts.resharded.hosted)
            update = update_seconds(float(elements), optimizer_states, *there, DTYPES[entry.type.dtype])
            parked = entry.name in parts.resharded.parked
            if (offloaded or parked) and cluster.host_bytes_per_s:
                # The gradient goes to the host and the weight comes back; a parked one is there, or comes and goes.
                # Each is a copy of its own, which is started too.
                ways = 1 if offloaded and parked else 2
                size = float(elements * DTYPES[entry.type.dtype])
                update += ways * transfer_seconds(size, cluster)
            found[entry.name] = (sent.get(entry.name, 0.0), float(update))
    return found
