"""Where a program first differs from the one of a single device: value by value forward, then gradient by gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from meshwright.capture.pytree import leaves
from meshwright.core.graph import MOVES, Graph
from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.partition import Partition, partition
from meshwright.plan.plan import fingerprint
from meshwright.runtime.build_module import build_module
from meshwright.runtime.collectives import Handle
from meshwright.runtime.communicator import SimulatedRank, SimulatedWorld
from meshwright.runtime.step import LocalStep
from meshwright.search.modes import make_plan
from meshwright.verify.report import relative_error, take
from meshwright.verify.runs import simulated_rank


def first_difference(
    parts: Partition, batch: Any, start: Mapping[str, torch.Tensor], tolerance: float
) -> str:
    """The first value of the program, and then the last gradient, that differs from the program on one device.

    Looks at the first step, and, where all agrees there (a bias may start at zero), at parameters moved at random.
    """
    if parts.plan.stages:
        return _in_one_stage(parts, batch, start, tolerance)
    if parts.micro_batches > 1:
        return _in_time(parts, batch, start, tolerance)
    generator = torch.Generator().manual_seed(0)
    moved = {
        k: v + 0.1 * torch.randn(v.shape, generator=generator, dtype=v.dtype) if v.is_floating_point() else v
        for k, v in start.items()
    }
    return (
        _first_at(parts, batch, start, tolerance)
        or _first_at(parts, batch, moved, tolerance)
        or "every node agrees forward and backward; "
        "the difference is in the reduction of a leaf's gradient or in the update"
    )


def _in_one_stage(parts: Partition, batch: Any, start: Mapping[str, torch.Tensor], tolerance: float) -> str:
    """Locate the difference in the plan without stages, where a wrong split shows as well."""
    found = ""
    for one in parts.own or (parts,):
        graph, asked = replace_reshards(one), one.requested
        once = replace(asked.techniques, micro_batches=1, pipeline=1, schedule="", stages=())
        plan = replace(
            asked, techniques=once, stages={}, world=None, meshes=(), fingerprint=fingerprint(graph)
        )
        told = first_difference(partition(graph, plan), batch, start, tolerance)
        found += (f"; on {plan.mesh}: " if parts.own else "") + told
    return f"between stages only, if this is all that one stage says: {found.removeprefix('; ')}"


def _in_time(parts: Partition, batch: Any, start: Mapping[str, torch.Tensor], tolerance: float) -> str:
    """Locate the difference in the plan without micro-batches, where a wrong split shows as well."""
    graph = replace_reshards(parts)
    once = replace(parts.requested.techniques, micro_batches=1, interleave=1)
    plan = replace(parts.requested, techniques=once, fingerprint=fingerprint(graph))
    found = first_difference(partition(graph, plan), batch, start, tolerance)
    return f"in micro-batches only, if the full batch shows no more than this: {found}"


def _first_at(parts: Partition, batch: Any, start: Mapping[str, torch.Tensor], tolerance: float) -> str:
    graph = parts.resharded.graph
    recorded = list(graph.nodes)
    kept = tuple(v for n in recorded for v in n.values)
    alone = _single(parts)
    given = dict(leaves(batch))
    expected, expected_grads = _record(alone, given, start, set(kept) & set(alone.resharded.graph.types))[0]
    found = _record(parts, given, start, set(kept))
    mesh = parts.plan.mesh
    for node in graph.nodes:
        for value in node.values:
            source = _origin(graph, value, expected)
            if source not in expected:
                continue
            error = _assembled_error(
                [f[0].get(value) for f in found],
                parts.resharded.layouts[value].forward,
                mesh,
                expected[source],
            )
            if error > tolerance * 10:
                return f"%{value} = {node.op} differs forward by {error:.2g}  {node.where}"
    for node in reversed(graph.nodes):
        for value in node.values:
            if value not in expected_grads:
                continue
            error = _assembled_error(
                [f[1].get(value) for f in found],
                parts.resharded.layouts[value].backward,
                mesh,
                expected_grads[value],
            )
            if error > tolerance * 10:
                return f"the gradient of %{value} = {node.op} differs by {error:.2g}  {node.where}"
    return ""


def _origin(graph: Graph, value: str, known: Mapping[str, torch.Tensor]) -> str:
    """The name on one device of what a value is: reshards, hubs among them, have no other."""
    while value not in known and (node := graph.producers.get(value)) is not None and node.op in MOVES:
        value = node.uses[0]
    return value


def _single(parts: Partition) -> Partition:
    graph = replace_reshards(parts)
    return partition(graph, make_plan(graph, Mesh.of(ranks=1), "stand_alone"))


def replace_reshards(parts: Partition) -> Graph:
    """The graph of a partition without its reshards and transfers: what one device runs."""
    graph = parts.resharded.graph
    alias: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        if node.op in MOVES:
            alias[node.name] = alias.get(node.uses[0], node.uses[0])
        else:
            nodes.append(node.with_uses(alias.get(u, u) for u in node.uses))
    rename = lambda pairs: tuple((k, alias.get(v, v)) for k, v in pairs)  # noqa: E731
    return replace(
        graph, nodes=tuple(nodes), outputs=rename(graph.outputs), mutations=rename(graph.mutations)
    )


def _record(
    parts: Partition, given: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor], wanted: set[str]
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Per rank: every wanted value, and the gradients of those that have one."""

    def body(comm: SimulatedRank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        rank = simulated_rank(comm)
        step = LocalStep(parts, rank, {k: v.clone() for k, v in start.items()}, None)
        names = [v for n in step.graph.nodes for v in n.values if v in wanted]
        graph = replace(
            step.graph, outputs=(("loss", step.graph.loss), *((n, n) for n in names)), mutations=()
        )
        module = build_module(graph, rank, Handle(comm))
        leaf = {**step.leaves, **step.local_batch(given)}
        loss, *values = module(*(leaf[i.name] for i in graph.inputs))
        graded = [(n, v) for n, v in zip(names, values, strict=True) if v.requires_grad]
        gradients: tuple[torch.Tensor | None, ...] = ()
        if graded and loss.requires_grad:
            gradients = torch.autograd.grad(loss, [v for _, v in graded], allow_unused=True)
        forward = {n: v.detach() for n, v in zip(names, values, strict=True)}
        return forward, {n: g for (n, _), g in zip(graded, gradients, strict=False) if g is not None}

    return SimulatedWorld(parts.ranks).run(body)


def _assembled_error(
    values: list[torch.Tensor | None], layout: TensorLayout, mesh: Mesh, expected: torch.Tensor
) -> float:
    """Compare a value that ranks hold by a layout with the expected one, after adding partial terms; return the
    error."""
    if any(v is None for v in values):
        return float("inf") if any(v is not None for v in values) else 0.0
    total: dict[int, torch.Tensor] = {}
    for rank, value in enumerate(values):
        assert value is not None
        key = min(mesh.group(rank, layout.partial)) if layout.partial else rank
        total[key] = total[key] + value.double() if key in total else value.double()
    return max(relative_error(v, take(expected, layout, mesh, r), expected) for r, v in total.items())
