"""A step that goes on when ranks are lost, where each of them holds all of the model.

A rank finds out in a collective, or by the launcher's word at the border of a step. It leaves its groups, which others
notice, and those that are left meet as the next generation (`meshwright.runtime.regroup`). The program is partitioned
for their number: it takes the same global batch, so that the loss stays the mean over all of it, however the rows
divide. The step that was interrupted is done again by all.

No rank has half of it. All that a step sends is there before the optimizer updates, and what it sends no rank can
complete without the others: so when one is interrupted, each of the others has either done none of the step or all of
it, and nobody is further ahead than one step. Who is behind takes the state of one who is not; no vote is needed in
steps that go well.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from typing import Any, Protocol

import torch

from meshwright.agreement import prepare
from meshwright.capture import Captured
from meshwright.compile import lower, plan_captured, values_of
from meshwright.core.graph import Graph
from meshwright.errors import BatchError, PeerLost, RunError
from meshwright.heartbeat import generation
from meshwright.heartbeat.generation import GOES_ON
from meshwright.partition import Partition
from meshwright.plan.plan import Plan
from meshwright.programs import ProgramTable
from meshwright.runtime import lost_peer as peers
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.local_batch import LocalBatch
from meshwright.runtime.rank import Rank
from meshwright.runtime.regroup import Group, group
from meshwright.runtime.rendezvous import Meeting
from meshwright.runtime.step import LocalStep
from meshwright.train.live_state import Word, take_state, word_of
from meshwright.train.step import TrainStep

WORD_SECONDS = 20.0  # for which a rank that has lost another waits for the launcher's word
log = logging.getLogger("meshwright")


class Follower(Protocol):
    """A loader: it reads for the step of the ranks that there are."""

    def follow(self, local: LocalStep) -> None:
        """From now on read this rank's part for another step."""
        ...

    def again(self, batch: LocalBatch) -> LocalBatch | None:
        """What the step of now reads of a batch that was given out; None if this loader did not give it."""
        ...


class Survival:
    """One rank's step among generations. `loss`: the last one."""

    def __init__(self, step: TrainStep, captured: Captured, group: Group) -> None:
        self.step_of_rank, self.captured, self.group = step, captured, group
        self.loaders: list[Follower] = []
        self.loss: torch.Tensor | None = None
        step.local.end.repeats, step.local.asks = True, False
        generation.say(group.folder, group.launched, GOES_ON)

    def takes_in(self, loader: Follower) -> None:
        """A loader reads for the step, whatever its ranks are."""
        self.loaders.append(loader)

    def step(self, batch: Any, update: bool) -> tuple[LocalStep, torch.Tensor]:
        """One step, whichever ranks are lost meanwhile: the program and its loss."""
        step = self.step_of_rank
        if self.group.changed():
            self.regroup(None)
        while True:
            before = position(step.local)
            try:
                local, given = step.program_for(self._own(batch))
                self.loss = local(given, update)
                return local, self.loss
            except RuntimeError as error:
                self.regroup(error)
            except RunError as error:
                if not isinstance(error, PeerLost):
                    raise
                self.regroup(error)
            if position(step.local) != before:  # another rank had done it before the end of the lost one
                assert self.loss is not None
                return step.local, self.loss

    def _own(self, batch: Any) -> Any:
        """The batch as the step of now reads it. Raises BatchError for a part that nobody reads again."""
        if not isinstance(batch, LocalBatch) or batch.key == self.step_of_rank.local.batches.key:
            return batch
        found = (loader.again(batch) for loader in self.loaders)
        mine = next((b for b in found if b is not None), None)
        if mine is None:
            raise BatchError(
                "a part of a batch was read for other ranks than those that are left",
                why="its loader is not known to the step, or has given out another one since",
                hint="give step(batch) the batches of mw.shard_loader(…, step) as they come",
            )
        return mine

    def regroup(self, error: Exception | None) -> None:
        """Go on with the ranks of the next generation. Raises the error where it is not that another rank was lost, or
        the launcher knows of none."""
        if isinstance(error, RuntimeError) and peers.lost(error, "a step") is None:
            raise error
        while True:
            if not self.group.next_generation(0.0 if error is None else WORD_SECONDS):
                assert error is not None
                raise error
            try:
                meeting = self.group.enter()
                self._rebuild(meeting)
                self._agree(meeting)
                break
            except PeerLost as lost:
                error = lost
            except RuntimeError as lost:
                if peers.lost(lost, "the meeting of a generation") is None:
                    raise
                error = lost
        local = self.step_of_rank.local
        size = local.world.mesh.size
        if local.world.rank == 0:
            log.warning(
                "generation %d: %d %s after step %d",
                self.group.now.number, size, "rank goes on" if size == 1 else "ranks go on", local.rank.step,
            )  # fmt: skip

    def _rebuild(self, meeting: Meeting) -> None:
        """This rank's step for the ranks of the generation, over the state that there is."""
        step = self.step_of_rank
        old, table = step.local, step.programs
        plan = for_ranks(self.captured, step.plan, len(self.group.now.ranks))
        parts = lower(self.captured, plan)
        comm = self.group.connect(meeting, plan.ranks, old.rank.device)
        local = over_state(parts, comm, old, values_of(table.source.model, self.captured, old.rank.device))
        first = replace(table.first, local=local)
        source = replace(table.source, plan=plan)
        source.shared.plan, source.shared.world = plan, comm
        step.become(local, parts, ProgramTable(first, table.limit, source))
        for loader in self.loaders:
            loader.follow(local)

    def _agree(self, meeting: Meeting) -> None:
        """All have one plan, and one state: that of a rank which is furthest. Collective."""
        step = self.step_of_rank
        mine = word_of(step.local, _digest(step.plan))
        words = [Word(*json.loads(text)) for text in meeting.collect(json.dumps(mine))]
        if len({word.plan for word in words}) > 1:
            raise RunError("ranks that are left have made different plans", why="they run one program")
        self.loss = take_state(step.local, words, self.loss)


