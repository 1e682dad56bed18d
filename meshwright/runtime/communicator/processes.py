"""A process as a rank of `torch.distributed`, on real process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import RunError
from meshwright.mesh import Mesh
from meshwright.runtime.communicator.protocol import Work


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
