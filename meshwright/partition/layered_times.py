"""How long a step with many equal layers takes, from the programs of a few: all its layers are played, none is lowered.

Seconds do not grow by the same with each layer: buckets of gradients close where they are full, what the last one
exposes does not grow with the depth, and of two streams one is full from some layer on. So the tasks of all layers are
listed (`more_layers.py`) and played. Of many micro-batches, which are alike but for the last, this is done for one,
and the others are told by the difference of a few layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from meshwright.cost.cluster import Cluster
from meshwright.partition import Partition
from meshwright.partition.accumulation import programs_in_time, scattered_each_time
from meshwright.partition.more_layers import with_layers
from meshwright.partition.step_times import StepTimes, played, step_times
from meshwright.partition.tasks import Issued, filled, issued

LONGEST = 16_000  # items of a step that is played; of a longer one so much, and half as much, tell the rest

Times = tuple[int, ...]  # how many layers of each kind are added


def layered_times(
    few: Partition,
    more: Sequence[Partition | None],
    times: Times,
    cluster: Cluster,
    optimizer_states: int,
    first: Mapping[str, str],
) -> StepTimes:
    """The step of the program of a `few` layers with `times` more of each kind. `more`: the programs with one more of a
    kind, None where none is to be added; `first`: parameter → that of the first layer which is like it."""
    count = programs_in_time(few)

    def listed(parts: Partition | None) -> Issued | None:
        return None if parts is None else issued(parts, cluster, optimizer_states, programs=1)

    step, longer = issued(few, cluster, optimizer_states, programs=1), [listed(parts) for parts in more]

    @functools.cache
    def seen(added: Times) -> StepTimes | None:
        whole = with_layers(step, longer, added, first)
        return None if whole is None else played(filled(whole, few, cluster), cluster)

    one = _extrapolated(seen, _affordable(step, longer, times), times)
    if one is not None and count == 1:
        return one
    all_told = _by_difference(
        [step_times(p, cluster, optimizer_states) if p else None for p in (few, *more)], times
    )
    if one is None:
        return all_told
    last = _by_difference(
        [played(filled(i, few, cluster), cluster) if i else None for i in (step, *longer)], times
    )
    return all_told.plus(one.plus(last, -1.0), float(count) if scattered_each_time(few) else 1.0)


def _affordable(step: Issued, longer: Sequence[Issued | None], times: Times) -> Times:
    """As many layers as can be played quickly, of each kind the same share."""
    items = sum(
        n * (len(long.items) - len(step.items)) for n, long in zip(times, longer, strict=True) if long
    )
    share = min(1.0, LONGEST / max(1, items))
    return tuple(math.ceil(share * n) for n in times)


def _extrapolated(seen: Callable[[Times], StepTimes | None], most: Times, times: Times) -> StepTimes | None:
    """What is seen of all layers; where these are too many, of the most and of half as many, and so on."""
    whole = seen(most)
    if whole is None or most == times:
        return whole
    fewer = tuple(n // 2 for n in most)
    half = seen(fewer)
    return half and whole.plus(whole.plus(half, -1.0), (sum(times) - sum(most)) / (sum(most) - sum(fewer)))


def _by_difference(seen: Sequence[StepTimes | None], times: Times) -> StepTimes:
    """Each further layer as long as the first of them."""
    few, *more = seen
    assert few is not None
    found = few
    for long, n in zip(more, times, strict=True):
        if long is not None:
            found = found.plus(long.plus(few, -1.0), n)
    return found


__all__ = ["layered_times"]
