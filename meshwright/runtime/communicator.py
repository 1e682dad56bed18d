"""Three communicators run one program: real process groups, simulated ranks in one process, and a counter.

All take and return plain tensors and never reduce in place (autograd may hand one gradient to two branches). The group
of a collective is the ranks that differ from this one along some mesh axes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
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


@dataclass
class Later:
    """A collective under way whose result is put together when it is waited for, which is done once."""

    finish: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        """The result."""
        return self.finish()


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

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The members' flat tensors (n,), stacked in group order: (members, n)."""
        ...

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The sum over the group of everybody's row for this member: (members, n) → (n,)."""
        ...

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """Send consecutive stretches of a flat tensor, `send[m]` elements to member m; receive `receive[m]`
        from each."""
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Overwrite a tensor, on all ranks of the mesh, by that of one of them."""
        ...

    def all_gather_start(self, x_n: torch.Tensor, axes: Sequence[str]) -> Work:
        """Start an `all_gather`. Until it is waited for nobody writes to `x_n`; so with the two below. All members
        start their collectives in one order, and wait in any."""
        ...

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """Start a `reduce_scatter`."""
        ...

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """Start an `all_to_all`."""
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
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
            slot = self._slots[key]
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

    def _start(
        self,
        value: Any,
        axes: Sequence[str],
        finish: Callable[[Mapping[int, Any], Sequence[int]], torch.Tensor],
    ) -> Work:
        """Bring a value; `finish` makes the result of everybody's values and the group once they are waited for."""
        group = self.mesh.group(self.rank, axes)
        kept = tuple(sorted(group))
        number = self._numbers[kept] = self._numbers.get(kept, 0) + 1
        self.world.bring((kept, number), self.rank, value)
        return Later(lambda: finish(self.world.take((kept, number), self.rank, group), group))

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`. Adds in group order, so that all members get the same bits."""
        return self._start(x.detach().clone(), axes, lambda values, _: _reduced(values, op)).wait()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return self._start(x.detach().clone(), axes, lambda values, _: x.copy_(_reduced(values)))

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        axes = [a.name for a in self.mesh.axes]
        x.copy_(self._start(x.detach().clone(), axes, lambda values, _: values[source]).wait())

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        return self.all_gather_start(x_n, axes).wait()

    def all_gather_start(self, x_n: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return self._start(
            x_n.detach().clone(), axes, lambda values, group: torch.stack([values[r] for r in group])
        )

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        return self.reduce_scatter_start(x_mn, axes).wait()

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""

        def finish(values: Mapping[int, torch.Tensor], group: Sequence[int]) -> torch.Tensor:
            mine = group.index(self.rank)
            return _reduced({rank: rows[mine] for rank, rows in values.items()})

        return self._start(x_mn.detach().clone(), axes, finish)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """See `Communicator`."""
        return self.all_to_all_start(x, send, receive, axes).wait()

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """See `Communicator`."""

        def finish(values: Mapping[int, Sequence[torch.Tensor]], group: Sequence[int]) -> torch.Tensor:
            mine = group.index(self.rank)
            received = [values[r][mine] for r in group]
            assert [r.numel() for r in received] == list(receive), (
                "members disagree about the sizes of an all-to-all"
            )
            return torch.cat(received)

        return self._start(x.detach().clone().split(list(send)), axes, finish)


def _reduced(values: Mapping[int, torch.Tensor], op: str = "sum") -> torch.Tensor:
    """A new tensor: what ranks hold, put together in the order of the ranks."""
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


# ---------------------------------------------------------------- one rank, alone


class AtOnce:
    """Starts of a communicator whose collectives are done when they are called."""

    all_gather: Callable[..., torch.Tensor]
    reduce_scatter: Callable[..., torch.Tensor]
    all_to_all: Callable[..., torch.Tensor]

    def all_gather_start(self, x_n: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return Done(self.all_gather(x_n, axes))

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return Done(self.reduce_scatter(x_mn, axes))

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """See `Communicator`."""
        return Done(self.all_to_all(x, send, receive, axes))


@dataclass
class Alone(AtOnce):
    """A world of one rank: there is nobody to talk to."""

    mesh: Mesh
    rank: int = 0

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """The value itself."""
        return x.clone()

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """The value itself."""
        return Done(x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Nothing: it is the source."""

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """One row."""
        return x_n.clone()[None]

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """The only row."""
        return x_mn[0].clone()

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """The value itself."""
        return x.clone()


# ---------------------------------------------------------------- the counter


@dataclass
class Counter(AtOnce):
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

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        self._count("broadcast", [a.name for a in self.mesh.axes], x.numel() * x.element_size())

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        members = self.mesh.count(axes)
        self._count("all_gather", axes, members * x_n.numel() * x_n.element_size())
        return x_n.expand(members, -1).clone()

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        self._count("reduce_scatter", axes, x_mn.numel() * x_mn.element_size())
        return x_mn[0].clone()

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """See `Communicator`."""
        self._count("all_to_all", axes, x.numel() * x.element_size())
        return x.new_zeros(sum(receive))


# ---------------------------------------------------------------- real process groups


@dataclass
class _Pending:
    work: Any
    result: torch.Tensor
    finish: Callable[[], torch.Tensor] | None = None  # what puts the result into the group's order

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.result if self.finish is None else self.finish()


# torch 2.13 renamed the two collectives on flat tensors; the old names remain for older releases.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroups:
    """This process as a rank of `torch.distributed`.

    Groups are made for all axis sets up front by `prepare`, since making one is itself a collective: every
    rank must make the same groups in the same order.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self._groups: dict[frozenset[str], Any] = {}
        self._orders: dict[tuple[str, ...], list[int] | None] = {}

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

    def _order(self, axes: Sequence[str]) -> list[int] | None:
        """Place of each member among the sorted ranks of the process group; None when group order is rank order."""
        key = tuple(axes)
        if key not in self._orders:
            members = self.mesh.group(self.rank, key)
            ranked = sorted(members)
            order = [ranked.index(m) for m in members]
            self._orders[key] = None if order == list(range(len(order))) else order
        return self._orders[key]

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`."""
        result = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, _OPS[op], group=self._group(axes))
        return result

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        return _Pending(dist.all_reduce(x, group=self._group(axes), async_op=True), x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        plain = x.detach().contiguous()
        dist.broadcast(plain, src=source)
        if plain.data_ptr() != x.data_ptr():
            x.copy_(plain)

    def all_gather(self, x_n: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        return self.all_gather_start(x_n, axes).wait()

    def all_gather_start(self, x_n: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        flat, members = x_n.detach().contiguous(), self.mesh.count(axes)
        result = flat.new_empty(members * flat.numel())
        work = _all_gather_flat(result, flat, group=self._group(axes), async_op=True)
        order = self._order(axes)
        stacked = result.view(members, -1)
        return _Pending(work, stacked, None if order is None else lambda: stacked[order])

    def reduce_scatter(self, x_mn: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        """See `Communicator`."""
        return self.reduce_scatter_start(x_mn, axes).wait()

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        order, rows = self._order(axes), x_mn.detach()
        if order is not None:
            rows = torch.empty_like(rows).index_copy_(0, torch.tensor(order, device=rows.device), rows)
        if rows.device.type == "cpu":
            # gloo would add up all rows on all ranks and keep one; an exchange sends half of that, in 2/3 of the time.
            received = torch.empty_like(rows, memory_format=torch.contiguous_format)
            sent = rows.contiguous()
            work = dist.all_to_all_single(received, sent, group=self._group(axes), async_op=True)
            return _Pending(work, received, lambda: received.sum(0, dtype=sent.dtype))
        result = rows.new_empty(rows.shape[1])
        work = _reduce_scatter_flat(result, rows.reshape(-1), group=self._group(axes), async_op=True)
        return _Pending(work, result)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> torch.Tensor:
        """See `Communicator`."""
        return self.all_to_all_start(x, send, receive, axes).wait()

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """See `Communicator`."""
        order, flat = self._order(axes), x.detach().contiguous()
        outgoing, incoming = list(send), list(receive)
        if order is not None:
            places = sorted(range(len(order)), key=lambda m: order[m])  # member at each place of the group
            stretches = flat.split(outgoing)
            flat = torch.cat([stretches[m] for m in places])
            outgoing, incoming = [send[m] for m in places], [receive[m] for m in places]
        result = flat.new_empty(sum(receive))
        group = self._group(axes)
        work = dist.all_to_all_single(result, flat, incoming, outgoing, group=group, async_op=True)
        if order is None:
            return _Pending(work, result)
        return _Pending(work, result, lambda: torch.cat([result.split(incoming)[p] for p in order]))
