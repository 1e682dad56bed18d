"""Reshards under way beside computation: a start and its waits, each the other's backward.

A flight brings one or several tensors. Its start launches the collective and gives a token; each wait takes its tensor
out of the flight. In backward each wait puts in its gradient, and when all are there their collective is launched; the
start waits for it. Only tokens without elements pass between the two nodes of autograd: what is sent back has another
shape than what was sent.

Where a flight's results are not kept (``again``), backward launches it once more at the first reader, and after its
first result the flights before it in the program that backward needs next: one, or as many as the start says.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence

import torch

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import Node
from meshwright.core.mesh import Mesh
from meshwright.partition.insert_reshards import parse_steps
from meshwright.redistribute.index_maps import exchange
from meshwright.runtime.accumulation import Accumulation
from meshwright.runtime.collectives import Handle
from meshwright.runtime.communicator import Communicator, Work
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.recompute import Again, Argument
from meshwright.runtime.reshard import Mover, StepTexts, collective_name, say


class Way:
    """The steps of one tensor in one direction: those before its first collective, that one, and those after."""

    def __init__(self, texts: StepTexts, mesh: Mesh, number: int, handle: Handle, told: str) -> None:
        """`told`: what the record of the rank says of its collectives."""
        movers = [Mover(exchange(s, mesh, number)) for s in parse_steps(texts)]
        first = next((n for n, m in enumerate(movers) if m.kind in COLLECTIVES), len(movers))
        self.handle, self.told = handle, told
        self.early, self.late = movers[:first], movers[first + 1 :]
        self.sent = movers[first] if first < len(movers) else None
        self.only_slices = [m.kind for m in movers] == ["slice"]

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """The steps that need nobody else."""
        return self._run(x, self.early, first=True)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """The steps after the first collective; those among them that are collectives block."""
        return self._run(x, self.late)

    def _run(self, x: torch.Tensor, movers: Sequence[Mover], first: bool = False) -> torch.Tensor:
        for mover in movers:
            say(self.told)
            x = mover(x, self.handle)
            # A part of what an earlier step made is copied, so that the rest can go.
            if mover.kind == "slice" and not (first and mover is movers[0]):
                x = x.clone(memory_format=torch.contiguous_format)
        return x

    @property
    def width(self) -> int:
        """Elements of its message to each member."""
        assert self.sent is not None
        return self.sent.plan.padded


class Crossing:
    """One direction of a flight of one step: `give` every tensor, `launch`, `take` them out on the other side."""

    def __init__(self, ways: Sequence[Way], comm: Communicator) -> None:
        self.ways, self.comm = ways, comm
        self.missing = set(range(len(ways)))
        self.launched = False
        self._inside: dict[int, torch.Tensor] = {}  # before the launch what is sent, after it what has come
        self._buffer: torch.Tensor | None = None  # where the messages of several lie behind one another
        self._work: Work | None = None

    def give(self, index: int, x: torch.Tensor) -> None:
        """A tensor goes in. Never writes to it."""
        assert not self.launched, "a tensor came after its flight had left"
        way = self.ways[index]
        x = way.before(x.detach())
        self.missing.discard(index)
        if way.sent is None:
            self._inside[index] = x
            return
        message = way.sent.message(x)
        if len(self.ways) == 1:
            self._inside[index] = message
            return
        if self._buffer is None:
            self._buffer = message.new_empty((*message.shape[:-1], sum(w.width for w in self.ways)))
        self._part(index).copy_(message)

    def _part(self, index: int) -> torch.Tensor:
        assert self._buffer is not None
        start = sum(w.width for w in self.ways[:index])
        return self._buffer.narrow(-1, start, self.ways[index].width)

    def launch(self) -> None:
        """Start the collective; zeros go for what was not given."""
        self.launched = True
        sent = self.ways[0].sent
        if sent is None:
            return
        if self._buffer is None:
            message = self._inside.pop(0)
            # Summed in place, so in memory of its own.
            own = (
                message.clone(memory_format=torch.contiguous_format) if sent.kind == "all_reduce" else message
            )
        else:
            for index in self.missing:
                self._part(index).zero_()
            own, self._buffer = self._buffer, None
        say(self.ways[0].told)
        start = getattr(self.comm, sent.collective.start)
        self._work = start(own, *sent.sizes, sent.axes)

    def take(self, index: int) -> torch.Tensor:
        """Wait for a tensor and take it out. The first wait takes all out of the buffer, so that it can go."""
        if self._work is not None:
            received, self._work = self._work.wait(), None
            widths = [w.width for w in self.ways] if len(self.ways) > 1 else [received.shape[-1]]
            for number, (way, piece) in enumerate(zip(self.ways, received.split(widths, -1), strict=True)):
                assert way.sent is not None
                self._inside[number] = way.sent.opened(piece)
        return self.ways[index].after(self._inside.pop(index))


class Flight:
    """A flight of one forward pass, there and back."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.onward = Crossing(start.onward, start.handle.comm)
        self.back = Crossing(start.back, start.handle.comm)
        self.awaited = 0  # gradients that waits will put in
        self.held_back = False  # whether they are added up with those of other micro-batches first
        self.leaves: list[bool] = []
        self.dtype: torch.dtype | None = None


