"""An allocator that only counts: live bytes by category, and their peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CATEGORIES = ("parameters", "optimizer", "gradients", "buckets", "batch", "buffers", "saved", "temporary")
# Names of instants: how those of forward end, and that between forward and backward.
FORWARD, LOSS_BACKWARD = ", forward", "loss, backward"


@dataclass(slots=True, eq=False)
class Storage:
    """Memory shared by tensors. It lives while it has `uses`, or `saves` by autograd."""

    size_bytes: int
    category: str = "temporary"
    uses: int = 1
    saves: int = 0
    host: bool = False

    @property
    def counted_as(self) -> str:
        """The category that it counts in now."""
        return "saved" if self.saves and self.category == "temporary" else self.category


@dataclass
class Heap:
    """Live bytes by category. `at` names the instant; `timeline` has the most live bytes within each.

    While `on_host`, new memory is host memory, which is counted separately: `host_total` and its `host_peak`.
    """

    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    timeline: list[tuple[str, int]] = field(default_factory=list)
    total: int = 0
    peak: int = 0
    instant: str = ""
    at_peak: dict[str, int] = field(default_factory=dict)
    on_host: bool = False
    host_total: int = 0
    host_peak: int = 0

    def at(self, instant: str) -> None:
        """Begin another instant."""
        self.timeline.append((instant, self.total))
        self._note()

    def new(self, size_bytes: float, category: str = "temporary") -> Storage:
        """Allocate memory with one use."""
        made = Storage(round(size_bytes), category, host=self.on_host)
        self._count(made, made.counted_as, made.size_bytes)
        return made

    def hold(self, storage: Storage) -> Storage:
        """Add a use."""
        assert storage.uses or storage.saves, "a tensor was read after it was freed"
        storage.uses += 1
        return storage

    def drop(self, storage: Storage) -> None:
        """Remove a use."""
        storage.uses -= 1
        assert storage.uses >= 0, "a tensor was freed twice"
        self._freed(storage, storage.counted_as)

    def save(self, storage: Storage) -> Storage:
        """Add a save by autograd."""
        assert storage.uses or storage.saves, "a tensor was kept after it was freed"
        before = storage.counted_as
        storage.saves += 1
        self._move(storage, before)
        return storage

    def release(self, storage: Storage) -> None:
        """Remove a save by autograd."""
        before = storage.counted_as
        storage.saves -= 1
        assert storage.saves >= 0, "a saved tensor was freed twice"
        if storage.uses:
            self._move(storage, before)
        else:
            self._freed(storage, before)

    def rename(self, storage: Storage, category: str) -> None:
        """Change the category."""
        before = storage.counted_as
        storage.category = category
        self._move(storage, before)

    def passing(self, size_bytes: float) -> None:
        """Allocate memory and free it at once."""
        self.drop(self.new(size_bytes))

    def _freed(self, storage: Storage, counted_as: str) -> None:
        if not storage.uses and not storage.saves:
            self._count(storage, counted_as, -storage.size_bytes)

    def _move(self, storage: Storage, before: str) -> None:
        if before != storage.counted_as and not storage.host:
            self.live[before] -= storage.size_bytes
            self.live[storage.counted_as] += storage.size_bytes

    def _count(self, storage: Storage, category: str, size_bytes: int) -> None:
        if storage.host:
            self.host_total += size_bytes
            self.host_peak = max(self.host_peak, self.host_total)
            return
        self.live[category] += size_bytes
        self.total += size_bytes
        self._note()

    def _note(self) -> None:
        if self.timeline and self.total > self.timeline[-1][1]:
            self.timeline[-1] = (self.timeline[-1][0], self.total)
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.live)
            self.instant = self.timeline[-1][0] if self.timeline else ""


@dataclass(frozen=True)
class Optimizer:
    """The memory of an optimizer beside parameters and gradients.

    `states`: moments per parameter, in the parameter's dtype as in torch (AdamW: two). `temporaries`: copies that an
    update holds for a moment, of the largest parameter (`at_once` false: one tensor at a time, torch's default on a
    CPU) or of all of them (`foreach`, its default on a GPU).
    """

    states: int = 2
    temporaries: int = 2
    at_once: bool = False


ADAMW = Optimizer()
ADAMW_FOREACH = Optimizer(temporaries=1, at_once=True)
ADAMW_FUSED = Optimizer(temporaries=0)


def optimizer_on(device: str, states: int) -> Optimizer:
    """Return an optimizer with so many moments, as torch updates by default on a type of device."""
    at_once = device != "cpu"
    return Optimizer(states, min(states, 1 if at_once else 2), at_once)


@dataclass(frozen=True)
class Peak:
    """The peak `bytes` at `instant` (a node and its phase), by `categories`.

    `timeline` has the most live bytes within each instant of the step. All of these are device memory. `host_bytes` is
    the peak of host memory, 0 if it is the same.
    """

    bytes: int
    instant: str
    categories: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...]
    host_bytes: int = 0

    def __str__(self) -> str:
        parts = (f"{name} {size / 2**20:.1f}" for name, size in self.categories.items() if size)
        return f"{self.bytes / 2**20:.1f} MiB at {self.instant} ({', '.join(parts)})"


__all__ = ["ADAMW", "ADAMW_FOREACH", "ADAMW_FUSED", "Optimizer", "Peak", "optimizer_on"]
