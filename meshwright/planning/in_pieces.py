"""A plan for a batch that may have too few examples for its micro-batches, such as the last one of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.core.graph import Graph
from meshwright.errors import PlanError
from meshwright.ops.analysis import factors_of
from meshwright.partition.time_axis import in_time
from meshwright.plan.plan import Plan


def in_pieces(plan: Plan, graph: Graph, carry: Callable[[Plan], Plan]) -> Plan:
    """The plan of another program, which `carry` makes from a plan: in its micro-batches and half-batches, or in one
    piece where the program has too few examples for them. Raises PlanError."""
    asked = plan.techniques
    if asked.pieces == 1:
        return carry(plan)

    def checked(one: Plan) -> Plan:
        found = carry(one)
        for own in found.own or (found,):
            in_time(graph, factors_of(graph), own)
        return found

    single = replace(asked, micro_batches=1, interleave=1)
    fewer = replace(plan, techniques=single, own=tuple(replace(p, techniques=single) for p in plan.own))
    batch = graph.input_of("batch")
    if any(i.type.shape[i.batch_dim] < asked.pieces for i in batch if i.batch_dim is not None):
        return checked(fewer)  # one example does not even count as a batch
    try:
        return checked(plan)
    except PlanError as error:
        try:
            return checked(fewer)
        except PlanError:
            raise error from None


__all__ = ["in_pieces"]