class Once:
    """The value of a flight that is not kept but regathered in backward: launched by its first reader or by the flight
    after it. `sources`: the values that it sends, which may have to be fetched from the host first."""

    def __init__(self, start: Start, sources: Sequence[Argument], before: Once | None) -> None:
        self.start, self.sources = start, sources
        self._before = weakref.ref(before) if before is not None else None
        self._crossing: Crossing | None = None
        self._opened = False

    def launch(self) -> None:
        """Start bringing it, if nobody has."""
        if self._crossing is None:
            ways = [self.start.onward[index] for index in self.start.repeats]
            self._crossing = Crossing(ways, self.start.handle.comm)
            for place, source in enumerate(self.sources):
                self._crossing.give(place, source.opened())
            self.sources = ()
            self._crossing.launch()

    def _earlier(self) -> Iterator[Once]:
        """The flights before it in the program, the nearest first."""
        before = self._before() if self._before is not None else None
        while before is not None:
            yield before
            before = before._before() if before._before is not None else None

    def take(self, index: int, _: torch.Tensor) -> torch.Tensor:
        """One of its results."""
        first = not self._opened
        self.launch()
        assert self._crossing is not None
        result = self._crossing.take(self.start.repeats.index(index))
        if first:  # after its own is out of the buffer, so that two are never there in full
            for before in itertools.islice(self._earlier(), self.start.ahead):
                before.launch()
        self._opened = True
        return result


class Prefetch:
    """The flights of a rank's program that backward brings again, in the order of the program."""

    def __init__(self) -> None:
        self._latest: weakref.ref[Once] | None = None

    def follow(self, start: Start, sources: Sequence[Argument]) -> Once:
        """The next of them."""
        before = self._latest() if self._latest is not None else None
        made = Once(start, sources, before)
        self._latest = weakref.ref(made)
        return made


class Start(torch.nn.Module):
    """The start of a flight. `flight` is the one of the latest forward pass, from which its waits take."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        number: int,
        handle: Handle,
        again: Again | None = None,
        prefetch: Prefetch | None = None,
    ) -> None:
        super().__init__()
        self.handle, self.again, self.prefetch = handle, again, prefetch
        told = [collective_name(node, way) for way in ("forward", "backward")]
        self.onward = [Way(texts, mesh, number, handle, told[0]) for texts in node.args[1]]
        self.back = [Way(texts, mesh, number, handle, told[1]) for texts in node.args[2]]
        wire = node.kwarg("wire")
        self.wire = TORCH_DTYPES[str(wire)] if wire else None  # in which gradients are added up
        self.repeats: tuple[int, ...] = node.kwarg("again", ())  # members that backward brings again
        # flights before it that backward launches after its first result
        self.ahead = int(node.kwarg("ahead", 1))
        self.flight: Flight | None = None
        self.once: Once | None = None
        self.sources: Sequence[torch.Tensor] = ()

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        """Launch it; a token."""
        self.flight = Flight(self)
        token = _Start.apply(self.flight, *xs)
        if self.again is not None and self.prefetch is not None and self.repeats and torch.is_grad_enabled():
            sent = [self.again.argument(xs[index]) for index in self.repeats]
            self.once, self.sources = self.prefetch.follow(self, sent), xs
        return token


class Wait(torch.nn.Module):
    """The wait for one tensor of a flight."""

    def __init__(self, start: Start, node: Node, sums: Accumulation | None = None) -> None:
        """`sums`: where its gradients are added up before they are sent."""
        super().__init__()
        self.name, self.sums = node.name, sums
        self.index = int(node.args[1])
        self.last = self.index == len(start.onward) - 1
        self._start = (start,)  # not a submodule: it is the start's own place in the program

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """The tensor in its new layout."""
        (start,) = self._start
        assert start.flight is not None
        y = _Wait.apply(token, start.flight, self)
        if start.again is not None and start.once is not None and self.index in start.repeats:
            again = functools.partial(start.once.take, self.index)
            start.again.watch(y, start.sources[self.index], again)
        if self.last:  # what autograd does not hold goes now
            start.flight, start.once, start.sources = None, None, ()
        return y


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flight: Flight, *xs: torch.Tensor) -> torch.Tensor:
        ctx.flight, flight.leaves, flight.dtype = flight, [x.is_leaf for x in xs], xs[0].dtype
        for index, x in enumerate(xs):
            flight.onward.give(index, x)
        flight.onward.launch()
        return xs[0].new_empty(0)

    @staticmethod
    def backward(ctx, token: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  one result, one gradient
        back = ctx.flight.back
        if ctx.flight.held_back:
            return (None,) * (1 + len(ctx.flight.leaves))
        given = [index not in back.missing for index in range(len(ctx.flight.leaves))]
        if not back.launched:
            back.launch()
        return None, *(_gradient(ctx.flight, n) if there else None for n, there in enumerate(given))


def _gradient(flight: Flight, index: int) -> torch.Tensor:
    mine = flight.back.take(index)
    if flight.start.wire is not None:
        mine = mine.to(flight.dtype)
    # A leaf keeps its gradient into the next step, and a view would keep all of it.
    lone = flight.leaves[index] and flight.back.ways[index].only_slices
    return mine.clone(memory_format=torch.contiguous_format) if lone else mine


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token: torch.Tensor, flight: Flight, wait: Wait) -> torch.Tensor:
        ctx.flight, ctx.wait = flight, wait
        flight.awaited += ctx.needs_input_grad[0]
        return flight.onward.take(wait.index)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  one result, one gradient
        flight, wait, wire = ctx.flight, ctx.wait, ctx.flight.start.wire
        token = gradient.new_empty(0)
        total = gradient if wait.sums is None else wait.sums.added(wait.name, gradient)
        flight.awaited -= 1
        if total is None:
            flight.held_back = True
            return token, None, None
        flight.back.give(wait.index, total if wire is None else total.to(wire))
        if not flight.awaited:
            flight.back.launch()
        return token, None, None
