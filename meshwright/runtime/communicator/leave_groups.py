"""The end of all process groups of this process: in order, at once, or put off to its very end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshwright import heartbeat
from meshwright.runtime import lost_peer as peers
from meshwright.runtime.stores import HashStore

TAG = 6113  # of our own messages between two ranks, so that none of the user's is taken for one


class HoldsGroups(Protocol):
    """What holds process groups."""

    def forget(self) -> None:
        """Hold none any more: they are about to end."""
        ...

    def held(self) -> list[Any]:
        """The process groups."""
        ...


living: weakref.WeakSet[HoldsGroups] = weakref.WeakSet()


def leave() -> None:
    """A barrier, then the end of all process groups and of their threads.

    A group ends its threads when nobody holds it any more. Left alive, they may let go of a last tensor while the
    interpreter is being taken down, for which they need its lock, and the process is aborted after all it had to do.
    """
    peers.check()
    everybody = tuple(range(dist.get_world_size()))
    with heartbeat.waiting(heartbeat.begun(heartbeat.SHUTDOWN, everybody)):
        dist.barrier()
    _destroy()
    gc.collect()


def leave_at_exit() -> None:
    """The end of all process groups where a script ends without ``mw.shutdown()`` and without an error."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        _destroy()
        gc.collect()


def _destroy() -> None:
    for groups in living:
        groups.forget()
    dist.destroy_process_group()


def break_off() -> None:
    """Leave all process groups at once, also in the middle of a collective.

    Who waits for this rank in one of them learns so: a message that is not awaited long enough closes the connections
    of a group of gloo, on both sides, and frees its threads.
    """
    if not dist.is_initialized():
        _start_names_anew()
        return
    interrupt()
    _destroy()


def _start_names_anew() -> None:
    """Count the names of process groups from 0 again, as ranks do that have just been started. torch does so where a
    default group ends, and not where one could not be made; ranks meet under these names."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def interrupt() -> None:
    """End what this rank waits for in its process groups, with an error: that of another thread, too."""
    if not dist.is_initialized():
        return
    for group in (dist.group.WORLD, *(group for groups in list(living) for group in groups.held())):
        # A group of an earlier generation that somebody still holds is no part of torch's any more.
        with contextlib.suppress(ValueError):
            _interrupt(group)


def _interrupt(group: Any) -> None:
    """The same for one group. Raises ValueError for one that has ended."""
    me, nothing = dist.get_rank(group), torch.empty(1)
    # A member that has gone is no help: a message from it fails at once, and closes no other connection.
    for other in range(dist.get_world_size(group)):
        if other != me:
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(nothing, group=group, group_src=other, tag=TAG - 1)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def outlive() -> None:
    """Keep the groups of gloo to the very end of this process, which an error ends.

    A group that goes waits for its threads, and these for the ranks that take part in what is on its way. Those may
    wait for this rank, whose sockets close when the process ends, and so nobody would ever learn of the error.
    """
    if not dist.is_initialized():
        return
    for group in (dist.group.WORLD, *(group for groups in living for group in groups.held())):
        if isinstance(group, dist.ProcessGroup) and "gloo" in dist.get_backend_config(group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
