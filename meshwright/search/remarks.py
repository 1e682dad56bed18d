"""Remarks of a plan for its user: what no rule was known for, what several ranks compute redundantly, and what that
costs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.core.graph import Graph, Node
from meshwright.core.layout import Dim, SubDim, TensorLayout, dim_axes, dim_size, local_size
from meshwright.core.mesh import Mesh
from meshwright.ops.analysis import factors_of
from meshwright.ops.strategy import Strategy, split_axes
from meshwright.ops.table import has_rule
from meshwright.plan.plan import Plan
from meshwright.redistribute.steps import origin, show_bytes
from meshwright.search.context import SearchContext

UNEVEN = 1.05  # times the mean: a largest block above that is worth a remark
HEAVY = (
    "aten.linear.default",
    "aten.addmm.default",
    "aten.matmul.default",
    "aten.mm.default",
    "aten.bmm.default",
    "aten.einsum.default",
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.scaled_dot_product_attention.default",
)


def unknown(graph: Graph, mesh: Mesh, plan: Plan) -> list[str]:
    """Operators without a rule: how often they occur, what is gathered for them, and how to give them one."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not has_rule(node.op):
            found.setdefault(node.op, []).append(node)
    if not found:
        return []
    context, ranks = SearchContext(graph, factors_of(graph), mesh), mesh.size
    notes = []
    for op, nodes in found.items():
        brought = {u for n in nodes for u in n.uses if ranks > 1 and _is_cut(_layout(context, plan, u))}
        size = sum(graph.types[u].size_bytes for u in brought)
        cost = f"all {ranks} ranks repeat it" if ranks > 1 else "on one rank that costs nothing"
        cost += f", and {show_bytes(size)} of its inputs are gathered on each" if size else ""
        notes.append(
            f"no rule is known for {op}, so it stays replicated: {cost} "
            f'({len(nodes)}×, {nodes[0].where}); give it one with mw.rule({op.removesuffix(".default")!r}, "…")'
        )
    return notes


def _layout(context: SearchContext, plan: Plan, value: str) -> TensorLayout:
    node = context.graph.producers.get(value)
    if node is None:
        return plan.inputs[value]
    return context.ports(node, plan.strategies[node.name]).outputs[node.values.index(value)]


def _is_cut(layout: TensorLayout) -> bool:
    return bool(layout.split_axes or layout.partial)


def repeated(graph: Graph, mesh: Mesh, assignment: Mapping[str, Strategy]) -> list[str]:
    """Heavy operators that several ranks compute redundantly, one note for each set of axes."""
    found: dict[tuple[str, ...], list[Node]] = {}
    known: dict[int, tuple[str, ...]] = {}  # layers of one kind share their strategies
    for node in graph.nodes:
        if node.op in HEAVY:
            strategy = assignment[node.name]
            idle = known.get(id(strategy))
            if idle is None:
                used = {a for axes in split_axes(strategy).values() for a in axes}
                used |= {a for a, _ in strategy.through}
                idle = tuple(a.name for a in mesh.axes if a.size > 1 and a.name not in used)
                known[id(strategy)] = idle
            if idle:
                found.setdefault(idle, []).append(node)
    notes = []
    for axes, nodes in found.items():
        names = list(dict.fromkeys(n.module or n.name for n in nodes))
        times = math.prod(mesh.sizes[a] for a in axes)
        notes.append(
            f"{times} ranks ({mesh.show(axes)}) compute the same in {_listed(names)}: no factor is split there"
        )
    return notes


def uneven(graph: Graph, mesh: Mesh, assignment: Mapping[str, Strategy]) -> list[str]:
    """Shardings of heavy operators whose largest block is well above the mean, one note for each: the step takes as
    long as the rank that has it."""
    found: dict[Dim, list[Node]] = {}
    known: dict[Dim, bool] = {}
    for node in graph.nodes:
        for _, dim in assignment[node.name].splits if node.op in HEAVY else ():
            if dim not in known:
                known[dim] = local_size(dim, mesh, origin(mesh)) > UNEVEN * _mean(mesh, dim)
            if known[dim]:
                found.setdefault(dim, []).append(node)
    notes = []
    for dim, nodes in found.items():
        axes = dim_axes(dim)
        most, mean, ranks = local_size(dim, mesh, origin(mesh)), _mean(mesh, dim), mesh.count(axes)
        empty = ranks - _holders(dim, mesh)
        idle = f", and {empty} {'has' if empty == 1 else 'have'} none" if empty else ""
        names = list(dict.fromkeys(n.module or n.name for n in nodes))
        notes.append(
            f"{ranks} ranks ({mesh.show(axes)}) share {dim_size(dim)} unevenly in {_listed(names)}: the largest block "
            f"is {most}, {most / mean:.2f} times the mean of {mean:.2f}{idle}; a size that {ranks} divides is even"
        )
    return notes


def _holders(dim: Dim, mesh: Mesh) -> int:
    """How many blocks of a dim have elements: all where the ranks have some of every part of a concatenation."""
    items = [item for item in dim if isinstance(item, SubDim)]
    if len(items) < len(dim):
        return mesh.count(dim_axes(dim))

    def filled(size: int, counts: list[int]) -> int:
        if not counts or not size:
            return min(size, 1)
        block = -(-size // counts[0])
        full, rest = divmod(size, block)
        return full * filled(block, counts[1:]) + filled(rest, counts[1:])

    return math.prod(filled(item.size, [mesh.sizes[a] for a in item.axes]) for item in items)


def _mean(mesh: Mesh, dim: Dim) -> float:
    return dim_size(dim) / mesh.count(dim_axes(dim))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
