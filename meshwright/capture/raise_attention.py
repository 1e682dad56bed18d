"""Restore the attention that the model expressed.

Traced masks are boolean S × S tensors and traced keys are repeated for each group of heads; the fused kernels expect
`is_causal` and `enable_gqa`. A mask is removed only when its value, computed from iotas, proves it redundant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from meshwright.capture.interpret import run
from meshwright.capture.normalize import ATTENTION
from meshwright.capture.rewrite import Rewriter, rewrite
from meshwright.core.graph import Graph, Node, Ref

BLOCK = 1024
NEVER = -1e30  # a float mask at or below this blocks as -inf does: exp gives 0 in every dtype
NEVER_F16 = -6e4

Region = tuple[tuple[int, int], ...]


def raise_attention(graph: Graph) -> Graph:
    """Replace proved masks by `is_causal` or nothing, repeated heads by grouped ones, and remove proved conditions."""
    masks = Masks(graph)  # a proved value keeps its name while the graph is rewritten

    def attention(b: Rewriter, n: Node) -> Ref | None:
        q, k, v, mask, p, causal = n.args
        kwargs = dict(n.kwargs)
        if mask is not None and not causal:
            kind = masks.kind(mask.name)
            if kind != "other":
                mask, causal = None, kind == "causal"
        grouped = _ungrouped(b, q, k, v)
        if grouped is not None and not kwargs["enable_gqa"]:
            (k, v), kwargs["enable_gqa"] = grouped, True
        args = (q, k, v, mask, p, causal)
        return None if args == n.args else b.emit(ATTENTION, args, n.outputs[0], **kwargs)

    def where(b: Rewriter, n: Node) -> Ref | None:
        return b.like(n.args[1], n.outputs[0]) if masks.kind(n.args[0].name) == "all" else None

    return rewrite(graph, {ATTENTION: attention, "aten.where.self": where})


def _ungrouped(b: Rewriter, q: Ref, k: Ref, v: Ref) -> tuple[Ref, Ref] | None:
    """Return the keys and values before each of their heads was repeated for its group of query heads."""
    sources = [_before_repeat(b, x) for x in (k, v)]
    if sources[0] is None or sources[1] is None or b.shape(sources[0])[1] != b.shape(sources[1])[1]:
        return None
    return (sources[0], sources[1]) if b.shape(q)[1] % b.shape(sources[0])[1] == 0 else None


def _before_repeat(b: Rewriter, x: Ref) -> Ref | None:
    """x if ``x = view(expand(view(y, (B, G, 1, S, D)), (B, G, R, S, D)), (B, G*R, S, D))``: y."""
    view = b.producer(x, "aten.view.default")
    wide = b.producer(view.args[0], "aten.expand.default") if view else None
    if wide is None or len(b.shape(x)) != 4:
        return None
    batch, heads, length, size = b.shape(x)
    narrow, shape = b.shape(wide.args[0]), wide.args[1]
    if len(shape) != 5 or narrow != (*shape[:2], 1, *shape[3:]) or shape[:2] != (batch, narrow[1]):
        return None
    if shape[1] * shape[2] != heads or shape[3:] != (length, size):
        return None
    return b.view(wide.args[0], (batch, narrow[1], length, size))


class Masks:
    """Proves masks that depend only on iotas, block by block, without an S × S tensor."""

    def __init__(self, graph: Graph) -> None:
        self.types, self.made = graph.types, graph.producers
        self.constant: set[str] = set()
        self.known: dict[str, str] = {}
        for node in graph.nodes:
            random = node.op.startswith("meshwright.") or node.kwarg("seed") is not None
            if not random and self.constant.issuperset(node.uses):
                self.constant.update(node.values)

    def kind(self, name: str) -> str:
        """Return ``all`` (nothing blocked), ``causal`` (row i sees columns up to i) or ``other``."""
        if name not in self.constant:
            return "other"
        if name not in self.known:
            self.known[name] = self._prove(name)
        return self.known[name]

    def _prove(self, name: str) -> str:
        shape = self.types[name].shape
        if len(shape) < 2 or math.prod(shape) == 0:
            return "other"
        equal = self._equal_along(name)
        square = range(len(shape) - 2, len(shape))
        possible = {"all", "causal"}
        for region in _blocks(tuple(1 if d in equal and d not in square else s for d, s in enumerate(shape))):
            block = self._value(name, region, {})
            seen = block if block.dtype == torch.bool else _float_mask(block)
            if seen is None:
                return "other"
            rows, columns = torch.arange(*region[-2])[:, None], torch.arange(*region[-1])[None]
            if not bool(seen.all()):
                possible.discard("all")
            if not bool((seen == (columns <= rows)).all()):
                possible.discard("causal")
            if not possible:
                return "other"
        return "all" if "all" in possible else "causal"

    def _equal_along(self, name: str) -> frozenset[int]:
        """Return the dims along which a constant does not change, as far as its operators show."""
        node, shape = self.made[name], self.types[name].shape
        found = {d for d, s in enumerate(shape) if s == 1}
        match node.op:
            case "aten.full.default":
                return frozenset(range(len(shape)))
            case "aten.expand.default":
                source = self.types[node.args[0].name].shape
                shift = len(shape) - len(source)
                found |= {*range(shift)} | {d + shift for d in self._equal_along(node.args[0].name)}
            case "aten.permute.default":
                inner = self._equal_along(node.args[0].name)
                found |= {place for place, d in enumerate(node.args[1]) if d in inner}
            case "aten.view.default":
                source, inner = self.types[node.args[0].name].shape, self._equal_along(node.args[0].name)
                long_in, long_out = ([d for d, s in enumerate(t) if s != 1] for t in (source, shape))
                if [source[d] for d in long_in] == [shape[d] for d in long_out]:
                    found |= {o for i, o in zip(long_in, long_out, strict=True) if i in inner}
            case op if op in ELEMENTWISE or op in ALONG:
                common = set(range(len(shape)))
                for use in node.uses:
                    shift = len(shape) - len(self.types[use].shape)
                    common &= {*range(shift)} | {d + shift for d in self._equal_along(use)}
                found |= common - ({node.args[1]} if op in ALONG else set())
        return frozenset(found)

    def _value(self, name: str, region: Region, memo: dict[tuple[str, Region], torch.Tensor]) -> torch.Tensor:
        """Return a box of a constant: by boxes through element-wise operators, views and what works along one dim,
        else sliced from the full value.
        """
        key = (name, region)
        if key not in memo:
            memo[key] = self._compute(self.made[name], name, region, memo)
        return memo[key]

    def _compute(
        self, node: Node, name: str, region: Region, memo: dict[tuple[str, Region], torch.Tensor]
    ) -> torch.Tensor:
        shape = self.types[name].shape
        match node.op:
            case "aten.full.default":
                return _run(replace(node, args=((1,) * len(shape), node.args[1])), {}).expand(
                    [e - s for s, e in region]
                )
            case "aten.arange.start_step":
                start, _, step = node.args
                ((low, high),) = region
                return _run(replace(node, args=(start + low * step, start + high * step, step)), {})
            case "aten.expand.default":
                return self._value(
                    node.args[0].name, _unbroadcast(region, self.types[node.args[0].name].shape), memo
                ).expand([e - s for s, e in region])
            case "aten.permute.default":
                inner = [(0, 0)] * len(region)
                for place, dim in enumerate(node.args[1]):
                    inner[dim] = region[place]
                return self._value(node.args[0].name, tuple(inner), memo).permute(node.args[1])
            case "aten.view.default":
                source = self.types[node.args[0].name].shape
                if [s for s in source if s != 1] == [s for s in shape if s != 1]:
                    kept = iter([r for r, s in zip(region, shape, strict=True) if s != 1])
                    inner = tuple(next(kept) if s != 1 else (0, 1) for s in source)
                    return self._value(node.args[0].name, inner, memo).reshape([e - s for s, e in region])
            case op if op in ELEMENTWISE:
                known = {
                    u: self._value(u, _unbroadcast(region, self.types[u].shape), memo) for u in node.uses
                }
                return _run(node, known).expand([e - s for s, e in region])
            case "aten.slice.Tensor":
                source, dim, first, _, step = node.args
                low, high = region[dim]
                inner = [*region]
                end = min(first + high * step, self.types[source.name].shape[dim])
                inner[dim] = (first + low * step, end)
                every = tuple(slice(None, None, step if d == dim else None) for d in range(len(shape)))
                return self._value(source.name, tuple(inner), memo)[every]
            case op if op in ALONG:
                dim = node.args[1]
                known = {
                    u: self._value(
                        u, (*region[:dim], (0, self.types[u].shape[dim]), *region[dim + 1 :]), memo
                    )
                    for u in node.uses
                }
                return _run(node, known).narrow(dim, region[dim][0], region[dim][1] - region[dim][0])
        known = {u: self._value(u, tuple((0, s) for s in self.types[u].shape), memo) for u in node.uses}
        values: dict[str, torch.Tensor] = dict(known)
        run([node], values)
        return values[name][tuple(slice(s, e) for s, e in region)]


ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Scalar neg.default abs.default clamp.default "
        "eq.Tensor ne.Tensor le.Tensor lt.Tensor ge.Tensor gt.Tensor "
        "eq.Scalar ne.Scalar le.Scalar lt.Scalar ge.Scalar gt.Scalar "
        "bitwise_and.Tensor bitwise_or.Tensor bitwise_not.default logical_not.default where.self masked_fill.Scalar "
        "_to_copy.default minimum.default maximum.default floor_divide.default"
    ).split()
)
# These work along the dim of their second argument only.
ALONG = ("aten.cumsum.default", "aten.slice.Tensor", "aten.cat.default")


def _run(node: Node, known: dict[str, torch.Tensor]) -> torch.Tensor:
    values = dict(known)
    run([node], values)
    return values[node.name]


def _unbroadcast(region: Region, shape: tuple[int, ...]) -> Region:
    trailing = region[len(region) - len(shape) :]
    return tuple((0, 1) if size == 1 else r for r, size in zip(trailing, shape, strict=True))


def _blocks(shape: tuple[int, ...]) -> Iterator[Region]:
    def cuts(size: int, step: int) -> list[tuple[int, int]]:
        return [(s, min(s + step, size)) for s in range(0, size, step)]

    def product(ranges: list[list[tuple[int, int]]]) -> Iterator[tuple[Any, ...]]:
        if not ranges:
            yield ()
            return
        for first in ranges[0]:
            for rest in product(ranges[1:]):
                yield (first, *rest)

    yield from product([*(cuts(s, 1) for s in shape[:-2]), cuts(shape[-2], BLOCK), cuts(shape[-1], BLOCK)])


def _float_mask(block: torch.Tensor) -> torch.Tensor | None:
    """Return where an additive mask lets through, or None if it is more than a mask."""
    limit = NEVER_F16 if block.dtype == torch.float16 else NEVER
    if not block.is_floating_point() or not bool(((block == 0) | (block <= limit)).all()):
        return None
    return block == 0
