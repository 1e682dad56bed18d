"""The memory of what backward makes again: what stands for it meanwhile, what it is made from, when it is there.

As in the runtime a note stands for a result with all who would have kept it. The result is there while somebody in
forward reads it, and again from the first opening of a note of its operator to its own last reader; until it is made,
the operator's arguments are kept, as memory or by notes in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshwright.predict.memory.allocator import Heap, Storage

Held = tuple["Call", int]  # one of the results of an operator
Make = Callable[[list[Storage]], list[Storage]]  # where arguments lie now → results, held once


@dataclass(eq=False, slots=True)
class Call:
    """One operator whose results are made again: where they lie in forward, what they are made from, where they lie in
    backward. `uses`: how many refer to each, savers and arguments of others."""

    lies: tuple[Storage, ...]
    make: Make
    uses: list[int]
    read: list[Storage | Held] = field(default_factory=list)
    kept: list[Storage] = field(default_factory=list)
    needs: list[Held] = field(default_factory=list)
    made: list[Storage] | None = None

    @property
    def ended(self) -> bool:
        """Nobody reads or refers to any of it."""
        return not any(self.uses) and not any(s.uses for s in self.lies)


class Notes:
    """The notes of a rank's step. Storages outlive it, so they are known by identity."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self._known: dict[int, Held] = {}

    def watch(
        self,
        lies: Iterable[Storage],
        read: Iterable[Storage],
        make: Make,
        held: Iterable[Storage] = (),
    ) -> Call:
        """Memory that is not kept; `make` gives all of it again, held once, while what it is made from is there: what
        was `read`, kept or by a note (it is told where that lies now), and what is `held` in any case."""
        lies = tuple(lies)
        call = Call(lies, make, [0] * len(lies), kept=[self.heap.save(s) for s in held])
        read = list(read)
        call.read = [self.of(s) or s for s in read]
        for storage in {id(s): s for s in read}.values():
            source = self.of(storage)
            if source is None:
                call.kept.append(self.heap.save(storage))
            else:
                self.hold(source)
                call.needs.append(source)
        self._known.update((id(s), (call, k)) for k, s in enumerate(lies))
        return call

    def of(self, storage: Storage) -> Held | None:
        """What stands for a memory, if anything does."""
        return self._known.get(id(storage))

    def hold(self, held: Held) -> None:
        """One more refers to it."""
        call, number = held
        call.uses[number] += 1

    def release(self, held: Held) -> None:
        """One less refers to it."""
        call, number = held
        call.uses[number] -= 1
        if call.made is not None and not call.uses[number]:
            self.heap.drop(call.made[number])
        elif call.ended:
            self._let_go(call)

    def dropped(self, storage: Storage) -> None:
        """Nobody in forward reads this memory any more, perhaps."""
        held = self.of(storage)
        if held is not None and held[0].ended:
            self._let_go(held[0])

    def open(self, held: Held) -> None:
        """Make it, and before it all that it is made from."""
        todo = [held[0]]
        while todo:
            call = todo[-1]
            missing = [source for source, _ in call.needs if source.made is None] if call.made is None else []
            todo += reversed(missing)
            if missing:
                continue
            if call.made is None:
                call.made = call.make([s if isinstance(s, Storage) else _made(s) for s in call.read])
                for storage, uses in zip(call.made, call.uses, strict=True):
                    if not uses:
                        self.heap.drop(storage)
                self._let_go(call)
            todo.pop()

    def opened(self, storage: Storage) -> Storage:
        """Where what lay in a memory lies now: made again if need be."""
        held = self.of(storage)
        if held is None:
            return storage
        self.open(held)
        return _made(held)

    def _let_go(self, call: Call) -> None:
        """What the results are made from."""
        kept, call.kept = call.kept, []
        needs, call.needs, call.read = call.needs, [], []
        for storage in kept:
            self.heap.release(storage)
        for source in needs:
            self.release(source)


def _made(held: Held) -> Storage:
    """Where a result lies that was made again."""
    call, number = held
    assert call.made is not None
    return call.made[number]
