"""A worker's side: splits pulls and pushes over the servers of a map, and joins what they answer."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs

from meshwright.errors import ServerError
from meshwright.servers import messages as m
from meshwright.servers.asking import ask, expected
from meshwright.servers.clipping import agree
from meshwright.servers.local import Requests, Transport
from meshwright.servers.norms import clipped
from meshwright.servers.rounds import sum_rows
from meshwright.servers.rules import row_wise
from meshwright.servers.shards import Options, ShardMap, no_row

Rows = tuple[torch.Tensor, torch.Tensor]
Asked = tuple[list[str], dict[str, torch.Tensor]]  # of one server: names, and which of the ids of each table
LATER_SECONDS = 0.05  # between two requests for samples that others may give back
FILL_BYTES = 64 << 20  # of initial values in one message
START_SECONDS = 60.0  # for the process of a server to start, on a busy machine
FILL_RATE = 1e7  # bytes a second of values that a server draws by seed, on a busy machine


@dataclass
class Traffic:
    """What a worker has moved, in bytes, and the seconds that it took, waiting for others included. Rows that its steps
    have looked up; those that `step.prefetch` had read before, and of them those that were current when they were used.
    `prefetch_seconds`: beside the steps."""

    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    pushed_bytes: int = 0
    push_seconds: float = 0.0
    looked_up_rows: int = 0
    prefetched_rows: int = 0
    current_rows: int = 0
    prefetched_bytes: int = 0
    prefetch_seconds: float = 0.0

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no pulls."""
        before = self.pulled_bytes, self.pull_seconds
        try:
            yield
        finally:
            self.pulled_bytes, self.pull_seconds = before


@dataclass(frozen=True)
class Prefetched:
    """Rows of tables that were read beside a step. `ids`: each once; `map`: the version by which they were split over
    servers. `versions`: by server and table; tables without are only to be pulled together."""

    ids: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    map: int
    versions: dict[int, dict[str, int]]


