"""Good choices of shardings and storage, from quick to small, and what each takes of a rank under techniques.

Bytes of states (weights, gradients, moments) and bytes of activations have a price each; the optimum for every pair of
prices is a point of the front of (seconds, state bytes, activation bytes). Beside those of all shardings stand the
fronts of known recipes: data parallel outside, one sharding of every operator on the 2, 4, 8 ranks inside, which leave
more examples to a rank, and so more micro-batches. Which choice is best depends on the techniques around, and is found
by adding up: activations are divided by micro-batches, those that are computed again are left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from meshwright.core.techniques import ACTIVATIONS, PARAMETERS, Techniques
from meshwright.cost.machine import QUEUED, launch_seconds
from meshwright.ops.batch import batch_rows, batch_units
from meshwright.ops.strategy import at_path
from meshwright.search.budget import AUTO, STAGES, TECHNIQUES
from meshwright.search.data_parallel import by_batch_rows
from meshwright.search.joint.prefetch import further_ahead
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import Memory, NoStates, Problem, Solution, solve
from meshwright.search.space.build import Space
from meshwright.search.space.constraints import exactly
from meshwright.search.space.families import outside
from meshwright.search.space.memory import fixed_bytes
from meshwright.search.stop import never
from meshwright.search.techniques.layers import SHARING

PRODUCTS = ("aten.linear.default", "aten.addmm.default", "aten.mm.default")  # whose weights' halves may wait
SECOND_FORWARD = 0.2  # of computing: forward is a third, less what lies outside of layers


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice of one space. `floor`: seconds that its step is not below; `compute` those of computing, `gathers` those
    in which links are busy with weights for each micro-batch, `adds` those in which the gradients of one are added to
    those before it. `examples`: how many a rank has, and so how many
    micro-batches there can be."""

    name: str
    space: Space
    states: tuple[int, ...]
    floor: float
    compute: float
    gathers: float
    adds: float
    examples: int


