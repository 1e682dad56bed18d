"""Splits a graph into stages so that the slowest stage is as quick as possible.

Exact over contiguous stretches of the graph's own order, by dynamic programming over stage cuts: first the least
possible time of the slowest stage, then, among all splits within a percent of that, the one that sends the fewest
bytes. For graphs with very many edges, only the places with the fewest bytes across and enough others are considered.

Operators that depend only on the batch's integers and on constants (masks, positions, rotary tables), or only on
parameters (casts), belong to no stage: each stage that reads them computes its own copy. Those that follow from buffers
without the batch (counts of steps, norms of weights by power iteration) are added afterwards: the graph has them first,
wherever the model does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.graph import Graph, Node
from meshwright.errors import PlanError

PLACES = 768  # of which the bottleneck is exact; more are thinned out
SLACK = 0.01  # how much slower than the best the slowest stage may be, for fewer bytes across


@dataclass(frozen=True)
class Costs:
    """The costs of stages. `seconds`: node → forward and backward of one micro-batch. `held`: node → bytes that it
    saves for backward, per micro-batch. `state`: parameter (name of the input) → bytes with gradient and optimizer
    states. `link`: seconds to send so many bytes to the next stage. `share`: the fraction of what arrives that one rank
    holds, of one micro-batch."""

    seconds: Mapping[str, float]
    held: Mapping[str, float]
    state: Mapping[str, float]
    link: Callable[[float], float]
    share: float = 0.0


@dataclass(frozen=True)
class Split:
    """`of`: node → its stage; those of `copied` belong to every stage that reads them. `seconds`: of each stage, with
    what it sends. `crossing`: for each stage cut, the values that cross it. `memory`: bytes of each stage."""

    of: Mapping[str, int]
    copied: frozenset[str]
    seconds: tuple[float, ...]
    crossing: tuple[tuple[str, ...], ...]
    memory: tuple[float, ...]

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.seconds)


def split(
    graph: Graph,
    stages: int,
    costs: Costs | Sequence[Costs],
    *,
    pins: Mapping[str, int] | None = None,
    limit_bytes: float = math.inf,
    in_flight: Sequence[int] = (),
) -> Split:
    """Split a graph into stages. `costs`: of all stages, or one for each if their meshes differ. `pins`: node → the
    stage requested by the user. `in_flight`: the number of micro-batches whose activations each stage holds at once
    (one by default), for `limit_bytes` per rank.

    Raises PlanError if there are too few operators, pins go backward, or no split fits into memory.
    """
    free = copied(graph)
    early = _before_the_batch(graph, free)
    nodes = [n for n in graph.nodes if n.name not in free and n.name not in early]
    if stages < 1 or stages > len(nodes):
        raise PlanError(
            f"{stages} pipeline stages for a model of {len(nodes)} operators",
            why="each stage needs at least one",
            hint=f"pipeline={min(max(len(nodes) // 4, 1), 4)}",
        )
    wanted = {name: stage for name, stage in (pins or {}).items() if name not in free}
    _check_numbers(graph, wanted, stages)
    pinned_to = {name: stage for name, stage in wanted.items() if name not in early}
    each = [costs] * stages if isinstance(costs, Costs) else costs
    known = {id(c): _Room(graph, nodes, c) for c in {id(c): c for c in each}.values()}
    rooms = [known[id(c)] for c in each]
    places = rooms[0].places(stages, pinned_to)
    spans = {id(room): room.seconds(places) for room in known.values()}
    cost = [spans[id(room)] for room in rooms]
    allowed = [_allowed(nodes, places, pinned_to, stage) for stage in range(stages)]
    _check_order(nodes, pinned_to, stages)
    flights = tuple(in_flight) or (1,) * stages
    held = {(id(r), n): r.memory(places, n) for r, n in dict.fromkeys(zip(rooms, flights, strict=True))}
    memory = [held[id(room), n] for room, n in zip(rooms, flights, strict=True)]
    fits = [ok & (m <= limit_bytes) for ok, m in zip(allowed, memory, strict=True)]
    least, _ = _shortest([np.where(ok, c, np.inf) for ok, c in zip(fits, cost, strict=True)], np.maximum)
    if math.isinf(least):
        raise _no_split(nodes, places, allowed, memory, limit_bytes, stages)
    enough = least * (1 + SLACK)
    sent = rooms[0].crossing[places][None, :] + np.zeros_like(cost[0])  # what leaves at the end of a stage
    _, ends = _shortest(
        [np.where(ok & (c <= enough), sent, np.inf) for ok, c in zip(fits, cost, strict=True)], np.add
    )
    edges = [0, *ends]
    of = {nodes[n].name: s for s in range(stages) for n in range(places[edges[s]], places[edges[s + 1]])}
    _place(graph, of, early, wanted)
    _keep_together(graph, of, wanted)
    return Split(
        of,
        free,
        tuple(float(cost[s][a, b]) for s, (a, b) in enumerate(itertools.pairwise(edges))),
        tuple(crossing(graph, of, cut) for cut in range(1, stages)),
        tuple(float(memory[s][a, b]) for s, (a, b) in enumerate(itertools.pairwise(edges))),
    )


def copied(graph: Graph) -> frozenset[str]:
    """The nodes that no stage owns, since each that reads them makes its own: what needs neither a parameter nor a
    gradient (masks of the batch), and what needs parameters and constants alone (casts). Nothing that follows from a
    buffer which the step replaces, or is a result of the step, is among them."""
    replaced = {target for target, _ in graph.mutations}
    still = {
        i.name
        for i in graph.inputs
        if i.role == "constant" or (i.role == "buffer" and i.target not in replaced)
    }
    batch = still | {i.name for i in graph.input_of("batch") if not i.needs_grad}
    weights = still | {i.name for i in graph.input_of("parameter")}
    ends = {v for _, v in (*graph.outputs, *graph.mutations)}
    found: set[str] = set()
    for node in graph.nodes:
        if ends.intersection(node.values):
            continue
        # What reads nothing at all (an arange) is made anew as well.
        known = [
            values
            for values, fits in ((batch, not any(node.needs_grad)), (weights, True))
            if fits and values.issuperset(node.uses)
        ]
        for values in known:
            values.update(node.values)
        if known:
            found.add(node.name)
    return frozenset(found)


def _before_the_batch(graph: Graph, free: frozenset[str]) -> frozenset[str]:
    """The other nodes that read nothing of the batch: they follow from buffers that the step replaces."""
    later = {i.name for i in graph.input_of("batch")}
    found: set[str] = set()
    for node in graph.nodes:
        if later.intersection(node.uses):
            later.update(node.values)
        elif node.name not in free:
            found.add(node.name)
    return frozenset(found)


def _place(graph: Graph, of: dict[str, int], early: frozenset[str], wanted: Mapping[str, int]) -> None:
    """Add the nodes before the batch: each in the stage that the user wants, but in no later one than its readers, and
    in the first if there are none, which has what only some programs of a model read."""
    for node in (n for n in reversed(graph.nodes) if n.name in early):
        readers = [of[r.name] for v in node.values for r, _ in graph.consumers[v] if r.name in of]
        of[node.name] = min(*readers, wanted.get(node.name, 0)) if readers else 0


def crossing(graph: Graph, of: Mapping[str, int], cut: int) -> tuple[str, ...]:
    """The values that a stage before `cut` makes and that `cut` or a later one reads."""
    return tuple(
        value
        for node in graph.nodes
        if of.get(node.name, cut) < cut
        for value in node.values
        if any(of.get(reader.name, -1) >= cut for reader, _ in graph.consumers[value])
    )


class _Room:
    """Seconds and bytes of every stretch of nodes, from sums over the nodes before each place."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], costs: Costs) -> None:
        self.nodes, self.costs = nodes, costs
        at = {node.name: n for n, node in enumerate(nodes)}
        self.time = _sums(costs.seconds.get(n.name, 0.0) for n in nodes)
        self.held = _sums(costs.held.get(n.name, 0.0) for n in nodes)
        across, forward = np.zeros(len(nodes) + 2), np.zeros(len(nodes) + 2)
        for n, node in enumerate(nodes):
            for value in node.values:
                last = max((at[r.name] for r, _ in graph.consumers[value] if r.name in at), default=n)
                both = 2 if value in graph.needs_grad else 1  # the gradient comes back
                for sums, times in ((across, both), (forward, 1)):
                    sums[n + 1] += times * graph.types[value].size_bytes
                    sums[last + 1] -= times * graph.types[value].size_bytes
        self.crossing = np.cumsum(across)[: len(nodes) + 1]
        self.arriving = costs.share * np.cumsum(forward)[: len(nodes) + 1]
        self.uses = {
            entry.name: sorted({at[r.name] for r, _ in graph.consumers[entry.name] if r.name in at})
            for entry in graph.input_of("parameter")
        }

    def places(self, stages: int, pinned_to: Mapping[str, int]) -> np.ndarray:
        """Places at which a stage may begin or end: before the node of that number."""
        count = len(self.nodes)
        every = np.arange(count + 1)
        if count < PLACES:
            return every
        pinned = [n for n, node in enumerate(self.nodes) if node.name in pinned_to]
        edges = {0, count, *pinned, *(n + 1 for n in pinned)}
        even = np.searchsorted(self.time, np.linspace(0.0, self.time[-1], PLACES // 2))
        narrow = np.argsort(self.crossing, kind="stable")[: PLACES // 2]
        return np.array(sorted({*edges, *even.tolist(), *narrow.tolist()}))

    def seconds(self, places: np.ndarray) -> np.ndarray:
        """[from, to] → seconds of the stage between two places, with half of what it exchanges at either end."""
        link = np.array([self.costs.link(b) if b else 0.0 for b in self.crossing[places]]) / 2
        spans = self.time[places][None, :] - self.time[places][:, None]
        return np.where(_forward(places), spans + link[:, None] + link[None, :], np.inf)

    def memory(self, places: np.ndarray, flights: int) -> np.ndarray:
        """[from, to] → bytes of the stage between two places with so many micro-batches in flight."""
        spans = self.held[places][None, :] - self.held[places][:, None]
        held = (spans + self.arriving[places][:, None]) * flights
        once = np.zeros(len(self.nodes) + 1)
        shared = np.zeros_like(held)
        for name, uses in self.uses.items():
            size = self.costs.state.get(name, 0.0)
            if len(uses) == 1:
                once[uses[0] + 1] += size
            elif uses:  # a parameter with several readers counts once wherever at least one of them is
                first = np.searchsorted(uses, places)
                shared += size * (first[None, :] > first[:, None])
        sums = np.cumsum(once)[places]
        return np.where(_forward(places), held + shared + sums[None, :] - sums[:, None], np.inf)


def _keep_together(graph: Graph, of: dict[str, int], pinned_to: Mapping[str, int]) -> None:
    """Move what leads from a buffer to its new value, without a gradient, into the stage that makes the value, if no
    earlier one reads it: a micro-batch may need the value that the one before has made."""
    entries, filled = {i.target: i.name for i in graph.inputs}, Counter(of.values())
    for target, value in graph.mutations:
        maker, buffer = graph.producers.get(value), entries[target]
        readers = {node.name for node, _ in graph.consumers[buffer]}
        if maker is None or maker.name not in of or readers == {maker.name}:
            continue
        stage, after, between = of[maker.name], {buffer}, list[Node]()
        for node in graph.nodes[: graph.nodes.index(maker)]:
            if after.intersection(node.uses) and not any(node.needs_grad):
                after.update(node.values)
                between.append(node)
        for node in reversed(between):
            later = (of.get(r.name, stage) >= stage for v in node.values for r, _ in graph.consumers[v])
            here = of.get(node.name, stage)
            if here < stage and filled[here] > 1 and node.name not in pinned_to and all(later):
                of[node.name] = stage
                filled.update({here: -1, stage: 1})


def _sums(values) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.fromiter(values, dtype=float))])


