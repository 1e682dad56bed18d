"""From shardings to a plan: where gradients stay partial, and in which layout each input enters the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.core.graph import Graph, Input, Node
from meshwright.core.layout import TensorLayout, normalize, without_axes
from meshwright.core.mesh import Mesh
from meshwright.ops.strategy import Strategy
from meshwright.search.context import Assignment, SearchContext


def pass_gradients_back(context: SearchContext, assignment: Assignment) -> None:
    """Let a partial gradient pass through operators that only rearrange or scale one tensor.

    It is then reduced once, where the branches of a hub meet (q, k and v of one norm), instead of once a branch.
    """
    graph = context.graph
    pinned = {value for _, value in (*graph.outputs, *graph.mutations)}
    passing: dict[tuple[int, tuple[str, ...]], Strategy] = {}
    for node in reversed(graph.nodes):
        if not context.site(node.name).rule.terms or len(node.outputs) != 1:
            continue
        value = node.name
        consumers = graph.consumers[value]
        if value in pinned or not consumers or value not in graph.needs_grad:
            continue
        asked = [context.ports(c, assignment[c.name]).inputs[p] for c, p in consumers]
        common = set(asked[0].grad).intersection(*(a.grad for a in asked))
        if not common or len(_grad_ports(graph, node)) != 1:
            continue
        mine = context.ports(node, assignment[node.name]).outputs[0]
        free = [a for a in context.mesh.sort(common) if a not in mine.split_axes and a not in mine.partial]
        # Only where every consumer takes the value as it is: otherwise a reshard stands between them anyway.
        if free and all(context.normal(a) == context.normal(mine) for a in asked):
            before = assignment[node.name]
            key = (id(before), tuple(free))
            # one object for all equal ones: what is derived from strategies is remembered by it
            if key not in passing:
                passing[key] = replace(before, grad=tuple(free))
            assignment[node.name] = passing[key]


def _grad_ports(graph: Graph, node: Node) -> set[str]:
    return {u for u in node.uses if u in graph.needs_grad}


def input_layouts(context: SearchContext, strategies: Mapping[str, Strategy]) -> dict[str, TensorLayout]:
    """The layout in which each input enters the program.

    A parameter enters as its first use wants it (a tied one: the others reshard); a batch tensor or buffer
    is split only on the axes on which all its uses agree (slicing further is free); a buffer that the step
    replaces enters whole.
    """
    graph = context.graph
    replaced = {target for target, _ in graph.mutations}
    found: dict[str, TensorLayout] = {}
    for entry in graph.inputs:
        uses = graph.consumers[entry.name]
        asked = [context.ports(c, strategies[c.name]).inputs[p] for c, p in uses]
        whole = TensorLayout(context.factors.dims[entry.name])
        if not asked or entry.target in replaced:
            found[entry.name] = whole
        elif entry.role == "parameter":
            found[entry.name] = _parameter_layout(entry, asked)
        else:
            found[entry.name] = _common(asked, whole, context.mesh)
    return found


def _parameter_layout(entry: Input, asked: list[TensorLayout]) -> TensorLayout:
    first = max(asked, key=lambda a: len(a.split_axes))
    grad = set(first.grad)
    for other in asked:
        # Uses of one layout may differ in where their gradient is partial; the leaf keeps what all share.
        if other.dims == first.dims and not other.partial and not first.partial:
            grad &= set(other.grad)
    return TensorLayout(first.dims, (), tuple(grad) if entry.needs_grad else ())


def _common(asked: list[TensorLayout], whole: TensorLayout, mesh: Mesh) -> TensorLayout:
    kept = asked[0].forward
    axes = set(kept.split_axes)
    for axis in kept.split_axes:
        others = set(kept.split_axes) - {axis}
        alone = normalize(TensorLayout(tuple(without_axes(d, others) for d in kept.dims)), mesh)
        for layout in asked[1:]:
            theirs = normalize(
                TensorLayout(tuple(without_axes(d, set(layout.split_axes) - {axis}) for d in layout.dims)),
                mesh,
            )
            if theirs != alone:
                axes.discard(axis)
    gone = set(kept.split_axes) - axes
    dims = tuple(without_axes(d, gone) for d in kept.dims)
    return TensorLayout(dims) if axes else whole