@dataclass
class Front:
    """Candidates, and what is known of them. `missed`: what simulations saw beyond sums, of a full batch, under
    techniques, and `misses` those of all candidates; `late`: by how much later than it must a step ended, under a
    policy of recompute, the one that was least late; `lates`: the same of each that was simulated under techniques,
    and `soonest` the least of these in whatever micro-batches; `hosted`: what the host holds beyond sums, of the
    one with least of it, under techniques; `sent`: bytes that stages of it send, once somebody asked; `full_models`:
    its sums for stages, likewise; `solved`: problems with what was found."""

    planner: Planner
    candidates: list[Candidate] = field(default_factory=list)
    missed: dict[Candidate, dict[Techniques, float]] = field(default_factory=dict)
    misses: dict[Techniques, list[float]] = field(default_factory=dict)
    late: dict[tuple[Candidate, Any], float] = field(default_factory=dict)
    lates: dict[Techniques, list[float]] = field(default_factory=dict)
    soonest: dict[Techniques, float] = field(default_factory=dict)
    hosted: dict[Techniques, float] = field(default_factory=dict)
    sent: dict[Candidate, float] = field(default_factory=dict)
    full_models: dict[tuple[Candidate, Techniques], Any] = field(default_factory=dict)
    _seen: dict[tuple[Candidate, Techniques], SearchResult] = field(default_factory=dict)
    _added: dict[tuple[Candidate, Techniques], np.ndarray] = field(default_factory=dict)
    solved: MutableMapping[Problem, Solution] = field(default_factory=WeakKeyDictionary)
    _known: MutableMapping[Space, dict[Techniques, Memory]] = field(default_factory=WeakKeyDictionary)

    @functools.cached_property
    def launching(self) -> float:
        """Seconds that a micro-batch more costs at least."""
        return launching(self.planner)

    @property
    def spent(self) -> bool:
        """True if a large model had as many simulations as it may have in one stage."""
        return self.planner.nodes > TECHNIQUES.large_nodes and len(self._seen) >= TECHNIQUES.large_simulations

    @functools.cached_property
    def queuing(self) -> float:
        """Seconds that a micro-batch takes longer where weights' halves of backward wait."""
        planner, cluster = self.planner, self.planner.request.cluster
        trained = (n for n in planner.context.graph.nodes if n.op in PRODUCTS and any(n.needs_grad))
        count = sum(planner.ties.times(n.name) for n in trained)
        return sum(QUEUED) * count * launch_seconds(cluster.device, cluster.measured)

    def memory(self, space: Space, techniques: Techniques) -> Memory:
        """The sums under techniques."""
        at_once = replace(techniques, micro_batches=1, prefetch=1)
        known = self._known.setdefault(space, {})
        if at_once not in known:
            known[at_once] = self.planner.under(at_once).memory(space)
        return self.planner.under(techniques).in_pieces(space, known[at_once])

    def peak_bytes(self, candidate: Candidate, techniques: Techniques) -> float:
        """About the peak of a candidate under techniques: the sums, and what only simulations saw of it, which is split
        in time as activations are."""
        return (
            self.sums(candidate, techniques) + self._missed(candidate, techniques) / techniques.micro_batches
        )

    def _missed(self, candidate: Candidate, techniques: Techniques) -> float:
        """Return the bytes that a simulation found beyond the sums under these techniques. If there was none: the least
        of those under techniques that differ only in micro-batches, then under equal recompute, then under any.
        Temporary buffers depend most on what is kept. What enough others missed, it misses at least."""
        return max(self._missed_by_itself(candidate, techniques), self._missed_by_others(techniques))

    def _missed_by_others(self, techniques: Techniques) -> float:
        least = _least_of_enough(self.misses, replace(techniques, micro_batches=1, prefetch=1))
        return least if least is not None else _least_of_enough(self.misses, _plain(techniques)) or 0.0

    def _missed_by_itself(self, candidate: Candidate, techniques: Techniques) -> float:
        seen = self.missed.get(candidate, {})
        if techniques in seen:
            return seen[techniques]
        in_pieces = [
            m for t, m in seen.items() if replace(t, micro_batches=techniques.micro_batches) == techniques
        ]
        again = [m for t, m in seen.items() if t.recompute == techniques.recompute]
        return min(in_pieces or again or seen.values(), default=0.0)

    def sums(self, candidate: Candidate, techniques: Techniques) -> float:
        """The sums at their worst instant, with what no choice changes."""
        return fixed_bytes(candidate.space) + float(self._totals(candidate, techniques).max())

    def _totals(self, candidate: Candidate, techniques: Techniques) -> np.ndarray:
        """The sums at each instant, of what a choice changes."""
        key = (candidate, techniques)
        if key not in self._added:
            self._added[key] = self.memory(candidate.space, techniques).totals(candidate.states)
        return self._added[key]

    def likely_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """Estimate the candidate's step: its lower bound, plus the excess that was seen for it, or for enough others
        under the techniques."""
        late = self.late.get((candidate, techniques.recompute))
        if late is None:
            late = _least_of_enough(self.lates, techniques)
        if late is None:
            late = _least_of_enough(self.lates, _plain(techniques)) or 0.0
        return self.least_seconds(candidate, techniques) + late

    def least_late(self, techniques: Techniques) -> float:
        """By how much later than it must a step ended under these techniques, in whatever micro-batches, at least."""
        return self.soonest.get(replace(techniques, micro_batches=1), 0.0)

    def least_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """Return a lower bound of the candidate's step under techniques, without interleaving."""
        adds = 0.0 if techniques.gradient_accumulation_shard else candidate.adds
        seconds = candidate.floor + (techniques.micro_batches - 1) * (self.launching + adds)
        if techniques.recompute == "full":
            seconds += SECOND_FORWARD * candidate.compute
        if "optimizer" in techniques.offload:
            sums = self.memory(candidate.space, self.planner.techniques)
            owned = (v for (kind, _), v in candidate.space.variable.items() if kind == "parameter")
            kept = sum(float(sums.amounts[v][candidate.states[v], 1]) for v in owned)
            share = 2 / (2 + self.planner.request.optimizer_states)  # gradients go out, weights come back
            seconds += self._over_link(share * kept)
        sent = techniques.micro_batches * candidate.gathers
        return max(seconds, sent, self._link_seconds(candidate, techniques))

    def _link_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """Seconds in which the host's link is busy: activations go there and back, parameters come for each
        micro-batch."""
        found = 0.0
        for word, ways in ((ACTIVATIONS, 2), (PARAMETERS, techniques.micro_batches)):
            if word in techniques.offload:
                found += ways * self._saved(candidate, replace(techniques, micro_batches=1), word)
        return self._over_link(found)

    def _over_link(self, size_bytes: float) -> float:
        """Seconds between the device and its host; none where they are one, or the cluster does not say."""
        rate = self.planner.request.cluster.host_bytes_per_s
        return size_bytes / rate if rate else 0.0

    def _saved(self, candidate: Candidate, techniques: Techniques, word: str) -> float:
        """Bytes of the device at the loss that a word of ``offload`` saves."""
        other = replace(techniques, offload=tuple(w for w in techniques.offload if w != word))
        return max(0.0, float(self._totals(candidate, other)[0] - self._totals(candidate, techniques)[0]))

    def overfills_host(self, candidate: Candidate, techniques: Techniques) -> bool:
        """True if the host's memory is too small for what the techniques offload: by a wide margin, or, once one was
        simulated under them, with the bytes that the sums missed."""
        room = self.planner.request.cluster.host_memory_bytes
        if not techniques.offload or not room:
            return False
        kept, missed = self._kept_on_host(candidate, techniques), self.hosted.get(techniques)
        return kept > TECHNIQUES.slack * room if missed is None else kept + missed > room

    def _kept_on_host(self, candidate: Candidate, techniques: Techniques) -> float:
        at_once, found = replace(techniques, micro_batches=1), 0.0
        for word in techniques.offload:
            saved = self._saved(candidate, at_once, word)
            found += saved / techniques.micro_batches if word == ACTIVATIONS else saved
        return found

    def saves(self, candidate: Candidate, techniques: Techniques) -> bool:
        """True if slices, and each word of ``offload``, save bytes at some instant beside the others."""
        plainer = [
            replace(techniques, offload=tuple(w for w in techniques.offload if w != word))
            for word in techniques.offload
        ]
        plainer += [replace(techniques, slice_activation=False)] if techniques.slice_activation else []
        mine = self._totals(candidate, techniques)
        return all(
            bool((mine < TECHNIQUES.worth_saving * self._totals(candidate, other)).any()) for other in plainer
        )

    def evaluated(
        self, candidate: Candidate, techniques: Techniques, enough: float = math.inf
    ) -> SearchResult:
        """The candidate simulated under techniques, with its weights gathered further ahead where that is quicker and
        may take less than `enough` seconds. Raises PlanError for techniques that it cannot take."""
        known = self._seen.get((candidate, techniques))
        if known is not None:
            return known
        found = self.planner.under(techniques).found(
            candidate.space, candidate.states, {"chosen": candidate.name}
        )
        if found.evaluation is not None:
            found = further_ahead(self.planner, found, enough)
            assert found.evaluation is not None
            missed = self.planner.peak_bytes(found) - self.sums(candidate, techniques)
            seen = self.missed.setdefault(candidate, {})
            seen[techniques] = max(0.0, missed) * techniques.micro_batches
            self.misses.setdefault(replace(techniques, micro_batches=1, prefetch=1), []).append(
                seen[techniques]
            )
            late = max(0.0, found.evaluation.step_seconds - self.least_seconds(candidate, techniques))
            key = (candidate, techniques.recompute)
            self.late[key] = min(late, self.late.get(key, late))
            self.lates.setdefault(techniques, []).append(late)
            at_once = replace(techniques, micro_batches=1)
            self.soonest[at_once] = min(late, self.soonest.get(at_once, late))
            if techniques.offload:
                missed = found.evaluation.host_bytes - self._kept_on_host(candidate, techniques)
                self.hosted[techniques] = min(missed, self.hosted.get(techniques, missed))
        self._seen[candidate, techniques] = found
        return found


