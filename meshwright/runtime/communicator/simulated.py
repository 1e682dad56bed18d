"""Ranks simulated as threads of one process: what tests and `verify` run on."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.core.collectives import CollectiveKind
from meshwright.core.mesh import Mesh
from meshwright.errors import RunError
from meshwright.runtime.communicator.by_record import Call, Methods, with_collectives
from meshwright.runtime.communicator.protocol import Done, Later, Waited, Work

COLLECT_SECONDS = 1.0  # between two collections of garbage while ranks run


class Aborted(RuntimeError):
    """Raised in the other simulated ranks when one has failed."""


class SimulatedWorld:
    """Ranks as threads of one process. `run` calls a function once per rank and returns the results in rank order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._lock = threading.Condition()
        self._slots: dict[Any, dict[int, Any]] = {}
        self._read: dict[Any, int] = {}
        self._failed: BaseException | None = None

    def run(self, function: Callable[[SimulatedRank], Any]) -> list[Any]:
        """Run all ranks to the end. The first failure aborts the others and is raised here."""
        results: list[Any] = [None] * self.mesh.size
        # A thread's grad mode is its own; carry the caller's.
        grad = torch.is_grad_enabled()

        def body(rank: int) -> None:
            try:
                with torch.set_grad_enabled(grad):
                    results[rank] = function(SimulatedRank(self, rank))
            except Aborted:
                pass
            except BaseException as error:
                with self._lock:
                    self._failed = self._failed or error
                    self._lock.notify_all()

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.mesh.size)]
        with _collecting_in_one_thread() as collect:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(COLLECT_SECONDS)
                while thread.is_alive():
                    collect()
                    thread.join(COLLECT_SECONDS)
        if self._failed is not None:
            raise self._failed
        return results

    def bring(self, key: Any, rank: int, value: Any) -> None:
        """Lay down a rank's value for the members of its group, without waiting for theirs."""
        with self._lock:
            self._slots.setdefault(key, {})[rank] = value
            self._lock.notify_all()

    def take(self, key: Any, rank: int, group: Sequence[int]) -> dict[int, Any]:
        """Everybody's value once all members of the group have brought theirs."""
        with self._lock:
            slot = self._slots.setdefault(key, {})  # nobody may have brought anything yet
            while len(slot) < len(group):
                if self._failed is not None:
                    raise Aborted
                if not self._lock.wait(timeout=60.0) and len(slot) < len(group):
                    missing = sorted(set(group) - set(slot))
                    self._failed = self._failed or RunError(
                        f"simulated ranks {missing} never reached a collective that rank {rank} waits in",
                        why=f"collective {key}",
                        hint="the ranks run different programs: print(step.program) on each",
                    )
                    self._lock.notify_all()
            self._read[key] = self._read.get(key, 0) + 1
            if self._read[key] == len(group):  # the last reader clears up
                del self._slots[key], self._read[key]
            return dict(slot)


@contextlib.contextmanager
def _collecting_in_one_thread() -> Iterator[Callable[[], object]]:
    """Yield a function that collects garbage, which no other thread does within the block.

    Python 3.11 collects inside an allocation, also while it makes the `__dict__` of an object. A callback in
    `gc.callbacks` lets other threads run then, and the same values end up in two dicts, which both free them: a crash
    later on. From 3.12 on the interpreter collects only between instructions.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        yield lambda: None
        return
    gc.disable()
    try:
        yield lambda: gc.collect(1)
    finally:
        gc.enable()


def _meant(kind: CollectiveKind) -> Methods:
    """Run a collective by its record's `meaning`; those below are written out."""

    def start(self: SimulatedRank, x: torch.Tensor, *args: Any, **options: Any) -> Work:
        call = Call.of(kind, x.detach().clone(), *args, **options)

        def finish(values: Mapping[int, Any], group: Sequence[int]) -> torch.Tensor:
            return call.meant([values[r] for r in group], group.index(self.number))

        return self.start(call.chunks if kind.splits else call.x, call.axes, finish)

    return {kind.start: start}


