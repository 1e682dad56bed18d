"""Micro-batches (`micro_batches=n`): the plan says what they make inexact. How programs are cut in time is
`partition/time.py`."""

from __future__ import annotations

from meshwright.graph import Graph
from meshwright.ops.analysis import factors_of
from meshwright.ops.batch import by_micro_batch
from meshwright.plan import Plan


def micro_batches(graph: Graph, plan: Plan) -> Plan:
    """The plan with a note that names what is inexact, or what was asked for in vain."""
    count, asked = plan.techniques.pieces, plan.techniques
    if asked.gradient_accumulation_shard:
        split = asked.optimizer_parallel >= 2 or any(e.name in plan.hubs for e in graph.input_of("parameter"))
        needed = "micro_batches" if count == 1 else "" if split else "optimizer_parallel=2 or 3"
        if needed:
            plan = plan.with_notes(f"gradient_accumulation_shard changes nothing without {needed}")
    if not asked.recompute_communication and "again" not in plan.keeps.values():
        plan = plan.with_notes("recompute_communication=False changes nothing: nothing is computed again")
    found = by_micro_batch(graph, factors_of(graph)) if count > 1 else []
    if not found:
        return plan
    names = ", ".join(f"%{n.name}" for n in found[:4]) + (
        f" and {len(found) - 4} more" if len(found) > 4 else ""
    )
    return plan.with_notes(
        f"inexact by design: {names} ({found[0].op}, {found[0].where}): their statistics are those of each of "
        f"{plan.techniques.pieces_told}, not of the batch, and so loss and gradients are not the whole batch's"
    )
