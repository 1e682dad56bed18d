"""The collectives as `torch.library` operators on plain tensors, with fake implementations, so that `torch.compile` and
tracers see them as they are. The communicator travels as a handle: a number that names it in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence

import torch

from meshwright.runtime.communicator import Communicator, Work

_live: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Handle:
    """Names a communicator for the operators, for as long as somebody holds it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.number = comm, next(_numbers)
        self.late: list[Work] | None = None  # sums under way that nothing waits for, while a step defers them
        _live[self.number] = self

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Within the block a late sum is only started; at its end all of them are there."""
        self.late = []
        try:
            yield
            self.settle()
        finally:
            self.late = None

    def settle(self) -> None:
        """Wait for the late sums that have been started."""
        if self.late is not None:
            for work in self.late:
                work.wait()
            self.late.clear()


_lib = torch.library.Library("meshwright", "FRAGMENT")
_lib.define("all_reduce(Tensor x, int comm, str axes) -> Tensor")
_lib.define("all_reduce_late(Tensor x, int comm, str axes) -> Tensor")
_lib.define("all_gather(Tensor x_n, int comm, str axes, int members) -> Tensor")
_lib.define("reduce_scatter(Tensor x_mn, int comm, str axes) -> Tensor")
_lib.define("all_to_all(Tensor x, int[] send, int[] receive, int comm, str axes) -> Tensor")


def _comm(number: int) -> Communicator:
    return _live[number].comm


def _all_reduce(x: torch.Tensor, comm: int, axes: str) -> torch.Tensor:
    return _comm(comm).all_reduce(x, axes.split("."))


def _all_reduce_late(x: torch.Tensor, comm: int, axes: str) -> torch.Tensor:
    handle = _live[comm]
    if handle.late is None:
        return handle.comm.all_reduce(x, axes.split("."))
    total = x.detach().clone(memory_format=torch.contiguous_format)
    handle.late.append(handle.comm.all_reduce_start(total, axes.split(".")))
    return total


def _all_gather(x_n: torch.Tensor, comm: int, axes: str, members: int) -> torch.Tensor:
    return _comm(comm).all_gather(x_n, axes.split("."))


def _reduce_scatter(x_mn: torch.Tensor, comm: int, axes: str) -> torch.Tensor:
    return _comm(comm).reduce_scatter(x_mn, axes.split("."))


def _all_to_all(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], comm: int, axes: str
) -> torch.Tensor:
    return _comm(comm).all_to_all(x, send, receive, axes.split("."))


for _name, _function in (
    ("all_reduce", _all_reduce),
    ("all_reduce_late", _all_reduce_late),
    ("all_gather", _all_gather),
    ("reduce_scatter", _reduce_scatter),
    ("all_to_all", _all_to_all),
):
    _lib.impl(_name, _function, "CompositeExplicitAutograd")

for _name in ("all_reduce", "all_reduce_late"):
    torch.library.register_fake(
        f"meshwright::{_name}",
        lambda x, comm, axes: torch.empty_like(x, memory_format=torch.contiguous_format),
        lib=_lib,
    )
torch.library.register_fake(
    "meshwright::all_gather",
    lambda x_n, comm, axes, members: x_n.new_empty((members, x_n.shape[0])),
    lib=_lib,
)
torch.library.register_fake(
    "meshwright::reduce_scatter", lambda x_mn, comm, axes: x_mn.new_empty((x_mn.shape[1],)), lib=_lib
)
torch.library.register_fake(
    "meshwright::all_to_all", lambda x, send, receive, comm, axes: x.new_empty((sum(receive),)), lib=_lib
)


def all_reduce(x: torch.Tensor, handle: Handle, axes: Sequence[str]) -> torch.Tensor:
    """The sum over the group, as a new tensor."""
    return torch.ops.meshwright.all_reduce(x, handle.number, ".".join(axes))


def all_reduce_late(x: torch.Tensor, handle: Handle, axes: Sequence[str]) -> torch.Tensor:
    """The same for a value that no operator reads: complete only when the handle has stopped deferring."""
    return torch.ops.meshwright.all_reduce_late(x, handle.number, ".".join(axes))


def all_gather(x_n: torch.Tensor, handle: Handle, axes: Sequence[str]) -> torch.Tensor:
    """Everybody's flat tensor: (n,) → (members, n)."""
    return torch.ops.meshwright.all_gather(x_n, handle.number, ".".join(axes), handle.comm.mesh.count(axes))


def reduce_scatter(x_mn: torch.Tensor, handle: Handle, axes: Sequence[str]) -> torch.Tensor:
    """The sum of everybody's row for this member: (members, n) → (n,)."""
    return torch.ops.meshwright.reduce_scatter(x_mn, handle.number, ".".join(axes))


def all_to_all(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], handle: Handle, axes: Sequence[str]
) -> torch.Tensor:
    """Consecutive stretches of a flat tensor to the members, and theirs to this one."""
    return torch.ops.meshwright.all_to_all(x, list(send), list(receive), handle.number, ".".join(axes))
