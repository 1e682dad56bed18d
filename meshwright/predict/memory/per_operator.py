"""The memory of single operators and parameters on a rank, from the walk over its program."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.partition import Partition
from meshwright.predict.memory.allocator import ADAMW, Optimizer, Storage
from meshwright.predict.memory.step import StepWalk


def kept_bytes(parts: Partition, rank: int = 0) -> Mapping[str, int]:
    """Return, by node of a rank's program, the bytes of its results and extra tensors that live after forward.

    They include all interleaved half-batches, but not parameters, the batch, or host memory.
    """
    walk = StepWalk(parts, rank, ADAMW, "cpu", None, True)
    walk.start()
    walk.forward()
    owner: dict[int, tuple[Storage, str]] = {}
    for value, storage in walk.values.items():
        if value in walk.graph.producers:
            owner.setdefault(id(storage), (storage, walk.graph.producers[value].name))
    for value, storage in walk.activations.parts.items():
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
    """Return, by parameter of a rank's program, its bytes with its gradient and optimizer state."""
    walk = StepWalk(parts, rank, optimizer, device, None, device == "cpu")
    return {
        entry.name: entry.type.size_bytes
        + (entry.name in walk.trained)
        * (entry.type.size_bytes + optimizer.states * walk.updated_bytes(entry.name))
        for entry in walk.graph.input_of("parameter")
    }


__all__ = ["kept_bytes", "state_bytes"]
