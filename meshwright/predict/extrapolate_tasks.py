"""The tasks of a step with many equal layers, from steps with a few: what one more layer puts in, put in as often.

A step is listed for a few layers, and for one more of a kind (`tasks.issued`). In each section the longer list is the
shorter one with a stretch put in (one for each copy, where copies of the batch run one after the other), and a step of
many layers has that stretch many times. That holds for what is computed and sent in order; it does not for buckets of
gradients, which close where they are full, and so these are filled afterwards, from the gradients of all layers. Where
two lists differ in another way nothing is told.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.partition.buckets import Gradient
from meshwright.predict.bucket_tasks import Arrival, Item
from meshwright.predict.tasks import Issued
from meshwright.predict.timeline import COMPUTE, Task


def with_layers(
    few: Issued, more: Sequence[Issued | None], times: Sequence[int], first: Mapping[str, str]
) -> Issued | None:
    """The step with `times` more layers of each kind; None where that cannot be told.

    `more`: the step with one more layer of a kind, None where none is to be added. `first`: parameter → that of the
    first layer of its kind which is like it; itself where it has no like.
    """
    kinds = [(n, long) for n, long in enumerate(more) if long is not None and times[n]]
    try:
        items = _expanded(few, [(long, times[n]) for n, long in kinds])
    except _Differs:
        return None
    added = [_added(few, long, times[n]) for n, long in kinds]
    gradients = _with_more(few.gradients, [a.gradients for a in added], first)
    weights = _with_more(few.weights[::-1], [a.weights[::-1] for a in added], first)
    named = _named(items, few, [g.name for g in gradients], first)
    if named is None:
        return None
    updates = dict(few.updates)
    for one in added:
        updates |= one.updates
    return Issued(tuple(named), (), tuple(gradients), tuple(weights[::-1]), updates)


# ---------------------------------------------------------------- parameters


def _added(few: Issued, long: Issued, times: int) -> Issued:
    """The parameters that further layers of a kind bring, layer by layer."""

    def copies(found: Iterable[Gradient], old: Iterable[Gradient]) -> tuple[Gradient, ...]:
        known = {g.name for g in old}
        new = [g for g in found if g.name not in known]
        return tuple(replace(g, name=_copy(g.name, c)) for c in range(times) for g in new)

    updates = {n: u for n, u in long.updates.items() if n not in few.updates}
    return Issued(
        (),
        (),
        copies(long.gradients, few.gradients),
        copies(long.weights[::-1], few.weights)[::-1],
        {_copy(n, c): u for c in range(times) for n, u in updates.items()},
    )


def _copy(name: str, number: int) -> str:
    return f"{name}+{number}"


def _original(name: str) -> str:
    return name.rpartition("+")[0] or name


def _with_more(
    few: Sequence[Gradient], added: Iterable[Sequence[Gradient]], first: Mapping[str, str]
) -> list[Gradient]:
    """Those of further layers come after the last that are like them."""
    found = list(few)
    for layers in added:
        alike = {first.get(n := _original(g.name), n) for g in layers}
        ends = [place for place, g in enumerate(found) if first.get(g.name, g.name) in alike]
        here = ends[-1] + 1 if ends else len(found)
        found[here:here] = layers
    return found


def _named(
    items: Sequence[Item], few: Issued, order: Sequence[str], first: Mapping[str, str]
) -> list[Item] | None:
    """The items with each gradient called as the parameter of its layer: backward comes to the last layer first."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in order:
        alike[first.get(n := _original(name), n)].append(name)
    if not _backwards(few, first):
        return None
    found: list[Item] = []
    left = {family: len(names) for family, names in alike.items()}
    for item in items:
        if isinstance(item, Arrival):
            names: list[str] = []
            for name in item.names:
                family = first.get(name, name)
                left[family] -= 1
                if left[family] < 0:
                    return None
                names.append(alike[family][left[family]])
            if item.ends:
                left = {family: len(names) for family, names in alike.items()}
            found.append(replace(item, names=tuple(names)))
        else:
            found.append(item)
    return found


def _backwards(few: Issued, first: Mapping[str, str]) -> bool:
    """Return whether gradients that are alike come in the reverse order of their parameters."""
    place = {g.name: number for number, g in enumerate(few.gradients)}
    last: dict[str, int] = {}
    for item in few.items:
        if isinstance(item, Arrival):
            for name in item.names:
                family = first.get(name, name)
                if place[name] >= last.get(family, len(place)):
                    return False
                last[family] = place[name]
            if item.ends:
                last = {}
    return True


# ---------------------------------------------------------------- items


class _Differs(Exception):
    """Two lists differ by something else than stretches of further layers."""


@dataclass(frozen=True, slots=True)
class _Insert:
    """A stretch of `length` items, before item `place` of the list of a few layers, that each of `times` more layers of
    a kind has; it is at `source` in the list of one more layer."""

    kind: int
    place: int
    length: int
    source: int
    times: int


