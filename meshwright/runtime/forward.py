"""The forward pass of a rank without gradients: one program, or the stages of a pipeline, on existing weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from meshwright import heartbeat
from meshwright.core.layout import TensorLayout
from meshwright.partition import Partition
from meshwright.runtime.agreement import RankComparison
from meshwright.runtime.ambient import Ambient
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.collectives import Handle
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.executor import make_executor
from meshwright.runtime.lent_weights import LentWeights
from meshwright.runtime.local_batch import BatchParts, Given, place_of, taker
from meshwright.runtime.parameter_offload import HostParameters
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.programs import Programs
from meshwright.runtime.rank import Rank
from meshwright.runtime.results import Results


class LocalForward:
    """A forward pass of one rank. `__call__` takes a batch as a training step does, and gives the results of the
    program by label.

    `leaves` are the program's parameters, buffers and constants as this rank has them: those of a training step, or its
    own. `layouts`: label → how the ranks hold a result; its axes in time are micro-batches.
    """

    def __init__(
        self,
        parts: Partition,
        rank: Rank,
        leaves: Mapping[str, torch.Tensor],
        host_parameters: HostParameters | None = None,
        first_tag: int = 0,
        held: Sequence[Collection[str]] = (),
    ) -> None:
        """Build the forward pass. `host_parameters`: the leaves that are offloaded between their uses, if they are
        offloaded already. `first_tag`: the first tag of messages between stages. `held`: the inputs that each rank has,
        where stages may read some that ranks of other stages have."""
        self.rank, self.world, self.leaves = rank, rank.comm, leaves
        self.asks = True  # as in a training step
        self.pipe = Pipeline(parts, rank.comm, training=False) if parts.plan.stages else None
        if self.pipe is not None:
            parts, rank.comm = self.pipe.parts, self.pipe.comm
        self.parts = parts
        rank.runs_on(parts.plan.mesh)
        self.handle = Handle(rank.comm)
        found = parts.resharded
        here = {n: leaves[n] for n in found.host_parameters if n in leaves}
        self.host_parameters = (
            HostParameters(here, rank.device) if host_parameters is None else host_parameters
        )
        self.batches = BatchParts(
            parts, rank.comm.rank, self.world.rank, lambda name: place_of(name, parts, rank.device)
        )
        self.comparison, self._passes = RankComparison(self.world, rank.device), 0
        self.ambient = Ambient()
        self.made = Programs(parts, rank, self.handle, self.host_parameters, self.pipe, training=False)
        self.results = Results(parts, rank, self.handle, self.pipe)
        self.layouts = self.results.layouts
        if self.pipe is not None:
            self.batches.only(self.made.reads)
        none = GradientBuckets(rank.comm, [])
        self.lent: LentWeights | None = None
        if self.pipe is not None and held:
            self.lent = LentWeights(self.pipe, rank, leaves, held, first_tag)
            leaves, first_tag = {**leaves, **self.lent.rooms}, first_tag + len(self.lent.takers)
        self.executor = make_executor(
            self.made, leaves, none, self.batches, self.results, first_tag=first_tag
        )
        self._wanted = [*self.results.values.values()]

    def __call__(
        self, batch: Given, *, gather: bool | Collection[str] = True, share: bool = True
    ) -> dict[str, torch.Tensor | None]:
        """Return results by label. With `gather`, or if it names the label, results are full tensors, else this rank's
        shards, those of micro-batches one after the other. In a pipeline results are sent to all ranks with `share`;
        without it (and without `gather`) ranks whose stages compute none return None. Raises BatchError."""
        self.batches.check(batch)
        self.comparison.settle()  # of an earlier pass: ranks may not meet in this one
        self.comparison.begin(self._passes, batch)
        self._passes += 1
        during = heartbeat.during("a forward pass")
        with self.ambient.as_built(), during, torch.no_grad(), self.host_parameters.away():
            self.made.begin()
            if self.lent is not None:
                self.lent.bring()
            made = self.executor.run(self.made.actions, batch, self._wanted)
            pieces = self.results.pieces(made.values, made.pieces)
            every = self.layouts if isinstance(gather, bool) else gather
            wanted = frozenset(every) if gather else frozenset()
            tag = self.executor.borders.first_free_tag
            return {
                label: self.results.together(label, pieces[label], label in wanted, share, tag)
                for label in self.layouts
            }

    def gathered(self, x: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        """A result of one micro-batch as this rank holds it, put together over the ranks. Collective."""
        with torch.no_grad():
            return self.results.gathered(x, layout, 0)


def leaves_of(
    parts: Partition, comm: Communicator, device: torch.device, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Shard parameters, buffers and constants for a rank, by input: a replicated one is the given tensor itself, a
    shard has its own memory."""
    pipe = Pipeline(parts, comm, training=False) if parts.requested.stages else None
    parts = parts if pipe is None else pipe.parts
    inside = Rank(comm if pipe is None else pipe.comm, device)
    found: dict[str, torch.Tensor] = {}
    for name, whole in values.items():
        if pipe is None or pipe.holds(name):
            part = taker(name, parts, inside)(whole.detach())
            found[name] = (
                part if part.shape == whole.shape else part.clone(memory_format=torch.contiguous_format)
            )
    return found


__all__ = ["LocalForward", "leaves_of"]
