"""Replay a recorded construction with real tensors, one at a time, and keep only this rank's shards.

Random numbers are drawn in the order of one device, so values are equal to its own bit for bit: every call that draws
runs at its place, on temporary memory if its result is overwritten later. Other calls run when their tensor exists,
however late the constructor made them. So a tensor is finished, sharded and freed as early as possible, and a rank
needs memory for its shards and, as a rule, one full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from meshwright.capture.meta_init_record import Call, Construction, View, user_line
from meshwright.capture.pytree import leaves
from meshwright.errors import CaptureError

Take = Callable[[torch.Tensor], torch.Tensor]


def construct(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, Construction]:
    """Run a constructor without memory. Return the model, and the recorded construction. Raises CaptureError."""
    built = Construction(evaluate)
    with built:
        model = make()
        built.finish()
    return model, built


def replay(built: Construction, takes: Mapping[str, tuple[torch.Tensor, Take]]) -> dict[str, torch.Tensor]:
    """Return shards by name.

    `takes` maps names to a tensor of the constructed model, and the function from the full tensor to the shard. The
    random generator of the CPU continues from its present state, and ends where a constructor on one device would leave
    it.
    """
    wanted: dict[int, list[tuple[str, View, Take]]] = {}
    for name, (tensor, take) in takes.items():
        view = built.view(tensor)
        wanted.setdefault(view.storage, []).append((name, view, take))
    run = _Replay(built, wanted)
    for number, call in enumerate(built.calls):
        if call.plain:
            continue
        if call.state is not None:
            torch.set_rng_state(call.state)
        if number in run.live:
            run.reach(number)
        elif call.drawn:
            run.draw(number)
    for number in sorted(run.live):
        run.reach(number)
    for storage in wanted:
        run.settle(storage)
    if built.end is not None:
        torch.set_rng_state(built.end)
    return run.parts


def evaluate(built: Construction, view: View) -> torch.Tensor:
    """Return the values of a tensor in the middle of a construction. Raises CaptureError if they are random."""
    live = living(built.calls, {view.storage}, others=False)
    state = torch.get_rng_state()
    run = _Replay(built, {}, live)
    drawn = [n for n in sorted(live) if built.calls[n].drawn]
    if not drawn:
        for number in sorted(live):
            run.execute(number)
    if drawn or not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise CaptureError(
            "init: the constructor asks for the value of a random tensor",
            why="random numbers are drawn after the full constructor has run",
            where=user_line(),
            hint="build the model on a real device and leave out init=",
        )
    return run.tensor(view)


def living(calls: list[Call], wanted: Iterable[int], *, others: bool = True) -> set[int]:
    """Return the numbers of the calls on which storages depend; with `others` also calls of unknown effect."""
    needed, live = set(wanted), set[int]()
    for number in range(len(calls) - 1, -1, -1):
        call = calls[number]
        made = {v.storage for v in call.makes.values()}
        if needed & (made | call.writes) or (others and not call.plain and not call.drawn):
            live.add(number)
            needed -= made | {call.overwrites}
            needed |= call.reads
    return live


class _Replay:
    """Memory and progress of a replay. `live`: the needed calls that have not run."""

    def __init__(
        self,
        built: Construction,
        wanted: Mapping[int, list[tuple[str, View, Take]]],
        live: Collection[int] | None = None,
    ) -> None:
        self.built, self.wanted = built, wanted
        self.live = set(living(built.calls, wanted) if live is None else live)
        self.memory = {number: t.untyped_storage() for number, t in built.constants.items()}
        self.parts: dict[str, torch.Tensor] = {}
        self.order: dict[int, list[int]] = {}  # storage → the calls that matter to it, last first
        for number in sorted(self.live, reverse=True):
            for storage in built.calls[number].touches:
                self.order.setdefault(storage, []).append(number)

    def tensor(self, view: View) -> torch.Tensor:
        """Return a view on real memory."""
        memory = self.memory.get(view.storage)
        if memory is None:
            made = torch.empty(self.built.nbytes[view.storage], dtype=torch.uint8, device="cpu")
            memory = self.memory[view.storage] = made.untyped_storage()
        empty = torch.empty(0, dtype=view.dtype, device="cpu")
        return empty.set_(memory, view.offset, view.size, view.stride)

    def execute(self, number: int) -> None:
        """Run a call on real memory, allocated if necessary."""
        call = self.built.calls[number]
        before = torch.get_rng_state() if call.plain else None
        bare = call.asks - set(self.memory)
        default = torch.get_default_dtype()
        torch.set_default_dtype(call.dtype)
        try:
            with torch.no_grad(), torch.device("cpu"):
                out = call.function(*self._real(call.args), **self._real(call.kwargs))
        finally:
            torch.set_default_dtype(default)
        assert before is None or torch.equal(before, torch.get_rng_state()), call.function
        for storage in bare:
            self.memory.pop(storage)
        outputs = [t for _, t in leaves(out)]
        for index, view in call.makes.items():
            real = outputs[index].detach()
            if (real.stride(), real.storage_offset()) != (view.stride, view.offset):
                self.tensor(view).copy_(real)
            else:
                self.memory[view.storage] = real.untyped_storage()

    def draw(self, number: int) -> None:
        """Run a call only for the random numbers that it consumes, on temporary memory."""
        aside = {s: self.memory.pop(s) for s in self.built.calls[number].touches if s in self.memory}
        self.execute(number)
        for storage in self.built.calls[number].touches:
            self.memory.pop(storage, None)
        self.memory |= aside

    def reach(self, number: int) -> None:
        """Run a needed call, its dependences before it, and what can follow at once."""
        if number not in self.live:
            return
        touched = self._run(self._needed(number))
        while touched:
            storage = touched.pop()
            while (following := self._next(storage)) is not None:
                needed = self._needed(following)
                if not all(self.built.calls[n].plain for n in needed):
                    break
                touched |= self._run(needed) - {storage}
            self.settle(storage)

    def settle(self, storage: int) -> None:
        """Take the shards of a storage's tensors and free it, if no more calls need it."""
        if self._next(storage) is not None:
            return
        for name, view, take in self.wanted.get(storage, ()):
            if name not in self.parts:
                whole = self.tensor(view)
                part = take(whole)
                shared = part.untyped_storage() is whole.untyped_storage()
                less = part.numel() * part.element_size() < self.built.nbytes[storage]
                self.parts[name] = (
                    part.clone(memory_format=torch.contiguous_format) if shared and less else part
                )
        self.free([storage])

    def free(self, storages: Iterable[int]) -> None:
        """Free memory that nothing needs."""
        for storage in storages:
            if self._next(storage) is None:
                self.memory.pop(storage, None)

    def _run(self, numbers: Iterable[int]) -> set[int]:
        touched: set[int] = set()
        for number in sorted(numbers):
            self.execute(number)
            self.live.discard(number)
            touched |= self.built.calls[number].touches
        return touched

    def _next(self, storage: int) -> int | None:
        """Return the next needed call of a storage."""
        waiting = self.order.get(storage, [])
        while waiting and waiting[-1] not in self.live:
            waiting.pop()
        return waiting[-1] if waiting else None

    def _needed(self, number: int) -> set[int]:
        """Return a call and all earlier ones that must run first."""
        found, open_ = {number}, [number]
        while open_:
            here = open_.pop()
            for storage in self.built.calls[here].touches:
                for earlier in reversed(self.order.get(storage, [])):
                    if earlier >= here:
                        break
                    if earlier in self.live and earlier not in found:
                        found.add(earlier)
                        open_.append(earlier)
        return found

    def _real(self, value: Any) -> Any:
        match value:
            case View():
                return self.tensor(value)
            case tuple() | list():
                return type(value)(self._real(v) for v in value)
            case dict():
                return {k: self._real(v) for k, v in value.items()}
        return value
