"""What a server has, and what a request may ask of it."""

from __future__ import annotations

import functools

import torch

from meshwright.errors import ServerError, did_you_mean
from meshwright.servers import messages as m
from meshwright.servers.clocks import Clocks
from meshwright.servers.counts import Counts
from meshwright.servers.dealing import Stream
from meshwright.servers.frozen import FrozenCopy
from meshwright.servers.rounds import Gradients, Prepared
from meshwright.servers.shards import ShardMap, fingerprint
from meshwright.servers.shares import Shares
from meshwright.servers.starts import fill
from meshwright.servers.store import Stored

Reply = tuple[m.Answer, m.Tensors]


class State:
    """`number`: the name of a server in shard maps. `lost`: it had values, and they are gone."""

    def __init__(self, number: int, *, lost: bool = False) -> None:
        self.number, self.lost = number, lost
        self.forget()

    def forget(self) -> None:
        """Begin without a job."""
        self.declared: m.Declare | None = None
        self.model = ""
        self.map = ShardMap(0, (), {})
        self.clocks = Clocks(None)
        self.shares = Shares()
        self.stored: dict[str, Stored] = {}
        self.rounds: dict[int, dict[int, Gradients]] = {}
        self.prepared: dict[int, Prepared] = {}  # by worker
        self.pushed: dict[int, int] = {}  # by worker, one more than the clock of its last push that counts
        self.norm = (-1, 0.0)  # of all gradients of a step: the last that was said
        self.mean: tuple[int, Gradients] | None = None  # of a step that waits for its norm
        self.counts = Counts()
        self.streams: dict[str, Stream] = {}
        # while blocks move: the clocks up to which pushes are accepted, and who moves them
        self.allowed: dict[int, int] | None = None
        self.mover = ""
        self.began: m.Begins | None = None  # once a checkpoint was loaded, or none was found
        self.copy = FrozenCopy()

    def begin(self, declared: m.Declare, map: ShardMap, *, fill_rows: bool = True) -> None:
        """Store what a job declares, and fill the rows that are filled by seed."""
        self.stored = {p.name: Stored(p) for p in declared.parameters}
        self.declared, self.map = declared, map
        self.model = fingerprint(declared.job, declared.parameters)
        self.clocks = Clocks(declared.bound, declared.workers)
        self.shares = Shares(declared.workers if declared.shares else 0)
        for parameter in declared.parameters if fill_rows else ():
            if parameter.start is not None:
                blocks = self.map.blocks_of(self.number).get(parameter.name, ())
                if blocks:
                    self.stored[parameter.name].start(blocks, functools.partial(fill, parameter))

    @property
    def size_bytes(self) -> int:
        """Bytes of values and optimizer states."""
        return sum(stored.size_bytes for stored in self.stored.values())

    def missing(self) -> dict[str, tuple[int, ...]]:
        mine = self.map.blocks_of(self.number)
        found = {n: tuple(b for b in blocks if b not in self.stored[n].blocks) for n, blocks in mine.items()}
        return {name: blocks for name, blocks in found.items() if blocks}

    # ---- steps whose pushes are here

    def in_doubt(self, worker: int) -> bool:
        """Whether a push of this worker is prepared here, and another server knows whether it counts."""
        return worker in self.prepared and self.map.first != self.number

    def complete(self, clock: int) -> bool:
        """Whether all workers have pushed a step, and it can be applied."""
        if not self.clocks.applies(clock):
            return False
        return self.clocks.bound != 0 or self.shares.complete(clock, len(self.rounds.get(clock, ())))

    def holds(self, clock: int) -> bool:
        """Whether a step before this one waits for the norm of its gradients."""
        return self.limit is not None and min(self.rounds, default=clock) < clock

    @property
    def limit(self) -> m.Limit | None:
        """Of the norm of all gradients of a step, before which it is not applied."""
        return self.declared.limit if self.declared is not None and self.declared.holds else None

    # ---- what a request may ask

    def without_values(self) -> ServerError:
        if not self.lost:
            return ServerError("this server has no model yet", hint="declare it first")
        return ServerError(
            f"the values of parameter server {self.number} are lost",
            why="it was started again, and neither a folder nor another server has them",
            hint="workers that are started again (--max-restarts 1) begin anew, and step.resume(path) loads a "
            "checkpoint; nothing is lost with --replicas 1 or --server-state; by hand with MESHWRIGHT_REPLICAS=1 or "
            "MS_RECOVERY_PATH; on Kubernetes with servers.copies or servers.state",
        )

    def check_model(self, model: str) -> None:
        if self.declared is None:
            raise self.without_values()
        if model != self.model:
            raise ServerError(
                f"a request for model {model or 'without a name'}", why=f"this server has {self.model}"
            )

    def check_clips(self, request: m.Clipping) -> None:
        self.check_model(request.model)
        if self.limit is None:
            raise ServerError(
                "the norm of a step that does not wait for it", hint="clip_norm= on all workers"
            )

    def check_worker(self, request: m.Prefetch | m.Pull | m.Push | m.Commit) -> None:
        self.check_model(request.model)
        if request.worker not in self.clocks.of:
            gone = request.worker in self.clocks.left
            raise ServerError(
                f"worker {request.worker} is no worker of this job",
                why="it has left, as by step.close(), or was lost"
                if gone
                else f"workers are {sorted(self.clocks.of)}",
                hint="step.full_state(), and whatever else needs values, before step.close()"
                if gone
                else "join first",
            )

    def of(self, name: str, table: bool | None = None) -> Stored:
        found = self.stored.get(name)
        if found is None:
            raise ServerError(f"there is no parameter {name!r}", hint=did_you_mean(name, self.stored))
        if table is False and found.parameter.table:
            raise ServerError(f"{name} is a table", why="it is read and updated by rows")
        return found

    def other_map(self, version: int) -> m.Answer:
        """The map here, for a worker with an older one; one with a newer one asks again."""
        return m.Moved(self.map) if version < self.map.version else m.Wait()

    def here(self, name: str) -> Stored:
        stored = self.of(name, False)
        if self.map.owners[name] != (self.number,):
            raise ServerError(f"{name} is on another server")
        return stored

    def table(self, name: str) -> Stored:
        stored = self.of(name)
        if not stored.parameter.table:
            raise ServerError(f"{name} is no table", why="it is read and updated in full")
        return stored

    def ids(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Check ids, but not where a block is missing: it is waited for."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ServerError(f"ids of {name} are {ids.dtype} {tuple(ids.shape)}", why="they are int64 [n]")
        if not self.missing():
            self.of(name).local(ids)
        return ids


__all__ = ["Reply", "State"]
