"""The price of a plan: the sum over the operators, collectives and kernels of the program that the ranks will run.

It does not depend on the search that chose the plan, so it checks the search's own price. Everything is for the rank at
the origin, which has the largest shards, with these conventions:

- An operator of the model is priced once, as on one device, with the local sizes of its letters. The nodes it became (a
  kernel, helpers ``_k0`` for counts, masks and divisions) have no price of their own, but their collectives do.
- A recomputed operator costs its forward once more.
- A reshard costs its steps, forward and backward. A reshard that backward repeats costs forward twice.
- A sharded saved activation costs its gather in backward, an offloaded one the copies to the host and back.
- A transfer to or from the host costs its copy and, for the gradient, the one back.
- Each micro-batch and each interleaved half-batch costs as much as the first, which is the largest. Reductions over
  them, shared gathers, and accumulated gradients (`partition/accumulation.py`) are sent once.
- Gradients of parameters cost their share of full buckets (`cost/gradients.py`).
- Gradient accumulation (`predict/accumulated.py`) is counted where an operator's backward ends.
- The update is priced by parameter. Annotations and inputs are free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import DTYPES, MOVES, RESHARD, TRANSFERS, Graph, Node, map_refs
from meshwright.core.mesh import IN_TIME, Mesh
from meshwright.cost.calls import call_name
from meshwright.cost.cluster import Cluster
from meshwright.cost.gradients import reduction_seconds
from meshwright.cost.host import place, transfer_seconds, update_seconds_there
from meshwright.cost.machine import issued_seconds, seconds
from meshwright.cost.operators import Amount, Work, work
from meshwright.ops.collectives import KernelCollective, kernel_collectives
from meshwright.ops.factors import Site
from meshwright.ops.local.sharded_node import ShardedNode
from meshwright.ops.strategy import Ports
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time, scattered_each_time, summed_first
from meshwright.partition.backward_demand import demand_within
from meshwright.partition.bucket_sizes import sizes
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.insert_reshards import backward_itemsize, parse_steps
from meshwright.partition.micro_batches import MicroBatches, first_micro_batch, how_often
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.sharded_update import gathered, update_layout
from meshwright.partition.stages import check_one_stage
from meshwright.predict.accumulated import added_seconds
from meshwright.predict.offload_prices import activation_prices, copied_bytes, fetch_seconds
from meshwright.redistribute.prices import Prices, total_seconds
from meshwright.redistribute.steps import largest_size, origin, wire_elements


@dataclass(frozen=True, slots=True)
class NodePrice:
    """Seconds of one operator of the model: computation, collectives inside kernels, and gradient accumulation.

    `forward_issue_seconds` and `backward_issue_seconds` are the host's, beside those of an accelerator, and no part of
    the total.
    """

    forward_seconds: float
    backward_seconds: float
    forward_talk_seconds: float = 0.0
    backward_talk_seconds: float = 0.0
    adding_seconds: float = 0.0
    forward_issue_seconds: float = 0.0
    backward_issue_seconds: float = 0.0

    def times(self, count: int) -> NodePrice:
        """Return the price of so many micro-batches."""
        return NodePrice(*(count * getattr(self, name) for name in self.__slots__))

    @property
    def total(self) -> float:
        """The sum of all seconds."""
        return (
            self.forward_seconds
            + self.backward_seconds
            + self.forward_talk_seconds
            + self.backward_talk_seconds
            + self.adding_seconds
        )


@dataclass(frozen=True)
class Price:
    """Seconds of a training step without overlap, by use; `total` is their sum.

    `by_node`: the price of each operator. `by_reshard`: seconds (forward, backward) of each reshard, transfer, and
    sharded or offloaded activation. `by_parameter`: seconds (reduction of its gradient and gathering after a sharded
    update, update) of each parameter.
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
    """Return the price of the program of the rank at the origin.

    `optimizer_states`: moments per parameter (2 for Adam).
    """
    check_one_stage(parts.plan, "the price")
    mesh = on_cluster(parts.plan.mesh, cluster)
    times, local = parts.micro_batches, first_local(parts)
    programs = first_micro_batch(parts, mesh.rank(origin(mesh))) if times > 1 else None
    by_node = node_prices(parts, local, mesh, cluster)
    by_reshard = reshard_prices(parts, mesh, cluster)
    kept = activation_prices(parts, local, mesh, cluster)
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


def first_local(parts: Partition) -> Graph:
    """Return the program of the rank at the origin, in its first micro-batch."""
    rank = parts.plan.mesh.rank(origin(parts.plan.mesh))
    if parts.micro_batches > 1:
        return first_micro_batch(parts, rank).programs[0]
    return parts.local(rank)


