"""One parameter server: answers messages one after another. It knows neither sockets nor threads nor time.

A request is checked in full before anything changes. A push is applied once, however often it arrives: it names its
worker and clock, and the server remembers each worker's clock. A push to several servers counts on all of them or on
none, whoever is killed in between: each prepares it, and once all have it, the worker commits it on the first server,
then on the others. What the first server says of a lost worker's push holds on all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from msgspec import structs

from meshwright.errors import BatchError, ServerError
from meshwright.servers import messages as m
from meshwright.servers.block_moves import answer_moving
from meshwright.servers.dealing import deal
from meshwright.servers.norms import factor, squares
from meshwright.servers.places import LATE_WORKERS
from meshwright.servers.rounds import Gradients, Prepared, mean
from meshwright.servers.rules import check_change
from meshwright.servers.same_job import begins_anew, check_same, of_before
from meshwright.servers.savings import answer_saving
from meshwright.servers.shards import fingerprint
from meshwright.servers.state import Reply, State
from meshwright.servers.store import VALUES


class Server(State):
    """Answers messages, whatever brings them."""

    def answer(self, request: m.Request, tensors: m.Tensors) -> Reply:
        """The answer to a request. A request that is refused changes nothing. Values in step may be the server's own
        tensors, which it changes with the worker's next push."""
        self.apply()  # what a commit has left
        try:
            match request:
                case m.Declare():
                    return self._declare(request), []
                case m.Fill():
                    return self._fill(request, tensors), []
                case m.Join():
                    return self._join(request), []
                case m.Leave():
                    self.check_model(request.model)
                    if request.lost and self.comes_again(request.worker):
                        self.prepared.pop(request.worker, None)
                    else:
                        self._leave(request.worker)
                    return m.Left(self.pushed.get(request.worker, 0)), []
                case m.Pull():
                    return self._pull(request, tensors)
                case m.Prefetch():
                    return self._prefetch(request, tensors)
                case m.Push():
                    return self._push(request, tensors), []
                case m.Commit():
                    return self._commit(request), []
                case m.Measure():
                    return self._measure(request), []
                case m.Clip():
                    return self._clip(request), []
                case m.Deal():
                    return self._deal(request), []
                case m.Look():
                    return self._seen(), []
                case m.Freeze() | m.Thaw() | m.Clear() | m.Begin() | m.Await():
                    self.check_model(request.model)
                    return answer_saving(self, request), []
                case _:
                    self.check_model(request.model)
                    return answer_moving(self, request, tensors)
        except (ServerError, BatchError) as error:
            self.counts.refused += 1
            return m.Refused(error.what, error.why, error.hint, isinstance(error, BatchError)), []

    # ---- what is stored

    def _declare(self, request: m.Declare) -> m.Answer:
        model = fingerprint(request.job, request.parameters)
        if begins_anew(self.declared, request):
            self.forget()
        if self.declared is None:
            if self.lost and not request.attempt:  # else all workers begin anew
                raise self.without_values()
            self.begin(request, request.map)
        else:
            check_same(self.declared, request)
            if request.life > self.declared.life:
                gone = of_before(self.declared, request, self.clocks.of)
                self.declared = structs.replace(self.declared, life=request.life)
                if self.declared.together:
                    self._take_back()
                for worker in gone:
                    self._leave(worker)
                here = len([w for w in self.clocks.of if w < request.workers])
                self.clocks.expected = (
                    0 if here == request.workers else len(self.clocks.of) - here + request.workers
                )
        options = {name: stored.options for name, stored in self.stored.items()}
        return m.Declared(model, self.map, self.missing(), options)

    def _seen(self) -> m.Seen:
        if self.declared is None:
            raise ServerError("this server has no model yet", hint="declare it first")
        clocks, left = dict(self.clocks.of), dict(self.clocks.left)
        blocks = sum(len(stored.blocks) for stored in self.stored.values())
        waiting = sum(map(len, self.rounds.values()))
        d = self.declared
        declared = (d.job, d.bound, d.attempt, d.shares, d.parameters, self.map)
        return m.Seen(*declared, self.size_bytes, blocks, waiting, clocks, left, self.counts, limit=d.limit)

    def _fill(self, request: m.Fill, tensors: m.Tensors) -> m.Answer:
        self.check_model(request.model)
        stored = self.of(request.parameter, True)
        missing = self.missing().get(request.parameter, ())
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
        self.check_model(request.model)
        if self.allowed is not None:
            return m.Wait()
        self.prepared.pop(request.worker, None)  # of its life before
        begins = request.clock
        if request.worker not in self.clocks.of:
            first = self.clocks.left.get(request.worker, 0)
            begins = max(begins, self.clocks.least(), first)
        elif self.clocks.of[request.worker] > begins:
            return m.Joined(self.clocks.of[request.worker], self.began.steps if self.began else 0)
        self.clocks.join(request.worker, begins)
        self.apply()
        return m.Joined(begins, self.began.steps if self.began else 0)

    def comes_again(self, worker: int) -> bool:
        """Whether a worker that is lost is started again, together with all others."""
        return self.declared is not None and self.declared.together and worker < LATE_WORKERS

    def _take_back(self) -> None:
        """Forget what workers have pushed for a step that others have not: all that start again do it again. Some may
        have left, asked to end."""
        for number in [n for n in self.rounds if not self.clocks.applies(n)]:
            for worker in [w for w in self.rounds[number] if w < LATE_WORKERS]:
                del self.rounds[number][worker]
                (self.clocks.of if worker in self.clocks.of else self.clocks.left)[worker] = number
                self.pushed[worker] = number
                for stream in self.streams.values():
                    stream.taken_back(worker, number)
            if not self.rounds[number]:
                del self.rounds[number]
            self.mean = None

    def _leave(self, worker: int) -> None:
        """Wait for a worker no more."""
        for stream in self.streams.values():
            stream.left(worker)
        self.prepared.pop(worker, None)
        self.clocks.leave(worker)
        self.copy.forget(worker)
        self.apply()

    def _deal(self, request: m.Deal) -> m.Answer:
        self.check_model(request.model)
        sizes = (request.size, request.epoch, request.total)
        found = deal(self.streams, request.stream, request.worker, request.request, request.after, *sizes)
        return m.Dealt(0, 0, later=True) if found is None else m.Dealt(*found)

    # ---- values

    def _pull(self, request: m.Pull, tensors: m.Tensors) -> Reply:
        self.check_worker(request)
        if request.map != self.map.version:
            return self.other_map(request.map), []
        if request.clock != (clock := self.clocks.of[request.worker]):
            raise ServerError(
                f"worker {request.worker} reads for step {request.clock}", why=f"its next one is {clock}"
            )
        if len(tensors) != len(request.tables):
            raise ServerError(f"ids of {len(tensors)} tables, not of {len(request.tables)}")
        dense = [self.here(name) for name in request.dense]
        tables = [
            (self.table(name), self.ids(name, ids)) for name, ids in zip(request.tables, tensors, strict=True)
        ]
        self.shares.check(self.clocks, request.clock)
        if self.missing() or not self.clocks.may_read(request.clock) or self.holds(request.clock):
            return m.Wait(), []
        self.counts.pulls += 1
        self.counts.oldest = max(self.counts.oldest, request.clock - self.clocks.least())
        values = [stored.tensor.detach() for stored in dense]
        if (
            self.clocks.bound != 0
        ):  # others may push while it is sent; in step, no update happens without this worker
            values = [tensor.clone() for tensor in values]
        for stored, ids in tables:
            if (version := request.since.get(stored.parameter.name)) is not None:
                at = stored.changed(ids, version)
                self.counts.prefetched_rows += len(ids)
                self.counts.current_rows += len(ids) - len(at)
                values.append(at)
                ids = ids.index_select(0, at)
            values.append(stored.read(ids))
        self.counts.pulled_bytes += sum(tensor.nbytes for tensor in values)
        return m.Values(self.clocks.least(), self.counts.updates), values

    def _prefetch(self, request: m.Prefetch, tensors: m.Tensors) -> Reply:
        """Rows as they are now. A pull says later which of them have changed."""
        self.check_worker(request)
        if request.map != self.map.version or self.missing():
            return m.Prefetched(()), []
        if len(tensors) != len(request.tables):
            raise ServerError(f"ids of {len(tensors)} tables, not of {len(request.tables)}")
        tables = [
            (self.table(name), self.ids(name, ids)) for name, ids in zip(request.tables, tensors, strict=True)
        ]
        values = [stored.read(ids) for stored, ids in tables]
        self.counts.pulled_bytes += sum(tensor.nbytes for tensor in values)
        return m.Prefetched(tuple(stored.version() for stored, _ in tables)), values

    # ---- gradients

    def _push(self, request: m.Push, tensors: m.Tensors) -> m.Answer:
        self.check_worker(request)
        clock = self.clocks.of[request.worker]
        if request.clock < clock:
            self.counts.repeated += 1
            return m.Done(repeated=True)
        if request.map != self.map.version:
            return self.other_map(request.map)
        if self.allowed is not None and request.clock >= self.allowed.get(request.worker, 0):
            return m.Wait()
        if request.clock > clock:
            raise ServerError(
                f"worker {request.worker} pushes step {request.clock}", why=f"its next one is {clock}"
            )
        self.shares.check(self.clocks, clock + 1)
        gradients = self._checked(request, tensors)
        self.counts.pushed_bytes += sum(tensor.nbytes for tensor in tensors)
        self.shares.tell(request.clock, request.worker, request.batch)
        if request.prepare:
            self.prepared[request.worker] = Prepared(clock, gradients)
        else:
            self._count(request.worker, gradients)
            self.apply()
        return m.Done()

    def _commit(self, request: m.Commit) -> m.Answer:
        self.check_worker(request)
        if request.clock < self.clocks.of[request.worker]:
            return m.Done(repeated=True)
        if request.map != self.map.version:
            return self.other_map(request.map)
        if self.allowed is not None and request.clock >= self.allowed.get(request.worker, 0):
            return m.Wait()
        push = self.prepared.get(request.worker)
        if push is None or push.clock != request.clock:
            raise ServerError(f"step {request.clock} of worker {request.worker} is not prepared")
        del self.prepared[request.worker]
        self._count(request.worker, push.gradients)
        if self.number != self.map.first:
            self.apply()
        return m.Done()  # the first one updates with the next request, when the others hear of it

    def settle(self, pushed: Mapping[int, int]) -> None:
        """Let prepared pushes count if they do on the first server, and drop the others. `pushed`: what it has."""
        for worker, push in list(self.prepared.items()):
            del self.prepared[worker]
            if pushed.get(worker, 0) > push.clock:
                self._count(worker, push.gradients)

    def _count(self, worker: int, gradients: Gradients) -> None:
        """Let the next push of a worker count."""
        clock = self.clocks.of[worker]
        self.rounds.setdefault(clock, {})[worker] = gradients
        self.clocks.of[worker] = self.pushed[worker] = clock + 1
        for stream in self.streams.values():
            stream.pushed(worker, clock)

    def _checked(self, request: m.Push, tensors: m.Tensors) -> Gradients:
        """The gradients of a push. Raises ServerError for any that does not fit."""
        if len(tensors) != len(request.dense) + 2 * len(request.tables):
            raise ServerError(
                f"a push has {len(tensors)} tensors for {len(request.dense)} + 2 × {len(request.tables)}"
            )
        if len({*request.dense, *request.tables}) < len(request.dense) + len(request.tables):
            raise ServerError("a push names a parameter twice")
        if not (math.isfinite(request.weight) and request.weight >= 0):
            raise ServerError(f"a push of {request.weight} examples")
        if self.missing():
            raise ServerError(
                "a push to a server that has no values yet", why=f"missing: {sorted(self.missing())}"
            )
        dense, rows, rest = {}, {}, iter(tensors)
        for name in request.dense:
            stored = self.here(name)
            dense[name] = _fits(name, next(rest), stored.tensor, stored.tensor.shape)
        for name in request.tables:
            stored, ids = self.table(name), self.ids(name, next(rest))
            rows[name] = (
                ids,
                _fits(name, next(rest), stored.tensor, (len(ids), *stored.parameter.shape[1:])),
            )
        for name, options in request.options.items():
            stored = self.of(name)
            known = stored.options
            if strange := sorted(options.keys() - known.keys()):
                raise ServerError(f"the optimizer of {name} has no option {strange[0]!r}")
            check_change(stored.parameter, known, options)
        return Gradients(request.weight, dense, rows, request.options)

    def apply(self) -> None:
        """Apply the rounds that are complete, the oldest first."""
        while self.rounds and self.complete(number := min(self.rounds)):
            if self.limit is not None and self.norm[0] < number:
                return
            gradients, group = self._mean(number), self.rounds.pop(number)
            self._update(gradients)
            for stream in self.streams.values():
                stream.applied(number)
            for worker in group:
                self.counts.applied[worker] = self.counts.applied.get(worker, 0) + 1

    def _mean(self, number: int) -> Gradients:
        """The gradients of several workers together."""
        if self.mean is None or self.mean[0] != number:
            group = self.rounds.get(number, {})
            self.mean = number, mean([group[worker] for worker in sorted(group)])
        return self.mean[1]

    def _update(self, gradients: Gradients) -> None:
        """One update."""
        self.mean = None
        if not gradients.weight:
            return
        scale = factor(self.norm[1], self.limit)
        for name, options in gradients.options.items():
            self.stored[name].set_options(options)
        for name, gradient in gradients.dense.items():
            self.stored[name].update(_scaled(gradient, scale))
        for name, (ids, rows) in gradients.rows.items():
            if self.stored[name].blocks:
                self.stored[name].update(_scaled(rows, scale), ids)
        self.counts.updates += 1

    def _measure(self, request: m.Measure) -> m.Answer:
        self.check_clips(request)
        self.shares.check(self.clocks, request.clock + 1)
        if request.clock <= self.norm[0]:
            return m.Measured(0.0, self.norm[1])
        if not self.complete(request.clock):
            return m.Wait()
        return m.Measured(squares(self._mean(request.clock)), None)

    def _clip(self, request: m.Clip) -> m.Answer:
        self.check_clips(request)
        if request.clock <= self.norm[0]:
            return m.Done(repeated=True)
        if not self.complete(request.clock):
            raise ServerError(f"the norm of step {request.clock}", why="not all workers have pushed it")
        self.norm = request.clock, request.norm
        self.apply()
        return m.Done()


def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    return gradient if scale == 1.0 else gradient * scale


def _fits(name: str, given: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(given.shape) != tuple(shape) or given.dtype != like.dtype:
        why = f"{like.dtype} {tuple(shape)} is expected"
        raise ServerError(f"a gradient of {name} is {given.dtype} {tuple(given.shape)}", why=why)
    return given


__all__ = ["Reply", "Server"]