def _plain(techniques: Techniques) -> Techniques:
    """Without what moves or shards what is kept: with it no step ends sooner, nor has a smaller buffer."""
    return replace(techniques, micro_batches=1, prefetch=1, slice_activation=False, offload=())


def _least_of_enough(seen: Mapping[Techniques, list[float]], techniques: Techniques) -> float | None:
    """The least of what was seen under techniques, if enough was."""
    each = seen.get(techniques, ())
    return min(each) if len(each) >= TECHNIQUES.late_samples else None


def launching(planner: Planner) -> float:
    """Seconds that a micro-batch more costs at least: each operator that computes is started once more, forward and
    backward."""
    graph, times = planner.context.graph, planner.ties.times
    started = sum(times(n.name) * (1 + any(n.needs_grad)) for n in graph.nodes if n.op not in SHARING)
    cluster = planner.request.cluster
    return started * launch_seconds(cluster.device, cluster.measured)


def least_bytes(planner: Planner, space: Space) -> float:
    """Return a lower bound in bytes of every choice of a space under the planner's techniques."""
    memory, problem = planner.memory(space), space.problem()
    sums = (solve(memory.alone(problem, t)).bound for t in range(memory.instants))
    return fixed_bytes(space) + max(sums)


def front(planner: Planner, space: Space) -> Front:
    """The fronts of a space and of the recipes."""
    made = Front(planner)
    _add(made, "front", space, TECHNIQUES.front_prices, TECHNIQUES.many)
    for name, recipe, examples in _recipes(planner):
        _add(made, name, recipe, TECHNIQUES.recipe_prices, examples)
    # These split the batch as far as it goes, where that is the quickest: others leave micro-batches their examples.
    for name, recipe, examples in _recipes(planner, 1, many=True):
        if examples > planner.techniques.pieces:
            asked = replace(planner.techniques, micro_batches=min(TECHNIQUES.many, examples))
            plain, memory = recipe.problem(micro_batches=asked.micro_batches), made.memory(recipe, asked)
            _take(made, name, recipe, _weighed(made, recipe, plain, memory, TECHNIQUES.recipe_prices))
    return made


