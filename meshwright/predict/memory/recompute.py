"""The memory of recomputed values: what stands for them in the meantime, their inputs, and when they exist.

As in the runtime, a placeholder (a note) stands for a result that would have been saved. The result exists while
forward reads it, and again from the first use of a placeholder of its operator to its own last reader. Until it is
recomputed, the operator's arguments are kept, as memory or as placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshwright.predict.memory.allocator import Heap, Storage

SavedResult = tuple["Call", int]  # one of the results of an operator
Make = Callable[[list[Storage]], list[Storage]]  # where arguments lie now → results, held once


@dataclass(eq=False, slots=True)
class Call:
    """One operator with recomputed results: their memory in forward, their inputs, and their memory in backward.

    `uses` counts the references to each, by autograd and by arguments of others.
    """

    lies: tuple[Storage, ...]
    make: Make
    uses: list[int]
    read: list[Storage | SavedResult] = field(default_factory=list)
    kept: list[Storage] = field(default_factory=list)
    needs: list[SavedResult] = field(default_factory=list)
    made: list[Storage] | None = None

    @property
    def ended(self) -> bool:
        """Return whether nothing refers to any of its results."""
        return not any(self.uses) and not any(s.uses for s in self.lies)


class Notes:
    """The placeholders of a rank's step. Storages outlive it, so they are keyed by identity."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self._known: dict[int, SavedResult] = {}

    def watch(
        self,
        lies: Iterable[Storage],
        read: Iterable[Storage],
        make: Make,
        held: Iterable[Storage] = (),
    ) -> Call:
        """Record memory that is not saved.

        `make` allocates all of it again, with one use each, from its inputs: those `read`, saved or as placeholders (it
        receives their memory), and those `held` in any case.
        """
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

    def of(self, storage: Storage) -> SavedResult | None:
        """Return the placeholder of a memory, if there is one."""
        return self._known.get(id(storage))

    def hold(self, held: SavedResult) -> None:
        """Add a reference."""
        call, number = held
        call.uses[number] += 1

    def release(self, held: SavedResult) -> None:
        """Remove a reference."""
        call, number = held
        call.uses[number] -= 1
        if call.made is not None and not call.uses[number]:
            self.heap.drop(call.made[number])
        elif call.ended:
            self._let_go(call)

    def dropped(self, storage: Storage) -> None:
        """Handle memory that forward may no longer read."""
        held = self.of(storage)
        if held is not None and held[0].ended:
            self._let_go(held[0])

    def open(self, held: SavedResult) -> None:
        """Recompute a value, after its inputs."""
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
        """Return the present memory of a value, recomputed if necessary."""
        held = self.of(storage)
        if held is None:
            return storage
        self.open(held)
        return _made(held)

    def _let_go(self, call: Call) -> None:
        """Release the inputs of the results."""
        kept, call.kept = call.kept, []
        needs, call.needs, call.read = call.needs, [], []
        for storage in kept:
            self.heap.release(storage)
        for source in needs:
            self.release(source)


def _made(held: SavedResult) -> Storage:
    """Return the memory of a recomputed result."""
    call, number = held
    assert call.made is not None
    return call.made[number]
