"""Partition a graph by a plan into the program of each rank.

There are three passes: insert reshards, localize, and overlap communication with computation. A plan with micro-batches
first gets an axis in time (`time_axis.py`), and each micro-batch has a program (`micro_batches.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from meshwright.core.graph import RESHARD, START, TO_DEVICE, TO_HOST, Graph, Node
from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import PipelineRank
from meshwright.errors import LayoutError
from meshwright.ops.analysis import factors_of
from meshwright.ops.batch import full_batch_readers
from meshwright.ops.factors import Factors
from meshwright.partition.activation_offload import SavedActivation
from meshwright.partition.backward_demand import FirstReaders
from meshwright.partition.insert_reshards import Resharded, insert_reshards
from meshwright.partition.interleave import STARTED, SUMMED, original
from meshwright.partition.localize import localize_graph
from meshwright.partition.overlap import Flight, flights, overlapped, stored_in
from meshwright.partition.parameter_offload import is_fetch
from meshwright.partition.recompute_marks import settled, with_keeps
from meshwright.partition.stages import Places, Stage, cut_stages, flights_within, places
from meshwright.partition.time_axis import check_in_time, counting_pieces, in_time, not_in_time
from meshwright.plan.check import check_shardings
from meshwright.plan.plan import Plan
from meshwright.redistribute import TWO_CORE_GLOO

T = TypeVar("T")

NO_COPIES: Mapping[str, int] = {}


@dataclass(frozen=True)
class Partition:
    """A partitioned graph: `resharded` is common to all ranks, and `local(rank)` returns the program of one.

    - `requested` is the plan as passed in. `plan` equals it, but with micro-batches its mesh has an axis in time, over
      which strategies and layouts are split too; a "rank" of that mesh is a rank in a micro-batch.
    - `activations` maps values to how they are saved for backward, if sharded or in host memory.
    - `again` maps each operator, reshard or transfer that backward recomputes to the nodes whose backward needs it
      first (`backward_demand.py`).
    - `own`: if stages have separate meshes, the partitions of all places of the pipeline; this is the first of them.
    """

    plan: Plan
    factors: Factors
    resharded: Resharded
    requested: Plan
    activations: Mapping[str, SavedActivation] = field(default_factory=dict)
    again: Mapping[str, FirstReaders] = field(default_factory=dict)
    own: tuple[Partition, ...] = ()

    def of_place(self, place: PipelineRank) -> Partition:
        """Return the partition of the ranks at a place of a pipeline."""
        return self.own[place] if self.own else self

    def for_places(self, places: int, make: Callable[[Partition], T]) -> list[T]:
        """Return the result of `make` for each place of a pipeline, computed once if all places share a mesh."""
        return [make(one) for one in self.own] if self.own else [make(self)] * places

    @property
    def ranks(self) -> Mesh:
        """The mesh of the ranks that run it; in a pipeline, of those that share a stage."""
        return self.requested.mesh

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches; 1 for a full batch."""
        return self.plan.mesh.size // self.ranks.size

    @property
    def copies(self) -> int:
        """The number of half-batches that are interleaved in one program."""
        return self.requested.techniques.interleave

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the "ranks" of the plan's mesh that stand for a rank in each micro-batch."""
        return tuple(micro_batch * self.ranks.size + rank for micro_batch in range(self.micro_batches))

    @functools.cached_property
    def fetched(self) -> dict[str, FirstReaders]:
        """The nodes that need each transfer of an offloaded parameter first, as in `again`."""
        brought = (n.name for n in self.resharded.graph.nodes if is_fetch(n))
        return {name: self.again[name] for name in brought if name in self.again}

    @functools.cached_property
    def flights(self) -> tuple[Flight, ...]:
        """Reshards that start early and together. They are the same on all ranks."""
        found = flights(self.resharded, self.plan)
        if not self.plan.stages:
            return found
        graph = self.resharded.graph
        inputs = frozenset(
            n.name for n in graph.nodes if n.op == RESHARD and stored_in(graph, n) not in graph.producers
        )
        return flights_within(found, self._places, inputs)

    @functools.cached_property
    def _places(self) -> Places:
        return places(self.resharded.graph, {**self.plan.stages, **self.resharded.borders})

    def stages(self, program: Graph, copy_of: Mapping[str, int] = NO_COPIES) -> tuple[Stage, ...]:
        """Split a local program, or one of a micro-batch, into the stages of a pipeline.

        `copy_of` maps nodes to their half-batch, if the program interleaves several.
        """
        starts = {flight.name: flight.members[0] for flight in self.flights}
        made_by = self.resharded.graph.producers

        def place(node: Node) -> frozenset[int]:
            name = starts.get(node.name, node.name)
            if node.name in copy_of:
                name = original(name, copy_of[node.name])
            name = name.removesuffix(STARTED) if node.op == START and node.name in copy_of else name
            if name in made_by:
                name = made_by[name].name  # the node that joins copies has the name of the value
            for end in ("_k", SUMMED):
                name = name if name in self._places else name.rpartition(end)[0] or name
            return self._places[name]

        return cut_stages(program, self.plan.techniques.pipeline, place)

    @functools.cached_property
    def known(self) -> dict[Hashable, object]:
        """Cached results of functions of this partition (`remembered.py`)."""
        return {}

    @functools.cached_property
    def _latest(self) -> dict[int, Graph]:
        return {}

    def local(self, rank: int) -> Graph:
        """Return the local graph of a rank (in a micro-batch, before it is split into programs in time).

        The latest one is cached, since explaining a plan needs it several times.
        """
        found = self._latest.get(rank)
        if found is None:
            found = overlapped(self.plain(rank), self.flights)
            self._latest.clear()
            self._latest[rank] = found
        return found

    def plain(self, rank: int) -> Graph:
        """Return the local graph of a rank in which all reshards block."""
        return localize_graph(self.resharded, self.factors, self.plan, rank)

    def on_host(self, node: Node) -> bool:
        """Return whether the host runs a node of a local program. A transfer runs on neither side."""
        if node.op in (TO_HOST, TO_DEVICE):
            return False
        if node.values[0] in self.resharded.hosted:
            return True
        return self.stands_for(node.name) in self.plan.hosts

    def stands_for(self, name: str) -> str:
        """Return the operator of the model for a node of a local program: itself, or the one it helps."""
        return name if name in self.factors.sites else name.rpartition("_k")[0]


