"""What a cluster file says: a device, the levels of links, the host, and what was measured. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Curve = tuple[tuple[float, float], ...]  # (amount of work, work per second reached), ascending in the amount


@dataclass(frozen=True)
class Device:
    """One rank's device. `flops`: dtype (``f32``, ``bf16``) → peak FLOP/s, dense. `memory_bytes_per_s` is of its own
    memory.

    `launch_seconds` is what starting one operator costs the host, the time a tiny operator takes.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    launch_seconds: float


@dataclass(frozen=True)
class Level:
    """One level of the cluster: `size` units of the next inner level, joined by links on which a rank sends
    `bytes_per_s` while all ranks send, a message taking `latency_seconds` on its way."""

    name: str
    size: int
    bytes_per_s: float
    latency_seconds: float


@dataclass(frozen=True)
class Measured:
    """What was measured on a machine; everything may be missing.

    `rates`: class of operators and dtype (``matmul f32``, ``attention f32``, ``memory``, ``update``) → curve of
    work per second (FLOP/s, or bytes/s) over the work of one call. `collectives`: level → kind → (latency seconds a
    round, bytes per second), one after the other with nothing else to do. `waited`: the same for one that a program
    waits for between what it computes: caches are cold, ranks come at different times. `slowdown`: ``compute`` and
    ``collective`` → factor while the other runs. `corrections`: class of operators, ``launch`` (what starting them
    costs), ``meeting`` and ``waited`` (latency and bytes of collectives that the program waits for), ``hidden``
    (sums that run beside compute) or ``hidden_rows`` (gathers and scatters that do; as ``hidden`` where it is missing)
    → factor from whole training steps. `void`: rows that were measured while the
    machine was not quiet. `post_seconds`: what starting to send or to receive a message takes of the time of a rank.
    """

    rates: Mapping[str, Curve] = field(default_factory=dict)
    collectives: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    slowdown: Mapping[str, float] = field(default_factory=dict)
    corrections: Mapping[str, float] = field(default_factory=dict)
    void: tuple[str, ...] = ()
    waited: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    post_seconds: float = 0.0


@dataclass(frozen=True)
class Description:
    """A cluster as its file has it. `levels` from the outermost (slowest) to the innermost.

    `host_memory_bytes` is one rank's share of its host's memory, `host_bytes_per_s` its link to the host, one way;
    0 where there is none. `growth`: how the rounds of a collective grow with its ranks, see `Prices`.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    host_memory_bytes: int = 0
    host_bytes_per_s: float = 0.0
    measured: Measured = field(default_factory=Measured)
    growth: str = "ring"
