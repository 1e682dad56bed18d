"""`mw.parameter_server`: a step of an eager model of which some or all parameters live on parameter servers.

A worker pulls values, computes a gradient on its own batch, and pushes it; servers update. What is not on servers is
all-reduced among the workers and updated on each, as by `mw.manual_step`.

What few workers need is imported where it is used: one that joins while others train has its first push sooner.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from meshwright import heartbeat
from meshwright.core.type_guards import is_whole
from meshwright.errors import BatchError, ServerError, did_you_mean
from meshwright.loss_value import AFTER_BACKWARD, Loss, default_loss
from meshwright.model_checks import check_function, check_model
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.mean_gradients import mean_gradients
from meshwright.runtime.rendezvous import launched_rank, launched_world, load_compiler
from meshwright.servers import messages as m
from meshwright.servers import of_job
from meshwright.servers.beside import Beside
from meshwright.servers.declared import Optimizers, declared
from meshwright.servers.lookups import Lookups, no_values
from meshwright.servers.marks import Factory, marked, tables
from meshwright.servers.meeting import JOINS
from meshwright.servers.moving import use_servers
from meshwright.servers.rejoin import take_part
from meshwright.servers.shards import MOST_SERVERS, Options, spread
from meshwright.servers.sockets import Remote
from meshwright.servers.worker import Traffic, Worker

if TYPE_CHECKING:
    from meshwright.checkpoint.load import Loaded
    from meshwright.checkpoint.of_servers import ServerState
    from meshwright.runtime.world import World

ALL_REDUCED = "parameters that are on no server are all-reduced among the workers"
EPOCHS = 1 << 20  # between the seeds of two orders of samples
NESTED = 4  # levels of a batch in which a first tensor is looked for without importing the capture
SHARES = "each worker trains its share of every batch"
STEP = "meshwright_server_step"
_SHARING: weakref.WeakSet[ServerStep] = weakref.WeakSet()  # steps whose workers train shares of one batch
Weight = Callable[[Any], float]
Share = Callable[[Any, int, int], Any]  # a batch, a worker's number, how many there are → its examples
Describe = Callable[[Any], str]  # a batch → what is compared with other workers


def examples(batch: Any) -> float:
    """The size of the first dim of a batch's first tensor. Raises BatchError without one."""
    first = batch
    for _ in range(NESTED):
        if isinstance(first, Mapping | list | tuple) and first:
            first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if isinstance(first, torch.Tensor) and first.dim():
        return float(first.shape[0])
    from meshwright.capture.pytree import leaves

    for _, tensor in leaves(batch):
        if tensor.dim():
            return float(tensor.shape[0])
    raise BatchError(
        "how many examples are in this batch?",
        why="it has no tensor with a dim",
        hint="mw.parameter_server(…, weight=lambda batch: …)",
    )


def _scalar(value: Any) -> torch.Tensor:
    """A user's loss as a scalar. Raises CaptureError for what is none."""
    if isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point():
        return value
    from meshwright.capture.trace import scalar_of

    return scalar_of(value)


def _world() -> World:
    from meshwright.manual import world

    return world()


