"""A lower bound of the simulated step, as prices of states and pairs: what a search can minimise.

What follows one after the other in a step takes no less than its sum. Two such chains are priced here:

- All that is computed, forward, backward, update, with the reshards that nothing can hide (`waited.py`).
- The same from the first reader of one parameter on: the parameter is gathered before that reader runs, and its
  gradient is scattered and summed after the reader's backward, which is the last but for the few operators before it.
  On slow links that is what a step ends with, and no amount of computing hides it.

The seconds of a chain are sums over operators, reshards and parameters, so the least over all choices is found exactly
as the least price is, and no plan's step is below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from meshwright.redistribute.lower_bound import LowerTable
from meshwright.redistribute.steps import wire_elements
from meshwright.search.budget import SPACE
from meshwright.search.solve.problem import Problem
from meshwright.search.space.build import Space
from meshwright.search.space.layouts import Prices


def step_problem(space: Space, entry: str = "", *, update: bool = True) -> Problem:
    """The seconds of a chain as a problem over the space's variables: all of computing, or what begins and ends with
    `entry`, a parameter. Without `update` only what is done for every micro-batch. Choices that the space does not
    allow stay so."""
    chain = _Chain(space, entry)
    chain.operators()
    if update:
        chain.parameters()
    chain.reshards()
    pairs = {
        key: np.where(np.isinf(matrix), np.inf, chain.pairs.get(key, 0.0))
        for key, matrix in space.pairs.items()
    }
    return Problem(tuple(chain.unary), pairs)


def entries(space: Space, states: Sequence[int]) -> list[str]:
    """The largest parameters that are read early under a choice: those whose chains may be long."""
    total = sum(float(space.unary[v][0, s]) for v, s in enumerate(states))
    before, early = 0.0, dict[str, None]()
    parameters = space.parameters
    for node in space.graph.nodes:
        if before > SPACE.early_share * total:
            break
        early.update(dict.fromkeys(use for use in node.uses if use in parameters))
        first = space.ties.first(node.name)
        at = space.nodes[first]
        state = states[space.variable["node", first]]
        before += space.ties.times(node.name) * float(at.forward[state] + at.backward[state])
    trained = [name for name in early if name in space.graph.needs_grad and name not in space.hosted]
    sizes = {name: space.graph.types[name].size_bytes for name in trained}
    return sorted(trained, key=lambda name: (-sizes[name], name))[: SPACE.chain_entries]


class _Chain:
    """The prices of a chain while they are added up."""

    def __init__(self, space: Space, entry: str) -> None:
        self.space, self.entry = space, entry
        self.unary = [np.zeros(parts.shape[1]) for parts in space.unary]
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        order = {node.name: number for number, node in enumerate(space.graph.nodes)}
        readers = [node.name for node, _ in space.graph.consumers[entry]] if entry else []
        self.start = min((order[name] for name in readers), default=0)
        self.reader = space.graph.nodes[self.start].name
        self.lower = LowerTable(space.table, space.cluster.hidden_prices)

    def operators(self) -> None:
        """Those from the reader on. What needs no gradient may run earlier than it stands in the graph."""
        space, times = self.space, defaultdict[str, int](int)
        for node in space.graph.nodes[self.start :]:
            if not self.entry or any(node.needs_grad):
                times[space.ties.first(node.name)] += space.ties.times(node.name)
        for name, count in times.items():
            states = space.nodes[name]
            self.unary[space.variable["node", name]] += count * (
                states.forward + states.backward + states.talk
            )

    def parameters(self) -> None:
        """The update of all, and what is sent of the one."""
        space = self.space
        for name, states in space.parameters.items():
            self.unary[space.variable["parameter", name]] += space.owners(name) * states.update
        if not self.entry:
            return
        states, value, table = space.parameters[self.entry], space.values[self.entry], self.lower
        cut, pending = states.stored @ table.bits, states.use.grad @ table.bits
        both, left = cut & pending, pending & ~cut

        def seconds(kind: str, axes: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
            sent = wire_elements(kind, table.members[axes], before, after)
            return np.where(axes, table.collective(kind, axes, np.asarray(value.itemsize * sent)), 0.0)

        whole = table.local_elements(value, states.sliced())
        total = seconds("all_gather", cut, states.elements, table.local_elements(value, states.use.forward))
        total += np.minimum(
            seconds("reduce_scatter", both, whole, states.elements), seconds("all_reduce", both, whole, whole)
        )
        total += seconds("all_reduce", left, states.elements, states.elements)
        self.unary[space.variable["parameter", self.entry]] += total

    def reshards(self) -> None:
        """Add the exposed reshards of values that are made in the chain, and those of the parameter for its reader."""
        space, waited = self.space, self.space.wiring.waited
        edges = space.wiring.found_edges(self.start, graded=True) if self.entry else space.wiring.edges
        for edge, times in edges.items():
            source, out, target, at, value = edge
            if target[0] == "whole" or (source, target, value) not in waited:
                continue
            have, want = space.port(source, out, gives=True), space.port(target, at, gives=False)
            graded = space.wiring.sends_gradient(edge)
            matrix = space.prices.between(space.values[value], have, want, graded, times)
            self._add(space.variable[source], space.variable[target], matrix)
        if self.entry:
            self._enter()

    def _enter(self) -> None:
        space, prices = self.space, Prices(self.lower)
        value, source = space.values[self.entry], ("parameter", self.entry)
        reader = ("node", space.ties.first(self.reader))
        have = space.port(source, -1, gives=True)
        for node, port in space.graph.consumers[self.entry]:
            if node.name != self.reader:
                continue
            want = space.port(reader, port, gives=False)
            prices.meet(value, have, True)
            prices.meet(value, want, True)
            matrix = np.nan_to_num(prices.between(value, have, want, True), nan=0.0)
            self._add(space.variable[source], space.variable[reader], matrix)
            return  # of several ports one: they are not one after the other

    def _add(self, u: int, v: int, matrix: np.ndarray) -> None:
        if u == v:
            self.unary[u] += np.diag(matrix)
            return
        key, matrix = ((u, v), matrix) if u < v else ((v, u), matrix.T)
        self.pairs[key] = self.pairs[key] + matrix if key in self.pairs else matrix


__all__ = ["entries", "step_problem"]
