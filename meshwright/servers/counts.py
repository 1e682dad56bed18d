"""What a server counts of its own work."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counts:
    """Since the start. `applied`: pushes that became part of an update, by worker; `oldest`: the most steps by which a
    value that was read was behind its reader; `pulled_bytes`, `pushed_bytes`: of tensors;
    `prefetched_rows`: that workers had before a step, and `current_rows`: of them, those that had not changed."""

    pulls: int = 0
    updates: int = 0
    repeated: int = 0
    refused: int = 0
    oldest: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    prefetched_rows: int = 0
    current_rows: int = 0
    applied: dict[int, int] = field(default_factory=dict)


__all__ = ["Counts"]