def stage_front(planner: Planner, places: int) -> Front:
    """The fronts of the recipes for a pipeline of so many places: they have as many times the memory, and run many
    micro-batches, whose gradients they add up."""
    made = Front(planner)
    for name, space, examples in _recipes(planner, many=True):
        asked = replace(planner.techniques, micro_batches=max(1, min(TECHNIQUES.many, examples)))
        plain, memory = space.problem(micro_batches=asked.micro_batches), made.memory(space, asked)
        _take(made, name, space, _weighed(made, space, plain, memory, STAGES.prices, places))
    return made


def first_front(planner: Planner) -> Front:
    """One choice: the recipe with most ranks inside, its storage sharded."""
    made = Front(planner)
    for name, recipe, _ in _recipes(planner, AUTO.recipe_axes):
        _add(made, name, recipe, TECHNIQUES.recipe_prices[1:])
    return made


def _recipes(planner: Planner, least: int = 0, *, many: bool = False) -> Iterator[tuple[str, Space, int]]:
    """Data parallel outside, one sharding of every operator on at `least` so many axes inside, if there are as many,
    and how many examples a rank has; none where the user pinned something. `many`: of shardings those alone that leave
    a rank all of these examples, so that there can be as many micro-batches."""
    context = planner.context
    if planner.seeds:
        return
    rows = by_batch_rows(context, planner.codes)
    if rows is None:
        return
    count = len(context.mesh.axes)
    examples = min(batch_rows(context.graph), default=TECHNIQUES.micro_batches * context.mesh.size)
    for inner in range(min(least, count), min(AUTO.recipe_axes, count) + 1):
        ranks = context.mesh.count([a.name for a in context.mesh.axes[count - inner :]])
        each = examples * ranks // context.mesh.size
        if each < planner.techniques.pieces:
            continue  # ranks without an example are no data parallel
        name = f"data parallel × {ranks} ranks of the best cut" if inner else "data parallel"
        family = outside(rows, count - inner) if inner else exactly(rows)
        pieces = max(
            planner.techniques.micro_batches,
            1 << max(0, min(each, TECHNIQUES.micro_batches).bit_length() - 1),
        )
        under = planner.under(replace(planner.techniques, micro_batches=pieces)) if many else planner
        yield name, under.space(family), each


def _add(
    made: Front, name: str, space: Space, prices: tuple[tuple[float, float], ...], examples: int = 1
) -> None:
    """The choices of a space for some prices, and that for as many micro-batches as there may be `examples`."""
    plain, memory = space.problem(), made.memory(space, made.planner.techniques)
    first, *others = _weighed(made, space, plain, memory, prices)
    several: list[Problem] = []
    if (pieces := min(TECHNIQUES.many, examples)) > 1:
        asked = replace(made.planner.techniques, micro_batches=pieces)
        many = space.problem(micro_batches=pieces)
        several = _weighed(made, space, many, made.memory(space, asked), TECHNIQUES.many_prices)
    if first is plain:
        hidden = space.problem(TECHNIQUES.alpha)
        several = [*_weighed(made, space, hidden, memory, TECHNIQUES.hidden_prices), *several]
    _take(made, name, space, [first, *several, *others])


