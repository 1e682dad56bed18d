"""Values that are kept for backward elsewhere than where they lie: in slices over the ranks that repeat them, in the
host's memory, or both. The program reads them as ever; what autograd saves of them is a note (`runtime/recompute.py`).

What goes to the host goes beside computing, and its memory on the device can go when it is there: at most as much is on
its way as the largest run needs (`partition/activation_offload.py`). Backward brings a run back at its first reader,
and with that the run before it, which it will need next.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch

from meshwright.core.mesh import Mesh
from meshwright.partition.activation_offload import SavedActivation
from meshwright.redistribute.index_maps import exchange
from meshwright.runtime.collectives import Handle
from meshwright.runtime.host_link import Copy, HostLink
from meshwright.runtime.recompute import Again, Result
from meshwright.runtime.reshard import Mover


class Keeper(torch.nn.Module):
    """Passes a value through, and saves it for backward as its record says: sharded, on the host, or both."""

    def __init__(
        self, activation: SavedActivation, mesh: Mesh, number: int, handle: Handle, store: Store
    ) -> None:
        """`number`: of the rank on the mesh."""
        super().__init__()
        self.activation, self.handle, self.store = activation, handle, store
        self.slices = [Mover(exchange(s, mesh, number)) for s in activation.slices]
        self.gather = [Mover(exchange(s, mesh, number)) for s in activation.gather]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The value."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.store.put(x, self)
        return x

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part, in memory of its own; all of the value where it is not cut."""
        if not self.slices:
            return x.detach()
        for mover in self.slices:
            x = mover(x.detach(), self.handle)
        return x.clone(memory_format=torch.contiguous_format)

    def whole(self, part: torch.Tensor, like: tuple[torch.Size, tuple[int, ...]]) -> torch.Tensor:
        """The value again, as it lay in memory."""
        if not self.gather:
            return part
        for mover in self.gather:
            part = mover(part, self.handle)
        if part.stride() == like[1]:
            return part
        return part.new_empty_strided(*like).copy_(part)


class Settle(torch.nn.Module):
    """The place in a program before which all must have left the device."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def forward(self) -> None:
        """Wait for what is on its way."""
        if not torch.compiler.is_compiling():
            self.store.settle()


class _Run:
    """Values of one layer that went to the host one after the other, and the run before."""

    def __init__(self, layer: str, before: _Run | None) -> None:
        self.layer = layer
        self.before = weakref.ref(before) if before is not None else None
        self.items: list[weakref.ref[_Away]] = []
        self.opened = False


class _Away:
    """A value on the host: `there`, until it is brought `back`."""

    def __init__(self, store: Store, keeper: Keeper, run: _Run, x: torch.Tensor) -> None:
        self.store, self.keeper, self.run = store, keeper, run
        self.like = x.size(), x.stride()
        self.there: torch.Tensor | None = None
        self.back: Copy | None = None
        self.result: weakref.ref[Result] | None = None

    def bring(self) -> None:
        """Start the way back, if somebody asks for the value and nobody has."""
        result = self.result() if self.result is not None else None
        if self.there is not None and result is not None and result.wanted:
            self.back = self.store.link.back(self.there)
            self.there = None

    def take(self) -> torch.Tensor:
        """The value on the device."""
        self.store.bring(self.run)
        assert self.back is not None, "a value was taken twice from the host"
        part, self.back = self.back.take(), None
        found = self.keeper.whole(part, self.like)
        before = self.run.before() if self.run.before is not None else None
        if not self.run.opened and before is not None:
            self.store.bring(before)
        self.run.opened = True
        return found


class Store:
    """The saved activations of a rank that are sharded or offloaded."""

    def __init__(self, again: Again, device: torch.device, room_bytes: int) -> None:
        """`room_bytes`: so much may be on its way to the host at a time."""
        self.again, self.link, self.room_bytes = again, HostLink(device), room_bytes
        self._leaving: deque[Copy] = deque()
        self._run: _Run | None = None

    def put(self, x: torch.Tensor, keeper: Keeper) -> None:
        """Save a value as its keeper says. A view, or a value that backward recomputes anyway, is saved with the
        storage that it shares."""
        if self.again.knows(x) or not _alone(x):
            return
        part = keeper.part(x)
        if not keeper.activation.host:
            like = x.size(), x.stride()
            self.again.keep(x, lambda: keeper.whole(part, like))
            return
        if self._run is None or self._run.layer != keeper.activation.layer or self._run.opened:
            self._run = _Run(keeper.activation.layer, self._run)
        item = _Away(self, keeper, self._run, x)
        leaving = self.link.out(part)
        item.there = leaving.result
        item.result = self.again.keep(x, item.take)
        self._run.items.append(weakref.ref(item))
        self._leaving.append(leaving)
        while len(self._leaving) > 1 and sum(c.size_bytes for c in self._leaving) > self.room_bytes:
            self._settle_one()

    def begin(self) -> None:
        """A forward pass begins: what it keeps does not follow what was kept before."""
        self._run = None

    def settle(self) -> None:
        """Wait until all are on the host, and let go of them."""
        while self._leaving:
            self._settle_one()

    def bring(self, run: _Run) -> None:
        """Start the way back of what a run holds, the last first."""
        self.settle()
        for reference in reversed(run.items):
            item = reference()
            if item is not None:
                item.bring()

    def _settle_one(self) -> None:
        self._leaving.popleft().take()


def _alone(x: torch.Tensor) -> bool:
    """True if a tensor fills its storage."""
    return (
        x.layout == torch.strided
        and not x.storage_offset()
        and x.untyped_storage().nbytes() == x.numel() * x.element_size()
        and x.numel() > 0
    )


__all__ = ["Keeper", "Settle", "Store"]
