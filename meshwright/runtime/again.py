"""What backward makes again instead of keeping it: results of operators (recompute) and of reshards (parameters
gathered twice, as in ZeRO-3; activations gathered twice, as in Megatron's sequence parallel).

What autograd saves passes through a pair of hooks. A saved tensor that lies in the memory of such a result (it, or a
view of it) is kept as a note: which result, and where in it. What an operator saves of its own (a mask, the statistics
of rows, probabilities) is kept as a note too: the i-th thing that this operator saves. So the memory goes as soon as
forward has read it. The first note that backward opens runs the operator again on its arguments, which are kept in the
same way, as tensors or as notes, and so are made again first. What is made lives until no note of it is left:
neighbours that saved the same tensor (q, k and v of one norm) share it, nothing is made twice, and what backward never
asks for (the last product of a layer) is not made at all.

Hooks belong to the thread that runs forward, as do simulated ranks; backward may run on another thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Moment = Callable[
    [], AbstractContextManager[Any]
]  # brings a rank back to the step and micro-batch of forward

TINY_BYTES = 256  # what an operator saves of its own and is no larger than a note of it is kept


class Result:
    """The results of one call of an operator: its function, and its arguments as they are kept."""

    __slots__ = ("__weakref__", "args", "function", "kwargs", "made", "moment", "own", "saved")

    def __init__(self, function: Callable[..., Any], moment: Moment) -> None:
        self.function, self.moment = function, moment
        self.args: Any = ()
        self.kwargs: Any = {}
        self.own: set[int] = set()  # numbers of what the operator saved that is to be recorded
        self.made: list[torch.Tensor] | None = None
        self.saved: dict[int, torch.Tensor] = {}

    def made_again(self) -> Result:
        """The same with its results made, and before them all that they are made from."""
        todo = [self]  # no recursion: a chain may be as long as the model is deep
        while todo:
            result = todo[-1]
            missing = result.missing() if result.made is None else []
            if missing:
                todo += reversed(missing)
                continue
            if result.made is None:
                result._make()
            todo.pop()
        return self

    def missing(self) -> list[Result]:
        """What has to be made first."""
        notes = (x.kept for x in _items((self.args, self.kwargs)) if isinstance(x, _Argument))
        return [n.result for n in notes if isinstance(n, Note) and n.result.made is None]

    def _make(self) -> None:
        args, kwargs = _mapped(_opened, self.args), _mapped(_opened, self.kwargs)
        self.args, self.kwargs = (), {}  # what only led here can go
        with self.moment():
            if self.own:
                with torch.enable_grad(), self._recording():
                    found = self.function(*args, **kwargs)
            else:
                with torch.no_grad():
                    found = self.function(*args, **kwargs)
        self.made = [x.detach() if x.requires_grad else x for x in tensors_of(found)]

    def _recording(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which what the operator saves is numbered as it was in forward."""
        numbers = iter(range(1 << 30))

        def pack(x: torch.Tensor) -> None:
            number = next(numbers)
            if number in self.own:
                self.saved[number] = x.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None)


@dataclass(frozen=True, slots=True)
class Note:
    """What is kept of a tensor: the result in whose memory it lay, and where in there. Notes own the result."""

    result: Result
    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def opened(self) -> torch.Tensor:
        """The tensor."""
        made = self.result.made_again().made
        assert made is not None
        return made[self.output].as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class OwnNote:
    """What is kept of something that an operator saves of its own: which operator, and the how manieth it was."""

    result: Result
    number: int

    def opened(self) -> torch.Tensor:
        """The tensor."""
        return self.result.made_again().saved[self.number]


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument as it is kept, and whether its gradient was wanted."""

    kept: torch.Tensor | Note
    needs_grad: bool


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
        made.args = (self._kept(source),)
        self._know([result], made, [source.untyped_storage()])

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, moment: Moment = nullcontext) -> Any:
        """``function(*args, **kwargs)``, of which backward finds nothing: neither results nor what it saves."""
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
        self._know(tensors_of(found), result, memories)
        return found

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which a forward pass is run."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _know(
        self, found: Sequence[torch.Tensor], result: Result, memories: Sequence[torch.UntypedStorage]
    ) -> None:
        for number, x in enumerate(found):
            memory = x.untyped_storage()
            # What is only a view of an argument costs no memory of its own.
            if not any(memory is other for other in memories):
                self._known[memory] = result, number, x.dtype

    def _kept(self, x: Any) -> Any:
        """An argument as it is kept."""
        if not isinstance(x, torch.Tensor):
            return x
        return _Argument(self._note(x) or x.detach(), x.requires_grad)

    def _note(self, x: torch.Tensor) -> Note | None:
        if x.layout != torch.strided:
            return None
        known = self._known.get(x.untyped_storage())
        if known is None or x.dtype != known[2] or x.is_conj() or x.is_neg():
            return None
        return Note(known[0], known[1], x.size(), x.stride(), x.storage_offset())

    def _pack(self, saved: torch.Tensor) -> torch.Tensor | Note | OwnNote:
        number, self._count = self._count, self._count + 1
        note = self._note(saved)
        if note is not None:
            return note
        if self._running is not None and saved.layout == torch.strided:
            memory = saved.untyped_storage()
            if memory.nbytes() > TINY_BYTES and not any(memory is other for other in self._memories):
                self._running.own.add(number)
                return OwnNote(self._running, number)
        # Detached: an operator's own result, kept as it is, would hold the operator and so itself.
        return saved.detach()


def _unpack(kept: torch.Tensor | Note | OwnNote) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else kept.opened()


def tensors_of(found: Any) -> list[torch.Tensor]:
    """The results of an operator, one or several."""
    return [found] if isinstance(found, torch.Tensor) else [x for x in found if isinstance(x, torch.Tensor)]


def _opened(x: Any) -> Any:
    if not isinstance(x, _Argument):
        return x
    found = x.kept.opened() if isinstance(x.kept, Note) else x.kept.detach()
    return found.requires_grad_() if x.needs_grad else found


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
