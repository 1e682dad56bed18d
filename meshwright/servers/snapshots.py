"""A server's state as one file: tensors as safetensors, the rest as a typed record in its header."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch

from meshwright.errors import ServerError
from meshwright.servers.counts import Counts
from meshwright.servers.dealing import Stream
from meshwright.servers.messages import Begins, Declare
from meshwright.servers.rounds import Gradients, Prepared
from meshwright.servers.server import Server
from meshwright.servers.shards import Options, ShardMap

FORMAT = 1
RECORD = "server"


class Waiting(msgspec.Struct, frozen=True):
    """A push of a round that is not complete, or one that is prepared; its tensors are beside, by number."""

    round: int
    worker: int
    weight: float
    dense: tuple[str, ...]
    rows: tuple[str, ...]
    options: dict[str, Options]
    prepared: bool = False


class Record(msgspec.Struct, frozen=True):
    format: int
    number: int
    declared: Declare | None
    map: ShardMap
    clocks: dict[int, int]
    left: dict[int, int]
    expected: int
    counts: Counts
    blocks: dict[str, tuple[int, ...]]
    options: dict[str, Options]
    waiting: tuple[Waiting, ...]
    allowed: dict[int, int] | None
    mover: str
    began: Begins | None
    lost: bool = False
    streams: dict[str, Stream] = {}
    batches: dict[int, dict[int, str]] = {}
    norm: tuple[int, str] = (-1, "0x0p+0")  # in hexadecimal: JSON has neither infinity nor NaN
    pushed: dict[int, int] = {}


@dataclass(frozen=True)
class Snapshot:
    record: Record
    tensors: dict[str, torch.Tensor]


def copy(server: Server) -> Snapshot:
    """A copy of all that a server has."""
    here = of(server)
    return Snapshot(here.record, {name: tensor.clone() for name, tensor in here.tensors.items()})


def of(server: Server) -> Snapshot:
    """All that a server has, with its own tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in server.stored.items():
        tensors.update({f"{name}/{key}": value for key, value in stored.tensors().items()})
    pushes = [
        (n, worker, push, False) for n, group in server.rounds.items() for worker, push in group.items()
    ]
    pushes += [(each.clock, worker, each.gradients, True) for worker, each in server.prepared.items()]
    waiting = []
    for number, worker, push, prepared in pushes:
        names = tuple(push.dense), tuple(push.rows)
        held = [*push.dense.values(), *(t for pair in push.rows.values() for t in pair)]
        tensors.update({f"waiting/{len(waiting)}/{i}": t.contiguous() for i, t in enumerate(held)})
        waiting.append(Waiting(number, worker, push.weight, *names, push.options, prepared))
    record = Record(
        FORMAT,
        server.number,
        server.declared,
        server.map,
        dict(server.clocks.of),
        dict(server.clocks.left),
        server.clocks.expected,
        msgspec.convert(msgspec.to_builtins(server.counts), Counts),
        {name: tuple(stored.blocks) for name, stored in server.stored.items()},
        {name: stored.options for name, stored in server.stored.items()},
        tuple(waiting),
        server.allowed,
        server.mover,
        server.began,
        server.lost,
        msgspec.convert(msgspec.to_builtins(server.streams), dict[str, Stream], strict=False),
        {clock: dict(told) for clock, told in server.shares.batches.items()},
        (server.norm[0], server.norm[1].hex()),
        dict(server.pushed),
    )
    return Snapshot(record, tensors)


def write(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot; the file is there in full or not at all."""
    text = encode(snapshot.record).decode()
    part = path.with_suffix(".part")
    safetensors.torch.save_file(snapshot.tensors, part, metadata={RECORD: text})
    part.rename(path)


def record_of(path: Path) -> Record:
    """The record of a snapshot, without its tensors. Raises ServerError."""
    with _opened(path) as file:
        return decode((file.metadata() or {})[RECORD].encode())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Raises ServerError for what is no snapshot."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            yield file
    except (OSError, KeyError, msgspec.DecodeError, safetensors.SafetensorError) as error:
        raise ServerError(f"{path} is no snapshot of a server", why=f"{error!s:.200}") from None


def read(path: Path, number: int) -> Server:
    """The server of a snapshot. Raises ServerError for one of another server, or of another version."""
    with _opened(path) as file:
        record = decode((file.metadata() or {})[RECORD].encode())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if (record.format, record.number) != (FORMAT, number):
        raise ServerError(
            f"{path} is of server {record.number}, format {record.format}", why=f"not of {number}"
        )
    return server_of(Snapshot(record, tensors))


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode(text: bytes) -> Record:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Record)


def server_of(snapshot: Snapshot) -> Server:
    """A server with these tensors. Raises ServerError where they do not fit."""
    record, tensors = snapshot.record, snapshot.tensors
    server = Server(record.number, lost=record.lost)
    if record.declared is not None:
        server.begin(record.declared, record.map, fill_rows=False)
    server.clocks.of, server.clocks.left = dict(record.clocks), dict(record.left)
    server.clocks.expected, server.counts = record.expected, record.counts
    server.streams = dict(record.streams)
    server.shares.batches = {clock: dict(told) for clock, told in record.batches.items()}
    server.norm = record.norm[0], float.fromhex(record.norm[1])
    server.pushed = dict(record.pushed)
    server.allowed, server.mover, server.began = record.allowed, record.mover, record.began
    named = [(*full.rpartition("/"), tensor) for full, tensor in tensors.items()]
    for name, stored in server.stored.items():
        # the name of another parameter may begin with this one and a slash
        held = {key: t for of, _, key, t in named if of == name}
        stored.restore(record.blocks[name], held, record.options[name])
    for index, entry in enumerate(record.waiting):
        rest = iter([tensors[f"waiting/{index}/{i}"] for i in range(len(entry.dense) + 2 * len(entry.rows))])
        dense = {name: next(rest) for name in entry.dense}
        rows = {name: (next(rest), next(rest)) for name in entry.rows}
        push = Gradients(entry.weight, dense, rows, entry.options)
        if entry.prepared:
            server.prepared[entry.worker] = Prepared(entry.round, push)
        else:
            server.rounds.setdefault(entry.round, {})[entry.worker] = push
    return server


__all__ = ["Snapshot", "copy", "decode", "encode", "of", "read", "record_of", "server_of", "write"]
