"""The joint search over pipelines: stages × levels × schedule × micro-batches × recompute × storage, with one inner
problem for each number of ranks that share a stage.

A front of choices is made once for each part of the cluster that may share a stage. Every outer configuration of it,
with every point of the open techniques, is then a few sums. The quickest by these sums are simulated: the full model
on the ranks of a stage, divided by the schedule; what a simulation saw beyond the sums corrects those of its like. What
does not fit is looked at again in slices, and with the optimizer on the host. The first that is not quicker than the
best so far ends the search.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.core.techniques import Techniques
from meshwright.cost.cluster import Cluster
from meshwright.cost.operator_tables import PRODUCTS
from meshwright.errors import PlanError
from meshwright.search.budget import AUTO, STAGES, TECHNIQUES
from meshwright.search.joint.candidates import Candidate
from meshwright.search.joint.dimensions import points, powers, sparing, stage_dimensions
from meshwright.search.joint.front import Front
from meshwright.search.pipeline.configurations import (
    SEARCHED,
    FullModel,
    Outer,
    may_win,
    outers,
    peak_bytes,
    pipelined_seconds,
    simulated_peak_bytes,
    step_seconds,
    unmixed,
)
from meshwright.search.planner import SearchResult
from meshwright.search.space.memory import fixed_bytes, gathered_bytes
from meshwright.search.space.micro_batches import ChosenBytes
from meshwright.search.techniques.layers import layers_of


@dataclass(frozen=True)
class Staged:
    """A pipeline: the choice for the ranks that share a stage, and about what the full step takes of time and
    memory."""

    outer: Outer
    found: SearchResult
    seconds: float
    peak_bytes: float


@dataclass(frozen=True)
class _Row:
    """A configuration before it is simulated."""

    whole_seconds: float
    order: tuple[int, ...]
    outer: Outer
    techniques: Techniques
    front: Front
    candidate: Candidate
    message: float
    uneven: float

    def seconds(self, excess: float) -> float:
        """About the step, with so many seconds more for each micro-batch of a full model."""
        pieces = self.techniques.micro_batches
        queued = _queued(self.front, self.techniques)
        seconds = self.whole_seconds + excess * pieces
        return pipelined_seconds(seconds, queued, self.outer, pieces, self.message, self.uneven)

    @property
    def place(self) -> tuple[object, ...]:
        """Where it is in each dimension that a reader learns of."""
        asked = self.techniques
        return self.outer.taken, self.outer.schedule, asked.micro_batches, asked.recompute

    def sparing(self) -> Iterator[_Row]:
        """The same with one more of the techniques that leave less on a rank, where that saves bytes."""
        for asked in sparing(self.front.planner, self.techniques):
            if self.front.saves(self.candidate, asked):
                whole, (first, *rest) = self.front.least_seconds(self.candidate, asked), self.order
                yield replace(self, whole_seconds=whole, order=(first + 1, *rest), techniques=asked)


def stages(
    cluster: Cluster,
    front_of: Callable[[Cluster], Front],
    layers: int,
    *,
    limit: float,
    enough: float = math.inf,
    least: Callable[[Outer, int], float] = lambda outer, micro_batches: 0.0,
    uneven: Callable[[Outer, int], float] = lambda outer, micro_batches: 1.0,
    examples: int = TECHNIQUES.micro_batches,
    tries: int = STAGES.simulations,
    schedules: Sequence[str] = tuple(SEARCHED),
    asked: int = 0,
    ended: Callable[[bool], bool] = lambda known: False,
) -> list[Staged]:
    """The pipelines that were simulated, fit and are quicker than `enough` seconds, the best first.

    `front_of` returns the choices for the ranks that share a stage from their part of the cluster. `layers`: stages
    there can be at most. `limit`: bytes of a rank. `least`: what no plan of a configuration with so many micro-batches
    is quicker than; `uneven`: about how much longer its slowest rank computes than the mean; `examples`: those of the
    batch; `asked`: how many stages, where there may not be any other number.

    `ended`, called with whether some fit, may end the search with those.
    """
    fitting: list[Staged] = []
    found = unmixed(cluster, (o for o in outers(cluster, layers, schedules) if asked in (0, o.stages)))
    groups = _groups(cluster, found, examples, least, uneven)
    _simulate(cluster, front_of, groups, fitting, enough, limit, (least, uneven), tries, ended)
    return sorted(fitting, key=lambda one: one.seconds)


def _simulate(
    cluster: Cluster,
    front_of: Callable[[Cluster], Front],
    groups: list[_Group],
    fitting: list[Staged],
    enough: float,
    limit: float,
    known_of: tuple[Callable[[Outer, int], float], Callable[[Outer, int], float]],
    tries: int,
    ended: Callable[[bool], bool],
) -> None:
    """Simulate what may be the quickest, until nothing else may be; `fitting` gets what fits."""
    best, known, first = enough, _Known(), None
    # Levels that are taken → simulations of these that may yet be no quicker, one after the other.
    patience = defaultdict[tuple[int, ...], int](lambda: STAGES.patience_at_first)
    fits: dict[tuple[Candidate, Outer, int], int] = {}  # choice that fits → by how much of techniques
    entries: list[_Group | _Row] = list(groups)
    queue: list[tuple[float, tuple[int, ...], int]] = [(e.seconds, (), n) for n, e in enumerate(groups)]
    heapq.heapify(queue)

    def later(row: _Row) -> None:
        heapq.heappush(queue, (row.seconds(0.0), row.order, len(entries)))
        entries.append(row)

    while queue and tries > 0 and not ended(bool(fitting)):
        estimate, order, number = heapq.heappop(queue)
        if estimate >= best:
            break
        row = entries[number]
        if isinstance(row, _Group):  # its front is made when nothing else may be quicker
            for one in row.rows(cluster, front_of, enough, *known_of):
                later(one)
            continue
        taken = row.outer.taken
        if not patience[taken]:
            continue
        if (now := row.seconds(known.excess(row))) > estimate:  # what was learned since
            heapq.heappush(queue, (now, order, number))
            continue
        key = row.candidate, row.outer, row.techniques.micro_batches
        if order[0] > fits.get(key, math.inf):
            continue  # more of them saves only what there is
        made: Staged | None = None
        if known.may_fit(row, limit):
            tries -= not known.has(row)
            found = known.evaluated(row)
            if found is None:
                continue
            made = staged(row.front, row.candidate, found, row.outer, cluster, row.uneven)
            known.saw(row, made)
            patience[taken] = STAGES.patience if made.seconds < best else patience[taken] - 1
        if made is None or made.peak_bytes > limit:
            for one in row.sparing():
                later(one)
            continue
        fits[key] = min(order[0], fits.get(key, order[0]))
        if made.seconds < enough:
            fitting.append(made)
        if made.seconds < best:
            best, first = made.seconds, row
            row.front.planner.tell(f"{row.outer.stages} stages", best, None)
    if first is not None and not ended(bool(fitting)):
        rows = [row for row in entries if isinstance(row, _Row)]
        fitting += [one for one in _beside(first, rows, known, cluster, limit) if one.seconds < enough]


def _beside(
    best: _Row, rows: Sequence[_Row], known: _Known, cluster: Cluster, limit: float
) -> Iterator[Staged]:
    """Yield, for each dimension, the quickest choice that differs from the best in it alone. It is simulated, so that
    the report shows its true cost."""
    mine = best.place
    for number in range(len(mine)):
        near = [row for row in rows if [n for n, v in enumerate(row.place) if v != mine[n]] == [number]]
        row = min(near, key=lambda row: row.seconds(known.excess(row)), default=None)
        if row is None or (found := known.evaluated(row)) is None:
            continue
        made = staged(row.front, row.candidate, found, row.outer, cluster, row.uneven)
        if made.peak_bytes <= limit:
            yield made


def _estimate(row: _Row) -> float:
    """Bytes of the rank that holds most, by sums."""
    whole = full_model_of(row.front, row.candidate, row.techniques)
    return peak_bytes(whole, row.outer, row.techniques.micro_batches)


class _Known:
    """Simulations so far, one for all schedules, and how far each exceeded its estimate, per micro-batch."""

    def __init__(self) -> None:
        self.found: dict[tuple[Candidate, Techniques], SearchResult | None] = {}
        self.more: dict[tuple[Candidate, Techniques], float] = {}
        self.over: dict[Candidate, float] = {}
        self.ratios = defaultdict[str, list[float]](list)  # of a schedule: simulated bytes to those by sums

    def has(self, row: _Row) -> bool:
        return (row.candidate, row.techniques) in self.found

    def evaluated(self, row: _Row) -> SearchResult | None:
        """The choice of a row simulated; None for more micro-batches than a rank has examples."""
        key = (row.candidate, row.techniques)
        if key not in self.found:
            try:
                found = self.found[key] = row.front.evaluated(row.candidate, row.techniques)
            except PlanError:
                self.found[key] = None
                return None
            if found.evaluation is not None:
                pieces = row.techniques.micro_batches
                each = max(0.0, found.evaluation.step_seconds - row.whole_seconds) / pieces
                self.more[key] = each
                # Uneven micro-batches take longer than even ones, which says nothing of other numbers.
                if row.candidate.examples % pieces == 0:
                    self.more[row.candidate, replace(row.techniques, micro_batches=1)] = each
        return self.found[key]

    def may_fit(self, row: _Row, limit: float) -> bool:
        """Whether a row may fit: by sums, and by how far simulations of its choice were over them at least; once a few
        rows of its schedule were simulated, by how far these were below them."""
        seen, slack = self.ratios[row.outer.schedule.name], TECHNIQUES.slack
        if len(seen) >= STAGES.ratios:
            slack = min(slack, STAGES.ratio_slack / min(seen))
        return _estimate(row) * self.over.get(row.candidate, 1.0) <= slack * limit

    def saw(self, row: _Row, made: Staged) -> None:
        """A row was simulated."""
        ratio = made.peak_bytes / max(1.0, _estimate(row))
        self.ratios[row.outer.schedule.name].append(ratio)
        over = max(1.0, ratio)
        self.over[row.candidate] = min(over, self.over.get(row.candidate, over))

    def excess(self, row: _Row) -> float:
        """Seconds of a micro-batch that the estimate of a row lacks."""
        asked = replace(row.techniques, micro_batches=1)
        plain = replace(asked, slice_activation=False, offload=())
        known = (self.more.get((row.candidate, one)) for one in (row.techniques, asked, plain))
        return next((more for more in known if more is not None), 0.0)


@dataclass(frozen=True)
class _Group:
    """The configurations that leave the same ranks to a stage, numbered. `seconds`: what none is quicker than."""

    outers: tuple[tuple[int, Outer], ...]
    seconds: float

    def rows(
        self,
        cluster: Cluster,
        front_of: Callable[[Cluster], Front],
        enough: float,
        least: Callable[[Outer, int], float],
        uneven: Callable[[Outer, int], float],
    ) -> Iterator[_Row]:
        """Those with every choice and technique that may be quicker than `enough`."""
        made = front_of(self.outers[0][1].inside(cluster))
        over = stage_dimensions(made.planner)
        schedules = {outer.schedule.name for _, outer in self.outers}
        for number, outer in self.outers:
            bounds: dict[int, float] = {}
            for point in points(over, made.planner.techniques):
                pieces = point.techniques.micro_batches
                if not outer.schedule.can_be(outer.ranks, pieces):
                    continue
                if pieces not in bounds:
                    bounds[pieces] = least(outer, pieces)
                if bounds[pieces] >= enough:
                    continue
                for candidate in made.candidates:
                    if pieces > candidate.examples:
                        continue
                    whole = made.least_seconds(candidate, point.techniques)
                    message = outer.message_seconds(cluster, _sent(made, candidate) / pieces)
                    if len(schedules) > 1 and not may_win(outer, whole, pieces, message):
                        continue
                    order = (sum(point.places), number)
                    row = _Row(
                        whole, order, outer, point.techniques, made, candidate, message, uneven(outer, pieces)
                    )
                    if row.seconds(0.0) < enough:
                        yield row


def _groups(
    cluster: Cluster,
    found: Sequence[Outer],
    examples: int,
    least: Callable[[Outer, int], float],
    uneven: Callable[[Outer, int], float],
) -> list[_Group]:
    """Configurations by the ranks that share a stage. None is quicker than its slowest rank computes at least, and
    waits."""
    alike: dict[tuple[int, ...], list[tuple[int, Outer]]] = {}
    for number, outer in enumerate(found):
        alike.setdefault(outer.taken, []).append((number, outer))
    groups: list[_Group] = []
    for each in alike.values():
        inside = each[0][1].inside(cluster).mesh
        inner = math.prod([axis.size for axis in inside.axes[-AUTO.recipe_axes :]])
        most = max(1, examples * inner // inside.size)
        seconds = [
            least(outer, pieces) * (uneven(outer, pieces) + outer.schedule.idle_share(outer.ranks, pieces))
            for _, outer in each
            for pieces in sorted({*powers(), most})
            if pieces <= most and outer.schedule.can_be(outer.ranks, pieces)
        ]
        if seconds:
            groups.append(_Group(tuple(each), min(seconds)))
    return groups


def staged(
    made: Front,
    candidate: Candidate,
    found: SearchResult,
    outer: Outer,
    cluster: Cluster,
    uneven: float = 1.0,
) -> Staged:
    """Convert a choice that was simulated for a full model into one for a pipeline."""
    whole = full_model_of(made, candidate, found.techniques)
    if found.evaluation is not None:
        whole = replace(whole, seconds=found.evaluation.step_seconds)
    pieces = found.techniques.micro_batches
    peak = peak_bytes(whole, outer, pieces)
    if found.evaluation is not None and found.evaluation.at:
        peak = simulated_peak_bytes(found.evaluation, whole, outer, pieces)
    return Staged(outer, found, step_seconds(whole, outer, pieces, cluster, uneven), peak)


def full_model_of(made: Front, candidate: Candidate, techniques: Techniques) -> FullModel:
    """The sums of a choice, states and activations apart: one for all schedules and numbers of stages."""
    if (known := made.full_models.get((candidate, techniques))) is not None:
        return known
    space, chosen = candidate.space, made.chosen(candidate, techniques)
    owned = {number: name for (kind, name), number in space.variable.items() if kind == "parameter"}
    each = {n: chosen.amounts[n] for n in owned}
    gathered = sum(float(gathered_bytes(space, name)[candidate.states[n]]) for n, name in owned.items())
    kept = later = _kept_bytes(chosen, owned)
    queued = _queued(made, techniques)
    if techniques.recompute and queued is not None:
        plain = made.chosen(candidate, replace(techniques, recompute=""))
        later = _kept_bytes(plain, owned)
    found = made.full_models[candidate, techniques] = FullModel(
        made.least_seconds(candidate, techniques),
        sum(float(row.max()) for row in each.values()) - gathered + fixed_bytes(space),
        max((float(row.max()) / space.owners(owned[n]) for n, row in each.items()), default=0.0),
        kept + gathered,
        _sent(made, candidate) / techniques.micro_batches,
        later + gathered,
        queued,
    )
    return found


def _queued(made: Front, techniques: Techniques) -> float | None:
    """Return the extra seconds of a micro-batch if weight gradients are delayed; None if a layer computes both halves
    of backward together, because it is recomputed only once."""
    return None if techniques.recompute == "full" else made.queuing


def _kept_bytes(chosen: ChosenBytes, owned: Container[int]) -> float:
    """Bytes of activations that a micro-batch keeps, with what readers gather of weights for themselves, which stays
    until their backward."""
    kept = sum(each for n, each in enumerate(chosen.amounts[:, 0].tolist()) if n not in owned)
    return kept + sum(chosen.pairs[:, 0].tolist())


def _sent(made: Front, candidate: Candidate) -> float:
    if candidate not in made.sent:
        made.sent[candidate] = _sent_bytes(candidate)
    return made.sent[candidate]


def _sent_bytes(candidate: Candidate) -> float:
    """Return the bytes that a rank sends of a batch from a layer to the next: the smallest output of any layer."""
    graph = candidate.space.graph
    ends = [v for layer in layers_of(graph) for v in layer.ends if v in graph.needs_grad]
    if not ends:  # a model without layers: what products give, but for the last
        ends = [v for n in graph.nodes if n.op in PRODUCTS for v in n.values if v in graph.needs_grad][:-1]
    return min((_local_bytes(candidate, value) for value in ends), default=0.0)


def _local_bytes(candidate: Candidate, name: str) -> float:
    """Bytes of an operator's result on a rank, as it is made or as those who read it share it."""
    space, states = candidate.space, candidate.states
    first = space.ties.first
    node = space.graph.producers[name]
    maker, hub = ("node", first(node.name)), ("hub", first(name))
    codes = [space.port(maker, node.values.index(name), gives=True).forward[states[space.variable[maker]]]]
    if hub in space.variable:
        codes.append(space.hubs[hub[1]].forward[states[space.variable[hub]]])
    value = space.values[first(name)]
    return value.itemsize * float(space.table.local_elements(value, np.stack(codes)).min())


__all__ = ["Staged", "stages", "staged", "full_model_of"]