def _forward(places: np.ndarray) -> np.ndarray:
    return places[:, None] < places[None, :]


def _shortest(costs: Sequence[np.ndarray], join: np.ufunc) -> tuple[float, list[int]]:
    """Through all places with one step a stage: the least joined cost, and where each stage ends."""
    count = costs[0].shape[0]
    best = np.full(count, np.inf)
    best[0] = -np.inf if join is np.maximum else 0.0
    back: list[np.ndarray] = []
    for cost in costs:
        total = join(best[:, None], cost)
        back.append(np.argmin(total, axis=0))
        best = total[back[-1], np.arange(count)]
    ends = [count - 1]
    for came in reversed(back):
        ends.append(int(came[ends[-1]]))
    return float(best[-1]), ends[-2::-1]


# ---------------------------------------------------------------- what the user wants, and what cannot be


def _allowed(
    nodes: Sequence[Node], places: np.ndarray, pinned_to: Mapping[str, int], stage: int
) -> np.ndarray:
    """[from, to] → whether the stretch has all nodes that are wanted in this stage, and none of another."""
    mine = _sums(float(pinned_to.get(n.name) == stage) for n in nodes)
    others = _sums(float(pinned_to.get(n.name, stage) != stage) for n in nodes)
    has = mine[places][None, :] - mine[places][:, None] == mine[-1]
    free = others[places][None, :] - others[places][:, None] == 0
    return has & free & _forward(places)


