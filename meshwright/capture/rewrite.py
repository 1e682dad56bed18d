"""Rewrite a graph node by node: `rewrite(graph, rules)`, and the view-like operators a rule may emit.

A rule receives the rewriter and a node whose arguments are already rewritten. It returns the new values of the node, or
None to keep it. The helpers (`view`, `permute`, `expand`, `slice`, `cat`, `full`, `cast`) look one producer back, so
chains of views, and views of constants, never arise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.core.graph import Device, Dtype, Graph, Node, Ref, TensorType, map_refs

Values = Ref | tuple[Ref, ...] | None
Rule = Callable[["Rewriter", Node], Values]

VIEW, PERMUTE, EXPAND = "aten.view.default", "aten.permute.default", "aten.expand.default"
SLICE, CAT, FULL, CAST = "aten.slice.Tensor", "aten.cat.default", "aten.full.default", "aten._to_copy.default"
ARANGE = "aten.arange.start_step"


class Rewriter:
    """The new graph: its nodes so far, and the new values of the old ones."""

    def __init__(self, graph: Graph) -> None:
        self.types = {i.name: i.type for i in graph.inputs}
        self.made: dict[str, Node] = {}
        self.became: dict[str, Ref] = {}
        self.nodes: list[Node] = []
        self.here = Node("", "", ())
        self._taken = set(graph.types) | {n.name for n in graph.nodes}
        self._count = 0

    def type(self, ref: Ref) -> TensorType:
        """Return the type of a value."""
        return self.types[ref.name]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.types[ref.name].shape

    def producer(self, ref: Ref, op: str = "") -> Node | None:
        """Return the node that produces a value, if it has this op."""
        node = self.made.get(ref.name)
        return node if node is not None and op in ("", node.op) else None

    def put(self, node: Node) -> tuple[Ref, ...]:
        """Append a node."""
        self.nodes.append(node)
        for value, type_ in zip(node.values, node.outputs, strict=True):
            self.types[value], self.made[value] = type_, node
        return tuple(Ref(v) for v in node.values)

    def emit(self, op: str, args: tuple[Any, ...], type_: TensorType, **kwargs: Any) -> Ref:
        """Append a node with one result, in place of the node being rewritten."""
        return self.emit_many(op, args, (type_,), **kwargs)[0]

    def emit_many(
        self, op: str, args: tuple[Any, ...], types: tuple[TensorType, ...], **kwargs: Any
    ) -> tuple[Ref, ...]:
        """Append a node with several results."""
        while (name := f"v{self._count}") in self._taken:
            self._count += 1
        self._count += 1
        flags = (False,) * len(types)
        return self.put(
            Node(name, op, args, tuple(kwargs.items()), types, flags, self.here.module, self.here.source)
        )

    def again(self, node: Node, became: Mapping[str, Ref]) -> tuple[Ref, ...]:
        """Append a copy of a node that reads other tensors of the same types."""
        fresh = node.with_uses(became[u].name if u in became else u for u in node.uses)
        return self.emit_many(fresh.op, fresh.args, fresh.outputs, **dict(fresh.kwargs))

    # ------------------------------------------------------------ operators with one level of looking back

    def full(self, shape: Sequence[int], value: bool | int | float, dtype: str) -> Ref:
        """Return a constant, without a tensor to take its shape from."""
        value = (
            bool(value) if dtype == "b8" else float(value) if TensorType(dtype, ()).is_float else int(value)
        )
        return self.emit(
            FULL, (tuple(shape), value), TensorType(dtype, tuple(shape)), dtype=Dtype(dtype), device=Device()
        )

    def full_value(self, ref: Ref) -> bool | int | float | None:
        """Return the value of a constant, or None."""
        node = self.producer(ref, FULL)
        return node.args[1] if node else None

    def view(self, x: Ref, shape: Sequence[int]) -> Ref:
        """Return the elements in another shape."""
        shape = tuple(shape)
        assert math.prod(shape) == math.prod(self.shape(x)), (shape, self.shape(x))
        if shape == self.shape(x):
            return x
        node = self.producer(x)
        match node:
            case Node(op="aten.view.default"):
                return self.view(node.args[0], shape)
            case Node(op="aten.full.default"):
                return self.full(shape, node.args[1], self.type(x).dtype)
        return self.emit(VIEW, (x, shape), replace(self.type(x), shape=shape))

    def permute(self, x: Ref, dims: Sequence[int]) -> Ref:
        """Return the dims in another order."""
        dims = tuple(d % len(dims) for d in dims)
        if dims == tuple(range(len(dims))):
            return x
        shape = tuple(self.shape(x)[d] for d in dims)
        node = self.producer(x)
        match node:
            case Node(op="aten.permute.default"):
                return self.permute(node.args[0], [node.args[1][d] for d in dims])
            case Node(op="aten.full.default"):
                return self.full(shape, node.args[1], self.type(x).dtype)
        return self.emit(PERMUTE, (x, dims), replace(self.type(x), shape=shape))

    def expand(self, x: Ref, shape: Sequence[int]) -> Ref:
        """Return dims of size 1, and new leading ones, repeated without a copy."""
        shape = tuple(shape)
        if shape == self.shape(x):
            return x
        node = self.producer(x)
        match node:
            case Node(op="aten.expand.default"):
                return self.expand(node.args[0], shape)
            case Node(op="aten.full.default"):
                return self.full(shape, node.args[1], self.type(x).dtype)
        return self.emit(EXPAND, (x, shape), replace(self.type(x), shape=shape))

    def slice(self, x: Ref, dim: int, start: int, end: int, step: int = 1) -> Ref:
        """Return every `step`-th element of a dim from `start` up to `end`, clamped to the dim."""
        shape = self.shape(x)
        size = shape[dim]
        start, end = (min(max(i + size if i < 0 else i, 0), size) for i in (start, end))
        length = max(0, -(-(end - start) // step))
        if length == size and step == 1:
            return x
        end = max(end, start)
        result = (*shape[:dim], length, *shape[dim + 1 :])
        node = self.producer(x)
        match node:
            case Node(op="aten.full.default"):
                return self.full(result, node.args[1], self.type(x).dtype)
            case Node(op="aten.expand.default") if (
                len(self.shape(node.args[0])) == len(shape) and self.shape(node.args[0])[dim] == 1
            ):
                return self.expand(node.args[0], result)
            case Node(op="aten.slice.Tensor") if step == 1 and node.args[1] == dim and node.args[4] == 1:
                return self.slice(node.args[0], dim, node.args[2] + start, node.args[2] + end)
            case Node(op="aten.cat.default") if step == 1 and node.args[1] == dim:
                return self._slice_of_cat(node, dim, start, end)
        return self.emit(SLICE, (x, dim, start, end, step), replace(self.type(x), shape=result))

    def _slice_of_cat(self, node: Node, dim: int, start: int, end: int) -> Ref:
        parts, offset = [], 0
        for part in node.args[0]:
            size = self.shape(part)[dim]
            low, high = max(start - offset, 0), min(end - offset, size)
            if low < high:
                parts.append(self.slice(part, dim, low, high))
            offset += size
        return self.cat(parts or [self.slice(node.args[0][0], dim, 0, 0)], dim)

    def cat(self, parts: Sequence[Ref], dim: int) -> Ref:
        """Return tensors joined along a dim, without empty ones."""
        kept = [p for p in parts if self.shape(p)[dim]] or list(parts[:1])
        if len(kept) == 1:
            return kept[0]
        shape = list(self.shape(kept[0]))
        shape[dim] = sum(self.shape(p)[dim] for p in kept)
        return self.emit(CAT, (tuple(kept), dim), replace(self.type(kept[0]), shape=tuple(shape)))

    def cast(self, x: Ref, dtype: str) -> Ref:
        """Return the values in another dtype."""
        if self.type(x).dtype == dtype:
            return x
        value = self.full_value(x)
        if value is not None:
            return self.full(self.shape(x), value, dtype)
        return self.emit(CAST, (x,), replace(self.type(x), dtype=dtype), dtype=Dtype(dtype))

    def like(self, x: Ref, type_: TensorType) -> Ref:
        """Return a value cast and expanded to a type."""
        return self.expand(self.cast(x, type_.dtype), type_.shape)

    def split(self, x: Ref, sizes: Sequence[int], dim: int) -> tuple[Ref, ...]:
        """Return consecutive pieces of a dim."""
        if len(sizes) == 1:
            return (x,)
        shape = self.shape(x)
        types = tuple(replace(self.type(x), shape=(*shape[:dim], s, *shape[dim + 1 :])) for s in sizes)
        return self.emit_many("aten.split_with_sizes.default", (x, tuple(sizes), dim), types)


def rewrite(graph: Graph, rules: Mapping[str, Rule], every: Rule | None = None) -> Graph:
    """Rewrite each node by the rule of its op (`every` if there is none), in one pass from first to last."""
    writer = Rewriter(graph)
    for node in graph.nodes:
        writer.here = current = _renamed(node, writer.became)
        rule = rules.get(node.op, every)
        result = rule(writer, current) if rule else None
        if result is None:
            writer.put(current)
            continue
        refs = result if isinstance(result, tuple) else (result,)
        for value, type_, ref in zip(node.values, node.outputs, refs, strict=True):
            assert writer.type(ref) == type_, f"{node} became {writer.type(ref)}"
            writer.became[value] = ref
    return replace(
        graph,
        nodes=tuple(writer.nodes),
        outputs=tuple((label, _follow(value, writer.became)) for label, value in graph.outputs),
        mutations=tuple((target, _follow(value, writer.became)) for target, value in graph.mutations),
    )


def arguments(node: Node, *defaults: Any) -> tuple[Any, ...]:
    """Return the arguments of a node, each that is left out by its default."""
    return (*node.args, *defaults[len(node.args) :])


def named(names: str, rule: Rule) -> dict[str, Rule]:
    """Return a table with one rule for several overloads of aten: ``"view.default squeeze.dim"``."""
    return {f"aten.{name}": rule for name in names.split()}


def _follow(value: str, became: Mapping[str, Ref]) -> str:
    return became[value].name if value in became else value


def _renamed(node: Node, became: Mapping[str, Ref]) -> Node:
    if became.keys().isdisjoint(node.uses):
        return node

    def change(ref: Ref) -> Ref:
        return became.get(ref.name, ref)

    return replace(
        node, args=map_refs(node.args, change), kwargs=tuple((k, map_refs(v, change)) for k, v in node.kwargs)
    )
