"""The space of one row for each node from arrays: what a search of thousands of nodes hands on when it is done. Its
prices are seconds alone, whatever a byte was priced at."""

from __future__ import annotations

import numpy as np

from meshwright.search.space.layouts import Port
from meshwright.search.space.nodes import NodeStates
from meshwright.search.space.parameters import ParameterStates
from meshwright.search.space.variables import ArraySpace
from meshwright.search.vectorized.prices import Priced


def array_space(priced: Priced) -> ArraySpace:
    """The states and prices of a space; each use of a parameter is stored as is quickest."""
    isomorphic = priced.isomorphic
    every = list(isomorphic.variable)
    nodes: dict[int, NodeStates] = {}
    for sheet in priced.sheets:
        for column, number in enumerate(sheet.members.tolist()):
            nodes[number] = sheet.states(isomorphic.codes[isomorphic.names[number]], column)
    parameters: dict[int, ParameterStates] = {}
    for variables, stored, which in priced.stored:
        parameters.update(zip(variables.tolist(), stored.best(which, isomorphic.table), strict=True))
    unary: list[np.ndarray] = []
    hubs: dict[str, Port] = {}
    for number, (kind, name) in enumerate(every):
        if kind == "node":
            found = nodes[number]
            unary.append(isomorphic.times[number] * _node(found))
        elif kind == "hub":
            hubs[name] = priced.ports[priced.group[number]][-1]
            unary.append(np.zeros((4, len(hubs[name].forward))))
        else:
            unary.append(isomorphic.owners[number] * _parameter(parameters[number]))
    for number, seconds in priced.back:
        unary[number][2] += seconds
    return ArraySpace(
        {name: nodes[number] for number, name in enumerate(isomorphic.names)},
        hubs,
        {every[number][1]: parameters[number] for number in sorted(parameters)},
        unary,
        priced.pairs_of_seconds(),
    )


def _node(states: NodeStates) -> np.ndarray:
    zero = np.zeros(len(states.rows))
    return np.stack([states.forward + states.backward, states.talk, zero, zero])


def _parameter(states: ParameterStates) -> np.ndarray:
    return np.stack([states.update, np.zeros_like(states.update), states.blocking, states.reduction])


__all__ = ["array_space"]
