"""Tensors that forward sets on a module, for the loss of the same pass: `self.aux_loss = …`.

They are intermediate values of the program if the pass writes them before it reads them: no pass sees those of the one
before. Descriptors on the classes of the user's modules record which comes first.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from meshwright.capture.attribute_watch import watched
from meshwright.capture.reads import codes, of_library
from meshwright.capture.value_records import ReadValues

NOTE = "{} exists only during a step: to get it with the loss, return (loss, outputs)"


class Left:
    """Watches one pass of a model."""

    def __init__(self, model: torch.nn.Module, found: ReadValues) -> None:
        self.model = model
        self.names = {
            step.argval
            for function in found.functions
            for code in codes(function.__code__)
            if code.co_name != "__init__"
            for step in dis.get_instructions(code)
            if step.opname == "STORE_ATTR" and not found.names & {"vars", "__dict__"}  # they read unseen
        }
        self.was: dict[tuple[int, str], Any] = {}
        self.read: set[tuple[int, str]] = set()
        self.written: set[tuple[int, str]] = set()
        self.notes: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Record what is read and what is written first."""
        # It may leave something in an attribute that is not there, None or an empty list.
        self.was = {
            (id(module), name): vars(module).get(name, self)
            for module in self.model.modules()
            for name in self.names
            if _is_empty(vars(module).get(name))
        }
        self.read, self.written, self.notes = set(), set(), []
        kinds = {type(module): None for module in self.model.modules()}
        made = [(k, n) for k in kinds if not of_library(k) for n in self.names if not hasattr(k, n)]
        with watched(made, self._reads, self._writes):
            yield

    def _reads(self, module: torch.nn.Module, name: str) -> None:
        key = id(module), name
        if key not in self.written:
            self.read.add(key)

    def _writes(self, module: torch.nn.Module, name: str) -> None:
        key = id(module), name
        if key not in self.read:
            self.written.add(key)

    def take_away(self) -> None:
        """Remove the tensors that the pass has set, or may have set, from the modules."""
        for prefix, module in self.model.named_modules():
            held = vars(module)
            for name in [n for n in self.names if (id(module), n) in self.written and n in held]:
                if (id(module), name) in self.was and _of_tensors(held[name]):
                    label = f"model.{prefix}.{name}" if prefix else f"model.{name}"
                    self.notes.append(NOTE.format(label))
                    self._restore(held, name, self.was[id(module), name])

    def _restore(self, held: dict[str, Any], name: str, was: Any) -> None:
        if was is self:
            del held[name]
        else:
            held[name] = was


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | dict) and not value)


def _of_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a list, tuple or dict of nothing else."""
    if isinstance(value, list | tuple | dict):
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return all(_of_tensors(x) for x in inner)
    return isinstance(value, torch.Tensor)


__all__ = ["Left"]
