"""Three communicators run one program: real process groups, simulated ranks in one process, and a counter.

All take and return plain tensors and never reduce in place (autograd may hand one gradient to two branches). The group
of a collective is the ranks that differ from this one along some mesh axes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshwright.errors import RunError
from meshwright.mesh import Mesh


class Work(Protocol):
    """A collective under way: `wait()` returns its result."""

    def wait(self) -> torch.Tensor: ...


@dataclass
class Done:
    """A collective that has already finished."""

    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The result."""
        return self.result


class Communicator(Protocol):
    """What a program needs from the ranks around it. `axes` are prime axes, the slowest given first."""

    mesh: Mesh
    rank: int

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """The sum (or "max", "min") over the group, as a new tensor."""
        ...

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """Start a sum over the group *in place* of a buffer that the caller owns."""
        ...

    def all_gather(self, x: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """The equally sized flat tensors of the group's members, in group order."""
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], axes: Sequence[str]) -> torch.Tensor:
        """The sum over the group of each member's piece for this rank. All pieces have one size."""
        ...

    def all_to_all(self, pieces: Sequence[torch.Tensor], sizes: Sequence[int], axes: Sequence[str]) -> list[torch.Tensor]:
        """Send `pieces[i]` (flat) to member i and receive flat tensors of the given sizes."""
        ...


# ---------------------------------------------------------------- simulated ranks


class Aborted(RuntimeError):
    """Raised in the other simulated ranks when one has failed."""


class SimulatedWorld:
    """Ranks as threads of one process. `run` calls a function once per rank and returns the results in rank order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._lock = threading.Condition()
        self._slots: dict[Any, dict[int, Any]] = {}
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
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        return results

    def exchange(self, key: Any, rank: int, group: Sequence[int], value: Any) -> dict[int, Any]:
        """Everybody's value once all members of the group have brought theirs."""
        with self._lock:
            slot = self._slots.setdefault(key, {})
            slot[rank] = value
            self._lock.notify_all()
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
            return dict(slot)


