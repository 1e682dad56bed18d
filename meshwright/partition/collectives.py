"""The collectives of one rank's program, forward and backward, computed without running it.

Prices read them, and tests count them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import DTYPES, START, WAIT, Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.ops.collectives import kernel_collectives
from meshwright.partition import Partition
from meshwright.partition.accumulation import summed_first
from meshwright.partition.activation_offload import SavedActivation, activations_in
from meshwright.partition.backward_demand import demand_within
from meshwright.partition.insert_reshards import RESHARD, backward_itemsize, parse_steps
from meshwright.partition.micro_batches import MicroBatches, first_micro_batch, how_often
from meshwright.partition.overlap import members_of
from meshwright.redistribute import Step
from meshwright.redistribute.index_maps import exchange

NO_ACTIVATIONS: Mapping[str, SavedActivation] = {}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a rank.

    `payload_bytes` is the size, with padding, of the input of an all-reduce, reduce-scatter or all-to-all, and of the
    output of an all-gather. `phase` is forward or backward, `node` the node it belongs to.
    """

    phase: str
    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    node: str


def program_collectives(
    local: Graph,
    mesh: Mesh,
    rank: int,
    held: Collection[str] = (),
    activations: Mapping[str, SavedActivation] = NO_ACTIVATIONS,
    again: Callable[[str], bool] | None = None,
) -> list[Collective]:
    """Return the collectives of a rank's program, in no particular order.

    Buckets of gradients belong to the runtime and are not among them. Gradients of the reshards in `held` are not sent.
    `activations`: activations that are saved sharded and gathered in backward. `again` says whether backward recomputes
    the results of a node; the default reads it from the reshards.
    """
    found: list[Collective] = []
    for node in local.nodes:
        for value in node.values:
            for step in activations[value].gather if value in activations else ():
                size = DTYPES[local.types[value].dtype] * payload_elements(step, mesh, rank)
                found.append(Collective("backward", step.kind, step.axes, size, node.name))
        remade = again is not None and again(node.name)
        if node.op == RESHARD:
            onward, back = parse_steps(node.args[1]), parse_steps(node.args[2])
            itemsize = DTYPES[node.outputs[0].dtype]
            halves = [("forward", onward, itemsize)]
            if any(node.needs_grad) and node.name not in held:
                halves.append(("backward", back, backward_itemsize(node)))
            if remade if again is not None else node.kwarg("again"):
                halves.append(("backward", onward, itemsize))
            for phase, steps, width in halves:
                for step in steps:
                    if step.kind in COLLECTIVES:
                        size = width * payload_elements(step, mesh, rank)
                        found.append(Collective(phase, step.kind, step.axes, size, node.name))
        elif node.op == START:
            found += _flight(local, node, mesh, rank, held)
        elif node.op != WAIT:
            for t in kernel_collectives(node, local.types):
                phases = ("forward", "backward") if remade and t.phase == "forward" else (t.phase,)
                found += [Collective(p, t.kind, t.axes, t.payload_bytes, node.name) for p in phases]
    return found


def step_collectives(parts: Partition, rank: int) -> list[Collective]:
    """Return the collectives of a full step of a rank: those of all micro-batches, and the sums over them.

    `rank` is its number on the plan's mesh, in the first micro-batch.
    """
    if parts.micro_batches == 1:
        return in_micro_batches(parts, rank, None, parts.local(rank))
    programs = first_micro_batch(parts, rank)
    early, late = sums_of_batch(parts, rank, programs)
    return [*early, *late, *in_micro_batches(parts, rank, programs, programs.programs[0])]


def sums_of_batch(
    parts: Partition, rank: int, programs: MicroBatches
) -> tuple[list[Collective], list[Collective]]:
    """Return the collectives that run once for all micro-batches: before the first, and after the last."""
    mesh = parts.plan.mesh
    early = [c for r in programs.rounds for c in program_collectives(r.sums, mesh, rank)]
    return early, program_collectives(programs.late, mesh, rank)


def in_micro_batches(
    parts: Partition, rank: int, programs: MicroBatches | None, local: Graph
) -> list[Collective]:
    """Return a rank's collectives in all micro-batches. `local`: its program of the first, or a stage of it."""
    mesh, activations = parts.plan.mesh, activations_in(parts.activations, local)
    remade = demand_within(parts.again, local)

    def again(name: str) -> bool:
        return parts.stands_for(name) in remade or name in remade

    first = program_collectives(local, mesh, rank, (), activations, again)
    if programs is None:
        return first
    count = how_often(parts, programs)
    held = program_collectives(local, mesh, rank, summed_first(parts), activations, again)
    return [*first, *(c for c in held for _ in range(count(c.node) - 1))]


def _flight(local: Graph, start: Node, mesh: Mesh, rank: int, held: Collection[str]) -> list[Collective]:
    """Return the collectives of a flight: the first ones of its members are fused."""
    members = members_of(local, start)
    itemsize, back = DTYPES[members[0].outputs[0].dtype], backward_itemsize(members[0])
    again = tuple(members[index] for index in start.kwarg("again", ()))
    there, home = ([parse_steps(texts) for texts in half] for half in start.args[1:3])
    halves = [("forward", members, there, itemsize)]
    if any(start.needs_grad) and members[0].name not in held:
        halves.append(("backward", members, home, back))
    halves.append(("backward", again, [there[index] for index in start.kwarg("again", ())], itemsize))
    found: list[Collective] = []
    for phase, nodes, ways, width in halves:
        sent = [[s for s in steps if s.kind in COLLECTIVES] for steps in ways]
        first = [steps[0] for steps in sent if steps]
        if first:
            size = width * sum(payload_elements(s, mesh, rank) for s in first)
            found.append(Collective(phase, first[0].kind, first[0].axes, size, nodes[0].name))
        for node, steps in zip(nodes, sent, strict=True):
            for s in steps[1:]:
                size = width * payload_elements(s, mesh, rank)
                found.append(Collective(phase, s.kind, s.axes, size, node.name))
    return found


def sent_bytes(collective: Collective, mesh: Mesh) -> float:
    """Return the bytes that a rank sends, by ring algorithms (Patarasu & Yuan 2009)."""
    members = mesh.count(collective.axes)
    return COLLECTIVES[collective.kind].rounds * collective.payload_bytes * (members - 1) / members


def payload_elements(step: Step, mesh: Mesh, rank: int) -> int:
    """Return the elements of a step's message on a rank, with the runtime's padding."""
    return exchange(step, mesh, rank).payload
