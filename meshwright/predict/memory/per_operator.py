"""What single operators and parameters weigh on a rank: read off the walk of its program."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.partition import Partition
from meshwright.predict.memory.allocator import ADAMW, Optimizer, Storage
from meshwright.predict.memory.step import StepWalk


def kept_bytes(parts: Partition, rank: int = 0) -> Mapping[str, int]:
    """Node of a rank's program → bytes of what it makes that are kept when forward has ended, its results and what
    autograd keeps beside them, of all copies that take turns. What is a parameter, or of the batch, or in the host's
    memory is not counted."""
    walk = StepWalk(parts, rank, ADAMW, "cpu", None, True)
    walk.start()
    walk.forward()
    owner: dict[int, tuple[Storage, str]] = {}
    for value, storage in walk.values.items():
        if value in walk.graph.producers:
            owner.setdefault(id(storage), (storage, walk.graph.producers[value].name))
    for value, storage in walk.stashes.parts.items():
        owner.setdefault(id(storage), (storage, walk.graph.producers[value].name))
    for name, kept in walk.kept.items():
        for storage in kept.storages:
            owner.setdefault(id(storage), (storage, name))
    found: dict[str, int] = {}
    for storage, name in owner.values():
        if storage.saves and storage.category == "temporary" and not storage.host:
            one = walk.of_one(name)
            found[one] = found.get(one, 0) + storage.size_bytes
    return found


def state_bytes(parts: Partition, rank: int, optimizer: Optimizer, device: str = "cpu") -> Mapping[str, int]:
    """Parameter of a rank's program → bytes of it, of its gradient and of what the optimizer keeps of it."""
    walk = StepWalk(parts, rank, optimizer, device, None, device == "cpu")
    return {
        entry.name: entry.type.size_bytes
        + (entry.name in walk.trained)
        * (entry.type.size_bytes + optimizer.states * walk.updated_bytes(entry.name))
        for entry in walk.graph.input_of("parameter")
    }


__all__ = ["kept_bytes", "state_bytes"]
