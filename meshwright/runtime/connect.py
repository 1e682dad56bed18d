"""Meeting the other ranks: rank 0's word first, through the rendezvous store, and only then a process group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError, RunError
from meshwright.mesh import Mesh
from meshwright.runtime.communicator import Alone, Communicator, ProcessGroups


def launched_world() -> int:
    """The number of ranks this process was launched with; 1 when it was started by hand."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def check_world(mesh: Mesh) -> None:
    """Raise RunError when the plan is for another number of ranks than were launched."""
    world = launched_world()
    if world != mesh.size:
        raise RunError(
            f"the plan is for {mesh.size} ranks ({mesh}), {world} {'was' if world == 1 else 'were'} launched",
            hint=f"meshwright run --nproc {mesh.size} script.py, or plan for mesh={world}",
        )


class Meeting:
    """The rendezvous of one job. `agree` lets rank 0 compute something once for all, before any process
    group exists."""

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.timeout = timeout
        self.store: dist.Store | None = None
        self.rank, self.world = 0, 1
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.store = _Broadcast()
        elif launched_world() > 1:
            self.store, self.rank, self.world = next(dist.rendezvous("env://", timeout=timeout))
        self._number = 0

    def agree(self, what: str, compute: Callable[[], bytes]) -> bytes:
        """Rank 0's bytes on every rank. An error of rank 0 that a user can cause is raised on all."""
        if self.store is None:
            return compute()
        self._number += 1
        key = f"meshwright/{what}/{self._number}"
        if self.rank == 0:
            try:
                self.store.set(key, b"ok" + compute())
            except MeshwrightError as error:
                self.store.set(
                    key, b"no" + json.dumps([error.what, error.why, error.where, error.hint]).encode()
                )
                raise
            except BaseException as error:
                self.store.set(
                    key,
                    b"no"
                    + json.dumps([f"rank 0 failed: {type(error).__name__}: {error}", "", "", ""]).encode(),
                )
                raise
        answer = bytes(self.store.get(key))
        if answer[:2] == b"no":
            text, why, where, hint = json.loads(answer[2:])
            raise RunError(text, why=why, where=where, hint=hint)
        return answer[2:]

    def connect(self, mesh: Mesh, device: torch.device) -> Communicator:
        """The communicator of a mesh, with the default process group made if there is none."""
        if self.world == 1:
            return Alone(mesh)
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = dist.PrefixStore("meshwright/group", self.store)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world, timeout=self.timeout
            )
        return ProcessGroups(mesh, self.rank)


class _Broadcast:
    """`set` and `get` over a process group that exists already."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._held[key] = value

    def get(self, key: str) -> bytes:
        box = [self._held.pop(key, None)]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]
