"""Pass values forward and gradients back between the stages of a step. Here one rank runs all stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from meshwright.pipeline.actions import Action
from meshwright.pipeline.messages import Message
from meshwright.runtime.communicator import Work

Kinds = Mapping[str, Callable[[Action], None]]  # kind of action → what does it


class Borders:
    """The borders between stages of one rank: a value waits here, detached, until its reader takes it."""

    kinds: Kinds = {}

    first_free_tag = 0  # this tag and those after it are of no message between stages

    def __init__(self) -> None:
        self._waiting: dict[Message, torch.Tensor | Work | None] = {}

    def away(self, stage: int) -> bool:
        """Return whether a stage is of another rank."""
        return False

    def give(self, message: Message, x: torch.Tensor | None) -> None:
        """Hand over a value, or a gradient: None if its reader has none."""
        self._waiting[message] = None if x is None else x.detach()

    def take(self, message: Message) -> torch.Tensor | None:
        """Return what was handed over, once it is there."""
        found = self._waiting.pop(message)
        return found if found is None or isinstance(found, torch.Tensor) else found.wait()

    def drop(self, message: Message) -> None:
        """Take what nothing needs, if it comes."""
        if message in self._waiting:
            self.take(message)

    def acknowledge(self, action: Action) -> None:
        """Note that what an action waited for is there."""

    def forget(self) -> None:
        """End a step: what nobody took is freed."""
        self._waiting.clear()


__all__ = ["Borders", "Kinds"]