def on_cluster(mesh: Mesh, cluster: Cluster) -> Mesh:
    """Return the mesh with links of the cluster; a mesh that has links is unchanged."""
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
    """Return the price of every operator of the model, or of those in `of`, in the model's order."""
    graph, sites, at = parts.resharded.graph, parts.factors.sites, origin(mesh)
    sent: dict[str, list[KernelCollective]] = {}
    for node in local.nodes:
        if talk := kernel_collectives(node, local.types):
            sent.setdefault(parts.stands_for(node.name), []).extend(talk)
    found: dict[str, NodePrice] = {}
    again = demand_within(parts.again, local)
    nodes = {node.name: node for node in local.nodes} if cluster.measured.calls else {}
    # copies of a layer share their layouts and their seconds
    known: dict[Hashable, tuple[tuple[Amount, Amount], Work]] = {}
    for name, site in sites.items():
        if of is not None and name not in of:
            continue
        ports = parts.resharded.ports[name]
        wanted = [u in graph.needs_grad for u in site.node.uses]
        host = name in parts.plan.hosts
        kind = (_kind_of(site.node, graph), site.signature, id(ports), tuple(wanted), host)
        if kind not in known:
            local_sizes = letter_sizes(site, ports, mesh, at)
            where = "cpu" if host else cluster.device_type
            done = work(site.node, site.rule, local_sizes, graph.types, wanted, device=where)
            if name in nodes:
                done = replace(done, call=call_name(nodes[name], local.types, wanted))
            known[kind] = seconds(done, *place(cluster, host)), done
        (forward, backward), done = known[kind]
        issued, issued_back = issued_seconds(done, cluster.device, cluster.measured)
        talk = sent.get(name, ())
        sends, back = (
            talk_seconds((t for t in talk if t.phase == phase), mesh, cluster.prices)
            for phase in ("forward", "backward")
        )
        if name in again:
            backward, back, issued_back = backward + forward, back + sends, issued_back + issued
        adding = added_seconds(parts, name, cluster)
        found[name] = NodePrice(float(forward), float(backward), sends, back, adding, issued, issued_back)
    return found


def _kind_of(node: Node, graph: Graph) -> Hashable:
    """Return all of a node, beside its rule and layouts, that its work depends on."""
    literals = map_refs((node.args, node.kwargs), lambda _: None)
    return (node.op, literals, node.outputs, node.needs_grad, tuple([graph.types[u] for u in node.uses]))


def letter_sizes(site: Site, ports: Ports, mesh: Mesh, at: Mapping[str, int]) -> dict[str, int]:
    """Return the local sizes of the letters of an operator, and of the parts of concatenations."""
    cut = ShardedNode(site, ports, mesh, at)
    return {**site.rule.sizes, **{letter: cut.size(letter) for letter in cut.letters}}


def talk_seconds(talk: Iterable[KernelCollective], mesh: Mesh, prices: Prices) -> float:
    """Return the seconds of kernels' collectives, one after the other."""
    return sum(
        prices.seconds(t.kind, mesh, t.axes, wire_elements(t.kind, mesh.count(t.axes), t.payload_bytes, 0))
        for t in talk
    )


# ---------------------------------------------------------------- reshards and parameters


def reshard_prices(
    parts: Partition, mesh: Mesh, cluster: Cluster, held: Collection[str] = ()
) -> dict[str, tuple[float, float]]:
    """Return the seconds of every reshard and transfer, forward and backward. Gradients of `held` are not sent."""
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
    """Return the seconds of a transfer over the link to the host, forward and backward."""
    once = float(transfer_seconds(copied_bytes(parts, node.name, mesh), cluster))
    return once, once if any(node.needs_grad) else 0.0


def once_prices(programs: MicroBatches, mesh: Mesh, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return the seconds of the reductions over all micro-batches, which run once in a step."""
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
    """Return whether backward recomputes the result of a reshard instead of saving it."""
    return bool(node.kwarg("again", False))


def parameter_prices(
    parts: Partition, mesh: Mesh, cluster: Cluster, optimizer_states: int
) -> dict[str, tuple[float, float]]:
    """Return the seconds to reduce each trained parameter's gradient in a bucket, and to update the rank's share.

    With a sharded update the former include the all-gather.
    """
    bucket = sizes(parts.plan)

    def sent_in(kind: str, size: float, axes: tuple[str, ...]) -> float:
        # Gathers after the update block; the rest overlaps with backward.
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
            elements = largest_size(update_layout(parts, entry), mesh)
            offloaded = "optimizer" in parts.plan.techniques.offload
            update = update_seconds_there(
                float(elements),
                optimizer_states,
                DTYPES[entry.type.dtype],
                cluster,
                host=entry.name in parts.resharded.hosted,
                offloaded=offloaded,
                parameters=entry.name in parts.resharded.host_parameters,
            )
            found[entry.name] = (sent.get(entry.name, 0.0), float(update))
    return found
