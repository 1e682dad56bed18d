"""In which order copies take turns: each is put on the timeline of the cluster, and the quickest is the plan's."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.cluster import Cluster
from meshwright.cost.saved import saved
from meshwright.graph import Graph
from meshwright.partition import partition
from meshwright.partition.step_times import step_times
from meshwright.plan import Plan
from meshwright.techniques import TURNS


def with_turns(graph: Graph, plan: Plan, cluster: Cluster, optimizer_states: int = 2) -> Plan:
    """The plan with the order of turns that ends a step first on a cluster; itself where nothing takes turns."""
    if plan.techniques.interleave == 1:
        return plan

    def seconds(turns: str) -> float:
        parts = partition(graph, replace(plan, turns=turns), keeps=saved)
        return step_times(parts, cluster, optimizer_states).step_seconds

    return replace(plan, turns=min(TURNS, key=seconds))


__all__ = ["with_turns"]
