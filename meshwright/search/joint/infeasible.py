"""Why nothing fits into memory: what is over, by how much, at which instant, and what was tried and does fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.core.graph import Graph
from meshwright.core.techniques import OFFLOAD
from meshwright.errors import DoesNotFit, LayoutError, PlanError
from meshwright.redistribute.steps import enough_bytes, show_bytes
from meshwright.search.budget import MEMORY
from meshwright.search.exact_spaces import families_of
from meshwright.search.joint.dimensions import micro_batches_of
from meshwright.search.least_memory import any_fits, least_bytes_of
from meshwright.search.memory_limit import nearer
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import Memory, solve
from meshwright.search.space.build import Space
from meshwright.search.space.memory import INSTANTS

Fits = Callable[[Planner], bool]
Change = tuple[str, dict[str, Any]]  # as a user reads it, and as options


def too_large(planner: Planner, nearest: SearchResult | None = None, fits: Fits = any_fits) -> DoesNotFit:
    """Build the error for a model that is too large, with the smallest single changes under which `fits` finds a plan.

    `nearest`: the simulated choice with the lowest peak. Smaller batches are suggested by sums alone: the caller, who
    has the model, tries them (`DoesNotFit.parts`).
    """
    wanted, places = planner.request.memory_bytes or 0.0, planner.request.places
    what = f"no plan fits into {show_bytes(wanted / places)} per rank"
    if planner.request.any_fits or not planner.request.reasons:
        return DoesNotFit(what, why="nor does the one that takes least", hint="a larger limit")
    planner.tell("what would fit")
    space = planner.space(families_of(planner)[0][1])
    memory, limit = planner.memory(space), planner.limit(space) or 0.0
    least = [_least(space, memory, t) for t in range(memory.instants)]
    worst = int(np.argmax(least))
    known = least_bytes_of(planner)
    fixed = wanted - limit  # what no choice changes
    peak = planner.peak_bytes(known) if known is not None else max(least) + fixed
    # Where the host has the optimizer, a device has no fewer bytes with fewer of its states.
    hosted = "optimizer" in planner.techniques.offload and peak > wanted
    fewer = () if hosted else _states(planner, fits)
    changes = dict([*fewer, *_micro_batches(planner, fits), *_techniques(planner, fits)])
    changes[f"{enough_bytes(peak / places)} per rank{' or more' * (places > 1)}"] = {"memory": peak / places}
    together = f" on the {places} ranks of a pipeline together" if places > 1 else ""
    if least[worst] > limit:
        why = (
            f"at {INSTANTS[worst]} every plan of this space needs {show_bytes(least[worst])} or more in addition to "
            f"the batch{together}, {show_bytes(least[worst] - limit)} over the limit"
        )
    else:
        close = nearer(planner, nearest, known)
        most = planner.peak_bytes(close) if close is not None else peak
        where = close.evaluation.instant if close is not None and close.evaluation is not None else "its peak"
        over = f"{show_bytes(most - wanted)} over the limit"
        why = f"the plan that comes nearest has {show_bytes(most)} at {where}{together}, {over}"
    return DoesNotFit(
        what,
        why=why,
        hint=hint_of(changes),
        parts=tuple(_parts(planner, space, memory, limit, peak - fixed - max(least))),
        changes=changes,
    )


def hint_of(changes: Iterable[str]) -> str:
    """The hint that names changes, of which each alone fits."""
    return "the smallest single changes that fit: " + "; or ".join(changes)


def _states(planner: Planner, fits: Fits) -> Iterator[Change]:
    """An optimizer that keeps less: the largest one that fits."""
    for fewer in reversed(range(planner.request.optimizer_states)):
        if fits(planner.with_request(replace(planner.request, optimizer_states=fewer))):
            s = "s" if fewer != 1 else ""
            text = f"an optimizer with {fewer or 'no'} state{s} per parameter (optimizer_states={fewer})"
            yield text, {"optimizer_states": fewer}
            return


def _micro_batches(planner: Planner, fits: Fits) -> Iterator[Change]:
    """The fewest micro-batches that fit, where they are exact and not asked for."""
    asked = planner.techniques
    if planner.request.places > 1:
        yield from _in_flight(planner, fits)
    if "micro_batches" in asked.given or asked.micro_batches > 1:
        return
    for pieces in micro_batches_of(planner, asked.interleave).values[1:]:
        try:
            if fits(planner.under(replace(asked, micro_batches=pieces))):
                yield f"micro_batches={pieces}", {"micro_batches": pieces}
                return
        except PlanError:  # more than a rank has examples
            return


def _in_flight(planner: Planner, fits: Fits) -> Iterator[Change]:
    """As many micro-batches as keep the ranks of a pipeline busy, of which a rank has up to one for each of them in
    flight; with recompute where that alone does not fit."""
    asked, places = planner.techniques, planner.request.places
    if asked.micro_batches > 1 or rows_of_batch(planner.context.graph) % (2 * places):
        return
    several = planner.with_request(replace(planner.request, in_flight=float(places)))
    more = {"recompute": "full"}
    for change in ({}, more) if not asked.recompute else ({},):
        try:
            if fits(several.under(replace(asked, micro_batches=2 * places, **change))):
                yield _written({"micro_batches": 2 * places, **change})
                return
        except (LayoutError, PlanError):  # more than a rank has examples
            continue


def _techniques(planner: Planner, fits: Fits) -> Iterator[Change]:
    """Those of which one alone, beside what is asked, lets a plan fit."""
    asked = planner.techniques
    single: list[dict[str, Any]] = [{"recompute": "full"}] if not asked.recompute else []
    single += [{"slice_activation": True}] if not asked.slice_activation else []
    words = OFFLOAD if planner.request.cluster.host_bytes_per_s else ()
    single += [{"offload": (*asked.offload, word)} for word in words if word not in asked.offload]
    for change in single:
        try:
            if fits(planner.under(replace(asked, **change))):
                yield _written(change)
        except PlanError:
            continue


def _written(change: dict[str, Any]) -> Change:
    return ", ".join(f"{name}={value!r}" for name, value in change.items()), change


def _parts(planner: Planner, space: Space, memory: Memory, limit: float, beyond: float) -> Iterator[int]:
    """Into how many parts of full rows the batch may be split so that one fits, by sums and what a simulation saw
    `beyond` them."""
    rows, found = rows_of_batch(space.graph), 0
    for parts in (n for n in MEMORY.batch_parts if rows % n == 0):
        smaller = _smaller_batch(space, memory, parts)
        needs = max(_least(space, smaller, t) for t in range(memory.instants))
        if found < MEMORY.batch_parts_named and needs + max(0.0, beyond) / parts <= limit:
            found += 1
            yield parts


def rows_of_batch(graph: Graph) -> int:
    """The rows of the batch; 1 where no dim counts them."""
    found = [i.type.shape[i.batch_dim] for i in graph.input_of("batch") if i.batch_dim is not None]
    return math.gcd(*found) or 1


def _least(space: Space, memory: Memory, instant: int) -> float:
    return solve(memory.alone(space.problem(), instant)).bound


def _smaller_batch(space: Space, memory: Memory, parts: int) -> Memory:
    owned = {space.variable["parameter", name] for name in space.parameters}
    return Memory(tuple(a if v in owned else a / parts for v, a in enumerate(memory.amounts)))


__all__ = ["Fits", "hint_of", "rows_of_batch", "too_large"]
