"""Which sub-dims are worth sharding: those that nothing on the way of gradients must keep replicated, outer before
inner.

The same sub-dim goes by many names (a letter here, a dim there), so leaves are joined over the graph first. *Held* is a
leaf that some operator with a gradient keeps replicated: a sharding there would be undone. *Inner* is one that stands
behind another in a dim of a parameter (the 128 of 8 heads): it is sharded when the outer ones have no room left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.graph import Graph
from meshwright.core.layout import Dim, leaves
from meshwright.ops.factors import Factors, Site
from meshwright.ops.rule import Port, must_replicate


@dataclass(frozen=True)
class Roles:
    """Marks per leaf of each letter of each node."""

    held: Mapping[tuple[str, str], tuple[bool, ...]]
    inner: Mapping[tuple[str, str], tuple[bool, ...]]


def roles(graph: Graph, factors: Factors) -> Roles:
    """The marks of all nodes of a graph."""
    leaf_counts: dict[int, int] = {}  # of trees, by identity: analysis makes equal ones one object

    def count(tree: Dim) -> int:
        if (known := leaf_counts.get(id(tree))) is None:
            known = leaf_counts[id(tree)] = len(list(leaves(tree)))
        return known

    parent: list[int] = []  # of leaves by number: of values, then of the letters of nodes

    def numbered(many: int) -> range:
        first = len(parent)
        parent.extend(range(first, first + many))
        return range(first, first + many)

    def find(leaf: int) -> int:
        while (above := parent[leaf]) != leaf:
            parent[leaf] = leaf = parent[above]
        return leaf

    values = {name: numbered(sum(map(count, dims))) for name, dims in factors.dims.items()}
    letters: dict[str, dict[str, range]] = {}
    for node in graph.nodes:
        site = factors.sites[node.name]
        own = letters[node.name] = {x: numbered(count(tree)) for x, tree in site.trees.items()}
        ports = (*site.rule.inputs, *site.rule.outputs)
        for port, value in zip(ports, (*node.uses, *node.values), strict=True):
            found = _port_leaves(site, port, own)
            if len(found) == len(values[value]):
                for leaf, other in zip(found, values[value], strict=True):
                    parent[find(leaf)] = find(other)
    held, inner = set[int](), set[int]()
    parameters = {i.name for i in graph.input_of("parameter")}
    for node in graph.nodes:
        site, own = factors.sites[node.name], letters[node.name]
        if any(node.needs_grad):
            for letter, mine in own.items():
                if must_replicate(site.rule, letter):
                    held.update(map(find, mine))
        for port, value in zip(site.rule.inputs, node.uses, strict=True):
            if value not in parameters:
                continue
            for dim in port:
                behind = [leaf for x in dim if "." not in x for leaf in own[x]][1:]
                inner.update(map(find, behind))
    marks: list[dict[tuple[str, str], tuple[bool, ...]]] = [{}, {}]
    for name, own in letters.items():
        for letter, mine in own.items():
            found = [find(leaf) for leaf in mine]
            for mark, chosen in zip(marks, (held, inner), strict=True):
                mark[name, letter] = tuple([leaf in chosen for leaf in found])
    return Roles(*marks)


def _port_leaves(site: Site, port: Port, own: Mapping[str, range]) -> list[int]:
    """The leaves of a port, as leaves of the node's letters. A part counts from where it begins in its letter."""
    found: list[int] = []
    for dim in port:
        for item in dim:
            letter, _, part = item.partition(".")
            mine = own[letter]
            if part and len(site.trees[letter]) == 1:
                parts = getattr(site.trees[letter][0], "parts", (site.trees[letter],))
                start = sum(len(list(leaves(p))) for p in parts[: int(part)])
                mine = mine[start : start + len(list(leaves(parts[int(part)])))]
            found += mine
    return found
