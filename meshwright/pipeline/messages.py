"""Messages between the ranks of a pipeline, in the order of their lists, derived from the values that cross stages.

A value goes from the stage that makes it to each that reads it, its gradient back. Receives are posted one action ahead
of the one that needs them. A sender may free what it sent when it hears from a rank that has read it (`acknowledged`),
so it never has to query whether a message has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.rank_numbers import PipelineRank
from meshwright.partition.stages import Stage
from meshwright.pipeline.actions import BACKWARD, BACKWARD_INPUT, COMPUTE, FORWARD, Action, Schedule


@dataclass(frozen=True, slots=True)
class Message:
    """A value of a micro-batch, or its gradient (`back`), between the stage that makes and one that reads it."""

    value: str
    maker: int
    reader: int
    micro_batch: int
    back: bool


class Messages:
    """The messages of a schedule over the stages of a program."""

    def __init__(self, cut: Sequence[Stage], schedule: Schedule) -> None:
        self.cut, self.schedule = cut, schedule
        edges = [
            (v, maker, reader)
            for maker, stage in enumerate(cut)
            for v, later in stage.gives.items()
            for reader in later
        ]
        away = [e for e in edges if schedule.ranks[e[1]] != schedule.ranks[e[2]]]
        self._peers: dict[
            PipelineRank, set[PipelineRank]
        ] = {}  # rank → those that it exchanges messages with
        for _, maker, reader in away:
            one, other = schedule.ranks[maker], schedule.ranks[reader]
            self._peers.setdefault(one, set()).add(other)
            self._peers.setdefault(other, set()).add(one)
        # In an order that does not depend on a rank's program: where stages have meshes of their own they differ.
        self.number = {edge: number for number, edge in enumerate(sorted(away))}
        graded = [e for e in away if e[0] in cut[e[1]].segment.graph.needs_grad]
        stages = range(len(cut))
        self._values_in = [[e for e in away if e[2] == s] for s in stages]
        self._values_out = [[e for e in away if e[1] == s] for s in stages]
        self._gradients_in = [[e for e in graded if e[1] == s] for s in stages]
        self._gradients_out = [[e for e in graded if e[2] == s] for s in stages]

    def needed(self, action: Action) -> list[Message]:
        """List the messages that must have arrived before an action."""
        s, m = action.stage, action.micro_batch
        if action.kind == FORWARD:
            return [Message(*edge, m, False) for edge in self._values_in[s]]
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            return [Message(*edge, m, True) for edge in self._gradients_in[s]]
        return []

    def sent(self, action: Action) -> list[Message]:
        """List the messages that are sent after an action."""
        s, m = action.stage, action.micro_batch
        if action.kind == FORWARD:
            return [Message(*edge, m, False) for edge in self._values_out[s]]
        if action.kind in (BACKWARD, BACKWARD_INPUT):
            return [Message(*edge, m, True) for edge in self._gradients_out[s]]
        return []

    def compute(self, place: PipelineRank) -> list[Action]:
        """List the actions that a rank computes, in order."""
        return [a for a in self.schedule.actions[place] if a.kind in COMPUTE]

    def listed(self, place: PipelineRank) -> list[Action]:
        """A rank's list with its messages: each receive before the action ahead of the one that needs it, each send
        after the one that made it."""
        found: list[Action] = []
        mine = self.compute(place)
        for before, action in zip([None, *mine], [*mine, None], strict=True):
            if action is not None and self.needed(action):
                kind = "receive_value" if action.kind == FORWARD else "receive_gradient"
                found.append(Action(kind, action.stage, action.micro_batch))
            if before is not None:
                found.append(before)
                if self.sent(before):
                    kind = "send_value" if before.kind == FORWARD else "send_gradient"
                    found.append(Action(kind, before.stage, before.micro_batch))
        return found

    def acknowledged(self, place: PipelineRank) -> dict[Action, list[Message]]:
        """Action of a rank → its messages that have been read when what the action needs has arrived."""
        ranks, found = self.schedule.ranks, dict[Action, list[Message]]()
        users = {m: action for action in self.compute(place) for m in self.needed(action)}
        for peer in sorted(self._peers.get(place, ())):
            read: list[Message] = []
            for action in self.compute(peer):
                read += [m for m in self.needed(action) if ranks[m.reader if m.back else m.maker] == place]
                answers = [m for m in self.sent(action) if m in users]
                if answers and read:
                    found.setdefault(users[answers[0]], []).extend(read)
                    read = []
        return found


__all__ = ["Message", "Messages"]