def _label(node: Node) -> str:
    return node.module or f"%{node.name}"


def _check_numbers(graph: Graph, wanted: Mapping[str, int], stages: int) -> None:
    for node in graph.nodes:
        stage = wanted.get(node.name, 0)
        if not 0 <= stage < stages:
            raise PlanError(
                f"{_label(node)} is assigned to stage {stage}",
                why=f"there are {stages} stages, from 0 to {stages - 1}",
                where=node.where,
                hint=f"pipeline={stage + 1}, or a stage below {stages}",
            )


def _check_order(nodes: Sequence[Node], pinned_to: Mapping[str, int], stages: int) -> None:
    latest: tuple[int, Node] | None = None
    used = taken = 0  # stages that have operators so far, and how many operators
    for number, node in enumerate(nodes):
        stage = pinned_to.get(node.name)
        if stage is None:
            continue
        if latest is not None and stage < latest[0]:
            raise PlanError(
                f"{_label(node)} is assigned to stage {stage}, after {_label(latest[1])} in stage {latest[0]}",
                why="values go from a stage to a later one",
                where=node.where,
                hint="stages that grow in the order in which the model runs",
            )
        if latest is None or stage > latest[0]:
            _check_room(
                used, stage, number - taken, f"before {_label(node)}, which is assigned to stage {stage}"
            )
        latest, used, taken = (stage, node), stage + 1, number + 1
    if latest is not None:
        after = f"after {_label(latest[1])}, which is assigned to stage {latest[0]}"
        _check_room(used, stages, len(nodes) - taken, after)


