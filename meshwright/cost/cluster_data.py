"""The data of a cluster file: a device, the levels of links, the host, and measurements. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Curve = tuple[tuple[float, float], ...]  # (amount of work, work per second reached), ascending in the amount
Links = Mapping[str, tuple[float, float]]  # kind → latency in seconds per round, and bytes per second


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    `flops` maps dtypes (``f32``, ``bf16``) to dense peak FLOP/s. `memory_bytes_per_s` is the bandwidth of its memory.
    `launch_seconds` is the time of a tiny operator. On a processor that is the host's time to start one; an accelerator
    starts the next while the host is ahead. `issue_seconds` is the host's time to issue an operator to an accelerator,
    beside which that computes; 0 leaves it out.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    launch_seconds: float
    issue_seconds: float = 0.0


@dataclass(frozen=True)
class Level:
    """One level of the cluster: `size` units of the next inner level and the links between them.

    A rank sends `bytes_per_s` while all ranks send. A message takes `latency_seconds` to arrive.
    """

    name: str
    size: int
    bytes_per_s: float
    latency_seconds: float


@dataclass(frozen=True)
class Measured:
    """Measurements of a machine. Everything may be missing.

    - `rates`: class of operators and dtype (``matmul f32``, ``attention f32``, ``memory``, ``update``) → curve of work
      per second (FLOP/s, or bytes/s) over the work of one call.
    - `collectives`: level → kind → (latency in seconds per round, bytes per second), measured alone.
    - `waited`: the same for a collective that a program waits for between computations: caches are cold, and ranks
      arrive at different times.
    - `slowdown`: ``compute`` and ``collective`` → factor while the other runs.
    - `corrections`: factors from full training steps, by class of operators, ``launch`` (starting them), ``issue``
      (the host's time to issue them), ``step`` (its time beside that), ``meeting`` and ``waited`` (latency and bytes of
      collectives that the program waits for), ``hidden`` (reductions that overlap with computation) and ``hidden_rows``
      (gathers and scatters that do; ``hidden`` where it is missing).
    - `operators`: operator and dtype (``layer_norm bf16``) → factors of its time forward and backward over what its
      bytes and FLOPs take.
    - `issues`: kind of operator or its name → factors of the host's time to issue one, forward and backward, over
      `issue_seconds`. ``free`` is a view, ``bias`` what a bias adds, ``update`` a parameter's update, ``step`` what a
      step takes beside its operators.
    - `calls`: an operator with its shapes (`cost/calls.py`) → its seconds forward and backward, measured by itself. For
      predictions of one plan: searches and files have none.
    - `void`: names of rows that were measured while the machine was busy.
    - `post_seconds`: a rank's time to start sending or receiving a message.
    """

    rates: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    collectives: Mapping[str, Links] = field(default_factory=dict[str, Links])
    slowdown: Mapping[str, float] = field(default_factory=dict[str, float])
    corrections: Mapping[str, float] = field(default_factory=dict[str, float])
    void: tuple[str, ...] = ()
    waited: Mapping[str, Links] = field(default_factory=dict[str, Links])
    post_seconds: float = 0.0
    operators: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    issues: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    calls: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])


@dataclass(frozen=True)
class Description:
    """A cluster as described by its file. `levels` go from the outermost (slowest) to the innermost.

    `host_memory_bytes` is one rank's share of its host's memory. `host_bytes_per_s` is the bandwidth of its link to the
    host, one way; 0 without a link. `growth` says how the rounds of a collective grow with its ranks (see `Prices`).
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    host_memory_bytes: int = 0
    host_bytes_per_s: float = 0.0
    measured: Measured = field(default_factory=Measured)
    growth: str = "ring"
