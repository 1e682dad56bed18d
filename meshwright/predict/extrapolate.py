"""Predict a step with many equal layers from the programs of a few: all layers are simulated, none is lowered.

Seconds do not grow equally with each layer: buckets of gradients close where they are full, the exposed part of the
last one does not grow with the depth, and one of two streams is saturated from some layer on. So the tasks of all
layers are listed (`extrapolate_tasks.py`) and simulated. Of many micro-batches, which are equal except for the last,
one is simulated so, and the others follow from the difference of a few layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time, scattered_each_time
from meshwright.predict.extrapolate_tasks import with_layers
from meshwright.predict.issued import Issued
from meshwright.predict.step_time import FEW, StepTimes, Unlike, played, times_of
from meshwright.predict.tasks import Lister, filled

LONGEST = (
    4_000  # items of a simulated step; a longer one is extrapolated from this length and from half of it
)

Times = tuple[int, ...]  # how many layers of each kind are added


def layered_times(
    few: Partition,
    more: Sequence[Partition | None],
    times: Times,
    cluster: Cluster,
    optimizer_states: int,
    first: Mapping[str, str],
) -> StepTimes:
    """Return the times of a step with `times` more layers of each kind than the program `few`.

    `more` are the programs with one more layer of a kind, None for a kind without more. `first` maps each parameter to
    the corresponding one of the first layer.
    """
    count = programs_in_time(few)
    each_time = scattered_each_time(few)
    steps = [None if p is None else Lister(p, cluster, optimizer_states) for p in (few, *more)]

    def listed(programs: int) -> _Listed:
        parts = [one and one.issued(programs) for one in steps]
        return _Listed(few, parts, times, cluster, first, count - programs if each_time else 0)

    if each_time and count > FEW:
        with contextlib.suppress(Unlike):
            return listed(FEW).times()
    if each_time or count == 1:
        return listed(count).times()
    # Only the last backward sends gradients: what others add grows by as much with each layer.
    found = _by_difference([one and times_of(one) for one in steps], times)
    last = listed(1)
    return found.plus(last.times(), 1.0).plus(last.by_difference(), -1.0)


@dataclass(frozen=True)
class _Listed:
    """The listed steps of a few layers, and of one more layer of each kind. `further`: micro-batches beside those that
    are listed."""

    parts: Partition
    steps: Sequence[Issued | None]
    more: Times
    cluster: Cluster
    first: Mapping[str, str]
    further: int

    def times(self) -> StepTimes:
        """Return the times with all layers.

        If they are too many to simulate, extrapolate from the most that are not, and from half of these.
        """
        most = self._affordable()
        whole = self._seen(most)
        if whole is None:
            return self.by_difference()
        half = tuple(n // 2 for n in most)
        less = self._seen(half) if most != self.more else None
        if less is None:
            return whole
        further = (sum(self.more) - sum(most)) / (sum(most) - sum(half))
        return whole.plus(whole.plus(less, -1.0), further)

    def by_difference(self) -> StepTimes:
        """Return the times with all layers, if each further layer takes as long as the first one added."""
        return _by_difference([step and self._played(step) for step in self.steps], self.more)

    def _affordable(self) -> Times:
        """Return as many layers as can be simulated quickly, with the same share of each kind."""
        few, *longer = (len(step.items) if step else 0 for step in self.steps)
        items = sum(n * (long - few) for n, long in zip(self.more, longer, strict=True) if long)
        share = min(1.0, LONGEST / max(1, items))
        return tuple(math.ceil(share * n) for n in self.more)

    def _seen(self, more: Times) -> StepTimes | None:
        few, *longer = self.steps
        whole = with_layers(few, longer, more, self.first) if few else None
        return whole and self._played(whole)

    def _played(self, step: Issued) -> StepTimes:
        return played(filled(step, self.parts, self.cluster), self.cluster, self.further)


def _by_difference(seen: Sequence[StepTimes | None], times: Times) -> StepTimes:
    """Extrapolate linearly: each further layer takes as long as the first one added."""
    few, *more = seen
    assert few is not None
    found = few
    for long, n in zip(more, times, strict=True):
        if long is not None:
            found = found.plus(long.plus(few, -1.0), n)
    return found


__all__ = ["layered_times"]
