"""The programs of a rank as modules: one, or one for each micro-batch, and in a pipeline one for each of its stages in
each micro-batch; and what they share: what is made again, what is kept elsewhere, what waits to be added up."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.core.graph import Graph
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time, summed_first
from meshwright.partition.activation_offload import room_bytes, settled_before, stashed_in
from meshwright.partition.interleave import in_copies, of_one, original
from meshwright.partition.localize import late_values
from meshwright.partition.micro_batches import MicroBatches, micro_batches_of
from meshwright.partition.parameter_offload import fetch_runs, is_fetch
from meshwright.partition.recompute_marks import keeps_of
from meshwright.partition.segments import Segment, split_segments
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.activation_offload import Store
from meshwright.runtime.build_module import BuildOptions, build_module
from meshwright.runtime.collectives import Handle
from meshwright.runtime.kernels.split_linear import Queue
from meshwright.runtime.micro_batches import Build, Program, modules_in_time
from meshwright.runtime.parameter_offload import Fetches, Parked
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.recompute import Again


class Programs:
    """The programs of a rank. `in_time`: one for each micro-batch, None for a full batch in one stage. `graph`: that of
    the first micro-batch. `found`: segments and modules of each micro-batch, in a pipeline those of all stages one
    after the other; `stages` has them by stage. `sums`: where gradients are accumulated before reshards send them, in a
    pipeline one for each stage. `stores`: saved activations of each stage. `again`, `fetches`, `queue`: what backward
    needs; None or empty if it needs nothing."""

    def __init__(
        self,
        parts: Partition,
        rank: Rank,
        handle: Handle,
        parked: Parked,
        pipe: Pipeline | None,
        cuts: Sequence[int] = (),
        *,
        training: bool = True,
    ) -> None:
        """Build the programs. `cuts`: nodes before which a plain program is split into segments. Without `training` no
        result may end late."""
        self.parts, self.rank, self.handle, self.parked, self.pipe = parts, rank, handle, parked, pipe
        cut = parts.micro_batches > 1 or pipe is not None
        in_time = micro_batches_of(parts, rank.comm.rank) if cut else None
        if pipe is not None and in_time is not None:
            in_time = pipe.begin(in_time)
        self.in_time: MicroBatches | None = in_time
        self.graph: Graph = parts.local(rank.comm.rank) if in_time is None else in_time.programs[0]
        self.copy_of = {} if in_time is None else in_time.copy_of
        late = late_values(self.graph if in_time is None else in_time.late)
        # A pipeline's loss is sent on at once.
        self.late = late if pipe is None and training else frozenset[str]()
        keeps = keeps_of(self.graph, in_copies(parts.resharded.keeps, parts.copies))
        asked = keeps or parts.stashes or any(n.kwarg("again") for n in self.graph.nodes)
        self.again, self._keeps = Again() if asked else None, keeps
        self.stores: dict[int, Store] = {}
        self.fetches: list[Fetches] = []
        self.sums = {s: Accumulation(summed_first(parts)) for s in (pipe.mine if pipe is not None else (0,))}
        self.queue = Queue() if pipe is not None and pipe.splits_backward else None
        options, _ = self._options(self.graph)
        self.build = self._builder(options)
        self.stages: dict[int, list[Program]] = {}
        self.found: list[Program]
        if pipe is not None and in_time is not None:
            for s, programs in pipe.segments(in_time).items():
                own, store = self._options(programs[0][0].graph)
                self.stores |= {} if store is None else {s: store}
                build = self._builder(replace(own, sums=self.sums[s], queue=self.queue))
                self.stages[s] = modules_in_time(programs, parts.plan.mesh, self.enter, build, parts.copies)
            self.found = [program for each in self.stages.values() for program in each]
        else:
            self.build = self._builder(replace(options, sums=self.sums[0]))
            graphs = [self.graph] if in_time is None else in_time.programs
            segments = [split_segments(graph, cuts) for graph in graphs]
            self.found = modules_in_time(segments, parts.plan.mesh, self.enter, self.build, parts.copies)

    def _builder(self, options: BuildOptions) -> Build:
        return functools.partial(build_module, rank=self.rank, handle=self.handle, options=options)

    def _options(self, graph: Graph) -> tuple[BuildOptions, Store | None]:
        """Return how the modules of a graph are built, in all micro-batches and for what comes before and after it; and
        where they store what is sharded or offloaded."""
        parts, again, rank = self.parts, self.again, self.rank
        homes = self.parked.homes  # of what this rank holds: the program of all stages has more
        brought = {n.name: homes[n.uses[0]] for n in graph.nodes if is_fetch(n) and n.uses[0] in homes}
        fetches = store = None
        if again is not None and brought:
            runs = (tuple(n for n in run if n in brought) for run in fetch_runs(graph))
            fetches = Fetches(again, self.parked.link, [run for run in runs if run], brought)
            self.fetches.append(fetches)
        stashes = stashed_in(parts.stashes, graph, parts.copies)
        if again is not None and stashes:
            store = Store(again, rank.device, room_bytes(graph, stashes, parts.plan.mesh, rank.comm.rank))
        hosts = (n.name for n in graph.nodes if parts.plan.hosts and parts.on_host(of_one(n, self.copy_of)))
        options = BuildOptions(
            late=self.late,
            again=again,
            keeps=self._keeps,
            hosts=frozenset(hosts),
            copy_of=self.copy_of,
            stashes=stashes,
            store=store,
            settled=settled_before(graph, stashes),
            fetches=fetches,
        )
        return options, store

    @property
    def reads(self) -> frozenset[str]:
        """The inputs of the model's program that those of this rank read."""
        graphs = [segment.graph for segments, _ in self.found for segment in segments]
        graphs += [terms for one in self.in_time.rounds for terms in one.terms] if self.in_time else []
        names = (entry.name for graph in graphs for entry in graph.inputs)
        return frozenset(original(n, self.copy_of[n]) if n in self.copy_of else n for n in names)

    def enter(self, micro_batch: int) -> None:
        """Put the rank into a micro-batch."""
        self.rank.micro_batch = micro_batch
        if self.pipe is None:
            self.sums[0].last = micro_batch + self.parts.copies >= self.parts.micro_batches

    def begin(self) -> None:
        """Before a step: nothing of an earlier one is under way."""
        for fetches in self.fetches:
            fetches.begin()
        for sums in self.sums.values():
            sums.begin()

    def uses(self, ids: Mapping[str, int]) -> list[dict[int, int]]:
        """How often each backward reaches the weights; in a pipeline each step, or where gradients are reduced each
        time, backward of each of its stages. `ids`: input → what stands for its weight."""
        if self.stages and scattered_each_time(self.parts):
            return [_uses(programs[0][0], ids) for programs in self.stages.values()]
        if self.stages:
            return [_uses((segment for segments, _ in self.found for segment in segments), ids)]
        return [_uses(segments, ids) for segments, _ in self.found]


def _uses(segments: Iterable[Segment], ids: Mapping[str, int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for segment in segments:
        for entry in segment.graph.inputs:
            if entry.role == "parameter" and entry.name in ids:
                counts[ids[entry.name]] = counts.get(ids[entry.name], 0) + 1
    return counts


__all__ = ["Programs"]
