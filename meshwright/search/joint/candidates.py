"""A choice of shardings and storage that techniques are tried with, and what is summed of it once."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwright.core.graph import DTYPES
from meshwright.ops.batch import batch_units
from meshwright.ops.strategy import at_path
from meshwright.search.budget import TECHNIQUES
from meshwright.search.planner import Planner
from meshwright.search.solve import Problem
from meshwright.search.space.build import Space
from meshwright.search.techniques.layers import layers_of

AGAIN = (
    3  # times the weights of a layer that backward gathers again: its own, the next layer's, and gradients
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice of one space. `floor`: seconds that its step is not below; `compute` those of computing, `gathers` those
    in which links are busy with weights for each micro-batch, `adds` those in which the gradients of one are added to
    those before it. `examples`: how many a rank has, and so how many micro-batches there can be. `layer_bytes`: about
    those that the weights of one layer and their gradients take for a moment, in however many micro-batches."""

    name: str
    space: Space
    states: tuple[int, ...]
    floor: float
    compute: float
    gathers: float
    adds: float
    examples: int
    layer_bytes: float

    def computing(self, nodes: Iterable[str], phase: Literal["forward", "backward"]) -> float:
        """Seconds of computing some operators of the space's graph, with those that they stand for."""
        return sum(self.space.ties.times(name) * self._each(name, phase) for name in nodes)

    @functools.cached_property
    def late_backward(self) -> float:
        """Seconds of backward after that of the last layer and of what comes behind it; of all without layers."""
        names = [node.name for node in self.space.graph.nodes]
        seconds = self.computing(names, "backward")
        for layer in layers_of(self.space.graph)[-1:]:
            seconds -= sum(self._each(node.name, "backward") for node in layer.nodes)
            seconds -= self.computing(names[names.index(layer.nodes[-1].name) + 1 :], "backward")
        return seconds

    def _each(self, name: str, phase: Literal["forward", "backward"]) -> float:
        first = self.space.ties.first(name)
        seconds = getattr(self.space.nodes[first], phase)
        return float(seconds[self.states[self.space.variable["node", first]]])


def candidate_of(
    planner: Planner, name: str, space: Space, states: tuple[int, ...], floor: Problem
) -> Candidate:
    least, compute = floor.price(states), space.price(states).compute
    gathers, each = space.least_gathers(states), examples_of(planner, space, states)
    adds, layer = space.adding_seconds(states), _layer_bytes(space, states)
    return Candidate(name, space, states, least, compute, gathers, adds, each, layer)


def _layer_bytes(space: Space, states: tuple[int, ...]) -> float:
    """About the bytes of weights and gradients of the layer with most, of what is stored in shards."""
    graph, found = space.graph, defaultdict[str, float](float)
    layer_of = {node.name: layer.name for layer in layers_of(graph) for node in layer.nodes}
    for name, known in space.parameters.items():
        state = states[space.variable["parameter", name]]
        if known.stored[state].any():
            used = space.table.local_elements(space.values[name], known.use.forward[state][None])
            reader = graph.consumers[name][0][0].name
            size = float(used[0]) * DTYPES[graph.types[name].dtype]
            found[layer_of.get(reader, name)] += (AGAIN if known.again[state] else 1) * size
    return max(found.values(), default=0.0)


def alike(one: Candidate, other: Candidate) -> bool:
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
    mesh, factors = planner.context.mesh, planner.context.factors
    units = planner.kept.once(
        "units of examples",
        lambda: {name: next(batch_units(factors.sites[name], factors), None) for name in space.nodes},
    )
    least = TECHNIQUES.micro_batches
    for name, counted in units.items():
        if counted is None:
            continue
        letter, unit = counted
        splits = dict(space.strategy(name, states).splits)
        parts = [at_path(splits.get(letter, factors.sites[name].trees[letter]), path) for path in unit]
        least = min([least, *(part.size // mesh.count(part.axes) for part in parts)])
    return max(1, least)


__all__ = ["Candidate", "alike", "candidate_of", "examples_of"]
