"""The tasks of a step with many equal layers, from steps with a few: what one more layer puts in, put in as often.

A step is listed for a few layers, and for one more of a kind (`tasks.issued`). In each section the longer list is the
shorter one with one stretch put in, and a step of many layers has that stretch many times. That holds for what is
computed and sent in order; it does not for buckets of gradients, which close where they are full, and so these are
filled afterwards, from the gradients of all layers. Where the two lists differ by more than one stretch nothing is
told, and the whole program has to be lowered.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.cost.timeline import Task
from meshwright.partition.bucket_tasks import Arrival, Item
from meshwright.partition.tasks import Issued
from meshwright.redistribute.buckets import Gradient


def with_layers(
    few: Issued, more: Sequence[Issued | None], times: Sequence[int], first: Mapping[str, str]
) -> Issued | None:
    """The step with `times` more layers of each kind; None where that cannot be told.

    `more`: the step with one more layer of a kind, None where none is to be added. `first`: parameter → that of the
    first layer of its kind which is like it; itself where it has no like.
    """
    kinds = [(n, long) for n, long in enumerate(more) if long is not None and times[n]]
    try:
        items = _Expanded(few, [(long, times[n]) for n, long in kinds]).items
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
    """Whether gradients that are alike come in the reverse order of their parameters."""
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
    """Two lists differ by something else than one stretch a section."""


@dataclass(frozen=True, slots=True)
class _Insert:
    """A stretch of `length` items, before item `place` of the list of a few layers, that each of `times` more layers of
    a kind has; it is at `source` in the list of one more layer."""

    kind: int
    place: int
    length: int
    source: int
    times: int


class _Expanded:
    """The items of a step with more layers. How far back lies what an item waits for either stays, or grows with each
    layer; which of the two, the lists with one more layer tell."""

    def __init__(self, few: Issued, more: Sequence[tuple[Issued, int]]) -> None:
        self.few, self.more = few, more
        self.signs, self.long_signs = _signs(few), [_signs(long) for long, _ in more]
        self.inserts = sorted(
            (i for kind in range(len(more)) for i in self._inserts(kind)), key=lambda i: i.place
        )
        self.items: list[Item] = []
        self._made: list[Hashable] = []  # what the items are like
        at = 0
        for insert in self.inserts:
            self._old(range(at, insert.place))
            at = insert.place
            for copy in range(insert.times):
                self._new(insert, copy)
        self._old(range(at, len(few.items)))

    def _inserts(self, kind: int) -> Iterator[_Insert]:
        (long, times), here, there = self.more[kind], self.signs, self.long_signs[kind]
        if len(self.few.sections) != len(long.sections):
            raise _Differs
        ends = zip(self.few.sections, long.sections, strict=True)
        for (low, long_low), (high, long_high) in itertools.pairwise(((0, 0), *ends)):
            length = (long_high - long_low) - (high - low)
            same = 0
            while low + same < high and here[low + same] == there[long_low + same]:
                same += 1
            if length < 0 or here[low + same : high] != there[long_low + same + length : long_high]:
                raise _Differs
            if length:
                yield _Insert(kind, low + same, length, long_low + same, times)

    def _old(self, places: range) -> None:
        """Items of the few layers."""
        for place in places:
            item = self.few.items[place]
            back = [place - a for a in _after(item)]
            if back:
                for kind, (long, times) in enumerate(self.more):
                    there = place + sum(i.length for i in self.inserts if i.kind == kind and i.place <= place)
                    longer = _after(long.items[there])
                    if len(longer) != len(back):
                        raise _Differs
                    now = [place - a for a in _after(item)]
                    back = [b + times * (there - a - n) for b, a, n in zip(back, longer, now, strict=True)]
            self._add(item, self.signs[place], back, [self.signs[a] for a in _after(item)])

    def _new(self, insert: _Insert, copy: int) -> None:
        """One more layer."""
        (long, _), signs = self.more[insert.kind], self.long_signs[insert.kind]
        for place in range(insert.source, insert.source + insert.length):
            item = long.items[place]
            after = _after(item)
            back = [place - a for a in after]
            for number, a in enumerate(after):
                if a < insert.source and not self._stays(insert, place, number):
                    back[number] += copy * insert.length + self._others(insert, a)
            self._add(item, signs[place], back, [signs[a] for a in after])

    def _stays(self, insert: _Insert, place: int, number: int) -> bool:
        """Whether what an item of a further layer waits for is as far back in each such layer."""
        (long, _), signs = self.more[insert.kind], self.long_signs[insert.kind]
        after = _after(long.items[place])
        before = place - insert.length  # the same in the layer before
        if before >= 0 and signs[before] == signs[place]:
            theirs = _after(long.items[before])
            if len(theirs) == len(after):
                return place - after[number] == before - theirs[number]
        return place - after[number] <= insert.length

    def _others(self, insert: _Insert, after: int) -> int:
        """How many items of layers of other kinds come between an item and what it waits for, which is before all
        layers of its kind."""
        mine = [i for i in self.inserts if i.kind == insert.kind and i.source <= after]
        if any(after < i.source + i.length for i in mine):
            raise _Differs
        there = after - sum(i.length for i in mine)
        between = (i for i in self.inserts if i.kind != insert.kind and there < i.place <= insert.place)
        return sum(i.length * i.times for i in between)

    def _add(self, item: Item, sign: Hashable, back: Sequence[int], like: Sequence[Hashable]) -> None:
        here = len(self.items)
        for distance, wanted in zip(back, like, strict=True):
            if not (0 < distance <= here and self._made[here - distance] == wanted):
                raise _Differs
        self.items.append(_waiting(item, tuple(here - distance for distance in back)))
        self._made.append(sign)


def _after(item: Item) -> tuple[int, ...]:
    if isinstance(item, Task):
        return item.after
    return (item.after,) if item.after >= 0 else ()


def _waiting(item: Item, after: tuple[int, ...]) -> Item:
    """An item that waits for those at other places."""
    if after == _after(item):
        return item
    if isinstance(item, Task):
        return Task(item.name, item.streams, item.seconds, after, item.kind, item.about)
    return Arrival(item.names, after[0], item.ends)


def _signs(step: Issued) -> list[Hashable]:
    """What makes items alike, whatever layer they are of."""
    sizes = {g.name: (g.key, g.size_bytes, g.fresh, g.wire) for g in step.gradients}

    def sign(item: Item) -> Hashable:
        if isinstance(item, Arrival):
            return (item.ends, *(sizes[name] for name in item.names))
        return (item.streams, item.seconds, item.kind, len(item.after), item.about.get("operator"))

    return [sign(item) for item in step.items]


__all__ = ["with_layers"]
