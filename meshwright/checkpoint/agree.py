"""Agreement of all ranks on a checkpoint: a text that rank 0 broadcasts, and whether any rank has a problem."""

from __future__ import annotations

import json

import torch

from meshwright import heartbeat
from meshwright.errors import CheckpointError, DamagedError, MeshwrightError
from meshwright.runtime.step import LocalStep

SAID = 1500  # characters of an error message that other ranks receive


def from_first(step: LocalStep, text: str) -> str:
    """Rank 0's text on every rank. Collective."""
    return _told(step, text, 0)


def confirm(step: LocalStep, problem: MeshwrightError | None) -> None:
    """Go on only if no rank has a problem; else all raise that of the last one that has. Collective."""
    world = step.world
    mine = torch.tensor([world.rank + 1 if problem is not None else 0], device=step.rank.device)
    axes = [a.name for a in world.mesh.axes]
    heartbeat.of("whether a rank has a problem")
    who = int(world.all_reduce(mine, axes, "max").item()) - 1
    if who < 0:
        return
    told = _told(step, "" if problem is None else packed(problem), who)
    if who == world.rank and problem is not None:
        raise problem
    raise unpacked(told, f"rank {who}: ")


def packed(error: MeshwrightError) -> str:
    """An error as a text for other ranks."""
    parts = (error.what, error.why, error.where, error.hint)
    return json.dumps([isinstance(error, DamagedError), *(p[:SAID] for p in parts)], ensure_ascii=False)


def unpacked(text: str, before: str = "") -> CheckpointError:
    """The error again; `before` is said before it."""
    damaged, what, why, where, hint = json.loads(text)
    kind = DamagedError if damaged else CheckpointError
    return kind(before + what, why=why, where=where, hint=hint)


def _told(step: LocalStep, text: str, source: int) -> str:
    """A rank's text, however long, on every rank. Collective."""
    data = text.encode() if step.world.rank == source else b""
    device = step.rank.device
    size = torch.tensor([len(data)], device=device)
    heartbeat.of("a word")
    step.world.broadcast(size, source)
    if not int(size):
        return ""
    filled = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(int(size))
    box = filled.to(device, torch.uint8)
    step.world.broadcast(box, source)
    return box.cpu().numpy().tobytes().decode()


__all__ = ["confirm", "from_first", "packed", "unpacked"]
