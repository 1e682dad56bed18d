"""Recomputes in backward instead of keeping: results of operators (recompute) and of reshards (parameters gathered
twice, as in ZeRO-3; activations gathered twice, as in Megatron's sequence parallel).

Saved tensors pass through a pair of autograd hooks. A saved tensor that lies in the memory of such a result (it, or a
view of it) is replaced by a placeholder: which result, and where in it. Values that an operator saves itself (a mask,
row statistics, probabilities) become placeholders too: the i-th value that this operator saves. So the memory is freed
as soon as forward has read it. The first placeholder that backward opens runs the operator again on its arguments,
which are kept in the same way, as tensors or as placeholders, and are recomputed first if necessary. A recomputed value
lives until no placeholder of it is left: neighbours that saved the same tensor (q, k and v of one norm) share it,
nothing is computed twice, and results that backward never needs (the last product of a layer) are not recomputed at
all.

Hooks belong to the thread that runs forward, as do simulated ranks; backward may run on another thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

# brings a rank back to the step and micro-batch of forward
Moment = Callable[[], AbstractContextManager[Any]]

TINY_BYTES = 256  # what an operator saves of its own and is no larger than a note of it is kept


class Result:
    """One call of an operator: its function, and its arguments as they are kept until it runs again."""

    __slots__ = ("__weakref__", "args", "done", "function", "kwargs", "moment", "outputs", "own")

    def __init__(self, function: Callable[..., Any], moment: Moment) -> None:
        self.function, self.moment = function, moment
        self.args: Any = ()
        self.kwargs: Any = {}
        self.done = False
        # Number → what stands for an output, and for what the operator saved of its own, while somebody holds it.
        self.outputs: dict[int, weakref.ref[Place]] = {}
        self.own: dict[int, weakref.ref[Place]] = {}

    @property
    def wanted(self) -> bool:
        """True if backward may still need a result."""
        return any(place() is not None for place in self.outputs.values())

    def output(self, number: int) -> Place | None:
        """Return the placeholder of an output; None if the operator has run again and nothing referenced the output
        then."""
        place = self.outputs[number]() if number in self.outputs else None
        if place is None and not self.done:
            place = Place(self)
            self.outputs[number] = weakref.ref(place)
        return place

    def run(self) -> None:
        """Run again, and before it all that its arguments are made from."""
        todo: list[Result] = [self]  # no recursion: a chain may be as long as the model is deep
        while todo:
            missing = [] if todo[-1].done else todo[-1]._missing()
            if missing:
                todo += reversed(missing)
                continue
            result = todo.pop()
            if not result.done:
                result._run()

    def _missing(self) -> list[Result]:
        notes = (x.kept for x in _items((self.args, self.kwargs)) if isinstance(x, Argument))
        found = (n.place.result for n in notes if isinstance(n, Note))
        return [result for result in found if result is not None]

    def _run(self) -> None:
        args, kwargs = _mapped(_opened, self.args), _mapped(_opened, self.kwargs)
        self.args, self.kwargs = (), {}  # what only led here can go
        with self.moment():
            if any(place() is not None for place in self.own.values()):
                with torch.enable_grad(), self._recording():
                    found = self.function(*args, **kwargs)
            else:
                with torch.no_grad():
                    found = self.function(*args, **kwargs)
        self.done = True
        made = tensors_of(found)
        for number, reference in self.outputs.items():
            place = reference()
            if place is not None:
                place.fill(made[number])

    def _recording(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which what the operator saves is numbered as it was in forward."""
        numbers = iter(range(1 << 30))

        def pack(x: torch.Tensor) -> None:
            place = self.own[number]() if (number := next(numbers)) in self.own else None
            if place is not None:
                place.fill(x)

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing)


class Place:
    """Stands for a tensor that an operator makes, and holds it once it is made again, until its last reader goes."""

    __slots__ = ("__weakref__", "result", "tensor")

    def __init__(self, result: Result) -> None:
        self.result: Result | None = result
        self.tensor: torch.Tensor | None = None

    def fill(self, x: torch.Tensor) -> None:
        """It is made."""
        self.tensor = x.detach() if x.requires_grad else x
        self.result = None  # the other results may go before it

    def opened(self) -> torch.Tensor:
        """The tensor."""
        if self.result is not None:
            self.result.run()
        assert self.tensor is not None, "an operator saved fewer things when it ran again"
        return self.tensor


