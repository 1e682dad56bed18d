"""Sharded updates of parameters: from the gradient to a rank's shard, and from updated shards to the weight (ZeRO-1/2).

level 1   all-reduce the gradient, take my shard of it (a slice)   →  update my shard  →  all-gather
level 2   my shard of the sum (reduce-scatter, sum)                →  update my shard  →  all-gather
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.core.graph import DTYPES, Input
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.core.remembered import cached_on_first
from meshwright.partition import Partition
from meshwright.partition.bucket_sizes import sizes
from meshwright.partition.buckets import BucketBytes, Gradient, Group, alone_bytes, fill
from meshwright.plan.plan import Plan
from meshwright.redistribute import Step
from meshwright.redistribute.index_maps import exchange
from meshwright.redistribute.slices import Selection
from meshwright.redistribute.steps import largest_size, origin


@dataclass(frozen=True)
class Update:
    """The steps of one parameter (by the name of the program's input).

    `part` takes my shard of a full gradient. `scatter` reduces it and takes my shard, None where no reduction is left.
    `gather` restores the weight. `scattered`: gradients are reduce-scattered, not all-reduced (level 2).
    """

    name: str
    part: Step
    scatter: Step | None
    gather: Step
    scattered: bool


@cached_on_first
def updates(parts: Partition) -> Mapping[str, Update]:
    """Return the parameters with sharded updates, in the order of the program's inputs."""
    mesh, states = parts.plan.mesh, parts.plan.states
    scattered = parts.plan.techniques.optimizer_parallel >= 2
    return {
        entry.name: _update(
            entry.name, parts.resharded.layouts[entry.name], states[entry.name], mesh, scattered
        )
        for entry in parts.resharded.graph.inputs
        if entry.name in states
    }


def _update(name: str, use: TensorLayout, state: TensorLayout, mesh: Mesh, scattered: bool) -> Update:
    more = mesh.sort(set(state.split_axes) - set(use.split_axes))
    waiting = tuple(a for a in more if a in use.grad)
    # The gradient is not sliced first on axes without a reduction: in `state` they may be inside the others, and then
    # no slice has the shards of all with whom it is reduced.
    before = TensorLayout(use.dims, waiting)
    return Update(
        name,
        Step("slice", more, use.forward, state),
        Step("reduce_scatter", waiting, before, state) if waiting else None,
        Step("all_gather", more, state, use.forward),
        scattered,
    )


def update_layout(parts: Partition, entry: Input) -> TensorLayout:
    """Return the layout of a parameter, and of its gradient, at the update."""
    return parts.plan.states.get(entry.name) or parts.resharded.layouts[entry.name]


def is_stretch(selection: Selection) -> bool:
    """Return whether a selection is one contiguous block of a contiguous tensor."""
    full = True
    for runs, size in zip(reversed(selection.runs), reversed(selection.of), strict=True):
        length = sum(n for _, n in runs)
        if len(runs) > 1 or (not full and length > 1):
            return False
        full = full and length == size
    return True


@functools.lru_cache(maxsize=1 << 12)
def comes_in_place(gather: Step, mesh: Mesh) -> bool:
    """Return whether every rank sends one contiguous block of the weight, of equal length, in the order of the group.

    Then a gather needs no memory beside the weight.
    """
    for layout in (gather.before, gather.after):
        if largest_size(layout, mesh) * mesh.count(layout.split_axes) != math.prod(layout.shape):
            return False  # shards are uneven
    place = exchange(gather, mesh, mesh.rank(origin(mesh))).place
    starts = [_start(p) for p in place]
    return all(is_stretch(p) for p in place) and starts == [n * place[0].numel for n in range(len(place))]


def _start(selection: Selection) -> int:
    """Return the offset of the first selected element in a contiguous tensor."""
    start = 0
    for runs, size in zip(selection.runs, selection.of, strict=True):
        start = start * size + (runs[0][0] if runs else 0)
    return start


@cached_on_first
def gathered(parts: Partition) -> tuple[Gradient, ...]:
    """Return the weights that are gathered after the update, in the order of the program's inputs."""
    mesh, updated = parts.plan.mesh, updates(parts)
    found: list[Gradient] = []
    for entry in parts.resharded.graph.inputs:
        if entry.name in updated:
            gather = updated[entry.name].gather
            sent = largest_size(gather.before, mesh) * mesh.count(gather.axes)  # shards padded to the largest
            whole = sent * DTYPES[entry.type.dtype]
            group = parts.plan.techniques.fusion_group(entry.target, *entry.ties)
            host = entry.name in parts.resharded.hosted
            found.append(Gradient(entry.name, gather.axes, entry.type.dtype, whole, group=group, host=host))
    return tuple(found)


def gathered_bytes(plan: Plan, bucket_bytes: BucketBytes | None = None) -> BucketBytes:
    """Return the bytes of a full bucket of gathered weights: `bucket_bytes`, if given."""
    large = sizes(plan)
    return (lambda weight: large("all_gather", weight.axes)) if bucket_bytes is None else bucket_bytes


@cached_on_first
def gathered_last(parts: Partition, device: str) -> tuple[Gradient, ...]:
    """Return the weights that are gathered after the update, in reverse order of their reads.

    `fresh` marks large ones that are gathered in place.
    """
    mesh, updated = parts.plan.mesh, updates(parts)

    def in_place(weight: Gradient) -> bool:
        enough = alone_bytes("cpu" if weight.host else device)
        return weight.size_bytes >= enough and comes_in_place(updated[weight.name].gather, mesh)

    return tuple(replace(weight, fresh=in_place(weight)) for weight in reversed(gathered(parts)))


def gathers(
    parts: Partition, bucket_bytes: BucketBytes | None = None, device: str = "cpu"
) -> tuple[Group, ...]:
    """Return the buckets of weights to gather after the update, in order of their reads.

    Large weights that are gathered in place are alone.
    """
    return fill(gathered_last(parts, device), device, gathered_bytes(parts.plan, bucket_bytes))
