"""Messages on a socket or in a file: four bytes of length, a typed record, then the bytes of its tensors.

A record is decoded into the types that its reader expects, or the connection ends. Tensors are received into their own
memory: nothing is copied, and nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from io import BufferedReader
from typing import Any

import msgspec
import torch

from meshwright.servers import messages as m

LENGTH = struct.Struct(">I")
RECORD_BYTES = 256 << 20  # the largest record: a map of many parameters
TENSOR_BYTES = 64 << 30  # of one message
DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.int64, torch.float64, torch.float32, torch.float16)
}
DTYPES["bfloat16"] = torch.bfloat16
Reading = Callable[[memoryview], None]  # fills a buffer, or raises EOFError


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """Of one tensor."""

    dtype: str
    shape: tuple[int, ...]


class Packet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message with what is said about its tensors."""

    body: m.Request | m.Copying | m.Answer
    tensors: tuple[Facts, ...] = ()


class Malformed(ValueError):
    """Bytes that are no message."""


_decoder = msgspec.msgpack.Decoder(Packet)


def pieces(body: m.Request | m.Copying | m.Answer, tensors: m.Tensors) -> list[memoryview]:
    """What is to be written, in order."""
    flat = [x.detach().contiguous() for x in tensors]
    facts = tuple(Facts(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in flat)
    record = msgspec.msgpack.encode(Packet(body, facts))
    return [memoryview(LENGTH.pack(len(record)) + record), *(_memory(x) for x in flat if x.numel())]


def read(fill: Reading) -> tuple[Any, m.Tensors]:
    """The next message. Raises EOFError at the end, Malformed for what is none."""
    packet = _packet(fill)
    tensors = [torch.empty(facts.shape, dtype=DTYPES[facts.dtype]) for facts in packet.tensors]
    for tensor in tensors:
        if tensor.numel():
            fill(_memory(tensor))
    return packet.body, tensors


def skim(file: BufferedReader) -> Any:
    """The next message of a file without its tensors. Raises EOFError where it is not complete."""

    def fill(into: memoryview) -> None:
        if file.readinto(into) < len(into):
            raise EOFError

    packet = _packet(fill)
    size = sum(math.prod(facts.shape) * DTYPES[facts.dtype].itemsize for facts in packet.tensors)
    if file.seek(size, os.SEEK_CUR) > os.fstat(file.fileno()).st_size:
        raise EOFError
    return packet.body


def _packet(fill: Reading) -> Packet:
    head = bytearray(LENGTH.size)
    fill(memoryview(head))
    (size,) = LENGTH.unpack(head)
    if size > RECORD_BYTES:
        raise Malformed(f"a record of {size:,} bytes; {RECORD_BYTES:,} are allowed")
    record = bytearray(size)
    fill(memoryview(record))
    try:
        packet = _decoder.decode(record)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed(f"{error!s:.200}") from None
    total = 0
    for facts in packet.tensors:
        if facts.dtype not in DTYPES or any(n < 0 for n in facts.shape):
            raise Malformed(f"a tensor of {facts.dtype} {facts.shape}")
        total += math.prod(facts.shape) * DTYPES[facts.dtype].itemsize
    if total > TENSOR_BYTES:
        raise Malformed(f"tensors of {total:,} bytes; {TENSOR_BYTES:,} are allowed")
    return packet


def _memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


__all__ = ["Malformed", "Reading", "pieces", "read", "skim"]
