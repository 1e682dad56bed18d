"""A step as the host issues it, and the same step with more micro-batches: those between two others are equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.partition.buckets import Gradient
from meshwright.predict.bucket_tasks import Arrival, Item
from meshwright.predict.timeline import Task


@dataclass(frozen=True)
class Issued:
    """A step before its buckets are filled.

    `items` are issued by the host in order; `sections` end at these positions (each backward ends one). `gradients` are
    reduced in buckets, and `weights` gathered after the update, both in the order of the parameters. `updates`: seconds
    of each parameter's update.
    """

    items: tuple[Item, ...]
    sections: tuple[int, ...]
    gradients: tuple[Gradient, ...]
    weights: tuple[Gradient, ...]
    updates: Mapping[str, float]

    def with_more(self, times: int) -> Issued | None:
        """Return a step of three micro-batches with `times` more after the second, which are like it.

        None where that is not all: the second or what follows waits for what was issued before the first.
        """
        first, _, second, _, last, *_ = self.sections
        length = last - second
        if any(after < first for item in self.items[second:] for after in after_of(item)):
            return None  # of the second it is what a third would wait for in the second
        if any(after < second for item in self.items[last:] for after in after_of(item)):
            return None
        items = [*self.items[:last]]
        for number in range(1, times + 1):
            items += shifted(self.items[second:last], number * length)
        items += shifted(self.items[last:], times * length)
        ends = [*self.sections[:5]]
        for number in range(1, times + 1):
            ends += [end + number * length for end in self.sections[3:5]]
        ends += [end + times * length for end in self.sections[5:]]
        return replace(self, items=tuple(items), sections=tuple(ends))


def after_of(item: Item) -> tuple[int, ...]:
    """Return the positions of what an item waits for."""
    if isinstance(item, Task):
        return item.after
    return (item.after,) if item.after >= 0 else ()


def shifted(items: tuple[Item, ...], by: int) -> Iterator[Item]:
    """Yield items with what they wait for at later positions."""
    for item in items:
        if isinstance(item, Arrival):
            yield Arrival(item.names, item.after + by, item.ends) if item.after >= 0 else item
        elif item.after:
            after = tuple([place + by for place in item.after])
            yield Task(
                item.name, item.streams, item.seconds, after, item.kind, item.about, item.issue_seconds
            )
        else:
            yield item


__all__ = ["Issued", "after_of", "shifted"]