def _weighed(
    made: Front,
    space: Space,
    plain: Problem,
    memory: Memory,
    prices: tuple[tuple[float, float], ...],
    places: int = 1,
) -> list[Problem]:
    """A problem with prices on bytes of states and of activations, in steps that the memory of `places` costs."""
    step = _nearly(made, plain, never).price
    owned = {space.variable["parameter", name] for name in space.parameters}
    limit = places * (made.planner.request.memory_bytes or 1.0)
    return [
        _priced(plain, memory, owned, states * step / limit, activations * step / limit)
        if states or activations
        else plain
        for states, activations in prices
    ]


def _take(made: Front, name: str, space: Space, problems: Iterable[Problem]) -> None:
    """The optima of some problems, as candidates."""
    floor, seen = space.problem(1.0), set[tuple[int, ...]]()
    stop = made.planner.request.stop
    for asked in problems:
        if stop.now():
            return
        found = tuple(_nearly(made, asked, stop.now).states)
        if found in seen:
            continue
        seen.add(found)
        candidate = _candidate(made, name, space, found, floor)
        if not any(_alike(candidate, other) for other in made.candidates):
            made.candidates.append(candidate)


def _nearly(made: Front, problem: Problem, ended: Callable[[], bool]) -> Solution:
    """The optimum of a problem, or what is near enough to be simulated, sooner. Each is solved once: the plain problem
    says what a price is a share of, too."""
    if (known := made.solved.get(problem)) is not None:
        return known
    try:
        found = solve(problem, limit_work=TECHNIQUES.front_work, ended=ended)
    except NoStates as error:
        if error.proven:
            raise
        found = solve(problem, ended=ended)
    if not found.stopped:
        made.solved[problem] = found
    return found


def with_choice(made: Front, found: SearchResult) -> None:
    """Make a choice that another search came to a candidate, too, so that it is looked at under other techniques."""
    states = tuple(found.states)
    if any(one.space is found.space and one.states == states for one in made.candidates):
        return
    made.candidates.append(
        _candidate(made, str(found.claims.get("chosen", "")), found.space, states, found.space.problem(1.0))
    )


def _candidate(made: Front, name: str, space: Space, states: tuple[int, ...], floor: Problem) -> Candidate:
    least, compute = floor.price(states), space.price(states).compute
    gathers, each = space.least_gathers(states), examples_of(made.planner, space, states)
    adds = space.adding_seconds(states)
    return Candidate(name, space, states, least, compute, gathers, adds, each)


def _alike(one: Candidate, other: Candidate) -> bool:
    """True if two candidates of different spaces are the same choice, as far as their sums show."""
    if one.space is other.space or one.examples != other.examples:
        return False
    mine, theirs = one.space.price(one.states), other.space.price(other.states)
    return bool(
        np.isclose(
            [one.floor, mine.total, mine.compute],
            [other.floor, theirs.total, theirs.compute],
            rtol=TECHNIQUES.same_candidate,
        ).all()
    )


def examples_of(planner: Planner, space: Space, states: tuple[int, ...]) -> int:
    """How many examples a rank has, at most."""
    choice, mesh, factors = space.choice(states), planner.context.mesh, planner.context.factors
    units = planner.kept.once(
        "units of examples",
        lambda: {name: next(batch_units(site, factors), None) for name, site in factors.sites.items()},
    )
    least, seen = TECHNIQUES.micro_batches, set[tuple[int, int]]()
    for node in space.graph.nodes:
        site, strategy, counted = factors.sites[node.name], choice.strategies[node.name], units[node.name]
        if counted is None or (id(site.trees), id(strategy)) in seen:
            continue
        seen.add((id(site.trees), id(strategy)))
        letter, unit = counted
        splits = dict(strategy.splits)
        parts = [at_path(splits.get(letter, site.trees[letter]), path) for path in unit]
        least = min([least, *(part.size // mesh.count(part.axes) for part in parts)])
    return max(1, least)


def _priced(problem: Problem, memory: Memory, owned: set[int], states: float, activations: float) -> Problem:
    """The problem with a price on the bytes at the first instant."""
    at = np.zeros(memory.instants)
    at[0] = 1.0
    amounts = tuple(a * (states if v in owned else activations) for v, a in enumerate(memory.amounts))
    pairs: Mapping = {key: block * states for key, block in memory.pairs.items()}
    return Memory(amounts, pairs).weighed(problem, at)


__all__ = [
    "Candidate",
    "Front",
    "examples_of",
    "first_front",
    "front",
    "launching",
    "least_bytes",
    "stage_front",
    "with_choice",
]
