"""What techniques keep elsewhere, for the sums of a search: no more than the passes of a plan will (`stashes.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from meshwright.graph import Graph
from meshwright.places import parked_parameters
from meshwright.search.space.memory import HERE, Elsewhere
from meshwright.search.techniques.layers import layers_of
from meshwright.techniques import ACTIVATIONS, Techniques


def elsewhere(
    graph: Graph, asked: Techniques, hosts: Collection[str], times: Callable[[str], int]
) -> Elsewhere:
    """What is not where it lies. `times`: how many operators of the model one of the graph stands for."""
    words = [word for word in asked.offload if word.partition(":")[0] == ACTIVATIONS]
    if not (words or asked.parks or asked.slice_activation):
        return HERE
    stay: dict[str, int] = {}
    if words == [ACTIVATIONS]:
        places = {n.name: number for number, n in enumerate(graph.nodes)}
        firsts = [(places[layer.nodes[0].name], layer) for layer in layers_of(graph)]
        before, last = max(firsts, key=lambda one: one[0], default=(len(places), None))
        stay = {n.name: 0 for n in graph.nodes[:before]}
        stay |= {n.name: 1 for n in (last.nodes if last else ()) if times(n.name) > 1}
    elif words:  # of layers that are named: all of it may go
        stay = dict.fromkeys((n.name for n in graph.nodes), 0)
    parked = parked_parameters(graph, hosts, asked)
    return Elsewhere(asked.slice_activation, stay, parked, "optimizer" in asked.offload)


__all__ = ["elsewhere"]