@with_collectives(_meant)
@dataclass
class SimulatedRank(Waited):
    """One simulated rank. Every collective is a rendezvous keyed by its group and its number within the group.

    Rank and group travel with this object, never in thread-locals: on CUDA, backward runs on threads of its own.
    `mesh` and `rank` are those of the world, or of a `part` of it, whose ranks in the world `ranks` lists.
    """

    world: SimulatedWorld
    rank: int
    mesh: Mesh = field(init=False)
    ranks: tuple[int, ...] = ()
    _numbers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh = self.world.mesh

    def part(self, ranks: Sequence[int], mesh: Mesh) -> SimulatedRank:
        """See `Communicator`."""
        found = SimulatedRank(self.world, ranks.index(self.rank), tuple(ranks), self._numbers)
        found.mesh = mesh
        return found

    @property
    def number(self) -> int:
        """This rank's number in the world."""
        return self.ranks[self.rank] if self.ranks else self.rank

    def _group(self, axes: Sequence[str]) -> tuple[int, ...]:
        group = self.mesh.group(self.rank, axes)
        return tuple(self.ranks[r] for r in group) if self.ranks else group

    def start(
        self,
        value: Any,
        axes: Sequence[str],
        finish: Callable[[Mapping[int, Any], Sequence[int]], torch.Tensor],
    ) -> Work:
        """Bring a value; `finish` makes the result of everybody's values and the group once they are waited for."""
        group, me = self._group(axes), self.number
        kept = tuple(sorted(group))
        number = self._numbers[kept] = self._numbers.get(kept, 0) + 1
        self.world.bring((kept, number), me, value)
        return Later(lambda: finish(self.world.take((kept, number), me, group), group))

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`. Adds in group order, so that all members get the same bits."""
        return self.start(x.detach().clone(), axes, lambda values, _: _reduced(values, op)).wait()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """See `Communicator`."""
        return self.start(x.detach().clone(), axes, lambda values, _: x.copy_(_reduced(values, op)))

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        axes = [a.name for a in self.mesh.axes]
        x.copy_(self.start(x.detach().clone(), axes, lambda values, _: values[source]).wait())

    def broadcast_start(self, x: torch.Tensor, source: int, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        first = self.ranks[source] if self.ranks else source
        return self.start(x.detach().clone(), axes, lambda values, _: x.copy_(values[first]))

    def all_gather_start(
        self, x_n: torch.Tensor, axes: Sequence[str], into: torch.Tensor | None = None
    ) -> Work:
        """See `Communicator`."""
        return self.start(
            x_n.detach().clone(),
            axes,
            lambda values, group: torch.stack([values[r] for r in group], out=into),
        )

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""

        def finish(values: Mapping[int, torch.Tensor], group: Sequence[int]) -> torch.Tensor:
            mine = group.index(self.number)
            return _reduced({rank: rows[mine] for rank, rows in values.items()})

        return self.start(x_mn.detach().clone(), axes, finish)

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """See `Communicator`."""

        def finish(values: Mapping[int, Sequence[torch.Tensor]], group: Sequence[int]) -> torch.Tensor:
            mine = group.index(self.number)
            received = [values[r][mine] for r in group]
            assert [r.numel() for r in received] == list(receive), (
                "members disagree about the sizes of an all-to-all"
            )
            return torch.cat(received)

        return self.start(x.detach().clone().split(list(send)), axes, finish)

    def send_start(self, x: torch.Tensor, to: int, tag: int) -> Work:
        """See `Communicator`."""
        self.world.bring(self._message(self.number, to, tag), self.number, x.detach().clone())
        return Done(x)

    def receive_start(self, into: torch.Tensor, source: int, tag: int) -> Work:
        """See `Communicator`."""
        key = self._message(source, self.number, tag)
        return Later(lambda: self.world.take(key, self.number, (source,))[source])

    def _message(self, source: int, to: int, tag: int) -> Any:
        """The name of the next message of a tag."""
        key = (source, to, tag, -1)  # no group of ranks
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        return ("message", source, to, tag, number)


def _reduced(values: Mapping[int, torch.Tensor], op: str = "sum") -> torch.Tensor:
    """A new tensor: what ranks hold, put together in the order of the ranks."""
    total = values[min(values)].clone()
    for rank in sorted(values)[1:]:
        match op:
            case "sum":
                total += values[rank]
            case "prod":
                total *= values[rank]
            case "max":
                total = torch.maximum(total, values[rank])
            case "min":
                total = torch.minimum(total, values[rank])
            case _:
                raise AssertionError(op)
    return total