@dataclass(frozen=True, slots=True)
class _Wait:
    """What an item waits for: of what was started, is like `sign` and nobody has waited for yet, the one at `index`
    (from the oldest, or, negative, from the newest); without a sign what the host waited for last."""

    sign: Hashable = None
    index: int = 0


class _Line:
    """Items in order, each after what it waits for by its nature, not by its place."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.last = -1  # what the host waited for last
        self.started: defaultdict[Hashable, list[int]] = defaultdict(list)

    def add(self, item: Item, sign: Hashable, wait: _Wait | None) -> None:
        """An item, what it is like, and what it waits for."""
        here = len(self.items)
        after: tuple[int, ...] = ()
        if wait is not None:
            after = (self.last if wait.sign is None else self._taken(wait),)
        if isinstance(item, Task):
            if COMPUTE in item.streams:
                self.last = here
            else:
                self.started[sign].append(here)
            if item.after != after:
                item = Task(item.name, item.streams, item.seconds, after, item.kind, item.about)
        elif after and after[0] != item.after:
            item = Arrival(item.names, after[0], item.ends)
        self.items.append(item)

    def _taken(self, wait: _Wait) -> int:
        open_ones = self.started[wait.sign]
        if not -len(open_ones) <= wait.index < len(open_ones):
            raise _Differs
        return open_ones.pop(wait.index)


NUMBER = re.compile(r"_?\d+")


@dataclass(frozen=True)
class _Read:
    """The items of a step, what each is like, and what each waits for."""

    step: Issued
    signs: list[Hashable]
    waits: list[_Wait | None]


def _read(step: Issued) -> _Read:
    """Raises `_Differs` where an item waits for something that another has waited for."""
    found, line = _Read(step, _signs(step), []), _Line()
    for item, sign in zip(step.items, found.signs, strict=True):
        wait, after = None, _after(item)
        if len(after) > 1:
            raise _Differs
        for place in after:
            wait = _Wait()
            if place != line.last:
                like = found.signs[place]
                open_ones = line.started[like]
                if place not in open_ones:
                    raise _Differs
                index = open_ones.index(place)
                wait = _Wait(like, index - len(open_ones) if index else 0)
        found.waits.append(wait)
        line.add(item, sign, wait)
    return found


def _expanded(few: Issued, more: Sequence[tuple[Issued, int]]) -> list[Item]:
    """The items of a step with further layers of some kinds."""
    short, longer = _read(few), [(_read(long), times) for long, times in more]
    inserts = [i for kind, (long, times) in enumerate(longer) for i in _inserts(kind, short, long, times)]
    line, at = _Line(), 0

    def add(read: _Read, low: int, high: int) -> None:
        for place in range(low, high):
            line.add(read.step.items[place], read.signs[place], read.waits[place])

    for insert in sorted(inserts, key=lambda i: i.place):
        add(short, at, insert.place)
        at = insert.place
        for _ in range(insert.times):
            add(longer[insert.kind][0], insert.source, insert.source + insert.length)
    add(short, at, len(few.items))
    return line.items


def _inserts(kind: int, few: _Read, long: _Read, times: int) -> Iterator[_Insert]:
    if len(few.step.sections) != len(long.step.sections):
        raise _Differs
    ends = zip(few.step.sections, long.step.sections, strict=True)
    for (low, long_low), (high, long_high) in itertools.pairwise(((0, 0), *ends)):
        for place, source, length in _stretches(few.signs[low:high], long.signs[long_low:long_high]):
            yield _Insert(kind, low + place, length, long_low + source, times)


def _stretches(few: Sequence[Hashable], long: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """(place in the few, place in the long, length) of what the longer list has more: one stretch; or, where copies run
    one after the other, one in each."""
    more = len(long) - len(few)
    if more <= 0:
        if more == 0 and few == long:
            return []
        raise _Differs
    first = _alike(few, long, 0, 0)
    if few[first:] == long[first + more :]:
        return [(first, first, more)]
    for length in range(1, more):  # in two copies; gradients are complete in one of them alone
        second = _alike(few, long, first, length)
        if second > first and few[second:] == long[second + more :]:
            return [(first, first, length), (second, second + length, more - length)]
    raise _Differs


def _alike(few: Sequence[Hashable], long: Sequence[Hashable], place: int, shift: int) -> int:
    """Where, from a place on, the two differ first."""
    while place < len(few) and few[place] == long[place + shift]:
        place += 1
    return place


def _after(item: Item) -> tuple[int, ...]:
    if isinstance(item, Task):
        return item.after
    return (item.after,) if item.after >= 0 else ()


def _signs(step: Issued) -> list[Hashable]:
    """What makes items alike, whatever layer they are of: their names but for numbers, their seconds and streams."""
    sizes = {g.name: (g.key, g.size_bytes, g.fresh, g.wire) for g in step.gradients}

    def sign(item: Item) -> Hashable:
        if isinstance(item, Arrival):
            return (item.ends, *(sizes[name] for name in item.names))
        name, sends = NUMBER.sub("", item.name), item.about.get("collective")
        return (name, item.streams, item.seconds, item.kind, len(item.after), sends)

    return [sign(item) for item in step.items]


__all__ = ["with_layers"]
