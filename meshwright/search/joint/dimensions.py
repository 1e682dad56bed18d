"""The techniques that `auto` may choose by itself, as dimensions: the values of each, the plainest first.

A value further on takes less memory of a rank and more seconds of the step. What a user gave stays as it is, and what
would make the numbers inexact is not among the values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.graph import Graph
from meshwright.core.techniques import ACTIVATIONS, OPTIMIZER, PARAMETERS, Techniques
from meshwright.ops.batch import batch_rows, example_reducers, full_batch_readers
from meshwright.ops.factors import Factors
from meshwright.search.budget import TECHNIQUES
from meshwright.search.planner import Planner
from meshwright.search.techniques.recompute import again_of


@dataclass(frozen=True)
class Dimension:
    """A technique and what it may be. `why`: why it has no more values, where a reader may wonder."""

    name: str
    values: tuple[Any, ...]
    why: str = ""


@dataclass(frozen=True)
class Point:
    """A value of each dimension, by its place."""

    places: tuple[int, ...]
    techniques: Techniques

    def beyond(self, other: Point) -> bool:
        """True if no technique is plainer than in another point."""
        more = has_no_less_on_host(self.techniques.offload, other.techniques.offload)
        return more and all(a >= b for a, b in zip(self.places, other.places, strict=True))


def has_no_less_on_host(words: Collection[str], others: Collection[str]) -> bool:
    """True if all `others` of ``offload`` are among `words`, and a step with these is no shorter. Parameters and
    optimizer are quicker there together than one of them: updated weights are not sent back at the end of a step."""
    both = {PARAMETERS, OPTIMIZER}
    return set(words) >= set(others) and not (both <= set(words) and len(both & set(others)) == 1)


def dimensions(planner: Planner, *, offload: bool = True) -> tuple[Dimension, ...]:
    """List the techniques that are left to choose. `offload`: whether anything may go to the host."""
    asked, cluster = planner.techniques, planner.request.cluster
    found = [*stage_dimensions(planner)]
    if planner.context.mesh.size > 1:
        found.append(Dimension("slice_activation", (False, True)))
    if _accumulates_shards(planner, found):
        found.append(Dimension("gradient_accumulation_shard", (False, True)))
    if offload and cluster.host_bytes_per_s:
        words = [OPTIMIZER] if planner.request.optimizer_states else []
        words.append(ACTIVATIONS)
        words += [PARAMETERS] if asked.optimizer_parallel not in (1, 2) else []
        # Numbers in binary, so that what has more words has a later place.
        subsets = range(1 << len(words))
        found.append(
            Dimension("offload", tuple(tuple(w for k, w in enumerate(words) if n >> k & 1) for n in subsets))
        )
    return tuple(d for d in found if d.name not in asked.given)


def stage_dimensions(planner: Planner) -> tuple[Dimension, ...]:
    """List those of the stages of a pipeline: recompute and micro-batches."""
    found = (_recompute(planner.context.graph), micro_batches_of(planner, planner.techniques.interleave))
    return tuple(d for d in found if d.name not in planner.techniques.given)


def _accumulates_shards(planner: Planner, over: Sequence[Dimension]) -> bool:
    """True if gradients may be accumulated, and in shards: ZeRO-1 and one micro-batch keep them as they are."""
    several = planner.techniques.micro_batches > 1 or any(
        d.name == "micro_batches" and len(d.values) > 1 for d in over
    )
    return several and planner.context.mesh.size > 1 and planner.techniques.optimizer_parallel != 1


def sparing(planner: Planner, asked: Techniques) -> Iterator[Techniques]:
    """The techniques with one more that leaves less on a rank for the time of messages: slices of activations, then the
    optimizer on the host. Each set comes from one other alone."""
    request, mesh = planner.request, planner.context.mesh
    hosted = bool(request.cluster.host_bytes_per_s and request.optimizer_states)
    if (
        "slice_activation" not in asked.given
        and mesh.size > 1
        and not (asked.slice_activation or asked.offload)
    ):
        yield replace(asked, slice_activation=True)
    if "offload" not in asked.given and hosted and not asked.offload:
        yield replace(asked, offload=(OPTIMIZER,))


def points(over: tuple[Dimension, ...], base: Techniques) -> Iterator[Point]:
    """All points; a point keeps what the base has beside the dimensions. Some have equal techniques."""
    names = [d.name for d in over]
    for places in itertools.product(*(range(len(d.values)) for d in over)):
        values = [d.values[k] for d, k in zip(over, places, strict=True)]
        yield Point(places, with_values(base, dict(zip(names, values, strict=True))))


def with_values(base: Techniques, values: Mapping[str, Any]) -> Techniques:
    """The techniques with other values. One micro-batch accumulates nothing, and gradients of parameters on the host
    are accumulated in shards anyway: there nothing is asked to be, unless a user did."""
    made = replace(base, **values)
    asked = made.pieces > 1 and PARAMETERS not in made.offload
    if asked or "gradient_accumulation_shard" in base.given:
        return made
    return replace(made, gradient_accumulation_shard=False)


def distinct(over: tuple[Dimension, ...], base: Techniques) -> Collection[Point]:
    """The points with techniques of their own, the plainest of equal ones."""
    found: dict[Techniques, Point] = {}
    for point in points(over, base):
        found.setdefault(point.techniques, point)
    return found.values()


def _recompute(graph: Graph) -> Dimension:
    known = {"": frozenset[str]()}
    for policy in ("selective", "full"):
        again = again_of(graph, policy)
        if again and again not in known.values():
            known[policy] = again
    return Dimension("recompute", tuple(known), "" if len(known) > 1 else "the model has no layers")


def micro_batches_of(planner: Planner, copies: int) -> Dimension:
    """The numbers of micro-batches that can be, each in so many copies."""
    return pieces_of(planner.context.graph, planner.context.factors, copies)


def pieces_of(graph: Graph, factors: Factors, copies: int) -> Dimension:
    """The same of a graph."""
    inexact = example_reducers(graph, factors)
    if inexact:
        why = f"%{inexact[0].name} ({inexact[0].op}) looks at all examples together, so that they would be inexact"
        return Dimension("micro_batches", (1,), why)
    needing = full_batch_readers(graph, factors)
    if needing:
        return Dimension(
            "micro_batches", (1,), f"%{needing[0].name} ({needing[0].op}) needs the full batch at once"
        )
    rows = math.gcd(*batch_rows(graph))
    # Each is at least twice the last: powers of two as far as they divide the batch, then other factors.
    counts = [1]
    for number in range(2, min(rows // copies, TECHNIQUES.micro_batches) + 1):
        if number >= 2 * counts[-1] and rows % (number * copies) == 0:
            counts.append(number)
    return Dimension("micro_batches", tuple(counts))


def powers() -> Iterator[int]:
    """Powers of two, up to the most micro-batches that are looked at."""
    number = 1
    while number <= TECHNIQUES.micro_batches:
        yield number
        number *= 2


__all__ = [
    "Dimension",
    "Point",
    "dimensions",
    "distinct",
    "has_no_less_on_host",
    "points",
    "powers",
    "sparing",
    "stage_dimensions",
    "with_values",
]
