"""A step of an eager model of which some or all parameters live on parameter servers.

A worker pulls values, computes a gradient on its own batch, and pushes it; servers update. What is not on servers is
all-reduced among the workers and updated on each, as by `mw.manual_step`.

What few workers need is imported where it is used: one that joins while others train has its first push sooner.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from meshwright import heartbeat
from meshwright.errors import did_you_mean
from meshwright.loss.evaluation import evaluating
from meshwright.loss.example_count import Share, Weight, examples, examples_of_each, weight_of
from meshwright.loss.loss_value import AFTER_BACKWARD, Loss, trainable
from meshwright.parameter_server.server_optimizers import Optimizers, check_equal, check_update, declared
from meshwright.parameter_server.server_weights import ServerWeights, check_free, initial, not_copied, seldom
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.mean_gradients import mean_gradients
from meshwright.runtime.rendezvous import launched_rank, launched_world, load_compiler
from meshwright.servers import messages as m
from meshwright.servers import of_job
from meshwright.servers.ahead import Ahead, Batch, named
from meshwright.servers.at_end import OPEN
from meshwright.servers.beside import Beside
from meshwright.servers.dealt import check_samples, dealt
from meshwright.servers.lookups import Lookups
from meshwright.servers.marks import Factory, check_all_reduced, marked, tables
from meshwright.servers.moving import begin_to_use
from meshwright.servers.norms import limit_of, other_norm, shown_limit, unknown_norm
from meshwright.servers.of_job import ALL_REDUCED, SHARES
from meshwright.servers.places import JOINS
from meshwright.servers.rejoin import starts_together, take_part
from meshwright.servers.shards import Options, spread
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Prefetched, Traffic, Worker

if TYPE_CHECKING:
    from meshwright.checkpoint.load import Loaded
    from meshwright.checkpoint.of_servers import ServerState
    from meshwright.runtime.world import World

NOTHING: dict[str, torch.Tensor] = {}
Describe = Callable[[Any, Sequence[torch.optim.Optimizer]], str]  # what is compared with other workers


class ServerStep:
    """A step with parameters on servers, returned by `mw.parameter_server`, and by `mw.train_step` with
    ``mode="parameter_server"``: ``loss = step(batch)``.

    `optimizer`: change its options, as a schedule of the learning rate does; servers follow with the next push. In its
    groups, tensors on the meta device stand for parameters on servers. `rank`: the number of this worker, of the
    `workers` that were started together. `worker`: pulls and pushes by hand.

    Outside of a step, calling the model and `model.state_dict()` pull the values of now; whatever else needs a
    parameter on a server raises ServerError. Buffers, such as running statistics, are each worker's own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        factory: Factory,
        loss: Loss,
        staleness: int | None,
        weight: Weight = examples,
        share: Share | None = None,
        describe: Describe | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """`share`: what this worker trains of a batch that all are given; None for a batch of its own. `describe`: what
        shows whether all were given the same."""
        check_free(model)
        marks = marked(model)
        by_rows = tables(model, marks)
        self.model, self.loss = model, loss
        load_compiler()  # which the first optimizer does, and takes longer
        self._optimizers = Optimizers(model, marks, factory)
        named = dict(model.named_parameters())
        parameters = declared(model, marks, by_rows, self._optimizers)
        self._rest = {n: p for n, p in named.items() if p.requires_grad and n not in marks}
        limit = limit_of(clip_norm, staleness, outside=bool(self._rest))
        count, number = launched_world(), launched_rank()
        of_job.check_goes_on(list(self._rest), share is not None)
        if count > 1:
            check_all_reduced(model, self._rest, () if staleness != 0 else marks.keys() - by_rows.keys())
        counts = weight is examples and count > 1 and (staleness == 0 or bool(self._rest))
        self.weight = examples_of_each if counts else weight
        transport, servers = of_job.transport(count)
        late = isinstance(transport, Remote) and bool(os.environ.get(JOINS))
        if isinstance(transport, Remote) and late:
            number = of_job.comes_late(transport, share is not None, list(self._rest))
        job = transport.meeting.job if isinstance(transport, Remote) else of_job.ALONE
        of_job.check_first(job)
        shares = share is not None
        attempt = of_job.begun(transport, outside=bool(self._rest) or shares)
        spread_now, life = spread(parameters, servers), 0 if late else of_job.life()
        together = not (late or shares) and starts_together()  # no step is made of some shares alone
        declare = m.Declare(
            job, parameters, spread_now, staleness, count, attempt, shares, life, limit, together
        )
        self.rank, self.workers = number, count
        self.worker = Worker(transport, number, declare)
        if number == 0:
            self.worker.fill(lambda name, rows: initial(named[name], name in by_rows, rows))
        self.worker.join()
        of_job.JOBS.add(job)
        self._begun_at = of_job.goes_on(self.worker, declare)
        # of a job that goes on, servers have options of later
        self._sent: dict[str, Options] = {} if self.worker.clock else {p.name: p.options for p in parameters}
        self._tables, self._lookups, self._ahead = by_rows, Lookups(), Ahead(self.worker)
        for name, module in by_rows.items():
            self._lookups.attach(name, module, lambda ids, name=name: self.worker.pull((), {name: ids})[name])
        self._active = False
        self._writing: Beside | None = None
        every = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        self._saved = [n for n in model.state_dict(keep_vars=True) if n in every and n not in marks]
        dense = {n: named[n] for n in marks if n not in by_rows}
        self._weights = ServerWeights(model, dense, by_rows, self._rest, alone=count == 1)
        self._weights.show(self, lambda: self._active, self._pull_dense, self._pull_table)
        self._world: World | None = None
        if self._rest and count > 1:
            from meshwright.manual import world

            self._world = world()
            start_equal(self._world.comm, self._world.device, self._rest, 0)
        self._shares, self._describe = shares, describe if shares and count > 1 else None
        self._share = share if count > 1 else None
        self._own = (lambda batch: batch) if share is None else lambda batch: share(batch, number, count)
        unable = ALL_REDUCED if self._world is not None else SHARES if share is not None and count > 1 else ""
        take_part(launched_rank(), unable)
        OPEN.add(self.worker)

    if not TYPE_CHECKING:  # a type checker shall go on to see what is not there

        def __getattr__(self, name: str) -> NoReturn:
            """Only what a step lacks comes here. Raises AttributeError, which names what to write instead."""
            from meshwright.core.other_systems import OF_A_SERVER_STEP

            has = [n for n in dir(type(self)) if n[0] != "_"]
            hint = OF_A_SERVER_STEP.get(name) or did_you_mean(name, has)
            raise AttributeError(f"a step with parameters on servers has no {name!r}; {hint}", name=name)

    @functools.cached_property
    def _state(self) -> ServerState:
        """What checkpoints have of this step."""
        from meshwright.checkpoint.of_servers import ServerState

        of = {**self._optimizers.placeholders, **self._rest}
        return ServerState(self.worker, self.model, self._saved, self._optimizers.every, of)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of what has none of its own."""
        return self._optimizers.main

    @property
    def traffic(self) -> Traffic:
        """The bytes that this worker has pulled and pushed so far, and the seconds that it took."""
        return self.worker.traffic

    @property
    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients of the last update, before clipping. Raises ServerError if none was computed."""
        if self.worker.norm is None:
            raise unknown_norm(self.worker.declare.limit)
        return torch.tensor(self.worker.norm)

    @property
    def clip_norm(self) -> float | None:
        """The 2-norm to which gradients are clipped. It cannot be changed: raises ServerError."""
        return shown_limit(self.worker.declare.limit)

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        raise other_norm(norm)

    @property
    def steps(self) -> int:
        """The number of steps that this worker has pushed, and of those before the checkpoint that was loaded."""
        self._begun_at = 0
        return self.worker.steps

    def __call__(self, batch: Any, *, update: bool = True) -> Any:
        """Run one step on this worker's own batch, of any size, and return the loss of this batch. With
        ``mode="parameter_server"`` all workers are given the global batch, and each trains its share of it.

        In step (``staleness=0``) the update is that of one device on all workers' batches together, if the loss is a
        mean over examples. If the loss function returns ``(loss, outputs)``, so does the step. Raises ServerError; with
        that mode also where another worker has ended before, and BatchError where workers passed different batches or,
        as is checked in steps 1, 2, 4, 8, …, the loss is no such mean.
        """
        check_update(update)
        of_job.check_begins(self._begun_at)
        told = "" if self._describe is None else self._describe(batch, self._optimizers.every)
        self._check_mean(batch)
        batch = self._own(batch)
        weight = weight_of(self.weight, batch)
        self._weights.check()
        self._optimizers.check()
        self._active = True
        try:
            return self._step(batch, weight, told)
        finally:
            self._active = False
            self._lookups.end()
            self._weights.give_up(clear=True)
            heartbeat.step(self.worker.steps)
            heartbeat.doing(heartbeat.OWN_CODE)

    def _check_mean(self, batch: Any) -> None:
        """Raise BatchError if the loss of a batch is not the mean of those of its shares."""
        if self._share is None or not seldom(self.worker.clock + 1):
            return
        from meshwright.loss.mean_loss import check_mean

        with self.traffic.uncounted(), self._lookups.kept(), self._reading():
            check_mean(self.model, self.loss, self.weight, batch, self._share, self.workers)

    def _step(self, batch: Any, weight: float, told: str) -> Any:
        ahead = self._ahead.take()
        ids = {} if ahead is None else ahead.ids
        rows_of = self._pull_dense(ids, ahead)
        self._weights.fill(rows_of)
        self._lookups.begin({name: (each, rows_of[name]) for name, each in ids.items()})
        given = self.loss(self.model, batch)
        loss, outputs = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        self._weights.check_loss(rows for leaves in self._lookups.leaves.values() for _, rows in leaves)
        trainable(loss, self.loss).backward()
        self.traffic.looked_up_rows += self._lookups.rows
        pulled = rows_of if seldom(self.worker.clock) else NOTHING  # to compare takes as long as a copy
        dense, rows = self._weights.gradients(pulled), self._lookups.gradients()
        if not weight:  # no example: whatever the loss made of that does not count
            dense, rows = {}, {}
            for parameter in self._rest.values():
                parameter.grad = None
        if self._world is not None:
            marks = self._optimizers.marks()
            sums = mean_gradients(list(self._rest.values()), weight, self._world.comm, marks)
            check_equal(sums, self._world.mesh.size)
        options = {name: self._optimizers.options(name) for name in self.worker.parameters}
        changed = {name: now for name, now in options.items() if now != self._sent.get(name)}
        limit = self.worker.declare.limit
        squares = 0.0 if limit is None else self._weights.squares()
        self.worker.push(weight, dense, rows, changed, told, squares)
        self._sent = options
        self._weights.clip(self.worker.norm, limit)
        self._optimizers.step()
        found = loss.detach()
        vars(found).update(AFTER_BACKWARD)
        return found if outputs is None else (found, outputs)

    def samples(self, count: int, batch: int, *, epochs: int = 1, seed: int = 0) -> Iterator[torch.Tensor]:
        """Yield indices [n] of a data set of `count` samples, at most `batch`, each index once an epoch over all
        workers together: those that come, go or are killed included. Call the step once with the samples of each.

        Indices are shuffled by `seed` and epoch. They are dealt by a server as workers ask for them, so a fast worker
        gets more. The samples of a worker that is killed before its push are dealt again. Checkpoints have the
        position: a job that loads one deals the samples that are not trained in it, to any number of workers, if
        `count` and `seed` are the same. Raises ServerError.
        """
        check_samples(self._shares, count=count, batch=batch, epochs=epochs)
        self._begun_at = 0
        return dealt(self.worker, count, batch, epochs, seed)

    def prefetch(
        self, batches: Iterable[Batch], ids: Callable[[Batch], Mapping[torch.nn.Module, torch.Tensor]]
    ) -> Iterator[Batch]:
        """Yield batches, and read table rows of the next one while the step on this one runs. Call the step once with
        each. Values are the same as without it: the step asks servers for the rows that have changed since then, of all
        tables at once. `traffic` has the share of rows that had not.

        Args:
            batches: Such as a DataLoader, but none by `samples`. It is asked for one batch ahead.
            ids: The ids that marked embeddings will look up in a batch, ``lambda batch: {model.ids: batch["ids"]}``.
                Rows of ids that are missing there are pulled when they are looked up.

        Raises ServerError for a module that is no marked embedding.
        """
        return self._ahead.over(batches, named(self._tables, lambda batch: ids(self._own(batch))))

    def evaluate(self, batch: Any) -> Any:
        """Return the loss of this worker's batch in evaluation mode, by the values that the servers have now."""
        with self._reading():
            return self.loss(self.model, self._own(batch))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Have the values of now, in evaluation mode."""
        self._active = True
        try:
            with evaluating(self.model):
                self._weights.fill(self._pull_dense())
                yield
        finally:
            self._active = False
            self._weights.give_up(clear=False)

    def save(
        self, path: str | Path, *, data: Any = None, async_: bool = False, keep: int | None = 2
    ) -> Path | None:
        """Write a checkpoint that any step loads, with servers or without. Every worker may call it: worker 0 writes,
        and the others do nothing.

        Its values are those after this worker's last step; without ``staleness=0`` steps of other workers may be in it
        in part. Servers keep what changes while worker 0 writes, block by block.

        Args:
            path: A folder. The checkpoint is ``path/step-00000100``.
            data: More to save: JSON values, tensors, and objects with ``state_dict``, alone or in dicts and lists.
            async_: Return at once, and write while training continues. The next `save`, or `wait`, raises the error if
                writing fails. In step, the others wait for worker 0 without it.
            keep: How many checkpoints to keep in `path`; None keeps all.

        Returns the path of the checkpoint on worker 0. Raises CheckpointError and ServerError; then nothing is saved.
        """
        if self.worker.number:
            return None
        from meshwright.checkpoint.save_servers import save

        self.wait()
        final, write = save(self._state, path, data=data, keep=keep, copied=async_)
        if async_:
            self._writing = Beside(write, f"save {final.name}", cut_off=False)
        else:
            write()
        return final

    def wait(self) -> None:
        """Wait for a running asynchronous save. Raises CheckpointError or ServerError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def load(self, path: str | Path, *, data: Any = None, optimizer: bool = True) -> Loaded:
        """Load a checkpoint, of this step or any other, before the first step. Every worker calls it, with the same
        path: worker 0 reads what servers have and sends it, and each reads what is on no server.

        Args:
            path: A folder of checkpoints (worker 0 chooses the newest), one checkpoint, a safetensors file or a Hugging
                Face folder.
            data: The structure that was passed to `save`; its objects get ``load_state_dict``.
            optimizer: False loads weights only, and `samples` begins anew.

        Raises CheckpointError for a checkpoint of another model or other optimizers, or a damaged one; ServerError once
        workers have pushed.
        """
        from meshwright.checkpoint.load_servers import load

        return load(self._state, path, data=data, optimizer=optimizer)

    def resume(self, path: str | Path, *, data: Any = None) -> Loaded | None:
        """Load the newest undamaged checkpoint in `path`, or nothing if there is none. Every worker calls it, before
        its first step. A worker of a job that goes on loads nothing: the servers have newer values."""
        if self.worker.clock:
            return None
        from meshwright.checkpoint.load_servers import resume

        return resume(self._state, path, data=data, told=lambda text: print(text, file=sys.stderr))

    def full_state(self) -> dict[str, torch.Tensor]:
        """A copy of the trained model as ``model.state_dict()`` names it, tables in full, on the host."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def use_servers(self, count: int) -> Beside:
        """Spread the parameters over another number of servers of `meshwright run`, while training goes on. One worker
        calls it. Raises ServerError without such servers.

        The move runs beside the steps: workers wait only while blocks are copied. Values and moments stay the same.
        """
        return begin_to_use(self.worker.transport, self.worker.declare, count)

    def close(self) -> None:
        """Leave the job: the other workers no longer wait for this one. A running save is waited for."""
        self.wait()
        OPEN.discard(self.worker)
        self._weights.close()
        self.worker.leave()
        self.worker.transport.close()

    def _pull_dense(
        self, ids: Mapping[str, torch.Tensor] = NOTHING, known: Prefetched | None = None
    ) -> dict[str, torch.Tensor]:
        """Values of what is pulled in full. `ids`: of tables of which rows are pulled with it."""
        dense = tuple(self._weights.dense)
        return self.worker.pull(dense, ids, known) if dense or ids else {}

    def _pull_table(self, name: str) -> torch.Tensor:
        return self.worker.pull((), {name: torch.arange(self.worker.parameters[name].rows)})[name]

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise ServerError: a copy would have no values."""
        raise not_copied("a step with parameters on servers")


__all__ = ["ServerStep"]
