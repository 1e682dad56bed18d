"""Candidates under techniques: what each takes of a rank and of time, by sums until it is simulated, and what
simulations saw beyond sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from meshwright.core.graph import DTYPES
from meshwright.core.placement import offloaded_parameters
from meshwright.core.techniques import ACTIVATIONS, PARAMETERS, RECOMPUTE, Techniques
from meshwright.cost.host import update_seconds_there
from meshwright.cost.machine import QUEUED, launch_seconds
from meshwright.search.budget import TECHNIQUES
from meshwright.search.joint.candidates import Candidate
from meshwright.search.joint.dimensions import has_no_less_on_host
from meshwright.search.joint.prefetch import further_ahead
from meshwright.search.joint.siblings import sibling_seconds
from meshwright.search.memory_limit import step_of
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import Memory, Problem, Solution
from meshwright.search.space.build import Space
from meshwright.search.space.memory import fixed_bytes
from meshwright.search.space.micro_batches import ChosenBytes
from meshwright.search.techniques.recompute import computed_again

PRODUCTS = ("aten.linear.default", "aten.addmm.default", "aten.mm.default")  # whose weights' halves may wait
EXACTLY = 1 + 1e-3  # of what the sums say of the update: a peak that is no higher is there


@dataclass(frozen=True)
class Missed:
    """Bytes beyond sums: of a layer's `weights`, and of activations of a full `batch`, which micro-batches split."""

    weights: float
    batch: float

    def bytes_of(self, micro_batches: int, most: float = math.inf) -> float:
        """Those of a step in micro-batches; of another candidate, whose weights take no more than `most`."""
        return min(self.weights, most) + self.batch / micro_batches


