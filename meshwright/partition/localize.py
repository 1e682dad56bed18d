"""Second pass: the program of one rank. Literal sizes become local ones, special operators become kernels."""

from __future__ import annotations

from dataclasses import replace

from meshwright.graph import Graph, Node, verify
from meshwright.ops.factors import Factors
from meshwright.ops.local import localize
from meshwright.partition.reshards import RESHARD, Resharded, local_type
from meshwright.plan import Plan


def localize_graph(resharded: Resharded, factors: Factors, plan: Plan, rank: int) -> Graph:
    """The local graph of a rank: ordinary operators on what the rank holds, with reshards between them."""
    mesh = plan.mesh
    at = mesh.coordinate(rank)
    graph = resharded.graph
    inputs = tuple(
        replace(i, type=local_type(i.type, resharded.layouts[i.name], mesh, rank)) for i in graph.inputs
    )
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == RESHARD:
            kind = local_type(node.outputs[0], resharded.layouts[node.name], mesh, rank)
            nodes.append(replace(node, outputs=(kind,)))
        else:
            site = replace(factors.sites[node.name], node=node)
            nodes += localize(site, resharded.ports[node.name], mesh, at)
    return verify(replace(graph, inputs=inputs, nodes=tuple(nodes)))
