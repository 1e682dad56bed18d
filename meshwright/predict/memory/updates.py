"""The memory of sharded updates, as in `runtime/sharded_update.py`.

It has the rows of gradients that are reduce-scattered, the shards that stay, and the buckets in which weights are
gathered after the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from meshwright.core.graph import DTYPES
from meshwright.partition import Partition
from meshwright.partition.buckets import BucketBytes, Group
from meshwright.partition.sharded_update import gathers, is_stretch, updates
from meshwright.predict.memory.allocator import Heap, Storage
from meshwright.predict.memory.messages import Scatter, gather, scatter
from meshwright.redistribute import Step
from meshwright.redistribute.index_maps import Exchange, exchange


@dataclass
class _Bucket:
    """A bucket of gradients: its rows while they live, and the gradients still missing."""

    group: Group
    missing: set[str] = field(default_factory=set)
    rows: Storage | None = None
    under_way: Scatter | None = None
    part: Storage | None = None


@dataclass(frozen=True)
class Beside:
    """The other pipeline stages of a rank.

    /- `trained`: the parameters they train. Of these, the gradients of `before` are complete before the last backward
    of a stage, and those of `after` come after it.

    - `starts`: buckets that scatter belong to the rank, not to a stage; if they scatter each time, another stage starts
      the reduction.
    - `counted`: inputs that another stage reads too and that are counted there.
    - `given`: values that they pass to this stage.
    """

    trained: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    starts: bool = False
    counted: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()


ALONE = Beside()


class UpdateMemory:
    """The memory that one rank needs for sharded updates, beside parameters and states."""

    def __init__(
        self,
        parts: Partition,
        rank: int,
        groups: Sequence[Group],
        bucket_bytes: BucketBytes | None,
        staged: bool,
        device: str,
        own: AbstractSet[str] | None = None,
        beside: Beside = ALONE,
    ) -> None:
        """`groups`: the buckets of gradients.

        `staged`: see `step.peak`. `own`: the trained parameters of the stage, by default all. `beside`: the rank's
        other stages.
        """
        self.own, self.beside = own, beside
        held = None if own is None else beside.trained.union(own)
        self.mesh, self.rank, self.staged = parts.plan.mesh, rank, staged
        self.updates = {n: u for n, u in updates(parts).items() if held is None or n in held}
        self.sizes = {i.name: DTYPES[i.type.dtype] for i in parts.resharded.graph.inputs}
        self.buckets = [_Bucket(g, {m.name for m in g.members}) for g in groups if g.parted]
        self.of = {m.name: s for s in self.buckets for m in s.group.members}
        self.wires = {m.name: DTYPES[m.wire or m.dtype] for g in groups for m in g.members}
        self.gathers = [
            replace(g, members=mine)
            for g in gathers(parts, bucket_bytes, device)
            if (mine := tuple(m for m in g.members if m.name in self.updates))
        ]
        self._next = 0

    def begin(self) -> None:
        """Begin a backward that reduce-scatters."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = {m.name for m in bucket.group.members}

    def resume(self, heap: Heap) -> None:
        """Begin with the gradients that earlier stages have left."""
        for bucket in self.buckets:
            done = bucket.missing.intersection(self.beside.before)
            if done:
                bucket.missing -= done
                bucket.rows = heap.new(self._rows_bytes(bucket), "buckets")
        self._start(heap)

    def _plan(self, step: Step) -> Exchange:
        return exchange(step, self.mesh, self.rank)

    def part_bytes(self, name: str) -> int | None:
        """Return the bytes of the updated shard of a weight; None if the rank updates all it holds."""
        if name not in self.updates:
            return None
        return self.sizes[name] * math.prod(self._plan(self.updates[name].part).shape_after)

    def copied_bytes(self) -> int:
        """Return the bytes of shards that are not views of their weights."""
        own = self.updates if self.own is None else self.own - self.beside.counted
        mine = {n: u for n, u in self.updates.items() if n in own}
        apart = (n for n, u in mine.items() if not is_stretch(self._plan(u.part).send[0]))
        return sum(self.part_bytes(n) or 0 for n in apart)

    def takes(self, name: str) -> bool:
        """Return whether a gradient goes into rows that are scattered.

        A gradient that also comes from another stage waits for that one.
        """
        return name in self.of and name not in self.beside.after

    def place(self, heap: Heap, name: str, gradient: Storage) -> None:
        """Copy a complete gradient into its rows and free it; full buckets start in their order."""
        bucket = self.of[name]
        if bucket.rows is None:
            bucket.rows = heap.new(self._rows_bytes(bucket), "buckets")
        heap.drop(gradient)
        bucket.missing.discard(name)
        self._start(heap)

    def _rows_bytes(self, bucket: _Bucket) -> int:
        return sum(self._row_bytes(m.name) for m in bucket.group.members)

    def _row_bytes(self, name: str) -> int:
        """Return the bytes of a parameter in the rows of all ranks."""
        update, size = self.updates[name], self.wires[name]
        if update.scatter is None:
            return size * math.prod(self._plan(update.part).shape_after)
        plan = self._plan(update.scatter)
        return size * plan.padded * len(plan.group)

    def _start(self, heap: Heap) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            if self._next:
                self._settle(heap, self.buckets[self._next - 1])
            here = self.buckets[self._next]
            if here.rows is not None and here.group.cut:
                members = self.mesh.count(here.group.cut)
                here.under_way = scatter(heap, here.rows.size_bytes, members, self.staged)
            self._next += 1

    def _settle(self, heap: Heap, bucket: _Bucket) -> None:
        if bucket.rows is None:
            return
        bucket.part = bucket.rows
        if bucket.under_way is not None:
            bucket.part = bucket.under_way.wait()
            heap.drop(bucket.rows)
        heap.rename(bucket.part, "gradients")
        bucket.rows = bucket.under_way = None

    def finish(self, heap: Heap, added: bool = False) -> None:
        """End backward: missing gradients are reduced as zeros, unless another stage provides them.

        `added`: shards are accumulated into those of another backward.
        """
        if self.beside.after:
            return
        for bucket in self.buckets:
            bucket.missing = set()
        self._start(heap)
        for bucket in self.buckets:
            self._settle(heap, bucket)
            part, bucket.part = bucket.part, None
            if part is not None and any(
                self.wires[m.name] != self.sizes[m.name] for m in bucket.group.members
            ):
                own = heap.new(sum(self.part_bytes(m.name) or 0 for m in bucket.group.members), "gradients")
                heap.drop(part)  # added up in another dtype
                part = own
            if part is not None and (added or self.beside.starts):
                heap.drop(part)

    def gather(self, heap: Heap) -> None:
        """Gather the weights, with two buckets under way at a time."""
        before: list[Storage] = []
        for group in self.gathers:
            if group.alone:  # its parts come to where they belong
                for storage in before:
                    heap.drop(storage)
                before = []
                whole = group.members[0].size_bytes
                heap.passing(whole if self.staged and not self.mesh.equally_near(group.axes) else 0)
                continue
            plans = [self._plan(self.updates[m.name].gather) for m in group.members]
            row = sum(p.padded * self.sizes[m.name] for p, m in zip(plans, group.members, strict=True))
            alone = len(plans) == 1 and not plans[0].short
            sent = heap.new(0 if alone else row)
            here = [sent, gather(heap, row * len(plans[0].group), self.mesh, group.axes, self.staged)]
            for storage in before:
                heap.drop(storage)
            before = here
        for storage in before:
            heap.drop(storage)
