"""Which worker trains which samples: dealt in order to whoever asks, each once, however many workers there are.

A worker has at most one range of samples of a stream. Its push makes the range done; what a worker had that has gone is
dealt to another one. A checkpoint has the ranges whose updates it has not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.errors import ServerError

Range = tuple[int, int]  # the first sample, and the one behind the last
Position = tuple[
    int, tuple[Range, ...]
]  # the first sample that nobody has had, and ranges before it to deal again


@dataclass
class Stream:
    """`next`: the first sample that nobody has had. `back`: ranges of workers that have gone. `out`: by worker, the
    number of its request and its range; `done`: samples whose push was accepted; `waiting`: by round and worker, the
    range whose push is not applied yet. `end`: behind the last sample that is asked for."""

    next: int = 0
    back: list[Range] = field(default_factory=list)
    out: dict[int, tuple[int, Range]] = field(default_factory=dict)
    done: int = 0
    waiting: dict[int, dict[int, Range]] = field(default_factory=dict)
    end: int = 0

    @classmethod
    def at(cls, position: Position) -> Stream:
        """A stream that goes on from a position."""
        first, back = position
        return cls(first, list(back), done=first - sum(stop - start for start, stop in back))

    @property
    def position(self) -> Position:
        """Where a job goes on that begins with the values of now."""
        out = [held for _, held in self.out.values()]
        unapplied = [held for ranges in self.waiting.values() for held in ranges.values()]
        return self.next, tuple(sorted([*self.back, *out, *unapplied]))

    def deal(self, worker: int, request: int, after: int, size: int, epoch: int, total: int) -> Range | None:
        """A range of at most `size` samples within one epoch; an empty one at the end of all `total`, None if what
        others have may come back. `after`: the worker's request before this one, in this life."""
        self.end = max(self.end, total)
        if worker in self.out:
            before, held = self.out[worker]
            if before == request:  # it is asked again
                return held
            del self.out[worker]
            if before == after:  # it went on without a push
                self.done += held[1] - held[0]
            else:
                self.back.append(held)
        found = self._taken(size, epoch, total)
        if found is not None:
            self.out[worker] = (request, found)
            return found
        return None if self.out else (total, total)

    def _taken(self, size: int, epoch: int, total: int) -> Range | None:
        if self.back:
            self.back.sort()
            first, stop = self.back.pop(0)
            if stop - first > size:
                self.back.append((first + size, stop))
            return first, min(stop, first + size)
        if self.next >= total:
            return None
        first, stop = self.next, min(self.next + size, (self.next // epoch + 1) * epoch, total)
        self.next = stop
        return first, stop

    def pushed(self, worker: int, round: int) -> None:
        """The push of a worker was accepted."""
        if worker in self.out:
            _, (first, stop) = self.out.pop(worker)
            self.done += stop - first
            self.waiting.setdefault(round, {})[worker] = (first, stop)

    def applied(self, round: int) -> None:
        """The pushes of a round have become an update."""
        self.waiting.pop(round, None)

    def taken_back(self, worker: int, round: int) -> None:
        """The push of a worker, which is not applied, does not count."""
        if (held := self.waiting.get(round, {}).pop(worker, None)) is not None:
            self.done -= held[1] - held[0]
            self.back.append(held)

    @property
    def finished(self) -> bool:
        """Whether all samples that are asked for are trained; False of a stream that was loaded, before it is asked."""
        return 0 < self.end <= self.next and not self.back and not self.out

    def left(self, worker: int) -> None:
        if worker in self.out:
            self.back.append(self.out.pop(worker)[1])


def deal(
    streams: dict[str, Stream],
    name: str,
    worker: int,
    request: int,
    after: int,
    size: int,
    epoch: int,
    total: int,
) -> Range | None:
    """What the stream of a name deals, see `Stream.deal`. Raises ServerError while samples of another one are not
    trained."""
    if min(size, epoch, total) < 1:
        raise ServerError(f"{size} of {total} samples", why="all are at least 1")
    known = next((other for other, x in streams.items() if other != name and not x.finished), None)
    if known is not None:
        raise ServerError(
            f"step.samples(…) of {name}",
            why=f"the job deals {known}, of which some are not trained",
            hint="the same count and seed on all workers, and after step.resume(…); step.load(path, optimizer=False) "
            "begins anew with any others",
        )
    return streams.setdefault(name, Stream()).deal(worker, request, after, size, epoch, total)


__all__ = ["Position", "Range", "Stream", "deal"]
