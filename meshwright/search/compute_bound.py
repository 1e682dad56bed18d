"""A lower bound of every plan, from sums over the model alone: O(1) for each number of ranks and micro-batches,
whatever the shardings.

The ranks of a step compute the full model at least once. A rank that holds the largest blocks of an operator has no
less than an even share of its FLOPs and of its bytes, and starts its kernels once for each micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import fields, replace

import numpy as np

from meshwright.core.graph import DTYPES, Graph, TensorType
from meshwright.cost.cluster import Cluster
from meshwright.cost.machine import launch_seconds, launches_of, seconds, update_seconds
from meshwright.cost.operator_tables import PRODUCTS
from meshwright.cost.operators import Work, work
from meshwright.ops.factors import Factors
from meshwright.search.space.cache import owners_of
from meshwright.search.space.wiring import Ties


class Least:
    """The least that one rank computes of a model. `factors` are those of `graph`; `ties` say how many of the model a
    node of it stands for."""

    def __init__(
        self, graph: Graph, factors: Factors, ties: Ties, cluster: Cluster, optimizer_states: int = 2
    ) -> None:
        self.graph, self.factors, self.ties, self.cluster = graph, factors, ties, cluster
        self.optimizer_states = optimizer_states
        self._computing: dict[int, np.ndarray] = {}
        self._updating: dict[int, float] = {}

    @functools.cached_property
    def _works(self) -> dict[str, tuple[int, bool, Work]]:
        """Of each kind of operator: how many there are, whether it is a product, and its work on one device."""
        times: dict[str, int] = {}
        for node in self.graph.nodes:
            first = self.ties.first(node.name)
            times[first] = times.get(first, 0) + self.ties.times(node.name)
        found: dict[str, tuple[int, bool, Work]] = {}
        for node in self.graph.nodes:
            if node.name in times:
                rule = self.factors.sites[node.name].rule
                wanted = [u in self.graph.needs_grad for u in node.uses]
                where = self.cluster.device_type
                done = work(node, rule, rule.sizes, self.graph.types, wanted, device=where)
                if done.kind != "free":
                    found[node.name] = times[node.name], node.op in PRODUCTS, done
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds of operators, each by the first of its nodes."""
        return tuple(self._works)

    def each(self, pieces: int) -> np.ndarray:
        """Seconds of one operator of each kind, of one of so many pieces: float64[operators]."""
        return self.computing(pieces).sum(axis=1) / [times for times, _, _ in self._works.values()]

    @functools.cached_property
    def starts(self) -> dict[str, tuple[float, float]]:
        """Seconds in which the kernels of one operator of each kind are started, forward and backward."""
        device = self.cluster.device
        each = launch_seconds(device, self.cluster.measured)
        counts = {name: launches_of(done, device) for name, (_, _, done) in self._works.items()}
        return {name: (each * float(ahead), each * float(back)) for name, (ahead, back) in counts.items()}

    @functools.cached_property
    def starting(self) -> float:
        """Seconds in which all kernels are started: what one more micro-batch costs, at least."""
        return sum(times * sum(self.starts[name]) for name, (times, _, _) in self._works.items())

    def starting_again(self, nodes: Iterable[str]) -> float:
        """Seconds in which the forward kernels of some nodes are started."""
        there = ((name, self.starts.get(self.ties.first(name))) for name in nodes)
        return sum(self.ties.times(name) * starts[0] for name, starts in there if starts)

    def busiest(self, pieces: int, ranks: int) -> float:
        """Return the least seconds of the busiest of `ranks` that follow one another: an operator is on one of them."""
        counts = np.array([times for times, _, _ in self._works.values()])
        return float((np.ceil(counts / ranks) * self.each(pieces)).max(initial=0.0))

    def computing(self, pieces: int) -> np.ndarray:
        """Seconds forward, backward and, of products, for their weights, of one of so many pieces:
        float64[operators, 3]."""
        if pieces not in self._computing:
            device, measured = self.cluster.device, self.cluster.measured
            rows = []
            for times, product, done in self._works.values():
                forward, backward = (float(half) for half in seconds(_share(done, pieces), device, measured))
                weights = backward / 2 if product else 0.0
                rows.append((times * forward, times * (backward - weights), times * weights))
            self._computing[pieces] = np.array(rows).reshape(-1, 3)
        return self._computing[pieces]

    def updating(self, ranks: int) -> float:
        """Seconds in which one of so many ranks updates its share of the weights."""
        if ranks not in self._updating:
            self._updating[ranks] = sum(
                count * self._update(self.graph.types[name], ranks)
                for name, count in owners_of(self.graph, self.ties.first, self.ties.times).items()
                if name in self.graph.needs_grad
            )
        return self._updating[ranks]

    def _update(self, kind: TensorType, ranks: int) -> float:
        item = DTYPES[kind.dtype]
        elements, at = kind.size_bytes / item / ranks, self.cluster
        return float(update_seconds(elements, self.optimizer_states, at.device, at.measured, item))

    def in_one(self, pieces: int) -> float:
        """Return a lower bound in seconds of a step of `pieces` pieces in one stage, interleaved copies included."""
        ranks = self.cluster.ranks
        return pieces * float(self.computing(ranks * pieces).sum()) + self.updating(ranks)

    def in_one_stage(self) -> float:
        """Return a lower bound in seconds of a step in one stage, in however many pieces."""
        return min(self.in_one(1), self.in_one(2))

    def anywhere(self) -> float:
        """Return a lower bound in seconds of every step, in stages or not: an even share of the model, each operator at
        the best rate that any share of it has."""
        ranks = self.cluster.ranks
        pieces = [1 << n for n in range(ranks.bit_length())]
        shares = [count / ranks * self.computing(count).sum(axis=1) for count in pieces]
        return float(np.min(shares, axis=0).sum())


def _share(done: Work, pieces: int) -> Work:
    names = [f.name for f in fields(Work) if f.name.startswith(("flops", "bytes", "passes"))]
    return replace(done, **{name: getattr(done, name) / pieces for name in names})


__all__ = ["Least"]
