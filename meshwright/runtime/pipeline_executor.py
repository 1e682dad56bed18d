"""Running one rank's list of a pipeline: stages of micro-batches forward and backward, and what passes between them.

Values cross as they are, detached; their gradients come back in the same way, zeros where a reader has none. Backward
of a stage is a call of its own, on the sum of what its readers sent. What the weights need of backward may wait in a
queue (`kernels/split_linear.py`) until its own action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright import heartbeat
from meshwright.core.graph import TensorType
from meshwright.partition.stages import Stage
from meshwright.pipeline.actions import BACKWARD, FORWARD, Action
from meshwright.pipeline.messages import Message
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.activation_offload import Store
from meshwright.runtime.buckets import GradientBuckets
from meshwright.runtime.communicator import Work
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.kernels.split_linear import Queue
from meshwright.runtime.micro_batches import InTime, Program
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.source_lines import in_backward

NO_STORES: Mapping[int, Store] = {}
PARITY = 2  # messages of a step and of the next one have tags of their own


@dataclass
class _Pass:
    """One stage of one micro-batch between its forward and its backward."""

    results: dict[str, torch.Tensor]  # with their autograd history
    borders: dict[str, torch.Tensor]  # detached leaves, as values of earlier stages were read
    queue: list[Any] = field(default_factory=list)  # what the weights still need


def _told(message: Message) -> str:
    """What the record of a rank says of a message."""
    from_, to = message.maker, message.reader
    way = f"gradient of %{message.value}, stage {to} to {from_}" if message.back else ""
    return f"{way or f'%{message.value}, stage {from_} to {to}'}, micro-batch {message.micro_batch}"


class _Seed(torch.autograd.Function):
    """Gives the roots of a backward pass their gradients, and holds them no longer: what `torch.autograd.backward` is
    given lives until it returns."""

    @staticmethod
    def forward(ctx, gradients: list[torch.Tensor], *roots: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = (None, *ctx.gradients)
        ctx.gradients.clear()
        return found


class Pipelined:
    """Runs action lists over the stages of one rank.

    `leaves` maps the inputs that this rank holds to their tensors, `values` the results of the step that it has made.
    """

    def __init__(
        self,
        pipe: Pipeline,
        programs: Mapping[int, Sequence[Program]],
        leaves: Mapping[str, torch.Tensor],
        buckets: GradientBuckets,
        update: Callable[[], None],
        enter: Callable[[int], None],
        sums: Mapping[int, Accumulation],
        loss: str,
        device: torch.device,
        queue: Queue | None = None,
        saving: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scale: float = 1.0,
        stores: Mapping[int, Store] = NO_STORES,
        first_tag: int = 0,
    ) -> None:
        """`programs`: stage → its segment and module in each micro-batch. `enter` puts the rank into a micro-batch.
        `sums`: stage → where gradients of its weights are added up before they are sent. `queue`: where linears leave
        what their weights need. `stores`: what some stages keep elsewhere. `first_tag`:
        messages have tags from here on."""
        self.pipe, self.comm, self.programs = pipe, pipe.comm, programs
        self.leaves, self.buckets, self.update, self.enter = leaves, buckets, update, enter
        self.sums, self.loss, self.device, self.queue = sums, loss, device, queue
        self.saving, self.scale, self.stores, self.first_tag = saving, scale, stores, first_tag
        self.values: dict[str, torch.Tensor] = {}
        self.time: InTime | None = None  # what runs before and after the micro-batches
        self.count = pipe.schedule.micro_batches
        self._step = 0
        self._read = pipe.messages.acknowledged(self.comm.place)
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._inbox: dict[tuple[str, int, int], torch.Tensor | Work] = {}  # (value, reader, micro-batch)
        self._back: dict[tuple[str, int, int], torch.Tensor | Work | None] = {}  # the same of its gradient
        self._sending: dict[Message, Work] = {}
        self._shared: Work | None = None  # the loss, on its way to this rank, or
        self._telling: list[Work] = []  # to the others
        self._done: dict[tuple[str, int], int] = {}  # halves of backward that a stage has done, and
        self._ended = 0  # micro-batches whose backward is over, in all stages
        self.kinds: dict[str, Callable[[Action], None]] = {
            "begin": lambda _: self.buckets.begin(),
            "forward": self._forward,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
            "receive_value": lambda action: self._receive(action, FORWARD),
            "send_value": lambda _: None,
            "receive_gradient": lambda action: self._receive(action, BACKWARD),
            "send_gradient": lambda _: None,
            "share": self._share,
            "reduce_wait": lambda _: self.buckets.finish(),
            "update": lambda _: self.update(),
            "end": self._end,
        }

    def run(
        self, actions: Sequence[Action], batch: Mapping[str, torch.Tensor], results: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Run a list of actions; returns those of the named results that this rank has, detached. The loss all have."""
        self._done, self._ended = {}, 0
        try:
            for action in actions:
                heartbeat.doing(action.kind, action.stage, action.micro_batch)
                self.kinds[action.kind](action)
            return {n: self.values[n].detach() for n in results if n in self.values}
        finally:
            self._step += 1
            self.forget()

    def forget(self) -> None:
        """Let go of what was made."""
        self.values, self._passes, self._inbox, self._back, self._sending = {}, {}, {}, {}, {}

    # ------------------------------------------------------------ messages

    def _tag(self, message: Message) -> int:
        edge = message.value, message.maker, message.reader
        number = 2 * self.pipe.messages.number[edge] + message.back
        return self.first_tag + (number * self.count + message.micro_batch) * PARITY + self._step % PARITY

    def _empty(self, kind: TensorType) -> torch.Tensor:
        return torch.empty(kind.shape, dtype=TORCH_DTYPES[kind.dtype], device=self.device)

    def _away(self, stage: int) -> bool:
        return self.pipe.place_of(stage) != self.comm.place

    def _receive(self, action: Action, kind: str) -> None:
        """Post what an action of a kind needs."""
        (segment,), _ = self.programs[action.stage][action.micro_batch]  # of fewer examples, if a later one
        for message in self.pipe.messages.needed(Action(kind, action.stage, action.micro_batch)):
            empty = self._empty(segment.graph.types[message.value])
            heartbeat.of(_told(message))
            source = message.reader if message.back else message.maker
            place, route = self.pipe.place_of(source), self.pipe.routes.of(message)
            arriving = self.comm.receive_from(empty, place, self._tag(message), route)
            key = message.value, message.reader, message.micro_batch
            (self._back if message.back else self._inbox)[key] = arriving

    def _send(self, x: torch.Tensor, message: Message) -> None:
        to = self.pipe.place_of(message.maker if message.back else message.reader)
        heartbeat.of(_told(message))
        self._sending[message] = self.comm.send_to(x, to, self._tag(message), self.pipe.routes.of(message))

    def _let_go(self, action: Action) -> None:
        """What an action waited for tells that some messages of this rank have been read."""
        for message in self._read.get(action, ()):
            self._sending.pop(message).wait()

    @staticmethod
    def _graded(stage: Stage) -> list[tuple[str, int]]:
        """(value, reader) of what later stages read of a stage and return a gradient for."""
        wanted = stage.segment.graph.needs_grad
        return [(v, t) for v, later in stage.gives.items() if v in wanted for t in later]

    def _enter(self, micro_batch: int) -> None:
        """Put the rank into a micro-batch: into the first of its copies."""
        assert self.time is not None
        self.enter(micro_batch * self.time.copies)

    # ------------------------------------------------------------ forward

    def _forward(self, action: Action) -> None:
        s, m = action.stage, action.micro_batch
        stage, time = self.pipe.cut[s], self.time
        assert time is not None
        (segment,), (module,) = self.programs[s][m]
        self._enter(m)
        given = time.given(m)
        borders: dict[str, torch.Tensor] = {}
        arguments = []
        for entry in segment.graph.inputs:
            if entry.name in stage.takes:
                found = self._inbox.pop((entry.name, s, m))
                value = found if isinstance(found, torch.Tensor) else found.wait()
                if entry.needs_grad and torch.is_grad_enabled():
                    value = borders[entry.name] = value.detach().requires_grad_()
            else:
                value = given[entry.name] if entry.name in given else self.leaves[entry.name]
            arguments.append(value)
        self._let_go(action)
        store = self.stores.get(s)
        if store is not None:
            store.begin()
        with self.saving():
            made = module(*arguments)
        if store is not None:
            store.settle()
        results = dict(zip(segment.results, made, strict=True))
        for value, later in stage.gives.items():
            for reader in later:
                if self._away(reader):
                    self._send(results[value], Message(value, s, reader, m, False))
                else:
                    self._inbox[value, reader, m] = results[value].detach()
        self._keep(stage, results, m)
        self._passes[s, m] = _Pass({k: v for k, v in results.items() if v.requires_grad}, borders)

    def _keep(self, stage: Stage, results: Mapping[str, torch.Tensor], m: int) -> None:
        """What of the results outlives the micro-batch: terms of sums, new buffers, the results of the last one."""
        time = self.time
        assert time is not None
        for entry in time.parts.late.inputs:
            if entry.name in stage.ends:
                time.add(entry.name, results[entry.name])
        for name, value in time.parts.carried:
            if value in stage.ends:
                time.shared[name] = results[value].detach()
        self.values |= {value: results[value].detach() for value in stage.ends}
        time.keep({value: results[value] for value in stage.ends}, m)

    # ------------------------------------------------------------ backward

    def _backward(self, action: Action) -> None:
        with self._reducing(action.stage):
            self._input_half(action)
            if self.queue is not None:
                self._weight_half(action)
            else:
                self._passes.pop((action.stage, action.micro_batch))

    def _backward_input(self, action: Action) -> None:
        self._input_half(action)

    def _seeded(self, stage: Stage, one: _Pass, m: int) -> torch.Tensor | None:
        """A scalar whose backward is that of a stage, from the gradients of what it made; None if there are none."""
        readers: dict[str, list[int]] = {}
        for value, reader in self._graded(stage):
            readers.setdefault(value, []).append(reader)
        roots, gradients = [], []
        for value, result in one.results.items():
            total = torch.full_like(result, self.scale) if value == self.loss else None
            for reader in readers.get(value, ()):
                found = self._back.pop((value, reader, m))
                term = found if found is None or isinstance(found, torch.Tensor) else found.wait()
                total = term if total is None else total if term is None else total + term
            if total is not None:
                roots.append(result)
                gradients.append(total)
        for value, reader in self._graded(stage):  # of what turned out to need none
            found = self._back.pop((value, reader, m), None)
            if found is not None and not isinstance(found, torch.Tensor):
                found.wait()
        return _Seed.apply(gradients, *roots) if roots else None

    def _backward_weight(self, action: Action) -> None:
        with self._reducing(action.stage):
            self._weight_half(action)

    @contextmanager
    def _reducing(self, stage: int) -> Iterator[None]:
        """The half of backward that ends a micro-batch in a stage. Where gradients are reduced each time, those of the
        stage are, and with those of the last one all that waits for the end of the step."""
        self._ended += 1
        if not self.buckets.each_time:
            yield
            return
        last = self._ended == self.count * len(self.pipe.mine)
        self.buckets.enter(self.pipe.mine.index(stage), last)
        yield
        if not last:  # whose sums are waited for at the end of the step
            self.buckets.finish()

    def _input_half(self, action: Action) -> None:
        s, m = action.stage, action.micro_batch
        stage, one = self.pipe.cut[s], self._passes[s, m]
        self._enter(m)
        self._count("input", s)
        end = self._seeded(stage, one, m)
        self._let_go(action)
        one.results = {}
        if end is not None:
            queued = nullcontext() if self.queue is None else self.queue.into(one.queue)
            with queued, in_backward(stage.segment.graph):
                end.backward()
        del end
        for value, maker in stage.takes.items():
            if value not in stage.segment.graph.needs_grad:
                continue
            border = one.borders.pop(value)
            if self._away(maker):
                gradient = torch.zeros_like(border) if border.grad is None else border.grad
                self._send(gradient, Message(value, maker, s, m, True))
            else:
                self._back[value, s, m] = border.grad

    def _weight_half(self, action: Action) -> None:
        s, m = action.stage, action.micro_batch
        one = self._passes.pop((s, m))
        self._enter(m)
        self._count("weight", s)
        if self.queue is not None:
            with in_backward(self.pipe.cut[s].segment.graph):
                self.queue.drain(one.queue)

    def _count(self, half: str, stage: int) -> None:
        """Whether the gradients of a half of backward are the last of a stage: then what was added up is sent."""
        self._done[half, stage] = done = self._done.get((half, stage), 0) + 1
        self.sums[stage].last = done == self.count

    # ------------------------------------------------------------ the end of a step

    def _share(self, action: Action) -> None:
        """The loss goes to the ranks that did not make it."""
        maker, count = self.pipe.maker(self.loss), self.comm.places
        tag = self.first_free_tag + self._step % PARITY
        heartbeat.of("the loss")
        if self.comm.place != maker:
            empty = self._empty(self.pipe.parts.resharded.graph.types[self.loss])
            self._shared = self.comm.receive_from(empty, maker, tag)
            return
        value = self.values[self.loss]
        self._telling = [self.comm.send_to(value, p, tag) for p in range(count) if p != maker]

    @property
    def first_free_tag(self) -> int:
        """Tags from here on are of nothing that a stage reads; the loss takes two of them."""
        return self.first_tag + 2 * len(self.pipe.messages.number) * self.count * PARITY

    def _end(self, action: Action) -> None:
        if self._shared is not None:
            self.values[self.loss], self._shared = self._shared.wait(), None
        for work in (*self._sending.values(), *self._telling):
            work.wait()
        self._telling = []


__all__ = ["Pipelined"]