@dataclass(frozen=True, slots=True)
class Note:
    """A placeholder of a saved tensor: the output in whose memory it lies, and its position in there."""

    place: Place
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def opened(self) -> torch.Tensor:
        """The tensor."""
        return self.place.opened().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument as it is kept, and whether its gradient was wanted."""

    kept: torch.Tensor | Note
    needs_grad: bool

    def opened(self) -> torch.Tensor:
        """The tensor, brought back if need be."""
        found = self.kept.opened() if isinstance(self.kept, Note) else self.kept.detach()
        return found.requires_grad_() if self.needs_grad else found


class Again:
    """The results of one rank's program that are not kept."""

    def __init__(self) -> None:
        # By memory, weakly: an address alone may be another tensor's by the time it is seen again.
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Result, int, torch.dtype]]
        self._known = weakref.WeakKeyDictionary()
        self._running: Result | None = None  # the operator under way, and
        self._memories: Sequence[torch.UntypedStorage] = ()  # where its arguments lie, and
        self._count = 0  # how many things it has saved so far

    def watch(self, result: torch.Tensor, source: torch.Tensor, steps: Callable[[torch.Tensor], Any]) -> None:
        """From now on nothing that lies in `result` is kept for backward; ``steps(source)`` makes it again."""
        made = Result(steps, nullcontext)
        made.args = (self.argument(source),)
        self._know([result], made, [source.untyped_storage()])

    def keep(self, result: torch.Tensor, make: Callable[[], torch.Tensor]) -> weakref.ref[Result]:
        """From now on nothing that lies in `result`, which has memory of its own, is kept for backward; ``make()``
        brings it back."""
        made = Result(make, nullcontext)
        self._know([result], made, [])
        return weakref.ref(made)

    def knows(self, x: torch.Tensor) -> bool:
        """True if the storage of a tensor will be recomputed anyway."""
        return x.untyped_storage() in self._known

    def argument(self, x: torch.Tensor) -> Argument:
        """A tensor as it is kept by whoever needs it in backward."""
        return Argument(self._note(x) or x.detach(), x.requires_grad)

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        moment: Moment = nullcontext,
        outputs: Collection[int] = (0,),
    ) -> Any:
        """``function(*args, **kwargs)``, of which backward finds nothing: neither `outputs` nor what it saves."""
        result = Result(function, moment)
        tensors = [x for x in _items((args, kwargs)) if isinstance(x, torch.Tensor)]
        before = self._running, self._memories, self._count
        self._running, self._memories, self._count = result, [x.untyped_storage() for x in tensors], 0
        try:
            found = function(*args, **kwargs)
            memories = self._memories
        finally:
            self._running, self._memories, self._count = before
        result.args, result.kwargs = _mapped(self._kept, args), _mapped(self._kept, kwargs)
        self._know(tensors_of(found), result, memories, outputs)
        return found

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which a forward pass is run."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _know(
        self,
        found: Sequence[torch.Tensor],
        result: Result,
        memories: Sequence[torch.UntypedStorage],
        outputs: Collection[int] = (0,),
    ) -> None:
        for number in outputs:
            x = found[number]
            memory = x.untyped_storage()
            # What is only a view of an argument costs no memory of its own.
            if not any(memory is other for other in memories):
                self._known[memory] = result, number, x.dtype

    def _kept(self, x: Any) -> Any:
        """An argument as it is kept."""
        return self.argument(x) if isinstance(x, torch.Tensor) else x

    def _note(self, x: torch.Tensor) -> Note | None:
        if x.layout != torch.strided:
            return None
        known = self._known.get(x.untyped_storage())
        if known is None or x.dtype != known[2] or x.is_conj() or x.is_neg():
            return None
        place = known[0].output(known[1])
        return Note(place, x.size(), x.stride(), int(x.storage_offset())) if place is not None else None

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | Note | Place:
        number, self._count = self._count, self._count + 1
        found = self._note(saved)
        if found is not None:
            return found
        if self._running is not None and saved.layout == torch.strided:
            memory = saved.untyped_storage()
            if memory.nbytes() > TINY_BYTES and not any(memory is other for other in self._memories):
                place = Place(self._running)
                self._running.own[number] = weakref.ref(place)
                return place
        # Detached: an operator's own result, kept as it is, would hold the operator and so itself.
        return saved.detach()


def _unpack(kept: torch.Tensor | Note | Place) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else kept.opened()


def tensors_of(found: Any) -> list[torch.Tensor]:
    """The results of an operator, one or several."""
    return [found] if isinstance(found, torch.Tensor) else [x for x in found if isinstance(x, torch.Tensor)]


def _opened(x: Any) -> Any:
    return x.opened() if isinstance(x, Argument) else x


def _items(value: Any) -> Iterator[Any]:
    """The leaves of a nest of tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _items(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _items(item)
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A nest with each leaf changed."""
    if isinstance(value, tuple | list):
        return tuple(_mapped(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    return change(value)
