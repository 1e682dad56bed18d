"""Micro-batches (`micro_batches=n`): the plan says what they make inexact. How programs are cut in time is
`partition/time.py`."""

from __future__ import annotations

from meshwright.graph import Graph
from meshwright.ops.analysis import factors_of
from meshwright.ops.batch import by_micro_batch
from meshwright.plan import Plan


def micro_batches(graph: Graph, plan: Plan) -> Plan:
    """The plan with a note that names what is inexact, or what was asked for in vain."""
    count = plan.techniques.pieces
    if count == 1 and plan.techniques.gradient_accumulation_shard:
        plan = plan.with_notes("gradient_accumulation_shard changes nothing without micro_batches")
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
