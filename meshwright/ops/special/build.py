"""Helpers of the functions in this folder: lines bound to the shapes of one node, and rules built by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from meshwright.core.graph import Node, TensorType
from meshwright.ops.rule import Port, Rule, RuleDim, Shape, bound

Types = Mapping[str, TensorType]
Special = Callable[[Node, Types], Rule]

SMALLEST_PART = 8  # a concatenation with a part shorter than this is not worth sharding part by part


def shapes_in(node: Node, types: Types) -> tuple[Shape, ...]:
    """Return the shape of each tensor port."""
    return tuple(types[name].shape for name in node.uses)


def shapes_out(node: Node) -> tuple[Shape, ...]:
    """Return the shape of each result."""
    return tuple(t.shape for t in node.outputs)


def line(node: Node, types: Types, text: str) -> Rule:
    """Return a line bound to the shapes of a node."""
    return bound(text, shapes_in(node, types), shapes_out(node))


def replicated(node: Node, types: Types, why: str) -> Rule:
    """Return a rule that shards nothing, with the reason."""
    inputs = [[(f"p{p}_{i}",) for i in range(len(s))] for p, s in enumerate(shapes_in(node, types))]
    outputs = [[(f"o{p}_{i}",) for i in range(len(s))] for p, s in enumerate(shapes_out(node))]
    sizes = {d[0]: n for ports, shapes in ((inputs, shapes_in(node, types)), (outputs, shapes_out(node)))
             for port, shape in zip(ports, shapes, strict=True) for d, n in zip(port, shape, strict=True)}  # fmt: skip
    return make(inputs, outputs, sizes, unsharded=sizes, why=why)


def make(
    inputs: Iterable[Sequence[RuleDim]],
    outputs: Iterable[Sequence[RuleDim]],
    sizes: Mapping[str, int],
    *,
    unsharded: Collection[str] = (),
    inside: Collection[str] = (),
    outer: Collection[str] = (),
    follows: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    terms: Iterable[tuple[int, ...]] = (),
    why: str = "",
) -> Rule:
    """Return a rule built by hand, for what no line can express (concatenations, a variable number of ports)."""
    ports_in: tuple[Port, ...] = tuple(map(tuple, inputs))
    ports_out: tuple[Port, ...] = tuple(map(tuple, outputs))
    return Rule(
        ports_in,
        ports_out,
        dict(sizes),
        frozenset(unsharded),
        frozenset(inside),
        tuple(terms),
        why,
        outer=frozenset(outer),
        follows=dict(follows or {}),
    )


def letters(count: int, marks: Mapping[int, str] | None = None, stem: str = "a") -> list[str]:
    """Return ``a0 a1! a2`` as a list, with marks by position."""
    return [f"{stem}{i}{(marks or {}).get(i, '')}" for i in range(count)]


def text_of(parts: Iterable[str]) -> str:
    """Return the dims of a port as text."""
    return " ".join(parts)


def dims_of(value: int | tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """Return a dim argument (number, tuple, None for all) as sorted non-negative numbers."""
    if value is None or value == ():
        return tuple(range(rank))
    given = value if isinstance(value, tuple) else (value,)
    return tuple(sorted({int(d) % max(rank, 1) for d in given}))


def broadcast(shape: Shape, names: Sequence[str], full: Shape) -> list[RuleDim]:
    """Return the dims of a tensor that broadcasts against `full` (aligned right), whose dims are called `names`."""
    offset = len(full) - len(shape)
    return [(names[offset + i],) if n == full[offset + i] and n != 1 else () for i, n in enumerate(shape)]