@dataclass
class SimulatedRank:
    """One simulated rank. Every collective is a rendezvous keyed by its group and its number within the group.

    Rank and group travel with this object, never in thread-locals: on CUDA, backward runs on threads of its own.
    """

    world: SimulatedWorld
    rank: int
    _numbers: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the world."""
        return self.world.mesh

    def _share(self, value: Any, axes: Sequence[str]) -> tuple[tuple[int, ...], dict[int, Any]]:
        group = self.mesh.group(self.rank, axes)
        kept = tuple(sorted(group))
        number = self._numbers[kept] = self._numbers.get(kept, 0) + 1
        return group, self.world.exchange((kept, number), self.rank, group, value)

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`. Adds in group order, so that all members get the same bits."""
        _, values = self._share(x.detach().clone(), axes)
        total = values[min(values)].clone()
        for rank in sorted(values)[1:]:
            match op:
                case "sum":
                    total += values[rank]
                case "max":
                    total = torch.maximum(total, values[rank])
                case "min":
                    total = torch.minimum(total, values[rank])
                case _:
                    raise AssertionError(op)
        return total

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return Done(x.copy_(self.all_reduce(x, axes)))

    def all_gather(self, x: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Communicator`."""
        group, values = self._share(x.detach().clone(), axes)
        return [values[r].clone() for r in group]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        group, values = self._share([p.detach().clone() for p in pieces], axes)
        mine = group.index(self.rank)
        total = values[min(values)][mine].clone()
        for rank in sorted(values)[1:]:
            total += values[rank][mine]
        return total

    def all_to_all(self, pieces: Sequence[torch.Tensor], sizes: Sequence[int], axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Communicator`."""
        group, values = self._share([p.detach().clone() for p in pieces], axes)
        mine = group.index(self.rank)
        received = [values[r][mine] for r in group]
        assert [r.numel() for r in received] == list(sizes), "members disagree about the sizes of an all-to-all"
        return received


# ---------------------------------------------------------------- one rank, alone


@dataclass
class Alone:
    """A world of one rank: there is nobody to talk to."""

    mesh: Mesh
    rank: int = 0

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """The value itself."""
        return x.clone()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """The value itself."""
        return Done(x)

    def all_gather(self, x: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """The value itself."""
        return [x.clone()]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], axes: Sequence[str]) -> torch.Tensor:
        """The only piece."""
        return pieces[0].clone()

    def all_to_all(self, pieces: Sequence[torch.Tensor], sizes: Sequence[int], axes: Sequence[str]) -> list[torch.Tensor]:
        """The only piece."""
        return [pieces[0].clone()]


# ---------------------------------------------------------------- the counter


@dataclass
class Counter:
    """Adds up what one rank out of thousands would send, and answers with values of the right shape.

    `calls` lists (kind, axes, payload bytes) in the order of execution. The payload is the tensor that enters an
    all-reduce, all-to-all or reduce-scatter and the tensor that leaves an all-gather.
    """

    mesh: Mesh
    rank: int = 0
    calls: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)

    def _count(self, kind: str, axes: Sequence[str], size_bytes: int) -> None:
        self.calls.append((kind, tuple(axes), size_bytes))

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`."""
        self._count("all_reduce", axes, x.numel() * x.element_size())
        return x.clone()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        self._count("all_reduce", axes, x.numel() * x.element_size())
        return Done(x)

    def all_gather(self, x: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Communicator`."""
        members = self.mesh.count(axes)
        self._count("all_gather", axes, members * x.numel() * x.element_size())
        return [x.clone() for _ in range(members)]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        self._count("reduce_scatter", axes, sum(p.numel() * p.element_size() for p in pieces))
        return pieces[0].clone()

    def all_to_all(self, pieces: Sequence[torch.Tensor], sizes: Sequence[int], axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Communicator`."""
        self._count("all_to_all", axes, sum(p.numel() * p.element_size() for p in pieces))
        like = pieces[0]
        return [like.new_zeros(size) for size in sizes]


# ---------------------------------------------------------------- real process groups


@dataclass
class _Pending:
    work: Any
    result: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.result


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroups:
    """This process as a rank of `torch.distributed`. Groups are made for all axis sets up front by `prepare`,

    since making one is itself a collective: every rank must make the same groups in the same order.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self._groups: dict[frozenset[str], Any] = {}

    def prepare(self, axis_sets: Sequence[frozenset[str]]) -> None:
        """Make the process groups over these sets of axes. Collective: all ranks pass equal sets."""
        for axes in sorted(set(axis_sets), key=sorted):
            if axes in self._groups:
                continue
            run = self.mesh.sort(axes)
            if self.mesh.count(run) == self.mesh.size:
                self._groups[axes] = dist.group.WORLD
                continue
            made: dict[tuple[int, ...], Any] = {}
            for rank in range(self.mesh.size):
                members = tuple(sorted(self.mesh.group(rank, run)))
                if members not in made:
                    made[members] = dist.new_group(list(members))
                if rank == self.rank:
                    self._groups[axes] = made[members]

    def _group(self, axes: Sequence[str]) -> Any:
        key = frozenset(axes)
        if key not in self._groups:
            raise RunError(
                f"no process group over {self.mesh.show(axes)} was prepared",
                why="groups are made once, before the first step, from the collectives of the program",
            )
        return self._groups[key]

    def _order(self, axes: Sequence[str]) -> list[int]:
        """Place of each member (in group order) among the sorted ranks of the process group."""
        members = self.mesh.group(self.rank, axes)
        ranked = sorted(members)
        return [ranked.index(m) for m in members]

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`."""
        result = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, _OPS[op], group=self._group(axes))
        return result

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return _Pending(dist.all_reduce(x, group=self._group(axes), async_op=True), x)

    def all_gather(self, x: torch.Tensor, axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Communicator`."""
        order = self._order(axes)
        flat = x.detach().reshape(-1).contiguous()
        result = flat.new_empty(len(order) * flat.numel())
        dist.all_gather_into_tensor(result, flat, group=self._group(axes))
        pieces = result.split(flat.numel()) if flat.numel() else [flat] * len(order)
        return [pieces[i].view(x.shape) for i in order]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        order = self._order(axes)
        ranked: list[torch.Tensor] = [pieces[0]] * len(order)
        for piece, place in zip(pieces, order, strict=True):
            ranked[place] = piece.detach().reshape(-1)
        result = ranked[0].new_empty(ranked[0].numel())
        dist.reduce_scatter_tensor(result, torch.cat(ranked), group=self._group(axes))
        return result.view(pieces[0].shape)

    def all_to_all(self, pieces: Sequence[torch.Tensor], sizes: Sequence[int], axes: Sequence[str]) -> list[torch.Tensor]:
        """See `Communicator`."""
        order = self._order(axes)
        count = len(order)
        ranked: list[torch.Tensor] = [pieces[0]] * count
        incoming = [0] * count
        for piece, size, place in zip(pieces, sizes, order, strict=True):
            ranked[place], incoming[place] = piece.detach().reshape(-1), size
        result = ranked[0].new_empty(sum(incoming))
        dist.all_to_all_single(
            result, torch.cat(ranked), incoming, [r.numel() for r in ranked], group=self._group(axes)
        )
        received = result.split(incoming)
        return [received[place] for place in order]
