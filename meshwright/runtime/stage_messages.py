"""The messages between the stages of a pipeline.

Values are sent detached. Their gradients come back in the same way, zeros where a reader has none. What one rank has of
several stages crosses without a message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright import heartbeat
from meshwright.core.graph import TensorType
from meshwright.partition.segments import Segment
from meshwright.pipeline.actions import BACKWARD, FORWARD, Action
from meshwright.pipeline.messages import Message
from meshwright.runtime.communicator import Work
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.micro_batches import StepBatch
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.programs import Programs
from meshwright.runtime.stage_borders import Borders

PARITY = 2  # messages of a step and of the next one have tags of their own


def _text(message: Message) -> str:
    """Return the name of a message in a rank's heartbeat."""
    from_, to = message.maker, message.reader
    way = f"gradient of %{message.value}, stage {to} to {from_}" if message.back else ""
    return f"{way or f'%{message.value}, stage {from_} to {to}'}, micro-batch {message.micro_batch}"


class StageMessages(Borders):
    """The borders of a rank's stages in a pipeline. `first_free_tag` and the tags after it are of no message between
    stages; the loss takes two of them."""

    def __init__(
        self, pipe: Pipeline, made: Programs, batch: StepBatch, loss: str, first_tag: int = 0
    ) -> None:
        """`batch` has the results of a step, the `loss` among them. Messages have tags from `first_tag` on."""
        super().__init__()
        self.pipe, self.comm, self.made, self.batch, self.loss = pipe, pipe.comm, made, batch, loss
        self.device, self.first_tag = made.rank.device, first_tag
        self.count = pipe.schedule.micro_batches
        self.first_free_tag = first_tag + 2 * len(pipe.messages.number) * self.count * PARITY
        self._step = 0
        self._read = pipe.messages.acknowledged(pipe.comm.place)
        self._sending: dict[Message, Work] = {}
        self._loss_coming: Work | None = None
        self._loss_going: Sequence[Work] = ()
        self.kinds = {
            "receive_value": lambda action: self._receive(action, FORWARD),
            "send_value": _done_already,
            "receive_gradient": lambda action: self._receive(action, BACKWARD),
            "send_gradient": _done_already,
            "share": self._share,
            "end": self._end,
        }

    def away(self, stage: int) -> bool:
        """Return whether a stage is of another rank."""
        return self.pipe.place_of(stage) != self.comm.place

    def give(self, message: Message, x: torch.Tensor | None) -> None:
        """Hand over a value or a gradient, by a message if its reader is another rank."""
        to = message.maker if message.back else message.reader
        if not self.away(to):
            super().give(message, x)
            return
        assert x is not None
        heartbeat.of(_text(message))
        place, route = self.pipe.place_of(to), self.pipe.routes.of(message)
        self._sending[message] = self.comm.send_to(x, place, self._tag(message), route)

    def acknowledge(self, action: Action) -> None:
        """Free what was sent: what an action waited for shows that it has been read."""
        for message in self._read.get(action, ()):
            self._sending.pop(message).wait()

    def forget(self) -> None:
        """End a step: what nobody took is freed."""
        super().forget()
        self._step += 1
        self._sending.clear()

    def _tag(self, message: Message) -> int:
        edge = message.value, message.maker, message.reader
        number = 2 * self.pipe.messages.number[edge] + message.back
        return self.first_tag + (number * self.count + message.micro_batch) * PARITY + self._step % PARITY

    def _empty(self, kind: TensorType) -> torch.Tensor:
        return torch.empty(kind.shape, dtype=TORCH_DTYPES[kind.dtype], device=self.device)

    def _receive(self, action: Action, kind: str) -> None:
        """Post what an action of a kind needs."""
        segment: Segment = self.made.segment(action.stage, action.micro_batch)
        for message in self.pipe.messages.needed(Action(kind, action.stage, action.micro_batch)):
            empty = self._empty(segment.graph.types[message.value])
            heartbeat.of(_text(message))
            source = message.reader if message.back else message.maker
            place, route = self.pipe.place_of(source), self.pipe.routes.of(message)
            self._waiting[message] = self.comm.receive_from(empty, place, self._tag(message), route)

    def _share(self, action: Action) -> None:
        """The loss goes to the ranks that did not make it."""
        maker = self.pipe.maker(self.loss)
        tag = self.first_free_tag + self._step % PARITY
        heartbeat.of("the loss")
        if self.comm.place != maker:
            empty = self._empty(self.pipe.parts.resharded.graph.types[self.loss])
            self._loss_coming = self.comm.receive_from(empty, maker, tag)
            return
        value = self.batch.values[self.loss]
        self._loss_going = [
            self.comm.send_to(value, p, tag) for p in self.pipe.meshes.every_place if p != maker
        ]

    def _end(self, action: Action) -> None:
        if self._loss_coming is not None:
            self.batch.values[self.loss], self._loss_coming = self._loss_coming.wait(), None
        for work in (*self._sending.values(), *self._loss_going):
            work.wait()
        self._loss_going = ()


def _done_already(action: Action) -> None:
    """A message is sent as soon as its value is there."""


__all__ = ["StageMessages"]
