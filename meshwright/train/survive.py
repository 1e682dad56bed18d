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

import contextlib
import hashlib
import json
import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch

from meshwright.capture import Captured
from meshwright.checkpoint.user_data import from_plain, give_back, to_plain
from meshwright.checks.rank_agreement import prepare
from meshwright.compile import lower, plan_captured, values_of
from meshwright.core.graph import Graph
from meshwright.errors import BatchError, PeerLost, RunError
from meshwright.heartbeat.generation import GOES_ON, JOINED, READY
from meshwright.partition import Partition
from meshwright.plan.plan import Plan
from meshwright.runtime import lost_peer as peers
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.local_batch import LocalBatch
from meshwright.runtime.rank import Rank
from meshwright.runtime.regroup import Group
from meshwright.runtime.rendezvous import Meeting, look_for
from meshwright.runtime.step import LocalStep
from meshwright.train.live_state import Beside, Word, take_state, word_of
from meshwright.train.step import TrainStep
from meshwright.train.step_programs import ProgramTable

LONG_SECONDS = 86400.0  # for which a rank that was started again waits for the others, who may compute
OFTEN_STEPS = 16  # in which ranks compare batches and options each time, after one has joined
WORD_SECONDS = 20.0  # for which a rank that has lost another waits for the launcher's word
log = logging.getLogger("meshwright")


class Follower(Protocol):
    """A loader: it reads for the step of the ranks that there are."""

    def follow(self, local: LocalStep) -> None:
        """From now on read this rank's part for another step."""
        ...

    def rewound(self, batch: Any) -> AbstractContextManager[None]:
        """Within it the position is that before a batch, if it is the last that was given out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...

    def again(self, batch: LocalBatch) -> LocalBatch | None:
        """What the step of now reads of a batch that was given out; None if this loader did not give it."""
        ...


class Survival:
    """One rank's step among generations. `plan`: for the ranks at the start. `loss`: the last one. `joined`: this rank
    was started again, and has taken the state of the others."""

    def __init__(self, step: TrainStep, captured: Captured, group: Group, plan: Plan) -> None:
        self.step_of_rank, self.captured, self.group, self.plan = step, captured, group, plan
        self.loaders: list[Follower] = []
        self.data: Any = None  # of the script, that a checkpoint would have
        self.loss: torch.Tensor | None = None
        self.joined = group.comes
        self._batch: Any = None  # of the step that begins
        self._taken = Beside([])  # what this rank took when it joined
        self._has_state = not group.comes
        self._last = False  # the next step is the last: another rank has ended
        step.local.end.repeats, step.local.asks = True, False
        step.outlives(self, group.changed)
        look_for(group.changed)
        group.watch()
        group.say(GOES_ON)
        if self.joined:
            group.say(READY)
            self._meet(None, LONG_SECONDS)
            group.say(JOINED)

    def takes_in(self, loader: Follower) -> None:
        """A loader reads for the step, whatever its ranks are. On a rank that has joined it goes on where those of the
        others are."""
        self.loaders.append(loader)
        if len(self.loaders) <= len(self._taken.positions):
            loader.load_state_dict(self._taken.positions[len(self.loaders) - 1])

    def keeps(self, data: Any) -> bool:
        """Have data of the script go to ranks that join; return whether this one has joined, and its data is that of
        the others."""
        self.data = data
        if self.joined and data is not None:
            give_back(from_plain(self._taken.data), data)
            for loader, position in zip(self.loaders, self._taken.positions, strict=False):
                loader.load_state_dict(position)
        return self.joined

    def _beside(self) -> Beside:
        with contextlib.ExitStack() as stack:
            for loader in self.loaders:
                stack.enter_context(loader.rewound(self._batch))
            return Beside([loader.state_dict() for loader in self.loaders], to_plain(self.data, "data"))

    def step(self, batch: Any, update: bool) -> tuple[LocalStep, torch.Tensor]:
        """One step, whichever ranks are lost meanwhile: the program and its loss."""
        step, self._batch = self.step_of_rank, batch
        if self.group.changed():
            self.regroup(None)
            self._last = bool(self.group.now.ended)
        if self._last and update:
            raise RunError(
                f"ranks {self.group.now.ended} have ended with exit code 0, this one begins another step",
                why="all ranks must do the same number of steps",
                hint="look for a sys.exit, a return or a shorter loop there; loops begin at step.steps",
            )
        while True:
            before = position(step.local)
            try:
                local, given = step.program_for(self._own(batch))
                with self.group.in_step():
                    self.loss = local(given, update)
                self._batch = None
                self._last = bool(self.group.now.ended) and update
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
        self._meet(error, 0.0 if error is None else WORD_SECONDS)

    def _meet(self, error: Exception | None, seconds: float) -> None:
        """Meet the ranks of the next generation, for which this one waits some seconds."""
        while True:
            if not self.group.next_generation(seconds):
                assert error is not None
                raise error
            try:
                meeting = self.group.enter()
                self._rebuild(meeting)
                self._agree(meeting)
                break
            except PeerLost as lost:
                error, seconds = lost, WORD_SECONDS
            except RuntimeError as lost:
                if peers.lost(lost, "the meeting of a generation") is None:
                    raise
                error, seconds = lost, WORD_SECONDS
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
        plan = for_ranks(self.captured, self.plan, len(self.group.now.ranks))
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
        mine = word_of(step.local, _digest(step.plan), self._has_state)
        words = [Word(*json.loads(text)) for text in meeting.collect(json.dumps(mine))]
        if len({word.plan for word in words}) > 1:
            raise RunError("ranks that are left have made different plans", why="they run one program")
        self.loss, taken = take_state(step.local, words, self.loss, self._beside)
        if taken is not None and not self._has_state:
            self._taken, self._has_state = taken, True
        if any(word.step < 0 for word in words):  # its script must have come to where the others are
            step.local.comparison.often = step.local.rank.step + OFTEN_STEPS


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
    rank = Rank(comm, was.device, was.seed, was.exact, was.step, calls=was.calls, compiles=was.compiles)
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


def group_unless(among: Group | None, reason: str) -> Group | None:
    """This process among the generations of its job; None where a job ends with its first rank, or for a reason, which
    the launcher reads."""
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


__all__ = ["Survival", "for_ranks", "group_unless", "why_not"]
