"""What is told of a step's memory: its peak; and what an optimizer needs beside parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Optimizer:
    """What an update keeps and needs. `states`: moments per parameter, in the parameter's dtype as torch keeps them
    (AdamW: two). `temporaries`: copies that an update holds for a moment: of the largest parameter (`at_once` false:
    one tensor at a time, torch's default on a CPU) or of all of them (`foreach`, its default on a GPU)."""

    states: int = 2
    temporaries: int = 2
    at_once: bool = False


ADAMW = Optimizer()
ADAMW_FOREACH = Optimizer(temporaries=1, at_once=True)
ADAMW_FUSED = Optimizer(temporaries=0)


def optimizer_on(device: str, states: int) -> Optimizer:
    """An optimizer with so many moments, as torch updates by default on a type of device."""
    at_once = device != "cpu"
    return Optimizer(states, min(states, 1 if at_once else 2), at_once)


@dataclass(frozen=True)
class Peak:
    """`bytes` at `instant` (a node and its phase), made up of `categories`; `timeline` has the most bytes that lived
    within each instant of the step. All of that is the device's memory; `host_bytes` are the most that lived in the
    host's, 0 where they are one."""

    bytes: int
    instant: str
    categories: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...]
    host_bytes: int = 0

    def __str__(self) -> str:
        parts = (f"{name} {size / 2**20:.1f}" for name, size in self.categories.items() if size)
        return f"{self.bytes / 2**20:.1f} MiB at {self.instant} ({', '.join(parts)})"


__all__ = ["ADAMW", "ADAMW_FOREACH", "ADAMW_FUSED", "Optimizer", "Peak", "optimizer_on"]
