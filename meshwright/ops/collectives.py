"""The collectives inside kernels, which no reshard shows.

A loss over sharded classes, a batch norm over a sharded batch and the count of targets own their collectives.
`kernel_collectives` reads them from the kernels of a rank's program. `site_collectives` reads them from a site and its
layouts, before there is a program, so that a search prices what will run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from meshwright.core.collectives import ALL_TO_ALL
from meshwright.core.graph import DTYPES, Node, TensorType
from meshwright.core.mesh import Mesh
from meshwright.ops.factors import Site
from meshwright.ops.local import LOCAL, localize
from meshwright.ops.local.reduce import batch_norm, classes
from meshwright.ops.local.window import windowed
from meshwright.ops.strategy import Ports


@dataclass(frozen=True, slots=True)
class KernelCollective:
    """One collective of a kernel. `phase` is forward or backward; `payload_bytes` is the size of the reduced tensor."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    payload_bytes: int


def kernel_collectives(node: Node, types: Mapping[str, TensorType]) -> tuple[KernelCollective, ...]:
    """Return the collectives of a node of a rank's program, in order of execution. `types` are local types."""
    found = KERNELS.get(node.op)
    return found(node, types) if found else ()


def site_collectives(
    site: Site, ports: Ports, mesh: Mesh, types: Mapping[str, TensorType], needs_grad: Collection[str] = ()
) -> tuple[KernelCollective, ...]:
    """Return the collectives that the kernels of a site run under its layouts, on the rank at the origin.

    `types` are those of the global graph; only their dtypes count. `needs_grad` names the values that need a gradient.
    """
    if site.node.op not in WITH_COLLECTIVES:
        return ()
    at = dict.fromkeys(mesh.sizes, 0)
    # Each port has its own name: a value that is read twice may come in two layouts.
    names = [f"port {number}" for number in range(len(site.node.uses))]
    local = {
        name: TensorType(types[use].dtype, layout.local_shape(mesh, at))
        for name, use, layout in zip(names, site.node.uses, ports.inputs, strict=True)
    }
    wanted = tuple(use in needs_grad for use in site.node.uses)
    nodes = localize(replace(site, node=site.node.with_uses(names)), ports, mesh, at, wanted)
    for node in nodes:
        local.update(zip(node.values, node.outputs, strict=True))
    return tuple(talk for node in nodes for talk in kernel_collectives(node, local))


WITH_COLLECTIVES = frozenset(
    op for op, localizer in LOCAL.items() if localizer in (classes, batch_norm, windowed)
)


def _all_reduce(node: Node, types: Mapping[str, TensorType]) -> tuple[KernelCollective, ...]:
    return (KernelCollective("forward", "all_reduce", tuple(node.args[1]), node.outputs[0].size_bytes),)


def _cross_entropy(node: Node, types: Mapping[str, TensorType]) -> tuple[KernelCollective, ...]:
    """Per example: a maximum, then the sums of exponentials, of target logits and, with smoothing, of all logits."""
    x, smoothing, axes = types[node.uses[0]], node.args[7], tuple(node.args[8])
    row = math.prod(types[node.uses[1]].shape) * max(DTYPES[x.dtype], 4)
    return (
        KernelCollective("forward", "all_reduce", axes, row),
        KernelCollective("forward", "all_reduce", axes, row * (3 if smoothing else 2)),
    )


def _batch_norm(node: Node, types: Mapping[str, TensorType]) -> tuple[KernelCollective, ...]:
    """Forward: sums and squared deviations. Backward: sums of the gradient and of its product with the result."""
    x, axes = types[node.uses[0]], tuple(node.args[9])
    row = x.shape[1] * max(DTYPES[x.dtype], 4)
    back = (KernelCollective("backward", "all_reduce", axes, 2 * row),) if node.needs_grad[0] else ()
    forward = KernelCollective("forward", "all_reduce", axes, row)
    return (forward, forward, *back)


def _halo(node: Node, types: Mapping[str, TensorType]) -> tuple[KernelCollective, ...]:
    """Forward: elements to the neighbours. Backward: the gradients of the elements received."""
    _, dim, send, receive, _, _, _, axes = node.args
    if not axes:
        return ()
    x = types[node.uses[0]]
    row = math.prod(x.shape[:dim]) * math.prod(x.shape[dim + 1 :]) * DTYPES[x.dtype]
    forward = KernelCollective("forward", ALL_TO_ALL.name, tuple(axes), row * sum(n for _, n in send))
    back = KernelCollective("backward", ALL_TO_ALL.dual, tuple(axes), row * sum(receive))
    return (forward, back) if node.needs_grad[0] else (forward,)


KERNELS: dict[str, Callable[[Node, Mapping[str, TensorType]], tuple[KernelCollective, ...]]] = {
    "meshwright.all_reduce": _all_reduce,
    "meshwright.cross_entropy_split": _cross_entropy,
    "meshwright.batch_norm_sync": _batch_norm,
    "meshwright.halo": _halo,
}
