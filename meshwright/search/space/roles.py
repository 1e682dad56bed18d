"""Which sub-dims are worth cutting: those that nothing on the way of gradients must keep whole, outer before inner.

The same sub-dim goes by many names (a letter here, a dim there), so leaves are joined over the graph first. *Held* is a
leaf that some operator with a gradient keeps whole: a cut there would be undone. *Inner* is one that stands behind
another in a dim of a parameter (the 128 of 8 heads): it is cut when the outer ones have no room left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.graph import Graph, Node
from meshwright.layout import leaves
from meshwright.ops.factors import Factors, Site
from meshwright.ops.rule import is_whole

Leaf = tuple[str, str, int]  # node and letter, or value and "", and the number of the leaf


@dataclass(frozen=True)
class Roles:
    """Marks per leaf of each letter of each node."""

    held: Mapping[tuple[str, str], tuple[bool, ...]]
    inner: Mapping[tuple[str, str], tuple[bool, ...]]


def roles(graph: Graph, factors: Factors) -> Roles:
    """The marks of all nodes of a graph."""
    parent: dict[Leaf, Leaf] = {}

    def find(leaf: Leaf) -> Leaf:
        while (above := parent.get(leaf, leaf)) != leaf:
            parent[leaf] = parent.get(above, above)
            leaf = above
        return leaf

    held, inner = set[Leaf](), set[Leaf]()
    parameters = {i.name for i in graph.input_of("parameter")}
    counts = {name: sum(len(list(leaves(d))) for d in dims) for name, dims in factors.dims.items()}
    for node in graph.nodes:
        site = factors.sites[node.name]
        for number, value in enumerate((*node.uses, *node.values)):
            own = list(_port_leaves(node, site, number))
            if len(own) == counts[value]:
                for place, leaf in enumerate(own):
                    parent[find(leaf)] = find((value, "", place))
    for node in graph.nodes:
        site = factors.sites[node.name]
        if any(node.needs_grad):
            for letter, tree in site.trees.items():
                if is_whole(site.rule, letter):
                    held.update(find((node.name, letter, i)) for i in range(len(list(leaves(tree)))))
        for number, value in enumerate(node.uses):
            if value not in parameters:
                continue
            for dim in site.rule.inputs[number]:
                behind = [
                    (node.name, x, i)
                    for x in dim
                    if "." not in x
                    for i in range(len(list(leaves(site.trees[x]))))
                ][1:]
                inner.update(find(leaf) for leaf in behind)
    marks: list[dict[tuple[str, str], tuple[bool, ...]]] = [{}, {}]
    for node in graph.nodes:
        for letter, tree in factors.sites[node.name].trees.items():
            found = [find((node.name, letter, i)) for i in range(len(list(leaves(tree))))]
            for mark, chosen in zip(marks, (held, inner), strict=True):
                mark[node.name, letter] = tuple(leaf in chosen for leaf in found)
    return Roles(*marks)


def _port_leaves(node: Node, site: Site, number: int) -> Iterator[Leaf]:
    """The leaves of a port, as leaves of the node's letters. A part counts from where it begins in its letter."""
    port = (*site.rule.inputs, *site.rule.outputs)[number]
    for dim in port:
        for item in dim:
            letter, _, part = item.partition(".")
            trees = [site.trees[letter]]
            start = 0
            if part and len(site.trees[letter]) == 1:
                parts = getattr(site.trees[letter][0], "parts", (site.trees[letter],))
                start = sum(len(list(leaves(p))) for p in parts[: int(part)])
                trees = [parts[int(part)]]
            for place in range(sum(len(list(leaves(t))) for t in trees)):
                yield (node.name, letter, start + place)
