"""The price of a step if a single operator were sharded differently and its neighbours stayed the same.

The price is that of the operator, its consumers, and the communication between them (`predict.price`). It is the exact
price of a single change. A search changes neighbours too, so its own next best may be cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph, Input, Node
from meshwright.core.layout import TensorLayout, dim_axes, without_axes
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.ops.factors import Site
from meshwright.ops.strategy import Strategy, fits, layouts, split_unit, splittable, ways
from meshwright.partition import Partition
from meshwright.partition.insert_reshards import insert_reshards
from meshwright.predict.price import on_cluster, program_price


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another strategy of one operator, and the seconds it adds to the step (negative: saves)."""

    strategy: Strategy
    more_seconds: float


def alternatives(
    graph: Graph, parts: Partition, name: str, cluster: Cluster, optimizer_states: int = 2
) -> tuple[Alternative, ...]:
    """Return every other sharding of one operator on one of the user's axes, with all else unchanged, cheapest first.

    `graph` is the captured one, without reshards.
    """
    site, mesh = parts.factors.sites[name], parts.plan.mesh
    mine = parts.plan.strategies[name]
    around = _around(graph, name)
    now = _price(around, parts, name, mine, cluster, optimizer_states)
    found: dict[str, Alternative] = {}
    for strategy in _others(site, mine, mesh):
        try:
            price = _price(around, parts, name, strategy, cluster, optimizer_states)
        except MeshwrightError:
            continue  # not every change of one operator has a reshard to its neighbours
        found.setdefault(str(strategy), Alternative(strategy, price - now))
    return tuple(sorted(found.values(), key=lambda a: a.more_seconds))


def _others(site: Site, mine: Strategy, mesh: Mesh) -> Iterator[Strategy]:
    """Yield the strategy with one named axis moved to another factor, or removed."""
    for _, run in mesh.names:
        gone = [a for a in run if mesh.sizes[a] > 1 and a not in mesh.time]  # micro-batches are no choice
        if not gone:
            continue
        splits = {letter: without_axes(dim, gone) for letter, dim in mine.splits}
        splits = {letter: dim for letter, dim in splits.items() if dim_axes(dim)}
        through = tuple((a, ports) for a, ports in mine.through if a not in gone)
        base = Strategy(tuple(splits.items()), through, tuple(a for a in mine.grad if a not in gone))
        if base != mine:
            yield base
        for letter in splittable(site):
            for unit in ways(site, letter):
                tree = splits.get(letter, site.trees[letter])
                for axis in gone:
                    if not fits(tree, unit, mesh, axis):
                        break
                    tree = split_unit(tree, unit, axis)
                else:
                    changed = {**splits, letter: tree}
                    strategy = Strategy(tuple((x, changed[x]) for x in sorted(changed)), through, base.grad)
                    if _sorted(strategy) != _sorted(mine):
                        yield strategy


def _sorted(strategy: Strategy) -> Strategy:
    return replace(strategy, splits=tuple(sorted(strategy.splits, key=lambda c: c[0])))


def _around(graph: Graph, name: str) -> Graph:
    """Return a graph of an operator, its consumers, and other readers of its inputs (they may share reshards)."""
    node = next(n for n in graph.nodes if n.name == name)
    wanted = {name, *(c.name for v in (*node.values, *node.uses) for c, _ in graph.consumers[v])}
    nodes: tuple[Node, ...] = tuple(n for n in graph.nodes if n.name in wanted)
    made = {v for n in nodes for v in n.values}
    entries = {i.name: i for i in graph.inputs}
    read = dict.fromkeys(u for n in nodes for u in n.uses if u not in made)
    inputs = tuple(
        entries.get(u) or Input(u, "batch", u, graph.types[u], needs_grad=u in graph.needs_grad) for u in read
    )
    return Graph(graph.name, inputs, nodes, tuple((k, v) for k, v in graph.outputs if v in node.values))


def _price(
    around: Graph, parts: Partition, name: str, strategy: Strategy, cluster: Cluster, optimizer_states: int
) -> float:
    plan, prices = parts.plan, parts.plan.prices or cluster.prices
    mesh = plan.mesh if plan.prices else on_cluster(plan.mesh, cluster)
    strategies = {**plan.strategies, name: strategy}
    node = next(n for n in around.nodes if n.name == name)
    asked = dict(zip(node.uses, layouts(parts.factors.sites[name], strategy).inputs, strict=True))
    inputs: dict[str, TensorLayout] = {}
    for entry in around.inputs:
        alone = entry.role == "parameter" and [n.name for n, _ in around.consumers[entry.name]] == [name]
        follows = alone and entry.name not in plan.hubs
        layout = asked[entry.name] if follows else parts.resharded.layouts[entry.name]
        inputs[entry.name] = replace(layout, partial=()) if entry.role == "parameter" else layout
    hubs = {k: v for k, v in plan.hubs.items() if k in around.types}
    changed = replace(
        plan, mesh=mesh, strategies=strategies, inputs=inputs, hubs=hubs, again=plan.again & hubs.keys()
    )
    sites = {n.name: parts.factors.sites[n.name] for n in around.nodes}
    factors = replace(parts.factors, sites=sites)
    resharded = insert_reshards(around, factors, changed, prices)
    return program_price(Partition(changed, factors, resharded, changed), cluster, optimizer_states).total