def _check_room(first: int, end: int, operators: int, where: str) -> None:
    """Raise PlanError where stages `first` to before `end` have fewer operators than there are of them."""
    if end - first > operators:
        raise PlanError(
            f"the pins leave no operator for stage {first + operators}",
            why=f"{operators or 'no'} operator{'s are' if operators != 1 else ' is'} {where}",
            hint="fewer stages, or fewer pins",
        )


def _no_split(
    nodes: Sequence[Node],
    places: np.ndarray,
    allowed: Sequence[np.ndarray],
    memory: Sequence[np.ndarray],
    limit: float,
    stages: int,
) -> PlanError:
    least, ends = _shortest(
        [np.where(ok, m, np.inf) for ok, m in zip(allowed, memory, strict=True)], np.maximum
    )
    if math.isinf(least):
        return PlanError(
            f"the pins leave no operator for one of {stages} stages",
            hint="fewer stages, or fewer pins",
        )
    edges = [0, *ends]
    worst = max(range(stages), key=lambda s: memory[s][edges[s], edges[s + 1]])
    first, last = nodes[places[edges[worst]]], nodes[places[edges[worst + 1]] - 1]
    return PlanError(
        f"no split into {stages} stages fits into {limit / 1e9:.3g} GB a rank",
        why=f"at best stage {worst} needs {least / 1e9:.3g} GB: from %{first.name} to %{last.name}",
        where=first.where,
        hint="more stages, recompute, or fewer micro-batches in flight (1f1b holds the fewest)",
    )
