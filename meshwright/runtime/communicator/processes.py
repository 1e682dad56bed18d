"""A process as a rank of `torch.distributed`, on real process groups.

On a CPU rows are sent to whom they belong, without gloo's own collectives: gloo gathers into a copy, to scatter it adds
up all rows on all ranks, and its threads let go of tensors a little after a collective has ended, when they are next
given a core. Messages hold what is sent and what comes until they are waited for, and nothing else is there. A gather
so takes two thirds of the processor's time that gloo's takes, a sum of two ranks three quarters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright import heartbeat
from meshwright.core.mesh import Mesh
from meshwright.errors import RunError
from meshwright.runtime import lost_peer as peers
from meshwright.runtime.communicator.leave_groups import TAG, living
from meshwright.runtime.communicator.protocol import Done, Waited, Work


class _waiting:
    """While a rank waits: its record says so, and the end of another rank is an error that says so."""

    __slots__ = ("entry", "what")

    def __init__(self, entry: Any, what: str) -> None:
        self.entry, self.what = entry, what

    def __enter__(self) -> None:
        heartbeat.waits(self.entry)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        heartbeat.over(self.entry)
        if isinstance(error, RuntimeError) and (lost := peers.lost(error, self.what)) is not None:
            raise lost from None


@dataclass
class _Pending:
    entry: Any  # in the record of this rank
    what: str
    work: Any
    result: torch.Tensor
    finish: Callable[[], torch.Tensor] | None = None  # what puts the result into the group's order

    def wait(self) -> torch.Tensor:
        with _waiting(self.entry, self.what):
            self.work.wait()
        return self.result if self.finish is None else self.finish()


@dataclass
class _Messages:
    """Messages to and from other ranks. They hold their tensors, and nobody else does."""

    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


# torch 2.13 renamed the two collectives on flat tensors; the old names remain for older releases.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_PAIRED = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class ProcessGroups(Waited):
    """This process as a rank of `torch.distributed`.

    Groups are made for all axis sets up front by `prepare`, since making one is itself a collective: every
    rank must make the same groups in the same order.
    """

    def __init__(self, mesh: Mesh, rank: int, ranks: Sequence[int] = ()) -> None:
        """`ranks`: those of the world that are the mesh's, where it is of a part of it; `rank` is this one's number
        among them."""
        self.mesh, self.rank = mesh, rank
        self._ranks = tuple(ranks)
        self._me = self._ranks[rank] if self._ranks else rank
        self._parts: dict[tuple[tuple[int, ...], Mesh], ProcessGroups] = {}
        self._groups: dict[frozenset[str], Any] = {}
        self._of_axes: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._orders: dict[tuple[str, ...], list[int] | None] = {}
        self._shown: dict[tuple[str, ...], str] = {}
        living.add(self)

    def forget(self) -> None:
        """Hold no process group any more: they are about to end."""
        self._groups.clear()
        for part in self._parts.values():
            part.forget()

    def held(self) -> list[Any]:
        """The process groups, those of parts excepted."""
        return list(self._groups.values())

    def part(self, ranks: Sequence[int], mesh: Mesh) -> ProcessGroups:
        """See `Communicator`. Each is made once. A rank that is not among them may `prepare` it, as all ranks must."""
        key = tuple(ranks), mesh
        if key not in self._parts:
            mine = ranks.index(self.rank) if self.rank in ranks else 0
            self._parts[key] = ProcessGroups(mesh, mine, ranks)
        return self._parts[key]

    def prepare(self, axis_sets: Sequence[frozenset[str]]) -> None:
        """Make the process groups over these sets of axes. Collective: all ranks pass equal sets."""
        with heartbeat.waiting(
            heartbeat.begun("making of process groups", tuple(range(dist.get_world_size())))
        ):
            self._prepare(axis_sets)

    def _prepare(self, axis_sets: Sequence[frozenset[str]]) -> None:
        for axes in sorted(set(axis_sets), key=sorted):
            if axes in self._groups:
                continue
            run = self.mesh.sort(axes)
            if not self._ranks and self.mesh.count(run) == self.mesh.size:
                self._groups[axes] = dist.group.WORLD
                continue
            made: dict[tuple[int, ...], Any] = {}
            for rank in range(self.mesh.size):
                members = tuple(sorted(self._in_world(self.mesh.group(rank, run))))
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

    def _in_world(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._ranks[r] for r in group) if self._ranks else group

    def _members(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks of the world in the group, in its order."""
        key = tuple(axes)
        if key not in self._of_axes:
            self._of_axes[key] = self._in_world(self.mesh.group(self.rank, key))
        return self._of_axes[key]

    def _order(self, axes: Sequence[str]) -> list[int] | None:
        """Place of each member among the sorted ranks of the process group; None when group order is rank order."""
        key = tuple(axes)
        if key not in self._orders:
            members = self._members(key)
            ranked = sorted(members)
            order = [ranked.index(m) for m in members]
            self._orders[key] = None if order == list(range(len(order))) else order
        return self._orders[key]

    def _begun(self, kind: str, axes: Sequence[str]) -> Any:
        """A collective begins: in the record of this rank."""
        peers.check()
        key = tuple(axes)
        if key not in self._shown:
            self._shown[key] = self.mesh.show(key)
        return heartbeat.begun(kind, self._members(key), self._shown[key])

    def all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
        """See `Communicator`."""
        with _waiting(self._begun("all_reduce", axes), "an all_reduce"):
            return self._all_reduce(x, axes, op)

    def _all_reduce(self, x: torch.Tensor, axes: Sequence[str], op: str) -> torch.Tensor:
        if x.device.type == "cpu" and len(self._members(axes)) == 2:  # what comes becomes the result
            mine = x.detach().contiguous()
            other = torch.empty_like(mine)
            self._messages([mine, mine], [other, other], axes).wait()
            return _PAIRED[op](other, mine, out=other)
        result = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, _OPS[op], group=self._group(axes))
        return result

    def all_reduce_start(self, x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> Work:
        """See `Communicator`."""
        entry = self._begun("all_reduce", axes)
        work = dist.all_reduce(x, _OPS[op], group=self._group(axes), async_op=True)
        return _Pending(entry, "an all_reduce", work, x)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        peers.check()
        plain = x.detach().contiguous()
        everybody = tuple(range(self.mesh.size))
        with _waiting(heartbeat.begun("broadcast", everybody, f"from rank {source}"), "a broadcast"):
            dist.broadcast(plain, src=source)
        if plain.data_ptr() != x.data_ptr():
            x.copy_(plain)

    def broadcast_start(self, x: torch.Tensor, source: int, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        entry = self._begun("broadcast", axes)
        (first,) = self._in_world((source,))
        work = dist.broadcast(x, src=first, group=self._group(axes), async_op=True)
        return _Pending(entry, "a broadcast", work, x)

    def all_gather_start(
        self, x_n: torch.Tensor, axes: Sequence[str], into: torch.Tensor | None = None
    ) -> Work:
        """See `Communicator`."""
        flat, members, order = x_n.detach().contiguous(), self._members(axes), self._order(axes)
        near = flat.device.type == "cpu" and self.mesh.equally_near(axes)
        there = into if near or order is None else None
        entry = self._begun("all_gather", axes)
        result = flat.new_empty((len(members), flat.numel())) if there is None else there
        if near:
            work = self._messages([flat] * len(members), list(result), axes)
            mine = result[members.index(self._me)]
            if mine.data_ptr() != flat.data_ptr():
                mine.copy_(flat)
            return _Pending(entry, "an all_gather", work, result)
        work = _all_gather_flat(result.view(-1), flat, group=self._group(axes), async_op=True)
        if order is None:
            return _Pending(entry, "an all_gather", work, result)
        return _Pending(
            entry,
            "an all_gather",
            work,
            result,
            lambda: result[order] if into is None else into.copy_(result[order]),
        )

    def _messages(
        self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], axes: Sequence[str]
    ) -> _Messages:
        """A tensor to every other member of the group, and one from each."""
        group, members = self._group(axes), self._members(axes)
        others = [(n, m) for n, m in enumerate(members) if m != self._me]
        works = [dist.irecv(receive[n], m, group=group, tag=TAG) for n, m in others if receive[n].numel()]
        works += [dist.isend(send[n], m, group=group, tag=TAG) for n, m in others if send[n].numel()]
        return _Messages(works)

    def reduce_scatter_start(self, x_mn: torch.Tensor, axes: Sequence[str]) -> Work:
        """See `Communicator`."""
        rows = x_mn.detach()
        entry = self._begun("reduce_scatter", axes)
        if rows.device.type == "cpu":
            return self._scatter(rows.contiguous(), axes, entry)
        order = self._order(axes)
        if order is not None:
            rows = torch.empty_like(rows).index_copy_(0, torch.tensor(order, device=rows.device), rows)
        result = rows.new_empty(rows.shape[1])
        work = _reduce_scatter_flat(result, rows.reshape(-1), group=self._group(axes), async_op=True)
        return _Pending(entry, "a reduce_scatter", work, result)

    def _scatter(self, rows: torch.Tensor, axes: Sequence[str], entry: Any) -> Work:
        """Every member's row for this one comes; they are added up when all are there."""
        members = self._members(axes)
        mine = members.index(self._me)
        if len(members) == 2:  # what comes becomes the sum
            other = torch.empty_like(rows[mine])
            work = self._messages(list(rows), [other, other], axes)
            return _Pending(entry, "a reduce_scatter", work, other, lambda: other.add_(rows[mine]))
        received = torch.empty_like(rows)
        work = self._messages(list(rows), list(received), axes)
        received[mine].copy_(rows[mine])
        return _Pending(entry, "a reduce_scatter", work, received, lambda: received.sum(0, dtype=rows.dtype))

    def all_to_all_start(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axes: Sequence[str]
    ) -> Work:
        """See `Communicator`."""
        flat = x.detach().contiguous()
        entry = self._begun("all_to_all", axes)
        if flat.device.type == "cpu":
            result = flat.new_empty(sum(receive))
            sent, received = flat.split(list(send)), result.split(list(receive))
            work = self._messages(sent, received, axes)
            mine = self._members(axes).index(self._me)
            received[mine].copy_(sent[mine])
            return _Pending(entry, "an all_to_all", work, result)
        order = self._order(axes)
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
            return _Pending(entry, "an all_to_all", work, result)
        return _Pending(
            entry,
            "an all_to_all",
            work,
            result,
            lambda: torch.cat([result.split(incoming)[p] for p in order]),
        )

    def shift_start(self, x: torch.Tensor, axes: Sequence[str], by: int = 1) -> Work:
        """See `Communicator`."""
        plain, members = x.detach().contiguous(), self._members(axes)
        here = members.index(self._me)
        after, before = (members[(here + n) % len(members)] for n in (by, -by))
        if after == self._me or not plain.numel():
            return Done(plain.clone())
        entry, group, result = self._begun("shift", axes), self._group(axes), torch.empty_like(plain)
        both = ((dist.irecv, result, before), (dist.isend, plain, after))
        works = dist.batch_isend_irecv([dist.P2POp(op, t, peer, group, TAG) for op, t, peer in both])
        return _Pending(entry, "a shift", _Messages(works), result)

    def send_start(self, x: torch.Tensor, to: int, tag: int) -> Work:
        """See `Communicator`."""
        plain = x.detach().contiguous()
        if not plain.numel():
            return Done(plain)
        entry = heartbeat.begun("send", (self._me, to), "sent")
        return _Pending(entry, f"a message to rank {to}", dist.isend(plain, to, tag=TAG + 1 + tag), plain)

    def receive_start(self, into: torch.Tensor, source: int, tag: int) -> Work:
        """See `Communicator`."""
        if not into.numel():
            return Done(into)
        entry = heartbeat.begun("receive", (source, self._me), "received")
        return _Pending(
            entry, f"a message from rank {source}", dist.irecv(into, source, tag=TAG + 1 + tag), into
        )
