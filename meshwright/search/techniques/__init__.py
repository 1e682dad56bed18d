"""The techniques that a user asked for, put into a plan one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from meshwright.graph import Graph
from meshwright.plan import Plan
from meshwright.search.techniques.budget import Weight
from meshwright.search.techniques.fusion import fusion
from meshwright.search.techniques.micro_batches import micro_batches
from meshwright.search.techniques.optimizer_parallel import optimizer_parallel
from meshwright.search.techniques.recompute import recompute
from meshwright.search.techniques.stashes import stashes
from meshwright.techniques import Techniques

# Each takes the graph and a plan that has its `techniques`, and gives the plan with what follows from them.
Pass = Callable[[Graph, Plan], Plan]
Weigh = Callable[[Graph, Plan], Weight]


def passes(weigh: Weigh) -> tuple[Pass, ...]:
    """In the order in which they are applied. `weigh` says what a plan's program keeps for backward, and costs."""
    return (optimizer_parallel, fusion, functools.partial(recompute, weigh=weigh), stashes, micro_batches)


def apply(graph: Graph, plan: Plan, techniques: Techniques, weigh: Weigh) -> Plan:
    """The plan with techniques. Raises PlanError for what cannot be."""
    plan = replace(plan, techniques=techniques)
    for step in passes(weigh):
        plan = step(graph, plan)
    return plan


__all__ = ["Weigh", "apply", "passes"]
