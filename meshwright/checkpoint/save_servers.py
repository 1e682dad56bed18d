"""Saving parameters on servers: each keeps a copy of what it has at one moment, and worker 0 writes it block by block
while all go on. What is on no server worker 0 writes from its own memory."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.collect import bytes_of
from meshwright.checkpoint.folder import as_path, begin
from meshwright.checkpoint.index import MODEL, STATE, key_of
from meshwright.checkpoint.of_servers import ServerState, box_of
from meshwright.checkpoint.safetensors_io import Tensor
from meshwright.checkpoint.save import PATIENCE_SECONDS, check_keep
from meshwright.checkpoint.step_state import SAFE_NAMES
from meshwright.checkpoint.user_data import to_plain
from meshwright.checkpoint.write import Job
from meshwright.errors import ServerError
from meshwright.redistribute.boxes import Box, full_box
from meshwright.servers import messages as m
from meshwright.servers.asking import ask
from meshwright.servers.local import Transport
from meshwright.servers.store import VALUES


class _Written:
    """What a checkpoint will have, in the order of its file."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.boxes: dict[str, list[Any]] = {}
        self.parameters: dict[str, dict[str, Any]] = {}
        self.options: list[dict[str, Any]] = []

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], box: Box, data: Callable[[], torch.Tensor]
    ) -> None:
        key = key_of(name, shape, box)
        self.tensors.append(Tensor(key, dtype, box.shape, lambda: bytes_of(data())))
        self.boxes[key] = [name, list(shape), list(box.start), list(box.shape)]

    def parameter(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """The record of a trained parameter."""
        if options not in self.options:
            self.options.append(options)
        record = {"options": self.options.index(options), "tensors": [], "values": {}}
        return self.parameters.setdefault(name, record)


def save(
    state: ServerState, path: str | Path, *, data: Any, keep: int | None, copied: bool
) -> tuple[Path, Callable[[], None]]:
    """What servers and worker 0 have now: the path of its checkpoint, and what writes it, in any thread. `copied`: what
    is on no server may change before. Raises CheckpointError, and ServerError for servers that do not answer."""
    check_keep(keep)
    folder, worker = as_path(path).absolute(), state.worker
    steps = worker.steps
    state.hold(folder)
    plain, transport, servers = to_plain(data, "data"), worker.transport.another(), worker.map.servers

    def thaw() -> None:
        with contextlib.suppress(ServerError), contextlib.closing(transport):
            ask(transport, {s: (m.Thaw(worker.model), []) for s in servers}, m.Done)

    with contextlib.ExitStack() as failed:
        failed.callback(thaw)
        frozen, written = worker.freeze(), _Written()
        servers = tuple(frozen)
        for server, answer in frozen.items():
            for name, blocks in worker.map.blocks_of(server).items():
                taken = _Taken(transport, worker.model, server, name)
                _add_blocks(written, state, taken, blocks, answer.states[name])
        for name, tensor in state.tensors.items():
            _add_own(written, state, name, tensor, copied)
        note = {
            "boxes": written.boxes,
            "empty": {},
            "optimizer": {
                "class": state.classes,
                "options": written.options,
                "parameters": written.parameters,
            },
            "data": plain,
            "step": steps,
            "seed": None,
            "temporary": [],
            "samples": frozen[min(frozen)].samples,
        }
        temporary, final = begin(folder, steps, uuid.uuid4().hex[:12])
        job = Job(temporary, final, 0, 1, written.tensors, note, None, PATIENCE_SECONDS, "", state.ties, keep)
        failed.pop_all()

    def write() -> None:
        try:
            job.run()
        finally:
            thaw()

    return final, write


class _Taken:
    """Blocks of a parameter from a server's copy; the newest alone stays here."""

    def __init__(self, transport: Transport, model: str, server: int, name: str) -> None:
        self.name = name
        self._transport, self._model, self._server = transport, model, server
        self._block, self._parts = -1, {}

    def part(self, block: int, key: str) -> torch.Tensor:
        """The values of a block, or what the optimizer keeps of it under `key`."""
        if block != self._block:
            take = m.Take(self._model, self.name, block, True)
            answer, tensors = ask(self._transport, {self._server: (take, [])}, m.Taken)[self._server]
            self._block, self._parts = block, dict(zip(answer.names, tensors, strict=True))
        return self._parts[key]


def _add_blocks(
    written: _Written, state: ServerState, taken: _Taken, blocks: Collection[int], states: Collection[m.State]
) -> None:
    """Add the blocks that one server has of a parameter, read when they are written."""
    name, parameter = taken.name, state.worker.parameters[taken.name]
    first = name not in written.parameters
    record = written.parameter(name, state.options_of(name))
    for block in blocks:
        box = box_of(parameter, block)
        dtype = _safe(parameter.dtype)
        written.add(MODEL + name, dtype, parameter.shape, box, partial(taken.part, block, VALUES))
        for kept in states:
            if kept.shape is None:
                held, shape = box, parameter.shape
            elif not first:
                continue  # the same in all blocks
            elif kept.shape == () and kept.dtype == "int64":  # was an int
                record["values"][kept.name] = int(taken.part(block, kept.name))
                continue
            else:
                held, shape = full_box(kept.shape), kept.shape
            if first:
                record["tensors"].append(kept.name)
            written.add(
                f"{STATE}{name}.{kept.name}",
                _safe(kept.dtype),
                shape,
                held,
                partial(taken.part, block, kept.name),
            )
        first = False


def _add_own(written: _Written, state: ServerState, name: str, tensor: torch.Tensor, copied: bool) -> None:
    """Add what is on no server."""

    def add(key: str, value: torch.Tensor) -> None:
        shape, held = tuple(value.shape), value.clone() if copied else value
        written.add(key, SAFE_NAMES[value.dtype], shape, full_box(shape), lambda: held)

    add(MODEL + name, tensor)
    if name not in state.of:
        return
    record = written.parameter(name, state.options_of(name))
    for key, value in state.state_of(name).items():
        if isinstance(value, torch.Tensor):
            record["tensors"].append(key)
            add(f"{STATE}{name}.{key}", value)
        else:
            record["values"][key] = to_plain(value, f"the optimizer's {key!r} of {name}")


def _safe(dtype: str) -> str:
    return SAFE_NAMES[getattr(torch, dtype)]


__all__ = ["save"]
