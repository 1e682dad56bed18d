"""From a graph and a plan to the program each rank runs, in three passes: insert reshards, localize, let what is sent
overlap with what is computed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.graph import RESHARD, TO_DEVICE, TO_HOST, Graph, Node
from meshwright.ops.analysis import factors_of
from meshwright.ops.factors import Factors
from meshwright.partition.again import Keeps
from meshwright.partition.keeps import with_keeps
from meshwright.partition.localize import localize_graph
from meshwright.partition.overlap import Flight, flights, overlapped
from meshwright.partition.reshards import Resharded, insert_reshards
from meshwright.plan import Plan
from meshwright.redistribute import TWO_CORE_GLOO, Prices


@dataclass(frozen=True)
class Partition:
    """What all ranks share (`resharded`), from which `local(rank)` makes the program of one."""

    plan: Plan
    factors: Factors
    resharded: Resharded

    @functools.cached_property
    def flights(self) -> tuple[Flight, ...]:
        """Reshards that start early, and together: the same on all ranks."""
        return flights(self.resharded, self.plan)

    @functools.cached_property
    def _latest(self) -> dict[int, Graph]:
        return {}

    def local(self, rank: int) -> Graph:
        """The local graph of a rank. The latest one is remembered: who explains a plan asks for it several times."""
        found = self._latest.get(rank)
        if found is None:
            found = overlapped(localize_graph(self.resharded, self.factors, self.plan, rank), self.flights)
            self._latest.clear()
            self._latest[rank] = found
        return found

    def on_host(self, node: Node) -> bool:
        """Whether the host runs a node of a local program. A transfer runs on neither side."""
        if node.op in (TO_HOST, TO_DEVICE):
            return False
        if node.values[0] in self.resharded.hosted:
            return True
        stands = node.name if node.name in self.factors.sites else node.name.rpartition("_k")[0]
        return stands in self.plan.hosts


def partition(
    graph: Graph, plan: Plan, prices: Prices | None = None, keeps: Keeps | None = None
) -> Partition:
    """Cut a graph as a plan says, moving values as is cheapest by `prices` (by default those the plan was made with).

    `keeps` says what autograd keeps of a node: only that can be made again in backward.
    Raises PlanError when the plan belongs to another graph.
    """
    plan = plan.check(graph)
    factors = factors_of(graph)
    plan.check_cuts(factors)
    resharded = insert_reshards(graph, factors, plan, prices or plan.prices or TWO_CORE_GLOO, keeps)
    return Partition(plan, factors, with_keeps(resharded, factors, plan))


__all__ = ["RESHARD", "Partition", "Resharded", "partition"]
