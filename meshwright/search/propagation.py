"""Sharding propagation: from the annotated nodes outward, breadth first, each node with the least redistribution.

One prime axis at a time. A node sees only the neighbours that are decided already, so the result is greedy, as in the
reference system; the searches with a cost model do better and cost more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from meshwright.graph import Node
from meshwright.layout import TensorLayout, normalize, only_axes
from meshwright.ops.strategy import Strategy
from meshwright.search.options import Assignment, Scene, combine, options, score


def propagate(
    scene: Scene,
    assignment: Assignment,
    axis: str,
    seeds: Mapping[str, Strategy],
    within: Iterable[str] | None = None,
    given: frozenset[str] = frozenset(),
) -> None:
    """Decide every node on one axis. `seeds` are single-axis strategies of annotated nodes; `within` limits the nodes;
    values in `given` are taken as they are cut, by the user's word."""
    graph = scene.graph
    allowed = set(within) if within is not None else {n.name for n in graph.nodes}
    nodes = {n.name: n for n in graph.nodes}
    decided: dict[str, TensorLayout] = {}
    wanted: dict[tuple[str, int], TensorLayout] = {}
    done: set[str] = set()

    def decide(node: Node, option: Strategy) -> None:
        done.add(node.name)
        combine(scene, assignment, node, option)
        ports = scene.ports(node, option)
        for port, asked in enumerate(ports.inputs):
            wanted[node.name, port] = normalize(only_axes(asked, (axis,)), scene.mesh)
        for value, given in zip(node.values, ports.outputs, strict=True):
            decided[value] = scene.seen_on(given, axis)

    def settled(node: Node) -> bool:
        """All computed inputs are decided, so the node sees what it will get."""
        return all(u in decided for u in node.uses if u in graph.producers)

    ready: deque[Node] = deque()
    waiting: dict[str, Node] = {}  # reached, but some input is open; in the order of reaching

    def reach(node: Node) -> None:
        for near in neighbours(scene, node):
            if near.name in done or near.name not in allowed:
                continue
            if settled(near):
                waiting.pop(near.name, None)
                ready.append(near)
            else:
                waiting.setdefault(near.name, near)

    for name, option in seeds.items():
        decide(nodes[name], option)
    for name in seeds:
        reach(nodes[name])
    while ready or waiting:
        # A node that is reached from its output side waits while others can be decided: from a residual stream the
        # output projection would otherwise stay whole before the cut of the heads arrives there.
        node = ready.popleft() if ready else waiting.pop(next(iter(waiting)))
        if node.name not in done:
            decide(node, best(scene, node, axis, assignment[node.name], decided, wanted, given))
            reach(node)


def neighbours(scene: Scene, node: Node) -> Iterable[Node]:
    """Nodes that read what a node makes, then those that make what it reads."""
    for value in node.values:
        for consumer, _ in scene.graph.consumers[value]:
            yield consumer
    for value in node.uses:
        if value in scene.graph.producers:
            yield scene.graph.producers[value]


def best(
    scene: Scene,
    node: Node,
    axis: str,
    fixed: Strategy,
    decided: Mapping[str, TensorLayout],
    wanted: Mapping[tuple[str, int], TensorLayout],
    given: frozenset[str] = frozenset(),
) -> Strategy:
    """The option of a node with the least redistribution against its decided neighbours."""
    allowed = [
        o for o in options(scene, node, axis, fixed) if not o.through or _brings_all(node, o, axis, decided)
    ]
    return min(allowed, key=lambda o: score(scene, node, o, axis, decided, wanted, given))


def _brings_all(node: Node, option: Strategy, axis: str, decided: Mapping[str, TensorLayout]) -> bool:
    """A pending sum passes only where every term is pending already: it delays a reduction, it never adds one."""
    return all(
        axis in decided[node.uses[p]].pending if node.uses[p] in decided else False
        for _, ps in option.through
        for p in ps
    )