def partition(graph: Graph, plan: Plan) -> Partition:
    """Partition a graph by a plan, with the cheapest reshards by the prices that are stored in it.

    Raises PlanError when the plan belongs to another graph, or has micro-batches that are impossible.
    """
    plan = plan.check(graph)
    graph = counting_pieces(graph, plan.techniques.pieces)
    factors = factors_of(graph)
    check_shardings(plan, factors)
    if plan.own:
        own = tuple(_one(graph, factors, one) for one in plan.own)
        return replace(own[0], requested=plan, own=own)
    return _one(graph, factors, plan)


def _one(graph: Graph, factors: Factors, plan: Plan) -> Partition:
    """Partition on one mesh."""
    timed = in_time(graph, factors, plan)
    try:
        resharded = insert_reshards(graph, factors, timed, plan.prices or TWO_CORE_GLOO)
    except LayoutError as error:
        whole = full_batch_readers(graph, factors) if timed is not plan else []
        if not whole:
            raise
        raise not_in_time(whole[0], plan) from error
    if timed is not plan:
        check_in_time(graph, factors, resharded, timed)
    kept = with_keeps(resharded, factors, timed)
    kept, activations, again = settled(kept, timed)
    return Partition(timed, factors, kept, plan, activations, again)


__all__ = ["RESHARD", "Partition", "Resharded", "partition"]
