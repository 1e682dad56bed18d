"""The stages that one rank of a pipeline holds, and the ranks with which it exchanges messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from meshwright.core.graph import Graph
from meshwright.core.rank_numbers import PipelineRank
from meshwright.partition import Partition
from meshwright.partition.micro_batches import MicroBatches
from meshwright.partition.segments import Segment
from meshwright.partition.stages import Stage, check_carried
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.messages import Messages
from meshwright.pipeline.messages_across_meshes import Routes
from meshwright.pipeline.of_plan import forward_only, holders, schedule_of
from meshwright.redistribute.across_meshes import MeshLayout
from meshwright.runtime.communicator import Communicator, InStage


class Pipeline:
    """One rank's view of a plan with stages. `parts`: what the ranks at its place share. `mine`: the numbers of its
    stages. `cut`: the stages of the program of its first micro-batch, all of them: what
    crosses is the same in each."""

    def __init__(self, parts: Partition, comm: Communicator, *, training: bool = True) -> None:
        """Without `training` the schedule goes forward alone."""
        self.meshes = meshes_of(parts.requested)
        # What is not its own is forwarded to the communicator inside.
        self.comm = InStage(comm, self.meshes)  # pyright: ignore[reportAbstractUsage]
        self.parts = parts.of_place(self.comm.place)
        whole = schedule_of(parts.requested)
        self.schedule = whole if training else forward_only(whole)
        self.mine = self.schedule.held_by(self.comm.place)
        self.cut: tuple[Stage, ...] = ()
        self.messages = Messages((), self.schedule)
        self.holders = holders(self.parts, self.schedule)
        self.routes = Routes(parts, self.schedule.ranks)

    def begin(self, programs: MicroBatches) -> MicroBatches:
        """Look at the programs of this rank; those that come after the last micro-batch, for its stages alone."""
        self.routes = replace(self.routes, copy_of=programs.copy_of)
        self.cut = self.parts.stages(programs.programs[0], programs.copy_of)
        self.messages = Messages(self.cut, self.schedule)
        check_carried(self.cut, programs.carried)
        return replace(programs, late=self._late(programs.late), carried=self._own(programs.carried))

    def segments(self, programs: MicroBatches) -> dict[int, list[tuple[Segment, ...]]]:
        """This rank's stages → their program in each micro-batch."""
        later = programs.programs[1:]
        cut = [self.cut, *(self.parts.stages(graph, programs.copy_of) for graph in later)]
        return {s: [(stages[s].segment,) for stages in cut] for s in self.mine}

    @property
    def splits_backward(self) -> bool:
        """True if backward is split into its two halves."""
        return self.schedule.splits_backward(self.comm.place)

    def _own(self, pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        here = {v for s in self.mine for v in self.cut[s].ends}
        return tuple((name, value) for name, value in pairs if value in here)

    def _late(self, graph: Graph) -> Graph:
        """The part of a graph of results that follows from what this rank's stages make."""
        here = {v for s in self.mine for v in self.cut[s].ends}
        inputs = tuple(i for i in graph.inputs if i.name in here)
        nodes = tuple(n for n in graph.nodes if here.issuperset(n.uses))
        outputs = tuple((name, value) for name, value in graph.outputs if name in here)
        return replace(graph, inputs=inputs, nodes=nodes, outputs=outputs)

    def holds(self, name: str) -> bool:
        """True if this rank has an input of the program."""
        return self.comm.place in self.holders[name]

    def reads_nowhere(self, name: str) -> bool:
        """True if no stage reads an input of the program: then it may be wherever an earlier program has it."""
        return self.holders[name] == (PipelineRank(0),) and not any(name in stage.reads for stage in self.cut)

    def owns(self, name: str) -> bool:
        """True on the first rank that has an input; it counts what must be counted once."""
        return self.comm.place == self.holders[name][0]

    def place_of(self, stage: int) -> PipelineRank:
        """Where in the pipeline a stage is."""
        return self.schedule.ranks[stage]

    def maker(self, value: str) -> PipelineRank:
        """The place whose rank makes a result of the step."""
        return next(self.place_of(n) for n, stage in enumerate(self.cut) if value in stage.ends)

    def updated(self, name: str) -> Callable[[PipelineRank], MeshLayout] | None:
        """How the ranks of each place hold the gradient of a parameter; None where all are of one mesh."""
        return functools.partial(self.routes.updated, name) if self.meshes.own else None

    def held(self, name: str) -> Callable[[PipelineRank], MeshLayout] | None:
        """How the ranks of each place hold an input of the program; None where all are of one mesh."""
        return functools.partial(self.routes.held, name) if self.meshes.own else None

    def shared(self, names: Iterable[str]) -> Mapping[str, tuple[PipelineRank, ...]]:
        """Those of some inputs that several places hold."""
        return {n: self.holders[n] for n in names if len(self.holders[n]) > 1}


__all__ = ["Pipeline"]
