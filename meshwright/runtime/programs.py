"""The programs of a rank as modules, for each of its stages and micro-batches; and what they share: what is recomputed,
which saved activations are sharded or offloaded, what waits to be added up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.core.graph import Graph
from meshwright.partition import Partition
from meshwright.partition.accumulation import scattered_each_time, summed_first
from meshwright.partition.activation_offload import activations_in, room_bytes, settled_before
from meshwright.partition.gradients import pending_gradients
from meshwright.partition.interleave import in_copies, of_one, original
from meshwright.partition.localize import late_values
from meshwright.partition.micro_batches import full_batch, micro_batches_of
from meshwright.partition.parameter_offload import fetch_runs, is_fetch
from meshwright.partition.recompute_marks import keeps_of
from meshwright.partition.segments import Segment, split_segments
from meshwright.partition.stages import Stage, segment_stages
from meshwright.pipeline.actions import Action
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.activation_offload import Store
from meshwright.runtime.build_module import BuildOptions, build_module
from meshwright.runtime.collectives import Handle
from meshwright.runtime.compiled import borders_of, compiled
from meshwright.runtime.kernels.split_linear import Queue
from meshwright.runtime.micro_batches import Build, Segments, modules_in_time, order_of_one_rank, step_actions
from meshwright.runtime.parameter_offload import Fetches, HostParameters
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.recompute import Again

Program = tuple[Segment, Callable[..., Any]]


class Programs:
    """A graph and a module for each stage of a rank in each micro-batch. Without a pipeline a rank has one
    stage.

    - `in_time`: its programs over time. `graph`: that of the first micro-batch; `copy_of`: node → its copy in there.
    - `cut`: all stages of the first micro-batch. What crosses their borders is the same in each.
    - `programs`: stage of this rank → its segment and module in each micro-batch.
    - `sums`: stage → where gradients are added up before some reshards send them.
    - `stores`: what stages of a pipeline shard or offload of their saved activations.
    - `again`, `fetches`, `queue`: what backward asks for; None or empty if it asks nothing.
    - `actions`: the list of what the rank does in a step.
    """

    def __init__(
        self,
        parts: Partition,
        rank: Rank,
        handle: Handle,
        host_parameters: HostParameters,
        pipe: Pipeline | None,
        cuts: Sequence[int] = (),
        *,
        training: bool = True,
    ) -> None:
        """`cuts`: nodes before which the program of a plan without a pipeline is split into stages. Without `training`
        no result may end late."""
        self.parts, self.rank, self.handle, self.host_parameters, self.pipe = (
            parts,
            rank,
            handle,
            host_parameters,
            pipe,
        )
        if pipe is not None:
            self.in_time = pipe.begin(micro_batches_of(parts, rank.comm.rank))
        else:
            programs_of = micro_batches_of if parts.micro_batches > 1 else full_batch
            self.in_time = programs_of(parts, rank.comm.rank)
        self.graph: Graph = self.in_time.programs[0]
        self.copy_of = self.in_time.copy_of
        # A pipeline's loss is sent on at once.
        ends_late = self.in_time.late if parts.micro_batches > 1 else self.graph
        self.late = late_values(ends_late) if pipe is None and training else frozenset[str]()
        keeps = keeps_of(self.graph, in_copies(parts.resharded.keeps, parts.copies))
        asked = keeps or parts.activations or any(n.kwarg("again") for n in self.graph.nodes)
        self.again, self._keeps = Again() if asked else None, keeps
        self.stores: dict[int, Store] = {}
        self.fetches: list[Fetches] = []
        self.sums: dict[int, Accumulation] = {}
        self.queue = Queue() if pipe is not None and pipe.splits_backward else None
        self.programs: dict[int, list[Program]] = {}
        self.build, self.cut = self._of_one_rank(cuts) if pipe is None else self._of_pipeline(pipe)
        self.actions = self._actions(training)

    def _of_one_rank(self, cuts: Sequence[int]) -> tuple[Build, tuple[Stage, ...]]:
        """Build the stages of a rank without a pipeline: usually one."""
        options, _ = self._options(self.graph)
        sums = Accumulation(summed_first(self.parts))
        build = self._builder(replace(options, sums=sums))
        stages = segment_stages(self.graph, cuts)
        self.sums = dict.fromkeys(range(len(stages)), sums)
        segments = [split_segments(graph, cuts) for graph in self.in_time.programs]
        self._build_stages(range(len(stages)), segments, build)
        return build, stages

    def _of_pipeline(self, pipe: Pipeline) -> tuple[Build, tuple[Stage, ...]]:
        """Build this rank's stages of a pipeline."""
        options, _ = self._options(self.graph)
        for s, segments in pipe.segments(self.in_time).items():
            self.sums[s] = Accumulation(summed_first(self.parts))
            own, store = self._options(segments[0][0].graph)
            self.stores |= {} if store is None else {s: store}
            self._build_stages(
                (s,), segments, self._builder(replace(own, sums=self.sums[s], queue=self.queue))
            )
        return self._builder(options), pipe.cut

    def _build_stages(
        self, numbers: Sequence[int], programs: Sequence[tuple[Segment, ...]], build: Build
    ) -> None:
        """Build the modules of some stages, whose segments each micro-batch has side by side."""
        found = modules_in_time(programs, self.parts.plan.mesh, self.enter, build, self.parts.copies)
        if self.rank.compiles:
            found = self._compiled(found)
        for index, s in enumerate(numbers):
            self.programs[s] = [(segments[index], modules[index]) for segments, modules in found]

    def _compiled(self, found: Iterable[Segments]) -> list[Segments]:
        """Compile modules, each once though micro-batches have it in common."""
        reduced = bool(pending_gradients(self.parts))
        made: dict[int, Callable[..., Any]] = {}
        for segments, modules in found:
            for segment, module in zip(segments, modules, strict=True):
                if id(module) not in made:
                    borders = borders_of(segment.graph) if reduced else ()
                    made[id(module)] = compiled(module, borders, says=self.rank.comm.rank == 0)
        return [(segments, [made[id(m)] for m in modules]) for segments, modules in found]

    def _actions(self, training: bool) -> tuple[Action, ...]:
        pipe, in_time = self.pipe, self.in_time
        if pipe is None:
            order = order_of_one_rank(len(self.cut), len(in_time.programs), training=training)
        else:
            order = pipe.messages.listed(pipe.comm.place)
        applies = {
            "late": bool(in_time.late.outputs),
            "share": pipe is not None and training,
            "reduce_wait": training,
            "update": training,
            "end": pipe is not None,
        }
        ends = [kind for kind, here in applies.items() if here]
        return step_actions(in_time, self.parts.micro_batches, order, ends)

    def _builder(self, options: BuildOptions) -> Build:
        return functools.partial(build_module, rank=self.rank, handle=self.handle, options=options)

    def _options(self, graph: Graph) -> tuple[BuildOptions, Store | None]:
        """Return how the modules of a graph are built, in all micro-batches and for what comes before and after it; and
        where they store what is sharded or offloaded."""
        parts, again, rank = self.parts, self.again, self.rank
        homes = self.host_parameters.homes  # of what this rank holds: the program of all stages has more
        brought = {n.name: homes[n.uses[0]] for n in graph.nodes if is_fetch(n) and n.uses[0] in homes}
        fetches = store = None
        if again is not None and brought:
            runs = (tuple(n for n in run if n in brought) for run in fetch_runs(graph))
            fetches = Fetches(again, self.host_parameters.link, [run for run in runs if run], brought)
            self.fetches.append(fetches)
        activations = activations_in(parts.activations, graph, parts.copies)
        if again is not None and activations:
            store = Store(again, rank.device, room_bytes(graph, activations, parts.plan.mesh, rank.comm.rank))
        hosts = (n.name for n in graph.nodes if parts.plan.hosts and parts.on_host(of_one(n, self.copy_of)))
        options = BuildOptions(
            late=self.late,
            again=again,
            keeps=self._keeps,
            hosts=frozenset(hosts),
            copy_of=self.copy_of,
            activations=activations,
            store=store,
            settled=settled_before(graph, activations),
            fetches=fetches,
        )
        return options, store

    @property
    def segments(self) -> list[Segment]:
        """The segments of all stages and micro-batches of this rank."""
        return [segment for programs in self.programs.values() for segment, _ in programs]

    def segment(self, stage: int, micro_batch: int) -> Segment:
        """The segment of a stage in a micro-batch, which may have fewer examples than the first."""
        return self.programs[stage][micro_batch][0]

    @property
    def modules(self) -> list[Callable[..., Any]]:
        """The modules of the first micro-batch, stage by stage."""
        return [programs[0][1] for programs in self.programs.values()]

    @property
    def reads(self) -> frozenset[str]:
        """The inputs of the model's program that those of this rank read."""
        graphs = [segment.graph for segment in self.segments]
        graphs += [terms for one in self.in_time.rounds for terms in one.terms]
        names = (entry.name for graph in graphs for entry in graph.inputs)
        return frozenset(original(n, self.copy_of[n]) if n in self.copy_of else n for n in names)

    def enter(self, micro_batch: int) -> None:
        """Put the rank into a micro-batch."""
        self.rank.micro_batch = micro_batch

    def begin(self) -> None:
        """Before a step: nothing of an earlier one is under way."""
        for fetches in self.fetches:
            fetches.begin()
        for sums in self.sums.values():
            sums.begin()

    @property
    def turns(self) -> str:
        """How often gradients are reduced, or added up where they are reduced: after each ``micro-batch``
        without a pipeline, after each backward of a ``stage`` that scatters them, else once a ``step``."""
        if self.pipe is None:
            return "micro-batch" if len(self.in_time.programs) > 1 else "step"
        return "stage" if scattered_each_time(self.parts) else "step"

    def uses(self, ids: Mapping[str, int]) -> list[dict[int, int]]:
        """How often backward reaches the weights in each of the turns. `ids`: input → what stands for its weight."""
        every = list(self.programs.values())
        match self.turns:
            case "micro-batch":
                turns = [[stage[m] for stage in every] for m in range(len(every[0]))]
            case "stage":
                turns = [stage[:1] for stage in every]
            case _:
                turns = [[program for stage in every for program in stage]]
        return [_uses((segment for segment, _ in turn), ids) for turn in turns]


def _uses(segments: Iterable[Segment], ids: Mapping[str, int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for segment in segments:
        for entry in segment.graph.inputs:
            if entry.role == "parameter" and entry.name in ids:
                counts[ids[entry.name]] = counts.get(ids[entry.name], 0) + 1
    return counts


__all__ = ["Program", "Programs"]