class Worker:
    """`number`: of the worker. `clock`: steps it has pushed. `least`: the slowest worker's clock at the last pull.
    `before`: steps of an earlier job, whose values were loaded. `options`: of the servers' optimizers when it began.
    `traffic`: what it has moved."""

    def __init__(self, transport: Transport, number: int, declare: m.Declare) -> None:
        """Declare the model to all servers of the map, or of the job's own where it has one already. Raises ServerError
        where they have another model."""
        self.transport, self.number = transport, number
        self.parameters = {p.name: p for p in declare.parameters}
        drawn = sum(4 * math.prod(p.shape) for p in declare.parameters if p.start is not None)
        first = declare.map.first
        if isinstance(transport.ask({first: (m.Look(), [])}, START_SECONDS)[first][0], m.Seen):
            known = ask(transport, {first: (declare, [])}, m.Declared)[first][0]
            declare = structs.replace(declare, map=known.map)
        self.declare = declare
        busy = START_SECONDS + drawn / FILL_RATE
        answers = transport.ask({s: (declare, []) for s in declare.map.servers}, busy)
        found = [expected(answer, m.Declared) for answer, _ in answers.values()]
        self.model: str = found[0].model
        self.map: ShardMap = max((answer.map for answer in found), key=lambda x: x.version)
        self.missing = {
            s: a.missing for (s, (a, _)) in answers.items() if isinstance(a, m.Declared) and a.missing
        }
        self.options = {
            n: o for a, _ in answers.values() if isinstance(a, m.Declared) for n, o in a.options.items()
        }
        self.clock, self.least, self.before = 0, 0, 0
        self.norm: float | None = None  # of all gradients of the last step, if it was computed
        self.traffic = Traffic()
        self.looks_ahead = False  # while a batch is asked for before the step on the one before
        self._asked = -1  # the last request for samples
        self.drained: dict[
            str, int
        ] = {}  # streams of samples that had no more for this worker: in how many epochs

    @property
    def steps(self) -> int:
        """Those that it has pushed, and those of an earlier job."""
        return self.before + self.clock

    def fill(self, values: Callable[[str, range], torch.Tensor]) -> None:
        """Send initial values of what the servers miss. `values`: of a parameter's rows, or of all of it."""
        for server, missing in self.missing.items():
            for name, blocks in missing.items():
                parameter = self.parameters[name]
                each = max(1, FILL_BYTES // max(1, parameter.size_bytes(0)))
                for start in range(0, len(blocks), each):
                    some = blocks[start : start + each]
                    tensors = [values(name, parameter.rows_of(b)).detach().contiguous() for b in some]
                    fill = m.Fill(self.model, name, tuple(some))
                    self.ask_all({server: (fill, tensors)}, m.Done)
        self.missing = {}

    def join(self) -> int:
        """Take part from the next round on that all servers can wait for; the clock of this worker then. They say it
        twice: a server that has just heard that this worker was lost may have let another one forget it again."""
        target, before = 0, set[int]()
        while True:
            asked: Requests = {s: (m.Join(self.model, self.number, target), []) for s in self.map.servers}
            joined = [a for a, _ in self.ask_all(asked, m.Joined).values()]
            clocks, self.before = {a.clock for a in joined}, max(a.steps for a in joined)
            agreed, before, target = clocks == before == {target}, clocks, max(clocks)
            if agreed:
                self.clock = target
                limit = self.declare.limit
                # who has pushed the last step may have been killed
                if target and limit is not None and self.declare.holds and not limit.outside:
                    agree(self.transport, self.model, self.map, target - 1, 0.0)
                return target

    def leave(self) -> None:
        """Let nobody wait for this worker any more."""
        self.ask_all({s: (m.Leave(self.model, self.number), []) for s in self.map.servers}, m.Left)

    def settle(self) -> None:
        """In step, wait until all that this worker has pushed is applied. Raises ServerError if it cannot be."""
        while True:
            pull = m.Pull(self.model, self.map.version, self.number, self.clock)
            if not self._moved(self.ask_all({s: (pull, []) for s in self.map.servers}, m.Values | m.Moved)):
                return

    def deal(self, stream: str, size: int, epoch: int, total: int) -> range:
        """Samples that no other worker has, at most `size` of one epoch; none if all are trained. They are done with
        this worker's next push. It is not waited for while others may have to give theirs back. Raises ServerError."""
        if self.looks_ahead:
            raise ServerError(
                "step.prefetch(…) of batches by step.samples(…)",
                why="samples are dealt for one step after another: those of a batch that waits would count as trained",
                hint="batches of a DataLoader, or step.samples(…) without step.prefetch(…)",
            )
        request, after = time.time_ns(), self._asked
        message = m.Deal(self.model, self.number, stream, request, after, size, epoch, total)
        first = self.map.first
        gone = False
        while (answer := self.ask_all({first: (message, [])}, m.Dealt)[first][0]).later:
            if not gone:  # the others need not wait for a push of this one
                self.leave()
                gone = True
            time.sleep(LATER_SECONDS)
        self._asked = request
        if gone:
            self.join()
        return range(answer.first, answer.stop)

    def freeze(self) -> dict[int, m.Frozen]:
        """Let all servers keep a copy of what they have now: what each optimizer keeps, by server."""
        while True:
            freeze = m.Freeze(self.model, self.map.version, self.number, self.clock)
            answers = self.ask_all({s: (freeze, []) for s in self.map.servers}, m.Frozen | m.Moved)
            if not self._moved(answers):
                return {server: answer for server, (answer, _) in answers.items()}

    # ---- values

    def prefetch(self, transport: Transport, ids: Mapping[str, torch.Tensor]) -> Prefetched | None:
        """Rows of ids, each once, as they are now, for a `pull` that follows. Of tables whose updates change all rows,
        ids alone; None while blocks move. From another thread, with a transport of its own."""
        begin, shards = time.perf_counter(), self.map
        some = {name: x for name, x in ids.items() if row_wise(p := self.parameters[name], p.options)}
        asked = self._split(shards, (), some)
        requests: Requests = {
            s: (
                m.Prefetch(self.model, shards.version, self.number, tuple(where)),
                [ids[t][at] for t, at in where.items()],
            )
            for s, (_, where) in asked.items()
        }
        answers = ask(transport, requests, m.Prefetched)
        if not all(answer.versions for answer, _ in answers.values()):
            return None
        versions = {
            s: dict(zip(where, answers[s][0].versions, strict=True)) for s, (_, where) in asked.items()
        }
        rows = self._joined(asked, answers, some, None)
        self.traffic.prefetched_bytes += sum(x.nbytes for x in rows.values())
        self.traffic.prefetch_seconds += time.perf_counter() - begin
        return Prefetched(dict(ids), rows, shards.version, versions)

    def pull(
        self,
        dense: Sequence[str] = (),
        tables: Mapping[str, torch.Tensor] | None = None,
        known: Prefetched | None = None,
    ) -> dict[str, torch.Tensor]:
        """Values of parameters, and rows of ids of tables, in the order of the ids. Waits while they are older than the
        bound allows. `known`: of the same ids; only rows that have changed since then are sent."""
        begin = time.perf_counter()
        found = self._pull(dense, dict(tables or {}), known)
        self.traffic.pulled_bytes += sum(x.nbytes for x in found.values())
        self.traffic.pull_seconds += time.perf_counter() - begin
        return found

    def _pull(
        self, dense: Sequence[str], ids: Mapping[str, torch.Tensor], known: Prefetched | None
    ) -> dict[str, torch.Tensor]:
        while True:
            if known is not None and known.map != self.map.version:
                known = None  # split otherwise
            asked = self._split(self.map, dense, ids)
            requests: Requests = {
                s: (
                    m.Pull(
                        self.model,
                        self.map.version,
                        self.number,
                        self.clock,
                        tuple(names),
                        tuple(where),
                        {} if known is None else known.versions.get(s, {}),
                    ),
                    [ids[t][at] for t, at in where.items()],
                )
                for s, (names, where) in asked.items()
            }
            answers = self.ask_all(requests, m.Values | m.Moved)
            if self._moved(answers):
                continue
            self.least = min((a.least for a, _ in answers.values()), default=self.least)
            return self._joined(asked, answers, ids, known)

    def _split(
        self, shards: ShardMap, dense: Sequence[str], ids: Mapping[str, torch.Tensor]
    ) -> dict[int, Asked]:
        """What is asked of each server: names, and which of the ids of each table."""
        owners = {name: self._owners(shards, name, x) for name, x in ids.items()}
        plan = {s: self._pulled(shards, s, dense, owners) for s in shards.servers}
        return {s: part for s, part in plan.items() if part[0] or part[1]}

    def _owners(self, shards: ShardMap, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The server of each id. Raises ServerError for ids beyond the table."""
        parameter = self.parameters[name]
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < parameter.rows):
            wrong = ids[(ids < 0) | (ids >= parameter.rows)][0].item()
            raise no_row(wrong, name, parameter.rows)
        owners = torch.tensor(shards.owners[name])
        return owners[torch.div(ids, parameter.block_rows, rounding_mode="floor")]

    @staticmethod
    def _pulled(
        shards: ShardMap, server: int, dense: Sequence[str], owners: Mapping[str, torch.Tensor]
    ) -> Asked:
        names = [name for name in dense if shards.owners[name] == (server,)]
        where = {name: (owner == server).nonzero().flatten() for name, owner in owners.items()}
        return names, {name: at for name, at in where.items() if len(at)}

    def _joined(
        self,
        asked: Mapping[int, Asked],
        answers: Mapping[int, tuple[Any, m.Tensors]],
        ids: Mapping[str, torch.Tensor],
        known: Prefetched | None,
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {} if known is None else dict(known.rows)
        for name, x in ids.items():
            if name in found:
                self.traffic.prefetched_rows += len(x)
                self.traffic.current_rows += len(x)
                continue
            parameter = self.parameters[name]
            found[name] = torch.empty((len(x), *parameter.shape[1:]), dtype=getattr(torch, parameter.dtype))
        for server, (names, where) in asked.items():
            tensors = iter(answers[server][1])
            found.update({name: next(tensors) for name in names})
            for name, at in where.items():
                if known is not None and name in known.rows:
                    at = at[next(tensors)]  # those that have changed
                    self.traffic.current_rows -= len(at)
                found[name].index_copy_(0, at, next(tensors))
        return found

    # ---- gradients

    def push(
        self,
        weight: float,
        dense: Mapping[str, torch.Tensor],
        rows: Mapping[str, Rows] | None = None,
        options: Mapping[str, Options] | None = None,
        batch: str = "",
        others: float = 0.0,
    ) -> None:
        """Send the gradients of a step: means over `weight` examples. Rows of one id are summed first. All servers get
        a push, so that their clocks agree. `batch`: a description that is compared with the other workers'. `others`:
        squares of gradients that are on no server, which count in the norm."""
        begin = time.perf_counter()
        summed = {name: sum_rows(*pair) for name, pair in (rows or {}).items()}
        if self.declare.limit is not None and not self.declare.holds:  # an update of its own
            self.norm, dense, summed = clipped(dense, summed, self.declare.limit)
        while True:
            owners = {name: self._owners(self.map, name, ids) for name, (ids, _) in summed.items()}
            requests = {
                s: self._pushed(s, weight, dense, summed, owners, options or {}, batch)
                for s in self.map.servers
            }
            if not self._moved(self.ask_all(requests, m.Done | m.Moved)) and self._committed():
                break
        self.clock += 1
        if self.declare.holds:
            self.norm = agree(self.transport, self.model, self.map, self.clock - 1, others)
        self.traffic.pushed_bytes += sum(x.nbytes for _, tensors in requests.values() for x in tensors)
        self.traffic.push_seconds += time.perf_counter() - begin

    def _committed(self) -> bool:
        """Let a push count that all servers have prepared; False if blocks have moved meanwhile, and it does not."""
        if len(self.map.servers) == 1:
            return True
        commit = m.Commit(self.model, self.map.version, self.number, self.clock)
        if self._moved(self.ask_all({self.map.first: (commit, [])}, m.Done | m.Moved)):
            return False
        self.ask_all({server: (commit, []) for server in self.map.servers}, m.Done)  # all update at once
        return True

    def _pushed(
        self,
        server: int,
        weight: float,
        dense: Mapping[str, torch.Tensor],
        rows: Mapping[str, Rows],
        owners: Mapping[str, torch.Tensor],
        options: Mapping[str, Options],
        batch: str,
    ) -> tuple[m.Request, m.Tensors]:
        names = [name for name in dense if self.map.owners[name] == (server,)]
        tensors = [dense[name].contiguous() for name in names]
        for name, (ids, gradients) in rows.items():
            at = (owners[name] == server).nonzero().flatten()
            tensors += [ids[at], gradients[at]]
        request = m.Push(
            self.model,
            self.map.version,
            self.number,
            self.clock,
            weight,
            tuple(names),
            tuple(rows),
            dict(options),
            batch,
            prepare=len(self.map.servers) > 1,
        )
        return request, tensors

    # ---- answers

    def ask_all(self, requests: Requests, kind: Any) -> dict[int, tuple[Any, m.Tensors]]:
        return ask(self.transport, requests, kind)

    def _moved(self, answers: Mapping[int, tuple[Any, m.Tensors]]) -> bool:
        """Take a newer map if a server has one; then the request is split again."""
        newer = [a.map for a, _ in answers.values() if isinstance(a, m.Moved)]
        if newer:
            self.map = max(newer, key=lambda x: x.version)
        return bool(newer)


__all__ = ["Prefetched", "Traffic", "Worker"]
