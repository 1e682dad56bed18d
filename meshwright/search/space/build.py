"""The space of a graph on a mesh: what the states of its variables (`variables.py`) and every choice of them cost.

Nodes that stand for each other are one variable, and what they cost counts as often as they occur. Prices are of one
training step: forward, backward, reduction, update.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.graph import DTYPES, Graph
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.host import transfer_seconds
from meshwright.cost.reduction import adding_seconds
from meshwright.ops.factors import Factors
from meshwright.redistribute.lower_bound import LowerTable
from meshwright.redistribute.price_matrix import Table
from meshwright.search.budget import SPACE
from meshwright.search.solve.problem import Problem
from meshwright.search.space.cache import SharedResults
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.families import Family
from meshwright.search.space.host_transfers import crossings
from meshwright.search.space.layouts import Prices, key_of
from meshwright.search.space.parameters import Storage, gather_seconds
from meshwright.search.space.prune import alone, worth_keeping
from meshwright.search.space.variables import ArraySpace, Variables
from meshwright.search.space.wiring import Edge, Ties


@dataclass(frozen=True)
class Parts:
    """Seconds of a choice: computing, what is sent on its way, sums of gradients. They add up to the price."""

    compute: float
    communication: float
    reduction: float

    @property
    def total(self) -> float:
        """Everything, one after the other."""
        return self.compute + self.communication + self.reduction


class Space(Variables):
    """States and prices of a graph on a mesh, for one family of strategies."""

    def __init__(
        self,
        graph: Graph,
        factors: Factors,
        mesh: Mesh,
        cluster: Cluster,
        family: Family | ArraySpace,
        storage: Storage,
        *,
        ties: Ties | None = None,
        codes: Mapping[str, NodeCodes] | None = None,
        table: Table | None = None,
        kept: SharedResults | None = None,
        hosts: Collection[str] = (),
        most: float = math.inf,
    ) -> None:
        """`codes` and what is `kept` are those of an earlier space of the same graph, mesh, cluster and `hosts`, the
        nodes that the host runs. `most`: the price of a choice that is known; a large space is then without the states
        that only dearer ones have (but for a few of each variable)."""
        super().__init__(
            graph,
            factors,
            mesh,
            cluster,
            family,
            storage,
            ties=ties,
            codes=codes,
            table=table,
            kept=kept,
            hosts=hosts,
        )
        if isinstance(family, ArraySpace):
            self.unary, self.pairs = list(family.unary), dict(family.pairs)
            return
        self.unary: list[np.ndarray] = self._unary()  # float64[4, states]: see there
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        if math.isfinite(most) and self._entries() > SPACE.prune_pairs:
            self._narrow(most)
        self._price_edges()

    def _unary(self) -> list[np.ndarray]:
        """Per variable float64[4, states]: compute, blocking, what may hide, reductions."""
        found: list[np.ndarray] = []
        times = self.wiring.times
        for name, states in self.nodes.items():
            zero = np.zeros(len(states.rows))
            compute = states.forward + states.backward
            found.append(times[name] * np.stack([compute, states.talk, zero, zero]))
        for crossing in crossings(self.graph, self.wiring, self.hosts):
            value, port = self.values[crossing.value], self.nodes[crossing.node].ports[crossing.port]
            size_bytes = value.itemsize * self.table.local_elements(value, port.forward)
            once = transfer_seconds(size_bytes, self.cluster)
            found[self.variable["node", crossing.node]][2] += crossing.times * once
        found += [np.zeros((4, len(port.forward))) for port in self.hubs.values()]
        for name, states in self.parameters.items():
            zero = np.zeros_like(states.update)
            found.append(
                self.owners(name) * np.stack([states.update, zero, states.blocking, states.reduction])
            )
        return found

    # ------------------------------------------------------------------------------------------------ prices

    @functools.cached_property
    def prices(self) -> Prices:
        """Those between all layouts that meet."""
        found = Prices(self.table, self.kept.prices)
        for edge in self.wiring.edges:
            source, out, target, at, value = edge
            needs_grad = self.wiring.sends_gradient(edge)
            found.meet(self.values[value], self.port(source, out, gives=True), needs_grad)
            found.meet(self.values[value], self.port(target, at, gives=False), needs_grad)
        return found

    def _entries(self) -> int:
        """Pairs of states of all variables that meet."""
        ends = {
            (self.variable[s], self.variable[t]) for s, _, t, _, _ in self.wiring.edges if t in self.variable
        }
        return sum(self.unary[u].shape[1] * self.unary[v].shape[1] for u, v in ends)

    def _narrow(self, most: float) -> None:
        """Leave out the states that only choices of more than `most` seconds have."""
        most *= 1 + 1e-9  # sums are rounded
        self._keep(alone([parts.sum(axis=0) for parts in self.unary], most))
        placed = ((at, matrix) for _, at, matrix in self._reshards(self.prices.rough()))
        self._keep(worth_keeping([parts.sum(axis=0) for parts in self.unary], placed, most))

    def _keep(self, kept: Sequence[np.ndarray]) -> None:
        """Leave out all other states."""
        for ((kind, name), number), states in zip(self.variable.items(), kept, strict=True):
            self.unary[number] = self.unary[number][:, states]
            match kind:
                case "node":
                    self.nodes[name] = self.nodes[name].take(states)
                case "hub":
                    self.hubs[name] = self.hubs[name].take(states)
                case _:
                    self.parameters[name] = self.parameters[name].take(states)

    def _reshards(self, prices: Prices) -> Iterator[tuple[Edge, int | tuple[int, int], np.ndarray]]:
        """For every edge the pair of variables whose prices it adds to, and the prices; one variable for what goes to
        a result of the program or comes back to where it is from."""
        for edge, times in self.wiring.edges.items():
            source, out, target, at, value = edge
            have, want = self.port(source, out, gives=True), self.port(target, at, gives=False)
            graded = self.wiring.sends_gradient(edge)
            matrix = prices.between(self.values[value], have, want, graded, times)
            u = self.variable[source]
            if source[0] == "parameter" and (again := self.parameters[source[1]].again).any():
                # What is made again is what its reader keeps: not something that is made of it in turn.
                other = key_of(have.forward)[:, None] != key_of(want.forward)[None, :]
                matrix = np.where(again[:, None] & other, np.inf, matrix)
            if target[0] == "whole":
                yield edge, u, matrix[:, 0]
            elif u == (v := self.variable[target]):
                yield edge, u, np.diag(matrix)
            else:
                yield (edge, (u, v), matrix) if u < v else (edge, (v, u), matrix.T)

    def _price_edges(self) -> None:
        for _, key, matrix in self._reshards(self.prices):
            if isinstance(key, int):
                self.unary[key][2] += matrix
            else:
                self.pairs[key] = self.pairs[key] + matrix if key in self.pairs else matrix

    @functools.cached_property
    def _blocking(self) -> dict[tuple[int, int], np.ndarray]:
        """The share of pairs that nothing can hide."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for (source, _, target, _, value), key, matrix in self._reshards(self.prices):
            if not isinstance(key, int) and (source, target, value) in self.wiring.waited:
                found[key] = found[key] + matrix if key in found else matrix
        return found

    # ------------------------------------------------------------------------------------------------ the problem

    def problem(self, alpha: float | None = None, micro_batches: int = 1) -> Problem:
        """Return the problem to minimise: the sum of all seconds; with `alpha`, ``α·compute + blocking + (1 −
        α)·hideable``, whose optimum is worth simulating.

        With α = 1 no step of one copy undercuts it (`step_bound` refines it); with less some may, if two collectives
        over different axes overlap. Sharded parameters are gathered in each of `micro_batches`, resharded for readers
        that need another layout, and gradients are accumulated.
        """
        compute, hideable = (1.0, 1.0) if alpha is None else (alpha, 1.0 - alpha)
        unary = [compute * p[0] + p[1] + hideable * (p[2] + p[3]) for p in self.unary]
        if micro_batches > 1:
            for name, seconds in self.gathers.items():
                number = self.variable["parameter", name]
                each = hideable * seconds + compute * self.adds.get(name, 0.0)
                unary[number] = unary[number] + (micro_batches - 1) * each
        pairs = dict(self.pairs)
        if hideable != 1.0:
            pairs = {k: self._weighed(k, matrix, hideable) for k, matrix in pairs.items()}
        if micro_batches > 1 and hideable:
            for key, matrix in self.brought.items():
                pairs[key] = pairs[key] + hideable * (micro_batches - 1) * matrix
        return Problem(tuple(unary), pairs)

    @functools.cached_property
    def gathers(self) -> dict[str, np.ndarray]:
        """Parameter → seconds in which all that it stands for are gathered for one micro-batch: float64[states]."""
        return {name: self.owners(name) * self._gathered(name, self.table) for name in self.parameters}

    @functools.cached_property
    def adds(self) -> dict[str, np.ndarray]:
        """Parameter → seconds in which the gradients of all that it stands for are added to those of the micro-batches
        before: float64[states]."""
        found: dict[str, np.ndarray] = {}
        for name, known in self.parameters.items():
            if name in self.graph.needs_grad:
                size = DTYPES[self.graph.types[name].dtype] * known.summed_elements
                each = adding_seconds(size, self.cluster, name in self.hosted)
                found[name] = self.owners(name) * np.asarray(each)
        return found

    @functools.cached_property
    def brought(self) -> dict[tuple[int, int], np.ndarray]:
        """Pair of variables → seconds in which a parameter goes from where it is brought to a reader that wants it
        otherwise, and its gradient back, for one micro-batch. A gradient that comes back to where the parameter is
        stored is sent in the last one alone (`partition/accumulation.py`)."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for edge, times in self.wiring.edges.items():
            source, out, target, at, name = edge
            if source[0] != "parameter" or target not in self.variable:
                continue
            have, want = self.port(source, out, gives=True), self.port(target, at, gives=False)
            value, u, v = self.values[name], self.variable[source], self.variable[target]
            there = self.prices.between(value, have, want, False, times)
            if self.wiring.sends_gradient(edge):
                both = self.prices.between(value, have, want, True, times)
                cut = self.parameters[source[1]].stored.any(axis=1, keepdims=True)
                there = np.where(cut, both, there)
            there = np.where(np.isinf(there), 0.0, there)
            if there.any():
                key, matrix = ((u, v), there) if u < v else ((v, u), there.T)
                found[key] = found[key] + matrix if key in found else matrix
        return found

    def least_gathers(self, states: Sequence[int]) -> float:
        """Seconds that the gathers of a choice take of one micro-batch at least: those over the same axes follow one
        another, and count by their bytes, beside computing."""
        found = defaultdict[bytes, float](float)
        for name, parameter in self.parameters.items():
            state = states[self.variable["parameter", name]]
            found[parameter.stored[state].tobytes()] += self._least_gathers[name][state]
        return max(found.values(), default=0.0)

    @functools.cached_property
    def _least_gathers(self) -> dict[str, np.ndarray]:
        table = LowerTable(self.table, self.cluster.hidden_prices)
        return {name: self.owners(name) * self._gathered(name, table) for name in self.parameters}

    def _gathered(self, name: str, table: Table) -> np.ndarray:
        found, value = self.parameters[name], self.values[name]
        used = self.table.local_elements(value, found.use.forward)
        cut = found.stored @ self.table.bits
        return gather_seconds(used, found.elements, cut, found.again, value.itemsize, table)

    def _weighed(self, key: tuple[int, int], matrix: np.ndarray, hideable: float) -> np.ndarray:
        """A pair's seconds where those that may hide count in part. What cannot be stays so."""
        sure = self._blocking.get(key, 0.0)
        with np.errstate(invalid="ignore"):
            weighed = sure + hideable * (matrix - sure)
        return np.where(np.isinf(matrix), np.inf, weighed)

    def price(self, states: Sequence[int], micro_batches: int = 1) -> Parts:
        """The seconds of a choice, as `problem` counts them."""
        sums = np.sum([parts[:, s] for parts, s in zip(self.unary, states, strict=True)], axis=0)
        pairs = sum(float(m[states[u], states[v]]) for (u, v), m in self.pairs.items())
        if micro_batches > 1:
            at = ((name, states[self.variable["parameter", name]]) for name in self.parameters)
            each = sum(float(self.gathers[name][state]) for name, state in at)
            each += sum(float(m[states[u], states[v]]) for (u, v), m in self.brought.items())
            pairs += (micro_batches - 1) * each
            sums[0] += (micro_batches - 1) * self.adding_seconds(states)
        return Parts(float(sums[0]), float(sums[1] + sums[2]) + pairs, float(sums[3]))

    def adding_seconds(self, states: Sequence[int]) -> float:
        """Seconds in which the gradients of a micro-batch are added to those before it."""
        return sum(float(each[states[self.variable["parameter", name]]]) for name, each in self.adds.items())

    @functools.cached_property
    def size(self) -> int:
        """States of all variables."""
        return sum(parts.shape[1] for parts in self.unary)
