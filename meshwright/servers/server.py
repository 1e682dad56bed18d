"""One parameter server: answers messages one after another. It knows neither sockets nor threads nor time.

A request is checked in full before anything changes. A push is applied once, however often it arrives: it names its
worker and clock, and the server remembers each worker's clock.
"""

from __future__ import annotations

import functools
import math

import torch

from meshwright.errors import BatchError, ServerError, did_you_mean
from meshwright.servers import messages as m
from meshwright.servers.clocks import Clocks
from meshwright.servers.counts import Counts
from meshwright.servers.dealing import Stream
from meshwright.servers.frozen import FrozenCopy
from meshwright.servers.rounds import Gradients, mean_dense, mean_rows
from meshwright.servers.same_job import begins_anew, check_same
from meshwright.servers.shards import ShardMap, fingerprint
from meshwright.servers.shares import Shares
from meshwright.servers.starts import fill
from meshwright.servers.store import VALUES, Stored

Reply = tuple[m.Answer, m.Tensors]


class Server:
    """`number`: its name in shard maps. `lost`: it had values, and they are gone."""

    def __init__(self, number: int, *, lost: bool = False) -> None:
        self.number, self.lost = number, lost
        self._forget()

    def _forget(self) -> None:
        """Begin without a job."""
        self.declared: m.Declare | None = None
        self.model = ""
        self.map = ShardMap(0, (), {})
        self.clocks = Clocks(None)
        self.shares = Shares()
        self.stored: dict[str, Stored] = {}
        self.rounds: dict[int, dict[int, Gradients]] = {}
        self.counts = Counts()
        self.streams: dict[str, Stream] = {}
        # while blocks move: the clocks up to which pushes are accepted, and who moves them
        self.allowed: dict[int, int] | None = None
        self.mover = ""
        self.began: m.Begins | None = None  # once a checkpoint was loaded, or none was found
        self.copy = FrozenCopy()

    def answer(self, request: m.Request, tensors: m.Tensors) -> Reply:
        """The answer to a request. A request that is refused changes nothing. Values in step may be the server's own
        tensors, which it changes with the worker's next push."""
        try:
            match request:
                case m.Declare():
                    return self._declare(request), []
                case m.Fill():
                    return self._fill(request, tensors), []
                case m.Join():
                    return self._join(request), []
                case m.Leave():
                    self._check_model(request.model)
                    for stream in self.streams.values():
                        stream.left(request.worker)
                    self.clocks.leave(request.worker)
                    self.copy.forget(request.worker)
                    self._apply()
                    return m.Done(), []
                case m.Pull():
                    return self._pull(request, tensors)
                case m.Push():
                    return self._push(request, tensors), []
                case m.Deal():
                    return self._deal(request), []
                case m.Look():
                    return self._seen(), []
                case m.Freeze() | m.Thaw() | m.Clear() | m.Begin() | m.Await():
                    self._check_model(request.model)
                    return self._save(request), []
                case _:
                    self._check_model(request.model)
                    return self._move(request, tensors)
        except (ServerError, BatchError) as error:
            self.counts.refused += 1
            return m.Refused(error.what, error.why, error.hint, isinstance(error, BatchError)), []

    # ---- what is stored

    def _declare(self, request: m.Declare) -> m.Answer:
        model = fingerprint(request.job, request.parameters)
        if begins_anew(self.declared, request):
            self._forget()
        if self.declared is None:
            if self.lost and not request.attempt:  # else all workers begin anew
                raise self._without_values()
            self.begin(request, request.map)
        else:
            check_same(self.declared, request)
        return m.Declared(model, self.map, self._missing())

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

    def _seen(self) -> m.Seen:
        if self.declared is None:
            raise ServerError("this server has no model yet", hint="declare it first")
        clocks, left = dict(self.clocks.of), dict(self.clocks.left)
        blocks = sum(len(stored.blocks) for stored in self.stored.values())
        waiting = sum(map(len, self.rounds.values()))
        job, bound = self.declared.job, self.clocks.bound
        return m.Seen(job, bound, self.size_bytes, blocks, waiting, clocks, left, self.counts)

    def _missing(self) -> dict[str, tuple[int, ...]]:
        mine = self.map.blocks_of(self.number)
        found = {n: tuple(b for b in blocks if b not in self.stored[n].blocks) for n, blocks in mine.items()}
        return {name: blocks for name, blocks in found.items() if blocks}

    def _fill(self, request: m.Fill, tensors: m.Tensors) -> m.Answer:
        self._check_model(request.model)
        stored = self._stored(request.parameter, True)
        missing = self._missing().get(request.parameter, ())
        blocks = {b: {VALUES: t} for b, t in zip(request.blocks, tensors, strict=False)}
        if len(blocks) != len(tensors) or len(blocks) != len(request.blocks):
            raise ServerError(
                f"{len(tensors)} values for {len(request.blocks)} blocks of {request.parameter}"
            )
        if not any(b in missing for b in blocks) and all(b in stored.blocks for b in blocks):
            return m.Done(repeated=True)
        if strange := [b for b in blocks if b not in missing]:
            raise ServerError(
                f"values of block {strange[0]} of {request.parameter}, which is not missing here"
            )
        stored.put(blocks)
        return m.Done()

    # ---- workers

    def _join(self, request: m.Join) -> m.Answer:
        """A worker begins with a round that is not yet applied, so that all servers can wait for it from there on."""
        self._check_model(request.model)
        if self.allowed is not None:
            return m.Wait()
        begins = request.clock
        if request.worker not in self.clocks.of:
            first = self.clocks.left.get(request.worker, 0)
            begins = max(begins, self.clocks.least(), first)
        elif self.clocks.of[request.worker] > begins:
            return m.Joined(self.clocks.of[request.worker], self.began.steps if self.began else 0)
        self.clocks.join(request.worker, begins)
        self._apply()
        return m.Joined(begins, self.began.steps if self.began else 0)

    def _deal(self, request: m.Deal) -> m.Answer:
        self._check_model(request.model)
        if min(request.size, request.epoch, request.total) < 1:
            raise ServerError(f"{request.size} of {request.total} samples", why="all are at least 1")
        stream = self.streams.setdefault(request.stream, Stream())
        sizes = (request.size, request.epoch, request.total)
        found = stream.deal(request.worker, request.request, request.after, *sizes)
        return m.Dealt(0, 0, later=True) if found is None else m.Dealt(*found)

    def _without_values(self) -> ServerError:
        if not self.lost:
            return ServerError("this server has no model yet", hint="declare it first")
        return ServerError(
            f"the values of parameter server {self.number} are lost",
            why="it was started again, and neither a folder nor another server has them",
            hint="--replicas 1 or --server-state from the beginning; MS_RECOVERY_PATH for one started by hand",
        )

    def _check_model(self, model: str) -> None:
        if self.declared is None:
            raise self._without_values()
        if model != self.model:
            raise ServerError(
                f"a request for model {model or 'without a name'}", why=f"this server has {self.model}"
            )

    def _check_worker(self, request: m.Pull | m.Push) -> None:
        self._check_model(request.model)
        if request.worker not in self.clocks.of:
            gone = request.worker in self.clocks.left
            raise ServerError(
                f"worker {request.worker} is no worker of this job",
                why="it left, or was lost" if gone else f"workers are {sorted(self.clocks.of)}",
                hint="join first",
            )

    def _stored(self, name: str, table: bool | None = None) -> Stored:
        found = self.stored.get(name)
        if found is None:
            raise ServerError(f"there is no parameter {name!r}", hint=did_you_mean(name, self.stored))
        if table is False and found.parameter.table:
            raise ServerError(f"{name} is a table", why="it is read and updated by rows")
        return found

    # ---- values

    def _pull(self, request: m.Pull, tensors: m.Tensors) -> Reply:
        self._check_worker(request)
        if request.map != self.map.version:
            return self._other_map(request.map), []
        if request.clock != (clock := self.clocks.of[request.worker]):
            raise ServerError(
                f"worker {request.worker} reads for step {request.clock}", why=f"its next one is {clock}"
            )
        if len(tensors) != len(request.tables):
            raise ServerError(f"ids of {len(tensors)} tables, not of {len(request.tables)}")
        dense = [self._here(name) for name in request.dense]
        tables = [
            (self._table(name), self._ids(name, ids))
            for name, ids in zip(request.tables, tensors, strict=True)
        ]
        self.shares.check(self.clocks, request.clock)
        if self._missing() or not self.clocks.may_read(request.clock):
            return m.Wait(), []
        self.counts.pulls += 1
        self.counts.oldest = max(self.counts.oldest, request.clock - self.clocks.least())
        values = [stored.tensor.detach() for stored in dense]
        if (
            self.clocks.bound != 0
        ):  # others may push while it is sent; in step, no update happens without this worker
            values = [tensor.clone() for tensor in values]
        values += [stored.read(ids) for stored, ids in tables]
        self.counts.pulled_bytes += sum(tensor.nbytes for tensor in values)
        return m.Values(self.clocks.least(), self.counts.updates), values

    def _other_map(self, version: int) -> m.Answer:
        """The map here, for a worker with an older one; one with a newer one asks again."""
        return m.Moved(self.map) if version < self.map.version else m.Wait()

    def _here(self, name: str) -> Stored:
        stored = self._stored(name, False)
        if self.map.owners[name] != (self.number,):
            raise ServerError(f"{name} is on another server")
        return stored

    def _table(self, name: str) -> Stored:
        stored = self._stored(name)
        if not stored.parameter.table:
            raise ServerError(f"{name} is no table", why="it is read and updated in full")
        return stored

    def _ids(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Check ids, but not where a block is missing: it is waited for."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ServerError(f"ids of {name} are {ids.dtype} {tuple(ids.shape)}", why="they are int64 [n]")
        if not self._missing():
            self._stored(name).local(ids)
        return ids

    # ---- checkpoints

    def _save(self, request: m.Saving) -> m.Answer:
        match request:
            case m.Freeze():
                if request.map != self.map.version:
                    return self._other_map(request.map)
                self.shares.check(self.clocks, request.clock)
                if self._missing() or (self.clocks.bound == 0 and self.clocks.least() < request.clock):
                    return m.Wait()
                samples = {name: stream.position for name, stream in self.streams.items()}
                return m.Frozen(self.copy.take(request.worker, self.stored), samples)
            case m.Thaw():
                self.copy.forget()
            case m.Clear():
                if self.rounds or any(self.clocks.of.values()):
                    raise ServerError(
                        "values are loaded while workers train", hint="load before the first step"
                    )
                for stored in self.stored.values():
                    stored.drop(list(stored.blocks))
            case m.Begin():
                if gone := self._missing():
                    raise ServerError(
                        f"block {next(iter(gone.values()))[0]} of {next(iter(gone))} has not come"
                    )
                self.began = m.Begins(request.steps, request.path)
                self.streams = {name: Stream.at(position) for name, position in request.samples.items()}
            case m.Await():
                return self.began or m.Wait()
        return m.Done()

    # ---- blocks that move to other servers

    def _move(self, request: m.Moving, tensors: m.Tensors) -> Reply:
        match request:
            case m.Hold():
                if self.mover not in ("", request.mover):
                    raise ServerError("blocks are moving already", hint="wait for that move")
                self.allowed, self.mover = {} if self.allowed is None else self.allowed, request.mover
                options = {name: stored.options for name, stored in self.stored.items()}
                return m.Held(dict(self.clocks.of), dict(self.clocks.left), options, self.map, self.began), []
            case m.Allow():
                self.allowed = dict(request.clocks)
            case m.Reached():
                behind = any(clock < (self.allowed or {}).get(w, 0) for w, clock in self.clocks.of.items())
                return (m.Wait() if behind or self.rounds else m.Done()), []
            case m.Resume():
                self.clocks.of, self.clocks.left, self.clocks.expected = (
                    dict(request.clocks),
                    dict(request.left),
                    0,
                )
                self.allowed, self.began = {}, request.began
                for name, options in request.options.items():
                    self._stored(name).set_options(options)
            case m.Take():
                stored = (
                    self.copy.of(request.parameter) if request.frozen else self._stored(request.parameter)
                )
                if request.block not in stored.blocks:
                    raise ServerError(f"block {request.block} of {request.parameter} is not here")
                parts = stored.take(request.block)
                return m.Taken(tuple(parts)), list(parts.values())
            case m.Give():
                stored = self._stored(request.parameter)
                if request.block in stored.blocks:
                    return m.Done(repeated=True), []
                owned = request.block in self.map.blocks_of(self.number).get(request.parameter, ())
                if self.allowed is None and not owned:
                    raise ServerError(
                        f"a block of {request.parameter} comes while workers push", hint="hold first"
                    )
                stored.put({request.block: dict(zip(request.names, tensors, strict=False))})
            case m.Remap():
                return self._remap(request.map), []
        return m.Done(), []

    def _remap(self, new: ShardMap) -> m.Answer:
        if new.version <= self.map.version:
            return m.Done(repeated=True)
        mine = new.blocks_of(self.number)
        for name, blocks in mine.items():
            if gone := [b for b in blocks if b not in self._stored(name).blocks]:
                raise ServerError(f"block {gone[0]} of {name} has not come")
        for name, stored in self.stored.items():
            if left := [b for b in stored.blocks if b not in mine.get(name, ())]:
                stored.drop(left)
        self.map, self.allowed, self.mover = new, None, ""
        return m.Done()

    # ---- gradients

    def _push(self, request: m.Push, tensors: m.Tensors) -> m.Answer:
        self._check_worker(request)
        clock = self.clocks.of[request.worker]
        if request.clock < clock:
            self.counts.repeated += 1
            return m.Done(repeated=True)
        if request.map != self.map.version:
            return self._other_map(request.map)
        if self.allowed is not None and request.clock >= self.allowed.get(request.worker, 0):
            return m.Wait()
        if request.clock > clock:
            raise ServerError(
                f"worker {request.worker} pushes step {request.clock}", why=f"its next one is {clock}"
            )
        self.shares.check(self.clocks, clock + 1)
        gradients = self._checked(request, tensors)
        self.counts.pushed_bytes += sum(tensor.nbytes for tensor in tensors)
        self.rounds.setdefault(request.clock, {})[request.worker] = gradients
        self.clocks.of[request.worker] += 1
        self.shares.tell(request.clock, request.worker, request.batch)
        for stream in self.streams.values():
            stream.pushed(request.worker, request.clock)
        self._apply()
        return m.Done()

    def _checked(self, request: m.Push, tensors: m.Tensors) -> Gradients:
        """The gradients of a push. Raises ServerError for any that does not fit."""
        if len(tensors) != len(request.dense) + 2 * len(request.tables):
            raise ServerError(
                f"a push has {len(tensors)} tensors for {len(request.dense)} + 2 × {len(request.tables)}"
            )
        if not (math.isfinite(request.weight) and request.weight >= 0):
            raise ServerError(f"a push of {request.weight} examples")
        if self._missing():
            raise ServerError(
                "a push to a server that has no values yet", why=f"missing: {sorted(self._missing())}"
            )
        dense, rows, rest = {}, {}, iter(tensors)
        for name in request.dense:
            stored = self._here(name)
            dense[name] = _fits(name, next(rest), stored.tensor, stored.tensor.shape)
        for name in request.tables:
            stored, ids = self._table(name), self._ids(name, next(rest))
            rows[name] = (
                ids,
                _fits(name, next(rest), stored.tensor, (len(ids), *stored.parameter.shape[1:])),
            )
        for name, options in request.options.items():
            known = self._stored(name).options
            if strange := sorted(options.keys() - known.keys()):
                raise ServerError(f"the optimizer of {name} has no option {strange[0]!r}")
        return Gradients(request.weight, dense, rows, request.options)

    def _apply(self) -> None:
        """Apply the rounds that are complete, the oldest first."""
        while self.rounds and self.clocks.applies(min(self.rounds)):
            number = min(self.rounds)
            if self.clocks.bound == 0 and not self.shares.complete(number, len(self.rounds[number])):
                return
            group = self.rounds.pop(number)
            pushes = [group[worker] for worker in sorted(group)]
            self._update(pushes)
            for stream in self.streams.values():
                stream.applied(number)
            for worker in group:
                self.counts.applied[worker] = self.counts.applied.get(worker, 0) + 1

    def _update(self, pushes: list[Gradients]) -> None:
        """One update, of the gradients of several workers together."""
        if not sum(push.weight for push in pushes):
            return
        for name, options in pushes[0].options.items():
            self.stored[name].set_options(options)
        for name in dict.fromkeys(name for push in pushes for name in push.dense):
            self.stored[name].update(mean_dense(name, pushes))
        for name in dict.fromkeys(name for push in pushes for name in push.rows):
            ids, rows = mean_rows(name, pushes)
            if self.stored[name].blocks:
                self.stored[name].update(rows, ids)
        self.counts.updates += 1


def _fits(name: str, given: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(given.shape) != tuple(shape) or given.dtype != like.dtype:
        why = f"{like.dtype} {tuple(shape)} is expected"
        raise ServerError(f"a gradient of {name} is {given.dtype} {tuple(given.shape)}", why=why)
    return given


__all__ = ["Reply", "Server"]
