"""Gathers a text from all ranks before any of them continues, so that a difference raises on all of them."""

from __future__ import annotations

import json
from typing import TypeVar

import torch

from meshwright import heartbeat
from meshwright.runtime.communicator import Communicator, ProcessGroups

T = TypeVar("T")


def gather_texts(comm: Communicator, device: torch.device, word: T) -> list[T]:
    """Everybody's word (plain data), by rank. Collective."""
    axes = [axis.name for axis in comm.mesh.axes]
    if comm.mesh.size == 1:
        return [word]
    if isinstance(comm, ProcessGroups):
        comm.prepare([frozenset(axes)])
    text = json.dumps(word).encode()
    sizes = _gathered(comm, axes, torch.tensor([len(text)], device=device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    rows = _gathered(comm, axes, padded).cpu()
    return [json.loads(row[: int(n)].numpy().tobytes()) for row, n in zip(rows, sizes.view(-1), strict=True)]


def _gathered(comm: Communicator, axes: list[str], x: torch.Tensor) -> torch.Tensor:
    """The ranks' tensors, by rank."""
    heartbeat.of("what ranks tell one another of their data")
    found = comm.all_gather(x, axes)
    group = comm.mesh.group(comm.rank, axes)
    return torch.stack([found[group.index(rank)] for rank in range(comm.mesh.size)])
