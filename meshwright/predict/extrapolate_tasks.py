"""The tasks of a step with many equal layers, from steps with a few: repeat the insertion of one more layer.

A step is listed for a few layers, and for one more of a kind (`tasks.issued`). In each section the longer list is the
shorter one with a range inserted (one for each half-batch, if they run one after the other), and a step of many layers
has that range many times. That holds for tasks in program order. It does not hold for buckets of gradients, which close
where they are full; these are filled afterwards, from the gradients of all layers. If two lists differ in another way,
there is no extrapolation.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.partition.buckets import Gradient
from meshwright.predict.bucket_tasks import Arrival, Item
from meshwright.predict.issued import Issued, after_of
from meshwright.predict.timeline import COMPUTE, Task


def with_layers(
    few: Issued, more: Sequence[Issued | None], times: Sequence[int], first: Mapping[str, str]
) -> Issued | None:
    """Return the step with `times` more layers of each kind; None if it cannot be extrapolated.

    `more` are the steps with one more layer of a kind, None for a kind without more. `first` maps each parameter to the
    corresponding one of the first layer of its kind; to itself if there is none.
    """
    kinds = [(n, long) for n, long in enumerate(more) if long is not None and times[n]]
    try:
        items = _expanded(few, [(long, times[n]) for n, long in kinds], first)
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
    """Return the parameters of further layers of a kind, layer by layer."""

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
    """Insert the parameters of further layers after the last corresponding ones."""
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
    """Return the items with each gradient named by its layer: backward reaches the last layer first."""
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
    """Return whether corresponding gradients arrive in the reverse order of their parameters."""
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
    """Two lists differ by something else than ranges of further layers."""


@dataclass(frozen=True, slots=True)
class _Insert:
    """A range of `length` items that each of `times` more layers of a kind has.

    It goes before item `place` of the short list, and is at `source` in the list with one more layer.
    """

    kind: int
    place: int
    length: int
    source: int
    times: int


@dataclass(frozen=True, slots=True)
class _Wait:
    """The dependence of an item, independent of its position.

    It is the item at `index` (from the oldest or, if negative, the newest) among the started items with key `sign` that
    nothing has waited for yet. Without a sign it is the last item that the host waited for.
    """

    sign: Hashable = None
    index: int = 0


class _Line:
    """Items in order, each after its dependence, whatever its position."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.last = -1  # what the host waited for last
        self.started: defaultdict[Hashable, list[int]] = defaultdict(list)

    def add(self, item: Item, sign: Hashable, wait: _Wait | None) -> None:
        """Add an item, with its key and its dependence."""
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
                item = Task(
                    item.name, item.streams, item.seconds, after, item.kind, item.about, item.issue_seconds
                )
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
    """The items of a step with their keys and dependences."""

    step: Issued
    signs: list[Hashable]
    waits: list[_Wait | None]


def _read(step: Issued, first: Mapping[str, str]) -> _Read:
    """Read a step. Raises `_Differs` if an item waits for something that another has waited for."""
    found, line = _Read(step, _signs(step, first), []), _Line()
    for item, sign in zip(step.items, found.signs, strict=True):
        wait, after = None, after_of(item)
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


def _expanded(few: Issued, more: Sequence[tuple[Issued, int]], first: Mapping[str, str]) -> list[Item]:
    """Return the items of a step with further layers of some kinds."""
    short, longer = _read(few, first), [(_read(long, first), times) for long, times in more]
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
    """Return (place in the short list, place in the long list, length) of each range that the long list has more.

    There is one or, if half-batches run one after the other, one in each.
    """
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
    """Return the first position, from a place on, at which the two lists differ."""
    while place < len(few) and few[place] == long[place + shift]:
        place += 1
    return place


def _signs(step: Issued, first: Mapping[str, str]) -> list[Hashable]:
    """Return a key for each item that is equal across layers: names without numbers, seconds and streams. Gradients
    have that of the first layer, too: a layer that others only resemble is none of them."""
    sizes = {
        g.name: (first.get(g.name, g.name), g.key, g.size_bytes, g.fresh, g.wire) for g in step.gradients
    }

    def sign(item: Item) -> Hashable:
        if isinstance(item, Arrival):
            return (item.ends, *(sizes[name] for name in item.names))
        name, sends = NUMBER.sub("", item.name), item.about.get("collective")
        return (name, item.streams, item.seconds, item.kind, len(item.after), sends)

    return [sign(item) for item in step.items]


__all__ = ["with_layers"]
