"""The options of every node, found once for nodes that differ in sizes alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshwright.core.graph import Graph, Node
from meshwright.core.layout import SubDim, dim_size
from meshwright.ops.factors import Factors, Site
from meshwright.redistribute.price_matrix import Value
from meshwright.search.budget import SPACE
from meshwright.search.space.codes import NodeCodes, Option, node_codes
from meshwright.search.space.roles import Roles, roles
from meshwright.search.space.wiring import Ties


def all_codes(
    graph: Graph,
    factors: Factors,
    values: Mapping[str, Value],
    ties: Ties,
    required: Mapping[str, Sequence[Option]] | None = None,
) -> dict[str, NodeCodes]:
    """The options of every node that is not a copy of another, the `required` ones of some among them."""
    marks, more = roles(graph, factors), required or {}
    by_shape: dict[Hashable, NodeCodes] = {}
    found: dict[str, NodeCodes] = {}
    for node in graph.nodes:
        name = node.name
        if ties.first(name) != name:
            continue
        site, asked = factors.sites[name], more.get(name, ())
        shape = None if asked else _shape(node, site, graph, factors, marks)
        known = by_shape.get(shape) if shape is not None else None
        if known is None:
            found[name] = node_codes(node, site, graph, factors, values, marks, asked)
            if shape is not None:
                by_shape[shape] = found[name]
        else:
            sizes = np.array([dim_size(tree[:1]) for tree in site.trees.values() if tree], dtype=np.float64)
            found[name] = replace(known, node=node, site=site, leaf_sizes=sizes)
    return found


def _shape(node: Node, site: Site, graph: Graph, factors: Factors, marks: Roles) -> Hashable:
    """All that the options of a node follow from but for its sizes; None where sizes have a say: where a letter has
    several sub-dims, a dim several letters, or a value is known by other sub-dims than the node's."""
    rule, trees = site.rule, site.trees
    if len(trees) > SPACE.options:  # which of too many shardings are dropped depends on their sizes
        return None
    for tree in trees.values():
        if len(tree) > 1 or (tree and (type(tree[0]) is not SubDim or tree[0].size < 2)):
            return None
    for port, value in zip((*rule.inputs, *rule.outputs), (*node.uses, *node.values), strict=True):
        for dim, known in zip(port, factors.dims[value], strict=True):
            if len(dim) > 1 or (trees.get(dim[0]) is not known if dim else bool(known)):
                return None
        if len({dim for dim in port if dim}) < sum(map(bool, port)):
            return None
    name = node.name
    return (
        node.op,
        *map(id, (rule.inputs, rule.outputs, rule.terms, rule.replicated, rule.reduced_inside)),
        tuple([(x, len(t), marks.held[name, x], marks.inner[name, x]) for x, t in trees.items()]),
        tuple([u in graph.needs_grad for u in (*node.uses, *node.values)]),
    )
