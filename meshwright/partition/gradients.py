"""The parameters whose gradients are partial after backward, as the buckets reduce them."""

from __future__ import annotations

from meshwright.core.graph import DTYPES, RESHARD
from meshwright.core.layout import dim_axes, only_axes
from meshwright.core.remembered import cached_on_first
from meshwright.core.techniques import wire_dtype
from meshwright.partition import Partition
from meshwright.partition.buckets import Gradient
from meshwright.redistribute.steps import largest_size

# Operators that create the gradient of a parameter, so that no other branch of backward can see it.
MAKES_GRADIENT = frozenset(
    f"aten.{name}.default"
    for name in ("linear", "addmm", "mm", "embedding", "convolution", "conv2d", "conv1d")
)


def loss_scale(parts: Partition) -> float:
    """Return the factor of the loss before backward: 1, or the number of ranks that share the batch for ``"sum"``."""
    if parts.plan.techniques.gradients == "mean":
        return 1.0
    graph, mesh = parts.resharded.graph, parts.plan.mesh
    axes: set[str] = set()
    for entry in graph.input_of("batch"):
        todo = [entry.name]
        while todo:
            name = todo.pop()
            axes |= set(dim_axes(parts.resharded.layouts[name].dims[0])) if entry.type.shape else set()
            todo += [v for node, _ in graph.consumers[name] if node.op == RESHARD for v in node.values]
    return float(mesh.count(a for a in axes if a in mesh.sizes and a not in mesh.time))


@cached_on_first
def pending_gradients(parts: Partition) -> tuple[Gradient, ...]:
    """Return the parameters (by input names) whose gradients are partial, in the order of their first use.

    Backward completes them in reverse. Sizes are those of the rank at the origin for every rank: even if shards are
    uneven, all ranks then fill their buckets equally and start their collectives in one order.
    """
    parted = parts.plan.states if parts.plan.techniques.optimizer_parallel >= 2 else {}
    graph, mesh = parts.resharded.graph, parts.plan.mesh
    order = {node.name: number for number, node in enumerate(graph.nodes)}
    found: list[tuple[int, Gradient]] = []
    for entry in graph.inputs:
        layout, users = parts.resharded.layouts[entry.name], graph.consumers[entry.name]
        axes = mesh.sort(a for a in layout.grad if mesh.sizes[a] > 1 and a not in mesh.time)
        if entry.role == "parameter" and entry.needs_grad and axes and users:
            more = parted[entry.name].split_axes if entry.name in parted else ()
            cut = tuple(a for a in axes if a in more)
            added = layout  # what is reduced: of a sharded update, the part that the reduction does not split
            if entry.name in parted:
                added = only_axes(parted[entry.name], [a for a in more if a not in cut])
            size = largest_size(added, mesh) * DTYPES[entry.type.dtype]
            wire = wire_dtype(parts.plan.techniques, entry.type.dtype)
            makers = [node for node, _ in users]
            if (
                entry.name in parts.resharded.host_parameters
            ):  # its gradient is that of its copy on the device
                makers = [node for brought in makers for node, _ in graph.consumers[brought.name]]
            fresh = not wire and all(node.op in MAKES_GRADIENT for node in makers)
            group = parts.plan.techniques.fusion_group(entry.target, *entry.ties)
            made = Gradient(
                entry.name,
                axes,
                entry.type.dtype,
                size,
                fresh,
                group,
                entry.name in parted,
                cut,
                wire,
                entry.name in parts.resharded.hosted,
            )
            found.append((min(order[node.name] for node, _ in users), made))
    return tuple(gradient for _, gradient in sorted(found, key=lambda f: f[0]))