def position(local: LocalStep) -> tuple[int, int]:
    """How far a step is: updates, and calls since the last one."""
    return local.rank.step, local.rank.calls


def for_ranks(captured: Captured, plan: Plan, ranks: int) -> Plan:
    """The same plan for another number of data-parallel ranks."""
    return plan_captured(captured, ranks, plan.mode, plan.pins, None, plan.techniques.as_given())


def over_state(
    parts: Partition, comm: Communicator, old: LocalStep, values: dict[str, torch.Tensor]
) -> LocalStep:
    """A step of other ranks over the state and optimizer of an earlier one."""
    prepare(comm, parts)
    for buckets in old.state.buckets:
        buckets.close()
    old.state.buckets.clear()
    was = old.rank
    rank = Rank(comm, was.device, was.seed, was.exact, was.step, calls=was.calls)
    local = LocalStep(parts, rank, values, None, after=old)
    local.shape, local.end.repeats, local.asks = old.shape, True, False
    return local


def why_not(
    plan: Plan, graph: Graph, device: torch.device, shape: Any, exact: bool | str, again: bool
) -> str:
    """Why a step cannot go on without a rank; empty if it can. `shape`: of what the loss returns beside itself;
    `again`: the script has a step already."""
    if plan.mode != "data_parallel" or plan.stages:
        return f"the plan is {plan.mode} on {plan.mesh_text}"
    if plan.techniques.optimizer_parallel or any(
        plan.inputs[e.name].split_axes for e in graph.inputs if e.role in ("parameter", "buffer")
    ):
        return "ranks hold shards of the weights or of the optimizer's state, of which there is no copy"
    if device.type != "cpu":
        return f"the step is on {device.type}, where a collective that was interrupted cannot be left yet"
    if exact == "torch":
        return 'exact_random="torch" draws from generators that a new rank does not have'
    if shape is not None:
        return "the loss returns outputs, which would be lost with the step that was interrupted"
    return "the script has a second step" if again else ""


def group_unless(reason: str) -> Group | None:
    """This process among the generations of its job; None where a job ends with its first rank, or for a reason, of
    which the launcher is told."""
    among = group()
    if among is None or not reason:
        return among
    among.cannot_go_on(reason)
    if among.launched == among.now.ranks[0]:
        log.warning(
            "--on-failure continue: after a failure all ranks restart from the checkpoint, since %s", reason
        )
    return None


def _digest(plan: Plan) -> str:
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]


__all__ = ["Survival", "group_unless", "why_not"]
