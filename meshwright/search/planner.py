"""The planner of a search: its request, the spaces of a search context, and the results found in them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.core.techniques import NONE, Techniques
from meshwright.cost.cluster import Cluster
from meshwright.redistribute.price_matrix import Table, Value
from meshwright.search.budget import AUTO, RECURSION
from meshwright.search.compute_bound import Least
from meshwright.search.context import SearchContext
from meshwright.search.equal_layers import ties_of
from meshwright.search.evaluate import Evaluation, Evaluator
from meshwright.search.layer_groups import Folded
from meshwright.search.pins import Seeds
from meshwright.search.solve import Memory, Problem
from meshwright.search.space.build import Space
from meshwright.search.space.cache import SharedResults
from meshwright.search.space.codes import NodeCodes, values_of
from meshwright.search.space.codes_shared import all_codes
from meshwright.search.space.constraints import constrained_options, honouring
from meshwright.search.space.demands import Demands
from meshwright.search.space.families import Family, in_pieces
from meshwright.search.space.memory import demands_of, fixed_bytes, instants, memory_of
from meshwright.search.space.micro_batches import MicroBatches
from meshwright.search.space.parameters import Storage
from meshwright.search.space.variables import ArraySpace, Choice
from meshwright.search.space.wiring import Wiring
from meshwright.search.stop import Stop
from meshwright.search.techniques.elsewhere import Elsewhere
from meshwright.search.techniques.offload import elsewhere
from meshwright.search.techniques.recompute import again_of
from meshwright.search.vectorized.isomorphic_graph import IsomorphicGraph
from meshwright.search.vectorized.kinds import kinds_of
from meshwright.search.vectorized.prices import MakePriced, Priced
from meshwright.search.vectorized.redistribution import BITS

Progress = Callable[[str, float | None, float | None], object]
"""Called with (stage, best price so far, bound); True asks the search to end."""


@dataclass(frozen=True)
class Request:
    """The request of a search.

    `optimizer_states`: moments per parameter element (2 for Adam). `space` and `inner`: the search space and its
    solver, if the mode has a choice. `simulate`: simulation decides on time and memory, instead of sums. `techniques`:
    the user's options; those that are not `given` may be chosen by `auto`. `places`: the ranks of a pipeline that will
    divide the model; `memory_bytes` is then their total, and they hold the activations of `in_flight` micro-batches.
    `in_stages`: choices are to be divided among stages, so that evaluations tell what is in layers.
    `hard`: the user set the memory limit, so that every mode refuses a plan over it. `stop`: when the search ends
    early. `any_fits`: any plan that fits is enough, and a refusal needs no reasons; `reasons`: it needs them.
    """

    cluster: Cluster
    memory_bytes: float | None = None
    optimizer_states: int = 2
    space: str = ""
    inner: str = "exact"
    progress: Progress = lambda stage, price, bound: None
    simulate: bool = False
    techniques: Techniques = NONE
    places: int = 1
    in_flight: float = 1.0
    in_stages: bool = False
    hard: bool = False
    stop: Stop = field(default_factory=Stop, compare=False)
    any_fits: bool = False
    reasons: bool = True

    def report(self, stage: str, price: float | None, bound: float | None) -> None:
        """Call `progress`, and note where it asks for the end."""
        self.stop.stage = stage
        if self.progress(stage, price, bound) is True:
            self.stop.interrupt()


@dataclass(frozen=True)
class SearchResult:
    """A choice, the space and states it comes from, what it claims, what a simulation said of it, and the techniques
    that it was evaluated with."""

    choice: Choice
    space: Space
    states: tuple[int, ...]
    claims: Mapping[str, Any]
    evaluation: Evaluation | None = None
    techniques: Techniques = NONE


class Planner:
    """Makes spaces of one context, sharing what they have in common."""

    def __init__(
        self,
        context: SearchContext,
        folds: Folded,
        seeds: Seeds,
        request: Request,
        hosts: frozenset[str] = frozenset(),
        like: Planner | None = None,
    ) -> None:
        """`hosts`: the nodes of the context's graph that the host runs; `like`: a planner of the same graph with the
        same seeds and hosts on another mesh or under another request, of which what they share is taken."""
        self.context, self.seeds, self.request, self.hosts = context, seeds, request, hosts
        self.ties = ties_of(folds)
        self.folds, self.techniques = folds, request.techniques
        self.evaluator = self._evaluator()
        self.nodes = len(folds.full.nodes)
        self.table = Table(context.mesh, request.cluster.prices)
        priced = hosts if request.cluster.host_bytes_per_s else frozenset()
        self.kept = (
            SharedResults(context.graph, *self._options(), priced) if like is None else like.kept.again()
        )
        self.values, self.codes = self.kept.values, self.kept.codes
        self._evaluated: dict[Hashable, Evaluation] = {}  # of all techniques

    def _options(self) -> tuple[dict[str, Value], dict[str, NodeCodes]]:
        """The values of the graph and the options of its nodes, on whatever mesh."""
        graph, factors = self.context.graph, self.context.factors
        values = values_of(graph, factors)
        codes = all_codes(graph, factors, values, self.ties)
        pinned = {name for nodes in self.seeds.values() for name in nodes if name in codes}
        required = {name: more for name in pinned if (more := constrained_options(self.seeds, codes[name]))}
        if required:
            codes = all_codes(graph, factors, values, self.ties, required)
        return values, codes

    def _evaluator(self) -> Evaluator | None:
        if not self.request.simulate:
            return None
        cluster, states = self.request.cluster, self.request.optimizer_states
        mesh, by_layers = self.context.mesh, self.request.in_stages
        return Evaluator(self.folds, mesh, cluster, states, self.hosts, self.techniques, by_layers)

    def under(self, techniques: Techniques) -> Planner:
        """The same with other techniques; spaces of the one are spaces of the other."""
        if techniques == self.techniques:
            return self
        other = copy.copy(self)
        other.techniques = techniques
        other.evaluator = other._evaluator()
        return other

    def with_request(self, request: Request) -> Planner:
        """The same under another request."""
        other = Planner(self.context, self.folds, self.seeds, request, self.hosts, self)
        return other.under(self.techniques)

    def memory(self, space: Space, optimizer_states: int | None = None) -> Memory:
        """Return a lower bound of the memory of each choice under the techniques."""
        again, states = again_of(space.graph, self.techniques.recompute), self._states(optimizer_states)
        found = memory_of(space, states, again, self._elsewhere(), self._layered)
        return self.in_micro_batches.memory(space, found)

    @functools.cached_property
    def least(self) -> Least:
        """What computing alone takes a rank, at least."""
        context, request = self.context, self.request
        return Least(context.graph, context.factors, self.ties, request.cluster, request.optimizer_states)

    @property
    def instants(self) -> int:
        """At how many instants bytes are summed under the techniques."""
        return instants(self.context.graph, self._layered)

    @property
    def _layered(self) -> bool:
        """Whether each layer is computed again in full."""
        return self.techniques.recompute == "full"

    def _elsewhere(self) -> Elsewhere:
        return self.kept.once(
            ("elsewhere", self.techniques),
            lambda: elsewhere(self.context.graph, self.techniques, self.hosts, self.ties.times),
        )

    def _states(self, optimizer_states: int | None) -> int:
        """Moments of a parameter element on the device."""
        if "optimizer" in self.techniques.offload and self.request.cluster.host_bytes_per_s:
            return 0
        return self.request.optimizer_states if optimizer_states is None else optimizer_states

    @property
    def in_micro_batches(self) -> MicroBatches:
        """How the bytes of a full batch become those of the micro-batches that are in flight at once."""
        asked = self.techniques
        hosted = self._elsewhere().host_parameters if asked.micro_batches > 1 else ()
        return MicroBatches(
            asked.micro_batches, self.request.in_flight, asked.gradient_accumulation_shard, hosted
        )

    def problem(self, space: Space, alpha: float | None = None) -> Problem:
        """Return the problem to minimise in a space under the techniques."""
        return space.problem(alpha, self.techniques.micro_batches)

    def peak_bytes(self, found: SearchResult) -> float:
        """The peak of a choice that was simulated, with what is there of further micro-batches at the same time."""
        assert found.evaluation is not None
        if self.request.in_flight == 1 or found.techniques.micro_batches == 1:
            return found.evaluation.peak_bytes
        several, one = copy.copy(self), copy.copy(self)
        several.techniques = one.techniques = found.techniques
        one.request = replace(self.request, in_flight=1.0)
        most, least = (p.memory(found.space).totals(found.states)[0] for p in (several, one))
        return found.evaluation.peak_bytes + float(most - least)

    def space(
        self, family: Family | ArraySpace, storage: Storage | None = None, most: float = math.inf
    ) -> Space:
        """The space of a family, the user's shardings honoured, or of what is made; large ones without what only
        choices dearer than `most` seconds have."""
        if not isinstance(family, ArraySpace):
            family = honouring(family, self.seeds, self.context.mesh)
            if self.techniques.pieces > 1:  # what leaves a rank without an example of some has no program
                family = in_pieces(family, self.context.factors, self.techniques.pieces)
        return Space(
            self.context.graph,
            self.context.factors,
            self.context.mesh,
            self.request.cluster,
            family,
            storage or self.storage(),
            ties=self.ties,
            codes=self.codes,
            table=self.table,
            kept=self.kept,
            hosts=self.hosts,
            most=most,
        )

    def vectorized(self, per_byte: np.ndarray | None = None) -> MakePriced | None:
        """Return a function that prices a graph of very many nodes as arrays, with a price per byte at each instant if
        `per_byte` is given; None if a single space is quick enough."""
        if not self._has_many_isomorphic():
            return None
        key = "alike" if per_byte is None else ("alike", self.techniques)
        arrays = self.kept.once(key, lambda: self.arrays(per_byte is not None))
        return functools.partial(Priced, arrays, per_byte=per_byte)

    @property
    def size(self) -> int:
        """Nodes × axes: what the time of one search or simulation grows with."""
        return len(self.codes) * len(self.context.mesh.axes)

    def _has_many_isomorphic(self) -> bool:
        """True if arrays over isomorphic nodes are quicker than a single space."""
        if not RECURSION.single_space_nodes < len(self.codes) <= RECURSION.arrays_nodes:
            return len(self.codes) > RECURSION.arrays_nodes
        places = max((len(value.places) for value in self.values.values()), default=0)
        if places * len(self.context.mesh.axes) > BITS:  # such values the arrays price one by one
            return False
        kinds = self.kept.once(
            "kinds", lambda: kinds_of(self.codes, self.context.graph, self.seeds or {}, self.hosts)
        )
        return len(self.codes) >= RECURSION.nodes_of_a_kind * len(kinds)

    def arrays(self, demanding: bool = False) -> IsomorphicGraph:
        """The graph as arrays; `demanding` ones know what memory takes under the techniques."""
        graph, cluster, asked = self.context.graph, self.request.cluster, self.techniques
        hosts = self.hosts if cluster.host_bytes_per_s else frozenset[str]()
        wiring = self.kept.once("wiring", lambda: Wiring(graph, self.ties, self.codes))
        demands: Demands | None = None
        if demanding:
            again, away = again_of(graph, asked.recompute), self._elsewhere()
            ranks, states = self.context.mesh.size, self._states(None)
            demands = demands_of(
                graph,
                self.values,
                self.ties,
                wiring,
                cluster,
                ranks,
                hosts,
                states,
                again,
                away,
                self._layered,
            )
            demands = demands.in_pieces(asked.micro_batches, parted=asked.gradient_accumulation_shard)
        return IsomorphicGraph(
            graph,
            self.codes,
            self.values,
            wiring,
            cluster,
            self.table,
            self.storage(),
            self.seeds,
            hosts,
            demands,
        )

    def storage(self, allowed: bool = True) -> Storage:
        """Storage sharded over the levels of the cluster, all axes of a level or none."""
        levels: dict[str, list[int]] = {}
        for number, axis in enumerate(self.context.mesh.axes):
            levels.setdefault(axis.link, []).append(number)
        return Storage(
            tuple(map(tuple, levels.values())),
            states=self.request.optimizer_states,
            again=self.request.memory_bytes is not None,
            allowed=allowed,
        )

    def groups(self) -> list[list[int]]:
        """The user's named axes, as numbers of prime axes."""
        return [
            [self.context.mesh.index(a) for a in run]
            for _, run in self.context.mesh.names
            if self.context.mesh.count(run) > 1
        ]

    def limit(self, space: Space) -> float | None:
        """Bytes that a choice may take of a rank beside what no choice changes."""
        return None if self.request.memory_bytes is None else self.request.memory_bytes - fixed_bytes(space)

    def found(
        self,
        space: Space,
        states: Sequence[int],
        claims: Mapping[str, Any],
        *,
        timed: bool = True,
        most: float = math.inf,
    ) -> SearchResult:
        """A choice with what it claims, simulated where the request says so; its bytes alone unless `timed`, and where
        they are more than `most`."""
        parts = space.price(states, self.techniques.micro_batches)
        choice = space.choice(states)
        evaluation = self._evaluation(choice, timed, most)
        told = {
            "cluster": self.request.cluster.name,
            "price_seconds": parts.total,
            "compute_seconds": parts.compute,
            "communication_seconds": parts.communication,
            "reduction_seconds": parts.reduction,
            **(_evaluated(evaluation) if evaluation else {}),
            **claims,
        }
        return SearchResult(choice, space, tuple(states), told, evaluation, self.techniques)

    def _evaluation(self, choice: Choice, timed: bool, most: float) -> Evaluation | None:
        """Evaluate a choice. Cached, as searches with different prices often end with equal choices."""
        if self.evaluator is None:
            return None
        parts = (choice.strategies, choice.inputs, choice.hubs)
        key = (self.techniques, choice.again, *(frozenset(part.items()) for part in parts))
        known = self._evaluated.get(key)
        if known is None or (timed and not known.timed and known.peak_bytes <= most):
            known = self._evaluated[key] = self.evaluator(choice, timed=timed, most=most)
        return known

    def settled(self, found: SearchResult, *, timed: bool = True) -> SearchResult:
        """A choice that is to be answered, evaluated in full unless the model is so large that it would take long; its
        bytes alone unless `timed`."""
        known = found.evaluation
        if self.evaluator is None or (
            known is not None and (known.in_full or self.nodes > AUTO.full_nodes) and known.timed >= timed
        ):
            return found
        if self.nodes > AUTO.full_nodes:
            evaluation = self.evaluator(found.choice, timed=timed)
        else:
            evaluation = self.evaluator.in_full(found.choice, timed=timed)
        return replace(found, claims={**found.claims, **_evaluated(evaluation)}, evaluation=evaluation)

    def tell(self, stage: str, price: float | None = None, bound: float | None = None) -> None:
        """Report progress, and note where the callback asks for the end."""
        self.request.report(stage, price, bound)


def _evaluated(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "step_seconds": evaluation.step_seconds,
        "peak_bytes": evaluation.peak_bytes,
        "peak_where": evaluation.instant,
        **({"host_bytes": evaluation.host_bytes} if evaluation.host_bytes else {}),
    }
