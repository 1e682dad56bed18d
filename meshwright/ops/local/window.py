"""Windows over a sharded image: fetch the neighbours' rows, then run the operator without padding at that side."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from meshwright.core.graph import Dtype, Node, Ref, TensorType
from meshwright.core.layout import SubDim, block, dim_size
from meshwright.ops.local.shape import groups
from meshwright.ops.local.sharded_node import ShardedNode, ref, with_arg
from meshwright.ops.special.window import Window, windows_of


@dataclass(frozen=True)
class Halo:
    """The elements that a rank sends and receives along one dim, in indices of its own shard.

    `send` has start and length for each member of the group. `receive` has lengths, those before this rank's own
    elements first. `pad` counts the elements outside the image, before and after. Without axes nothing is sent.
    """

    axes: tuple[str, ...]
    send: tuple[tuple[int, int], ...]
    receive: tuple[int, ...]
    me: int
    pad: tuple[int, int]


def halo(window: Window, blocks: tuple[tuple[int, int], ...], me: int, axes: tuple[str, ...]) -> Halo:
    """Return the halo of a member. `blocks` has start and length, in windows, of each member's results, ascending."""
    size = sum(n for _, n in blocks) * window.stride
    held = [(start * window.stride, (start + n) * window.stride) for start, n in blocks]

    def needs(member: int) -> tuple[int, int]:
        start, stop = held[member]
        return (start - window.before, stop + window.after) if stop > start else (start, start)

    def shared(owner: int, reader: int) -> tuple[int, int]:
        """Return start and length, in global indices, of what one member needs of another."""
        (first, last), (start, stop) = needs(reader), held[owner]
        begin, end = max(first, start), min(last, stop)
        return (begin, end - begin) if owner != reader and end > begin else (start, 0)

    members = range(len(blocks))
    sent = [shared(me, m) for m in members]
    send = tuple((start - held[me][0], n) if n else (0, 0) for start, n in sent)
    receive = tuple(shared(m, me)[1] for m in members)
    first, last = needs(me)
    pad = (max(-first, 0), max(last - size, 0))
    anybody = any(shared(owner, reader)[1] for owner in members for reader in members)
    return Halo(axes if anybody else (), send, receive, me, pad)


def mean_of_image(sharded: ShardedNode) -> tuple[Node, ...]:
    """Average over the full extent of a sharded image: a local sum, divided by the global count."""
    names = [x for x in sharded.letters if x.startswith("h")]
    if not sharded.axes(names):
        return (sharded.last(),)
    node, count = sharded.node, math.prod(sharded.site.rule.sizes[x] for x in names)
    dims = tuple(range(-len(names), 0))
    total = sharded.helper(
        0, "aten.sum.dim_IntList", (node.args[0], dims, True), sharded.outputs[0], grad=any(node.needs_grad)
    )
    return (total, sharded.last("aten.div.Tensor", (ref(total), float(count)), {}))


def windowed(sharded: ShardedNode) -> tuple[Node, ...]:
    """Run the operator on this rank's shard of an image and the halo that its windows reach."""
    node = sharded.node
    shapes = [tuple(p.shape) for p in sharded.ports.inputs]
    windows = windows_of(node, *shapes[:2])
    convolves = "conv" in node.op
    plain = (
        groups(8 if node.op == "aten.convolution.default" else 6)(sharded) if convolves else (sharded.last(),)
    )
    names = [f"y{i}" for i in range(len(windows.dims))] if windows is not None else []
    split = [i for i, name in enumerate(names) if name in sharded.letters and sharded.axes([name])]
    if windows is None or not split or plain[-1].op == "meshwright.nothing":
        return plain
    image = sharded.input_shape(0)
    first = len(image) - len(names)
    source: Ref = node.args[0]
    helpers: list[Node] = []
    padding, reached = list(windows.padding), list(image)
    for i in split:
        window = windows.dims[i]
        assert window is not None
        found = _halo_of(sharded, window, names[i])
        padding[i] = 0
        if not (found.axes or any(found.pad)):
            continue
        dim = first + i
        reached[dim] += sum(found.receive) + sum(found.pad)
        kind = TensorType(sharded.node.outputs[0].dtype, tuple(reached))
        args = (source, dim, found.send, found.receive, found.me, found.pad, windows.fill, found.axes)
        helpers.append(sharded.helper(len(helpers), "meshwright.halo", args, kind, grad=sharded.wants(0)))
        source = ref(helpers[-1])
    if 0 in sharded.outputs[0].shape:
        # No window begins here, but neighbours may need this rank's elements: it takes part in backward.
        kinds = tuple((t.shape, Dtype(t.dtype)) for t in sharded.outputs)
        uses = (source, *(Ref(name) for name in node.uses[1:]))
        return (*helpers, sharded.last("meshwright.nothing", (uses, kinds, None), {}))
    (last,) = plain
    defaults = (None, None, None, (1,) * len(names), 0) if convolves else (None, None, (), 0)
    args = with_arg((source, *last.args[1:]), windows.padding_at, tuple(padding), defaults)
    if windows.ceil_at is not None and len(args) > windows.ceil_at:
        args = with_arg(args, windows.ceil_at, False)
    kwargs = {k: v for k, v in last.kwargs if k not in ("padding", "ceil_mode")}
    return (*helpers, sharded.last(node.op.replace(".padding", ".default"), args, kwargs))


def _halo_of(sharded: ShardedNode, window: Window, letter: str) -> Halo:
    outermost, *within = sharded.letters[letter]
    assert isinstance(outermost, SubDim)
    inner, axes = dim_size(tuple(within)), outermost.axes
    members = [
        dict(zip(axes, at, strict=True))
        for at in itertools.product(*(range(sharded.mesh.sizes[a]) for a in axes))
    ]
    blocks = [block(outermost.size, axes, sharded.mesh, at) for at in members]
    me = members.index({a: sharded.at[a] for a in axes})
    return halo(window, tuple((start * inner, length * inner) for start, length in blocks), me, axes)
