"""Turn indexing by row numbers into views.

`x[arange(n)[:, None], arange(m)[None]]` reads x unchanged. As an index it would need the *global* row numbers of a
tensor of which a rank has a shard. Mask code is full of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.capture.rewrite import Rewriter, rewrite
from meshwright.core.graph import Graph, Node, Ref


@dataclass(frozen=True, slots=True)
class Iota:
    """An integer tensor of value ``start + step * (index along dim)``; `dim` is None for a single number."""

    dim: int | None
    start: int
    step: int


def indices_to_views(graph: Graph) -> Graph:
    """Replace every `index` by iotas, each along a separate dim, by slice, permute, view and expand."""
    facts: dict[str, Iota] = {}

    def every(b: Rewriter, n: Node) -> Ref | None:
        result = _index(b, n, facts) if n.op == "aten.index.Tensor" else None
        fact = _iota(b, n, facts) if result is None and len(n.outputs) == 1 else None
        if fact is not None:
            facts[n.name] = fact
        elif (
            result is not None
            and len(b.shape(result))
            and (node := b.producer(result))
            and (made := _iota(b, node, facts))
        ):
            facts[result.name] = made
        return result

    return rewrite(graph, {}, every)


def _iota(b: Rewriter, n: Node, facts: dict[str, Iota]) -> Iota | None:
    out = n.outputs[0]
    if out.dtype not in ("i64", "i32"):
        return None
    match n.op:
        case "aten.arange.start_step":
            start, _, step = n.args
            return Iota(0, start, step) if isinstance(start, int) and isinstance(step, int) else None
        case "aten.full.default":
            return Iota(None, n.args[1], 0)
    source = facts.get(n.args[0].name) if n.args and isinstance(n.args[0], Ref) else None
    if source is None:
        return None
    shape = b.shape(n.args[0])
    match n.op:
        case "aten._to_copy.default":
            return source
        case "aten.expand.default":
            shift = len(out.shape) - len(shape)
            if source.dim is not None and out.shape[source.dim + shift] != shape[source.dim]:
                return Iota(None, source.start, 0)
            return Iota(None if source.dim is None else source.dim + shift, source.start, source.step)
        case "aten.view.default":
            dim = source.dim
            if dim is None:
                return source
            if [s for s in shape if s != 1] != [s for s in out.shape if s != 1] or shape[dim] == 1:
                return Iota(None, source.start, 0) if shape[dim] == 1 else None
            place = sum(1 for s in shape[:dim] if s != 1)
            return Iota([d for d, s in enumerate(out.shape) if s != 1][place], source.start, source.step)
        case "aten.permute.default":
            return Iota(
                None if source.dim is None else n.args[1].index(source.dim), source.start, source.step
            )
        case "aten.slice.Tensor":
            _, dim, start, _, step = n.args
            if dim != source.dim:
                return source
            return Iota(dim, source.start + start * source.step, source.step * step)
        case "aten.add.Tensor" | "aten.sub.Tensor" if (
            isinstance(n.args[1], int) and len(n.args) == 2 and not n.kwargs
        ):
            sign = 1 if n.op == "aten.add.Tensor" else -1
            return Iota(source.dim, source.start + sign * n.args[1], source.step)
    return None


def _index(b: Rewriter, n: Node, facts: dict[str, Iota]) -> Ref | None:
    x, picks = n.args[0], n.args[1]
    places = [i for i, p in enumerate(picks) if p is not None]
    if any(picks[i].name not in facts for i in places) or places != list(range(places[0], places[-1] + 1)):
        return None
    shapes = [b.shape(picks[i]) for i in places]
    rank = max(len(s) for s in shapes)
    target = tuple(max(((1,) * (rank - len(s)) + s)[d] for s in shapes) for d in range(rank))
    along: dict[int, int] = {}  # dim of the picked block → dim of x
    result = x
    for place, shape in zip(places, shapes, strict=True):
        fact = facts[picks[place].name]
        dim = None if fact.dim is None else fact.dim + rank - len(shape)
        count = 1 if dim is None else target[dim]
        if dim in along or (dim is not None and (fact.step < 1 or shape[fact.dim or 0] != count)):
            return None
        start, size = fact.start, b.shape(x)[place]
        last = start + (count - 1) * fact.step
        if start < 0 <= last:
            return None
        start, last = (start + size, last + size) if last < 0 else (start, last)
        if not 0 <= start <= last < size:
            return None
        result = b.slice(result, place, start, last + 1, fact.step if dim is not None else 1)
        if dim is not None:
            along[dim] = place
    first = places[0]
    order = [
        *range(first),
        *(along[d] for d in sorted(along)),
        *(p for p in places if p not in along.values()),
    ]
    result = b.permute(result, [*order, *range(places[-1] + 1, len(b.shape(x)))])
    head, tail = b.shape(x)[:first], b.shape(x)[places[-1] + 1 :]
    block = tuple(target[d] if d in along else 1 for d in range(rank))
    return b.expand(b.view(result, (*head, *block, *tail)), (*head, *target, *tail))
