"""The hubs that backward gathers again: those that autograd would save, in the same way on every rank.

The gather that backward repeats is a collective, started by the first consumer that had saved its result. All ranks
must start it at the same place. They do if they run the same operators. A rank without heads, or with one row where
others have several (a view there, a copy here), may save something else. Such hubs are saved instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from meshwright.core.graph import PIN, RESHARD, TRANSFERS, Graph
from meshwright.core.layout import TensorLayout, leaves
from meshwright.core.mesh import Mesh
from meshwright.ops.saved import saved_in
from meshwright.ops.strategy import Ports
from meshwright.redistribute import Reshard

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default reshape.default _unsafe_view.default transpose.int permute.default t.default expand.default "
        "slice.Tensor select.int narrow.default split.Tensor split_with_sizes.default chunk.default unbind.int "
        "squeeze.default squeeze.dim squeeze.dims unsqueeze.default flatten.using_ints unflatten.int alias.default "
        "detach.default contiguous.default"
    ).split()
) | {PIN}


def can_be_made_again(
    graph: Graph,
    hub: str,
    layouts: Mapping[str, TensorLayout],
    ports: Mapping[str, Ports],
    pairs: Mapping[str, Reshard],
    mesh: Mesh,
) -> bool:
    """Return whether backward needs the result of the reshard `hub`, at the same place on all ranks.

    `graph` is the one with reshards; `layouts`, `ports` and `pairs` are of its values, nodes and reshards.
    """
    wanted, even = readers_alike(graph, hub, layouts, ports, pairs, mesh)
    return bool(pairs[hub].forward) and wanted and even


def readers_alike(
    graph: Graph,
    value: str,
    layouts: Mapping[str, TensorLayout],
    ports: Mapping[str, Ports],
    pairs: Mapping[str, Reshard],
    mesh: Mesh,
) -> tuple[bool, bool]:
    """Return whether autograd saves a value, or a view of it, for one of its readers, and whether all ranks agree."""
    if not has_even_blocks(layouts[value], mesh):
        return False, False
    wanted, todo = False, [value]
    while todo:
        for node, port in graph.consumers[todo.pop()]:
            if node.op == RESHARD:
                same, mine = _in_place(pairs[node.name]), (layouts[node.name],)
            elif node.op in TRANSFERS:  # no copy where the device is the host's processor
                same, mine = True, (layouts[node.name],)
            else:
                same, mine = node.op in VIEWS, (*ports[node.name].inputs, *ports[node.name].outputs)
                wanted |= any(node.needs_grad) and port in saved_in(graph)[node.name].inputs
            if same is None or not all(has_even_blocks(layout, mesh) for layout in mine):
                return wanted, False
            if same:  # it reads nothing else, so it is met once
                todo += node.values
    return wanted, True


def _in_place(pair: Reshard) -> bool | None:
    """Return whether the result of a reshard shares memory with its argument; None if it does on some ranks only."""
    kinds = {step.kind for step in pair.forward}
    if not kinds <= {"slice", "mask"}:
        return False
    return None if "mask" in kinds else True


@functools.lru_cache(maxsize=1 << 14)
def has_even_blocks(layout: TensorLayout, mesh: Mesh) -> bool:
    """Return whether every rank holds the same number of elements along each split dim, or at least two."""
    for dim in layout.dims:
        for sub in leaves(dim):
            lengths = _block_lengths(sub.size, sub.axes, mesh)
            if len(lengths) > 1 and min(lengths) < 2:
                return False
    return True


def _block_lengths(size: int, axes: tuple[str, ...], mesh: Mesh) -> set[int]:
    lengths = {size}
    for axis in axes:
        count, after = mesh.sizes[axis], set[int]()
        for length in lengths:
            step = max(1, -(-length // count))
            full, rest = divmod(length, step)  # full blocks, one of the rest, none for others
            after |= {step} if full else set[int]()
            after |= {rest} if full < count else set[int]()
            after |= {0} if full + 1 < count else set[int]()
        lengths = after
    return lengths