@dataclass
class Front:
    """Candidates, and what is known of them. `missed`: what simulations saw beyond sums, under techniques, and
    `misses` those of all candidates; `late`: by how much later than it must a step ended, by policy of recompute and
    techniques; `lates`: the same of all that were simulated under techniques, and `soonest` those in whatever
    micro-batches; `hosted`: what the host holds beyond sums, of the one with least of it, under techniques; `sent`:
    bytes that stages of it send, once somebody asked; `full_models`: its sums for stages, likewise; `solved`: problems
    with what was found; `partly`: what fits with a policy for all layers, and about what it takes with that in no more
    than must be."""

    planner: Planner
    candidates: list[Candidate] = field(default_factory=list)
    missed: dict[Candidate, dict[Techniques, Missed]] = field(default_factory=dict)
    misses: dict[Techniques, list[Missed]] = field(default_factory=dict)
    late: dict[tuple[Candidate, Any], dict[Techniques, float]] = field(default_factory=dict)
    lates: dict[Techniques, list[float]] = field(default_factory=dict)
    soonest: dict[Techniques, list[float]] = field(default_factory=dict)
    hosted: dict[Techniques, float] = field(default_factory=dict)
    sent: dict[Candidate, float] = field(default_factory=dict)
    full_models: dict[tuple[Candidate, Techniques], Any] = field(default_factory=dict)
    partly: list[tuple[float, SearchResult]] = field(default_factory=list)
    seen: dict[tuple[Candidate, Techniques], SearchResult] = field(default_factory=dict)
    _added: dict[tuple[Candidate, Techniques], np.ndarray] = field(default_factory=dict)
    _again: dict[tuple[Candidate, str], tuple[float, float]] = field(default_factory=dict)
    _updates: dict[tuple[Candidate, tuple[str, ...]], float] = field(default_factory=dict)
    solved: MutableMapping[Problem, Solution] = field(default_factory=WeakKeyDictionary)
    _chosen: dict[tuple[Candidate, Techniques], ChosenBytes] = field(default_factory=dict)
    _known: MutableMapping[Space, dict[Techniques, Memory]] = field(default_factory=WeakKeyDictionary)

    @property
    def spent(self) -> bool:
        """True if a large model had as many simulations as it may have in one stage."""
        return self.planner.nodes > TECHNIQUES.large_nodes and len(self.seen) >= TECHNIQUES.large_simulations

    @functools.cached_property
    def queuing(self) -> float:
        """Seconds that a micro-batch takes longer where weights' halves of backward wait."""
        planner, cluster = self.planner, self.planner.request.cluster
        trained = (n for n in planner.context.graph.nodes if n.op in PRODUCTS and any(n.needs_grad))
        count = sum(planner.ties.times(n.name) for n in trained)
        return sum(QUEUED) * count * launch_seconds(cluster.device, cluster.measured)

    def memory(self, space: Space, techniques: Techniques) -> Memory:
        """The sums under techniques."""
        whole = self._at_once(space, replace(techniques, micro_batches=1, prefetch=1))
        return self.planner.under(techniques).in_micro_batches.memory(space, whole)

    def _at_once(self, space: Space, at_once: Techniques) -> Memory:
        known = self._known.setdefault(space, {})
        if at_once not in known:
            known[at_once] = self.planner.under(at_once).memory(space)
        return known[at_once]

    def chosen(self, candidate: Candidate, techniques: Techniques) -> ChosenBytes:
        """The sums of a candidate under techniques, by variable."""
        space, at_once = candidate.space, replace(techniques, micro_batches=1, prefetch=1)
        if (candidate, at_once) not in self._chosen:
            whole = ChosenBytes.of(self._at_once(space, at_once), candidate.states)
            self._chosen[candidate, at_once] = whole
        asked = self.planner.under(techniques).in_micro_batches
        return asked.chosen(space, candidate.states, self._chosen[candidate, at_once])

    def peak_bytes(self, candidate: Candidate, techniques: Techniques) -> float:
        """About the peak of a candidate under techniques: the sums, and what only simulations saw before the update."""
        before, at_update = self._before_and_at_update(candidate, techniques)
        return max(at_update, before + self._missed(candidate, techniques))

    def may_fit(self, candidate: Candidate, techniques: Techniques) -> bool:
        """False if a candidate takes more than the limit by its sums, or by a wide margin with what they miss. At the
        update the sums are exact; before it they may be a little high, as they do not know in which order results
        go."""
        limit = self.planner.request.memory_bytes or 0.0
        _, at_update = self._before_and_at_update(candidate, techniques)
        return (
            at_update <= limit
            and self.sums(candidate, techniques) <= TECHNIQUES.sums_slack * limit
            and self.peak_bytes(candidate, techniques) <= TECHNIQUES.slack * limit
        )

    def _missed(self, candidate: Candidate, techniques: Techniques) -> float:
        """Return the bytes that a simulation found beyond the sums under these techniques. If there was none: the least
        of those under techniques that differ only in micro-batches, then under equal recompute, then under any.
        Temporary buffers depend most on what is kept. What enough others missed, it misses at least."""
        return max(
            self._missed_by_itself(candidate, techniques), self._missed_by_others(candidate, techniques)
        )

    def _missed_by_others(self, candidate: Candidate, techniques: Techniques) -> float:
        def least(each: Iterable[Missed]) -> float:
            return min(m.bytes_of(techniques.micro_batches, candidate.layer_bytes) for m in each)

        for asked in (replace(techniques, micro_batches=1, prefetch=1), _plain(techniques)):
            each = self.misses.get(asked, ())
            if len(each) >= TECHNIQUES.late_samples:
                return least(each)
        # What is kept and what is computed again decides most: of others with that in common a share is sure.
        alike = [
            m for asked, each in self.misses.items() if _plain(asked) == _plain(techniques) for m in each
        ]
        if len(alike) < TECHNIQUES.late_samples:
            return 0.0
        return TECHNIQUES.missed_share * least(alike)

    def _missed_by_itself(self, candidate: Candidate, techniques: Techniques) -> float:
        seen, count = self.missed.get(candidate, {}), techniques.micro_batches
        if techniques in seen:
            return seen[techniques].bytes_of(count)
        in_pieces = [m for t, m in seen.items() if replace(t, micro_batches=count) == techniques]
        again = [m for t, m in seen.items() if t.recompute == techniques.recompute]
        return min((m.bytes_of(count) for m in in_pieces or again or seen.values()), default=0.0)

    def sums(self, candidate: Candidate, techniques: Techniques) -> float:
        """The sums at their worst instant, with what no choice changes."""
        return fixed_bytes(candidate.space) + float(self._totals(candidate, techniques).max())

    def _before_and_at_update(self, candidate: Candidate, techniques: Techniques) -> tuple[float, float]:
        """The sums at their worst instant before the update, and at the update."""
        loss, update, *others = (fixed_bytes(candidate.space) + self._totals(candidate, techniques)).tolist()
        return max(loss, *others), update

    def _totals(self, candidate: Candidate, techniques: Techniques) -> np.ndarray:
        """The sums at each instant, of what a choice changes."""
        key = (candidate, techniques)
        if key not in self._added:
            self._added[key] = self.chosen(candidate, techniques).totals()
        return self._added[key]

    def likely_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """Estimate the candidate's step: its lower bound, plus the excess that was seen for it, or for enough others
        under the techniques; no less than under plainer ones, and than siblings take."""
        late = self._own_late(candidate, techniques)
        if late is None:
            late = _least_of_enough(self.lates, techniques)
        if late is None:
            late = _least_of_enough(self.lates, _plain(techniques)) or 0.0
        estimate = self.least_seconds(candidate, techniques) + late
        siblings = sibling_seconds(self.planner, self.seen, self.must_take, candidate, techniques)
        return max(estimate, siblings, self.plainer_seconds(candidate, techniques))

    def _own_late(self, candidate: Candidate, techniques: Techniques) -> float | None:
        """By how much later than it must the candidate's step ended under the same policy of recompute, at least; None
        if there was no simulation with no more slices and no more on the host, which keep a link busy."""
        words, slices = set(techniques.offload), techniques.slice_activation
        seen = self.late.get((candidate, techniques.recompute), {})
        return min(
            (
                late
                for plainer, late in seen.items()
                if set(plainer.offload) <= words and plainer.slice_activation <= slices
            ),
            default=None,
        )

    def plainer_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """The most that the candidate's step took in simulations without slices or with less offload; 0 without any.
        More of these makes no step shorter (tests: by less than 1e-3), unless weights are gathered further ahead in the
        memory that it saves: a simulation without room for that does not count."""
        most, room = 0.0, (self.planner.request.memory_bytes or math.inf) - candidate.layer_bytes
        for (other, plainer), found in self.seen.items():
            words, slices = plainer.offload, plainer.slice_activation
            if (
                other is candidate
                and plainer != techniques
                and plainer == replace(techniques, offload=words, slice_activation=slices)
                and slices <= techniques.slice_activation
                and has_no_less_on_host(techniques.offload, words)
                and found.evaluation is not None
                and found.evaluation.timed
                and self.planner.peak_bytes(found) <= room
            ):
                most = max(most, step_of(found))
        return most

    def least_late(self, techniques: Techniques) -> float:
        """By how much later than it must a step ended under these techniques, in whatever micro-batches, at least."""
        seen = self.soonest.get(replace(techniques, micro_batches=1), ())
        return min(seen) if len(seen) >= TECHNIQUES.late_order else 0.0

    def least_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """Return a lower bound of the candidate's step under techniques, without interleaving."""
        *before, update = self.must_take(candidate, techniques)
        sent = techniques.micro_batches * candidate.gathers
        return max(sum(before), sent, self._link_seconds(candidate, techniques)) + update

    def must_take(self, candidate: Candidate, techniques: Techniques) -> tuple[float, ...]:
        """Seconds that nothing hides: of the candidate, of micro-batches, of computing again, of waiting for the host,
        and by which the update is later."""
        parts = self._repeated, self.again_seconds, self._waits_for_host, self._updated_later
        return candidate.floor, *(part(candidate, techniques) for part in parts)

    def _repeated(self, candidate: Candidate, techniques: Techniques) -> float:
        """Seconds that several micro-batches take longer than one: kernels are started, and gradients added up."""
        sharded = techniques.gradient_accumulation_shard or PARAMETERS in techniques.offload
        each = self.planner.least.starting + (0.0 if sharded else candidate.adds)
        return (techniques.micro_batches - 1) * each

    def again_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """Seconds of what backward computes again under a policy for all layers."""
        policy = techniques.recompute
        if policy not in RECOMPUTE:
            return 0.0
        key = (candidate, policy)
        if key not in self._again:
            again = computed_again(candidate.space.graph, policy)
            self._again[key] = candidate.computing(again, "forward"), self.planner.least.starting_again(again)
        seconds, starting = self._again[key]
        return seconds + (techniques.micro_batches - 1) * starting

    def _waits_for_host(self, candidate: Candidate, techniques: Techniques) -> float:
        """Seconds that computing waits for the host's link, at least: what goes to the host in forward, or comes from
        it, does so before backward of the last layer but one begins, and what comes for backward after that."""
        one_way = self._link_seconds(candidate, techniques) / 2
        if not one_way:
            return 0.0
        after = candidate.late_backward + self.again_seconds(candidate, techniques)
        before = candidate.compute - candidate.late_backward
        # These may all be on either side.
        others = candidate.floor - candidate.compute + self._repeated(candidate, techniques)
        return max(0.0, one_way - before - others) + max(0.0, one_way - after - others)

    def _updated_later(self, candidate: Candidate, techniques: Techniques) -> float:
        """Seconds that the update takes longer where the host has moments or weights."""
        if not techniques.offload:
            return 0.0
        planner, space = self.planner, candidate.space
        key = (candidate, techniques.offload)
        if key not in self._updates:
            away = offloaded_parameters(space.graph, planner.hosts, techniques)
            found = 0.0
            for name, known in space.parameters.items():
                if name not in space.graph.needs_grad or name in space.hosted:
                    continue
                state = candidate.states[space.variable["parameter", name]]
                there = update_seconds_there(
                    float(known.elements[state]),
                    planner.request.optimizer_states,
                    DTYPES[space.graph.types[name].dtype],
                    planner.request.cluster,
                    offloaded="optimizer" in techniques.offload,
                    parameters=name in away,
                )
                found += space.owners(name) * (float(there) - float(known.update[state]))
            self._updates[key] = found
        return self._updates[key]

    def _link_seconds(self, candidate: Candidate, techniques: Techniques) -> float:
        """Seconds in which the host's link is busy: activations go there and back, parameters come for forward and for
        backward of each micro-batch."""
        found = 0.0
        for word, ways in ((ACTIVATIONS, 2), (PARAMETERS, 2 * techniques.micro_batches)):
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
        """True if slices, shards of accumulated gradients, and each word of ``offload`` save bytes at some instant
        beside the others."""
        plainer = [
            replace(techniques, offload=tuple(w for w in techniques.offload if w != word))
            for word in techniques.offload
        ]
        for name in ("slice_activation", "gradient_accumulation_shard"):
            plainer += [replace(techniques, **{name: False})] if getattr(techniques, name) else []
        mine = self._totals(candidate, techniques)
        return all(
            bool((mine < TECHNIQUES.worth_saving * self._totals(candidate, other)).any()) for other in plainer
        )

    def evaluated(
        self,
        candidate: Candidate,
        techniques: Techniques,
        enough: float = math.inf,
        most: float = math.inf,
    ) -> SearchResult:
        """The candidate simulated under techniques, with its weights gathered further ahead where that is quicker and
        may take less than `enough` seconds; its bytes alone where they are more than `most`. Raises PlanError for
        techniques that it cannot take."""
        known = self.seen.get((candidate, techniques))
        if known is not None:
            return known
        under = self.planner.under(techniques)
        found = under.found(candidate.space, candidate.states, {"chosen": candidate.name}, most=most)
        if found.evaluation is not None:
            if found.evaluation.timed:
                found = further_ahead(self.planner, found, enough)
                self._saw_seconds(candidate, techniques, found.claims["step_seconds"])
            self._saw_bytes(candidate, techniques, found)
        self.seen[candidate, techniques] = found
        return found

    def _saw_bytes(self, candidate: Candidate, techniques: Techniques, found: SearchResult) -> None:
        """Remember what a simulation needed beyond the sums, of the device and of its host."""
        assert found.evaluation is not None
        before, at_update = self._before_and_at_update(candidate, techniques)
        peak = self.planner.peak_bytes(found)
        beyond = max(0.0, peak - before) if peak > EXACTLY * at_update else 0.0
        weights = min(beyond, candidate.layer_bytes)
        missed = Missed(weights, (beyond - weights) * techniques.micro_batches)
        self.missed.setdefault(candidate, {})[techniques] = missed
        at_once = replace(techniques, micro_batches=1, prefetch=1)
        self.misses.setdefault(at_once, []).append(missed)
        if techniques.offload:
            more = found.evaluation.host_bytes - self._kept_on_host(candidate, techniques)
            self.hosted[techniques] = min(more, self.hosted.get(techniques, more))

    def _saw_seconds(self, candidate: Candidate, techniques: Techniques, step: float) -> None:
        """Remember by how much later than it must a simulated step ended."""
        late = max(0.0, step - self.least_seconds(candidate, techniques))
        self.late.setdefault((candidate, techniques.recompute), {})[techniques] = late
        self.lates.setdefault(techniques, []).append(late)
        at_once = replace(techniques, micro_batches=1)
        self.soonest.setdefault(at_once, []).append(late)


def _plain(techniques: Techniques) -> Techniques:
    """Without what moves or shards what is kept: with it no step ends sooner, nor has a smaller buffer."""
    return replace(techniques, micro_batches=1, prefetch=1, slice_activation=False, offload=())


def _least_of_enough(seen: Mapping[Techniques, list[float]], techniques: Techniques) -> float | None:
    """The least of what was seen under techniques, if enough was."""
    each = seen.get(techniques, ())
    return min(each) if len(each) >= TECHNIQUES.late_samples else None


__all__ = ["Front"]