class ServerStep:
    """A step with parameters on servers, returned by `mw.parameter_server`, and by `mw.train_step` with
    ``mode="parameter_server"``: ``loss = step(batch)``.

    `optimizer`: change its options, as a schedule of the learning rate does; servers follow with the next push. In its
    groups, tensors on the meta device stand for parameters on servers. `rank`: the number of this worker. `worker`:
    pulls and pushes by hand.

    Outside of a step, calling the model and `model.state_dict()` pull the values of now; a parameter on a server that
    is read without either is NaN. Buffers, such as running statistics, are each worker's own.
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
    ) -> None:
        """`share`: what this worker trains of a batch that all are given; None for a batch of its own. `describe`: what
        shows whether all were given the same."""
        if STEP in vars(model):
            raise ServerError(
                "this model has a step with parameters on servers already", hint="use that step"
            )
        marks = marked(model)
        by_rows = tables(model, marks)
        self.model, self.loss, self.weight = model, loss, weight
        load_compiler()  # which the first optimizer does, and takes longer
        self._optimizers = Optimizers(model, marks, factory)
        named = dict(model.named_parameters())
        parameters = declared(model, marks, by_rows, self._optimizers)
        for parameter in parameters:
            if named[parameter.name].is_meta and (parameter.start is None or not parameter.table):
                raise no_values(parameter.name)
        self._rest = {n: p for n, p in named.items() if p.requires_grad and n not in marks}
        count, number = launched_world(), launched_rank()
        transport, servers = of_job.transport(count)
        if isinstance(transport, Remote) and os.environ.get(JOINS):
            number = self._comes_late(transport, share is not None)
        job = transport.meeting.job if isinstance(transport, Remote) else "alone"
        # What is on no server is lost when all workers start again, so what servers have would not fit it. Shares of a
        # step that was pushed in part would not either.
        shares = share is not None
        attempt = of_job.attempt() if self._rest or shares else 0
        spread_now = spread(parameters, servers)
        self._declare = m.Declare(job, parameters, spread_now, staleness, count, attempt, shares)
        self.rank = number
        self.worker = Worker(transport, number, self._declare)
        if number == 0:
            self.worker.fill(lambda name, rows: _values(named[name], name in by_rows, rows))
        self.worker.join()
        self._sent: dict[str, Options] = {p.name: p.options for p in parameters}
        self._dense = {n: named[n] for n in marks if n not in by_rows}
        self._tables, self._lookups = by_rows, Lookups()
        for name, module in by_rows.items():
            self._lookups.attach(name, module, lambda ids, name=name: self.worker.pull((), {name: ids})[name])
        self._active = False
        self._writing: Beside | None = None
        every = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        self._saved = [n for n in model.state_dict(keep_vars=True) if n in every and n not in marks]
        self._show_trained()
        self._world = _world() if self._rest and count > 1 else None
        if self._world is not None:
            start_equal(self._world.comm, self._world.device, self._rest, 0)
        self._shares, self._describe = shares, describe if shares and count > 1 else None
        self._own = (lambda batch: batch) if share is None else lambda batch: share(batch, number, count)
        unable = ALL_REDUCED if self._world is not None else SHARES if share is not None and count > 1 else ""
        take_part(launched_rank(), unable)
        if self._describe is not None:
            _SHARING.add(self)

    def _comes_late(self, transport: Remote, shares: bool) -> int:
        """The number of a worker that comes while others train. Raises ServerError where these would not notice."""
        if shares:
            raise ServerError(
                "a worker cannot come while others train",
                why=SHARES,
                hint="mw.parameter_server(…), and batches by step.samples(…)",
            )
        if self._rest:
            raise ServerError(
                "a worker cannot come while others train",
                why=f"{ALL_REDUCED}: {', '.join(list(self._rest)[:5])}",
                hint="mw.on_server(model), or no mark at all: then all parameters are on servers",
            )
        return transport.meeting.worker()

    if not TYPE_CHECKING:  # a type checker shall go on to see what is not there

        def __getattr__(self, name: str) -> NoReturn:
            """Only what a step lacks comes here. Raises AttributeError, which names what to write instead."""
            from meshwright.elsewhere import OF_A_SERVER_STEP

            hint = OF_A_SERVER_STEP.get(name) or did_you_mean(
                name, [n for n in dir(type(self)) if n[0] != "_"]
            )
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
    def steps(self) -> int:
        """The number of steps that this worker has pushed, and of those before the checkpoint that was loaded."""
        return self.worker.before + self.worker.clock

    def __call__(self, batch: Any, *, update: bool = True) -> Any:
        """Run one step on this worker's own batch, of any size, and return the loss of this batch. With
        ``mode="parameter_server"`` all workers are given the global batch, and each trains its share of it.

        In step (``staleness=0``) the update is that of one device on all workers' batches together, if the loss is a
        mean over examples. If the loss function returns ``(loss, outputs)``, so does the step. Raises ServerError; with
        that mode also where another worker has ended before, and BatchError where workers passed different batches.
        """
        if update is not True:
            raise ServerError(
                f"step(batch, update={update!r}) on parameter servers",
                why="each step is pushed: gradients are not accumulated",
                hint="one step(batch) with the examples of all micro-batches",
            )
        told = "" if self._describe is None else self._describe(batch)
        batch = self._own(batch)
        weight = self.weight(batch)
        self._active = True
        try:
            return self._step(batch, weight, told)
        finally:
            self._active = False
            heartbeat.step(self.steps)
            heartbeat.doing(heartbeat.OWN_CODE)

    def _step(self, batch: Any, weight: float, told: str) -> Any:
        for parameter in (*self._rest.values(), *self._dense.values()):
            parameter.grad = None
        self._pull_dense()
        self._lookups.begin()
        given = self.loss(self.model, batch)
        loss, outputs = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        _scalar(loss).backward()
        rows = self._lookups.gradients()
        if self._world is not None:
            mean_gradients(list(self._rest.values()), weight, self._world.comm)
        if self._rest and self.optimizer is not None:
            self.optimizer.step()
        dense = {n: p.grad for n, p in self._dense.items() if p.grad is not None}
        self.worker.push(weight, dense, rows, self._changed(), told)
        with torch.no_grad():
            for (
                parameter
            ) in self._dense.values():  # from here on old: whoever reads one without a pull shall see it
                parameter.fill_(torch.nan)
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
        if self._shares:
            raise ServerError(
                "samples(…) deals each worker samples of its own",
                why=SHARES,
                hint="mw.parameter_server(…), or batches of a DataLoader that are the same on all workers",
            )
        for name, value in (("count", count), ("batch", batch), ("epochs", epochs)):
            if not is_whole(value) or value < 1:
                raise ServerError(f"samples(…) has {name}={value!r}", why="it is a number from 1")
        stream = f"{count} samples, seed {seed}"
        known, order = -1, torch.empty(0)
        while some := self.worker.deal(stream, batch, count, count * epochs):
            epoch, first = divmod(some.start, count)
            if epoch != known:
                generator = torch.Generator().manual_seed(seed * EPOCHS + epoch)
                known, order = epoch, torch.randperm(count, generator=generator)
            yield order[first : first + len(some)]

    def evaluate(self, batch: Any) -> Any:
        """Return the loss of this worker's batch in evaluation mode, by the values that the servers have now."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                self._pull_dense()
                return self.loss(self.model, self._own(batch))
        finally:
            for module in training:
                module.training = True

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

    def _show_trained(self) -> None:
        """Let the module show trained values outside of a step: a call and `state_dict` pull them."""

        def before(*_: Any) -> None:
            if not self._active:
                self._pull_dense()

        def completed(_: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for name in self._tables:
                rows = self.worker.parameters[name].rows
                state[prefix + name] = self.worker.pull((), {name: torch.arange(rows)})[name]

        def refused(*_: Any) -> None:
            raise ServerError(
                "values are loaded into a model whose parameters are on servers",
                hint="model.load_state_dict(…) first, then mw.parameter_server(model, …)",
            )

        if vars(self.model).setdefault(STEP, self) is not self:
            raise ServerError(
                "this model has a step with parameters on servers already", hint="use that step"
            )
        self.model.register_forward_pre_hook(before)
        self.model.register_state_dict_pre_hook(before)
        self.model.register_state_dict_post_hook(completed)
        self.model.register_load_state_dict_pre_hook(refused)

    def use_servers(self, count: int) -> Beside:
        """Spread the parameters over another number of servers of `meshwright run`, while training goes on. One worker
        calls it. Raises ServerError without such servers.

        The move runs beside the steps: workers wait only while blocks are copied. Values and moments stay the same.
        """
        transport = self.worker.transport
        if not is_whole(count) or not 1 <= count <= MOST_SERVERS or not isinstance(transport, Remote):
            why = "servers are processes that meshwright run starts" if is_whole(count) else "it is a number"
            raise ServerError(
                f"use_servers({count!r}) cannot be done", why=why, hint="meshwright run --servers 2 …"
            )
        transport.meeting.want(count)
        other = transport.another()

        def move() -> None:
            with contextlib.closing(other):
                use_servers(other, self._declare, range(count))

        return Beside(move, "moving blocks", cut_off=True)

    def close(self) -> None:
        """Leave the job: the other workers no longer wait for this one. A running save is waited for."""
        self.wait()
        _SHARING.discard(self)
        self.worker.leave()
        self.worker.transport.close()

    def _pull_dense(self) -> None:
        if self._dense:
            values = self.worker.pull(tuple(self._dense))
            with torch.no_grad():
                for name, parameter in self._dense.items():
                    parameter.copy_(values[name])

    def _changed(self) -> dict[str, Options]:
        """Options that differ from what the servers were sent last."""
        now = {name: self._optimizers.options(name) for name in self._sent}
        changed = {name: options for name, options in now.items() if options != self._sent[name]}
        self._sent = now
        return changed


def settle_shares() -> None:
    """At the end of a script, if no error is on its way: wait until the last steps of `mode="parameter_server"` have
    the shares of all workers. Raises ServerError where one has ended before, BatchError where batches differed."""
    if sys.exc_info()[0] is None:
        for step in list(_SHARING):
            step.worker.settle()


def _values(parameter: torch.Tensor, table: bool, rows: range) -> torch.Tensor:
    values = parameter.detach().cpu()
    return values[rows.start : rows.stop] if table else values


def parameter_server(
    model: torch.nn.Module,
    optimizer: Factory,
    *,
    loss: Loss = default_loss,
    staleness: int | None = 0,
    weight: Weight = examples,
) -> ServerStep:
    """Build a step with parameters on servers, for a model that runs eagerly. Every worker calls it.

    Parameters that `mw.on_server` marks live on servers, or all if none is marked; the others are all-reduced among the
    workers. A marked embedding keeps no table in the worker: a lookup pulls the rows of its ids.

    Args:
        model: Any module. The values of worker 0 count.
        optimizer: A function that takes the parameters and returns an optimizer of `torch.optim`; servers run it.
        loss: ``loss(model, batch)`` returns a scalar, or a scalar and outputs. By default ``model(**batch).loss``.
        staleness: How many steps a worker may be ahead of the slowest one when it reads: 0 keeps all in step and makes
            one update of their gradients; otherwise each push is an update of its own. None: any number.
        weight: The number of examples in a batch; by default the size of the first dim of its first tensor.

    Raises ServerError for what servers cannot hold: an optimizer of the user's own, a table that forward changes.
    """
    check_arguments(model, loss, staleness)
    return ServerStep(model, optimizer, loss, staleness, weight)


def check_arguments(model: object, loss: object, staleness: object) -> None:
    """Raise CaptureError for what is no module, ServerError for a staleness that is no number of steps."""
    check_model(model)
    check_function("loss", loss, "lambda model, batch: model(batch).mean()")
    if staleness is not None and not (is_whole(staleness) and staleness >= 0):
        raise ServerError(
            f"staleness={staleness!r}",
            why="it counts steps: 0, 1, …, or None for no bound",
            hint="staleness=0",
        )
