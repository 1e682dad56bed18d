"""Every collective of one rank's program, forward and backward, before it runs: what prices read and what a
test counts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.graph import DTYPES, START, WAIT, Graph, Node
from meshwright.mesh import Mesh
from meshwright.ops.talk import kernel_talk
from meshwright.partition import Partition
from meshwright.partition.accumulation import summed_first
from meshwright.partition.micro_batches import first_micro_batch, how_often
from meshwright.partition.overlap import members_of
from meshwright.partition.reshards import RESHARD, backward_itemsize, parse_steps
from meshwright.partition.stashes import Stash
from meshwright.redistribute import Step
from meshwright.redistribute.positions import exchange
from meshwright.redistribute.steps import COLLECTIVES

NO_STASHES: Mapping[str, Stash] = {}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a rank. `payload_bytes` is the tensor that enters an all-reduce, reduce-scatter or
    all-to-all, and the one that leaves an all-gather (padding included); `phase` is forward or backward;
    `node` where it belongs."""

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
    stashes: Mapping[str, Stash] = NO_STASHES,
) -> list[Collective]:
    """The collectives of a rank's program, in no particular order. Gradient buckets are the runtime's and
    not among them. What backward is to make again is counted, whether or not autograd asks for it. The gradients of
    the reshards in `held` are not sent. `stashes`: what is kept for backward in slices, and gathered there."""
    found: list[Collective] = []
    for node in local.nodes:
        for value in node.values:
            for step in stashes[value].gather if value in stashes else ():
                size = DTYPES[local.types[value].dtype] * payload_elements(step, mesh, rank)
                found.append(Collective("backward", step.kind, step.axes, size, node.name))
        if node.op == RESHARD:
            onward, back = parse_steps(node.args[1]), parse_steps(node.args[2])
            itemsize = DTYPES[node.outputs[0].dtype]
            halves = [("forward", onward, itemsize)]
            if any(node.needs_grad) and node.name not in held:
                halves.append(("backward", back, backward_itemsize(node)))
            if node.kwarg("again"):
                halves.append(("backward", onward, itemsize))
            for phase, steps, width in halves:
                for step in steps:
                    if step.kind in COLLECTIVES:
                        size = width * payload_elements(step, mesh, rank)
                        found.append(Collective(phase, step.kind, step.axes, size, node.name))
        elif node.op == START:
            found += _flight(local, node, mesh, rank, held)
        elif node.op != WAIT:
            talks = kernel_talk(node, local.types)
            found += [Collective(t.phase, t.kind, t.axes, t.payload_bytes, node.name) for t in talks]
    return found


def step_collectives(parts: Partition, rank: int) -> list[Collective]:
    """Those of a whole step of a rank (number on the plan's mesh, in the first micro-batch): of all micro-batches, and
    the sums over them."""
    mesh = parts.plan.mesh
    if parts.micro_batches == 1:
        return program_collectives(parts.local(rank), mesh, rank, stashes=parts.stashes)
    programs = first_micro_batch(parts, rank)
    once = [c for r in programs.rounds for c in program_collectives(r.sums, mesh, rank)]
    once += program_collectives(programs.late, mesh, rank)
    count, first = how_often(parts, programs), programs.programs[0]
    held = program_collectives(first, mesh, rank, summed_first(parts), parts.stashes)
    again = [c for c in held for _ in range(count(c.node) - 1)]
    return [*once, *again, *program_collectives(first, mesh, rank, stashes=parts.stashes)]


def _flight(local: Graph, start: Node, mesh: Mesh, rank: int, held: Collection[str]) -> list[Collective]:
    """The collectives of a flight: the first ones of its members are one."""
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
    """Bytes that a rank sends, by ring algorithms (Patarasu & Yuan 2009)."""
    members = mesh.count(collective.axes)
    passes = 2 if collective.kind == "all_reduce" else 1
    return passes * collective.payload_bytes * (members - 1) / members


def payload_elements(step: Step, mesh: Mesh, rank: int) -> int:
    """Elements of a step's message on a rank, as the runtime pads it."""
    plan = exchange(step, mesh, rank)
    match step.kind:
        case "all_gather" | "reduce_scatter":
            return plan.padded * len(plan.group)
        case "all_to_all":
            return plan.sent
        case _:
            return math.prod(plan.shape_before)
