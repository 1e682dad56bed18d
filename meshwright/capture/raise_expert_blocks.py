"""Raise the two products of a mixture of experts, and what lies between and after them, to one operator.

`meshwright.experts` goes from the rows to the weighted sum over their choices, so its experts may be sharded over ranks
(decision 19). A block is raised only if nothing else reads what is computed inside it, and if its gate is one of those
that the kernel has. Any other graph is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.capture.raise_moe import EXPERT_LINEAR, INDEX, SPLIT
from meshwright.capture.rewrite import SLICE, VIEW, Rewriter, rewrite
from meshwright.core.graph import Graph, Node, Ref, prune

EXPERTS = "meshwright.experts"
SUM, MUL, ADD = "aten.sum.dim_IntList", "aten.mul.Tensor", "aten.add.Tensor"
CLAMP, SIGMOID, RELU = "aten.clamp.default", "aten.sigmoid.default", "aten.relu.default"
SQUARES = {"aten.square.default": ((),), "aten.pow.Tensor_Scalar": ((2,), (2.0,))}
PLAIN = {"aten.silu.default": "silu", RELU: "relu"}
GELU = "aten.gelu.default"
APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Product:
    """Rows times the matrix of each expert, plus the bias of each if there is one."""

    rows: Ref
    weight: Ref
    bias: Ref | None
    experts: Ref


@dataclass(frozen=True)
class Gate:
    """The gate of a block: its name in the kernel's table, what it gates, and its constants."""

    name: str
    of: Ref
    constants: tuple[float, ...] = ()


def raise_expert_blocks(graph: Graph) -> Graph:
    """Replace products of experts, with their gate, weights and sum over choices, by `meshwright.experts`."""
    if not any(n.op == EXPERT_LINEAR for n in graph.nodes):
        return graph

    def total(b: Rewriter, n: Node) -> Ref | None:
        for ports, scale, gate in _blocks(b, n):
            if _is_apart(graph, b, n, {r.name for r in (*ports, scale) if r is not None}):
                weights = b.view(scale, b.shape(scale)[:1])
                constants = (gate.constants,) if gate.constants else ()
                return b.emit(EXPERTS, (*ports, weights, gate.name, *constants), n.outputs[0])
        return None

    return prune(rewrite(graph, {SUM: total}))


def _is_apart(graph: Graph, b: Rewriter, total: Node, ends: set[str]) -> bool:
    """Return whether only the operators between `ends` and `total` read what they make."""
    inside, open_names = {total.name: total}, list(total.uses)
    while open_names:
        name = open_names.pop()
        node = b.made.get(name)
        if name in ends or (node is not None and node.name in inside):
            continue
        if node is None:
            return False  # an input of the program
        inside[node.name] = node
        open_names += node.uses
    made = {value for node in inside.values() if node is not total for value in node.values}
    outside = {value for _, value in (*graph.outputs, *graph.mutations)}
    readers = {node.name for value in made for node, _ in graph.consumers.get(value, ())}
    return made <= graph.types.keys() and made.isdisjoint(outside) and readers <= inside.keys()


def _blocks(b: Rewriter, total: Node) -> Iterator[tuple[tuple[Ref | None, ...], Ref, Gate]]:
    """Yield the ports of the block that ends in a sum over choices, its weights as a column apart, and its gate."""
    pairs = _made(b, total.args[0], VIEW)
    if pairs is None or total.kwargs or total.args[1:] not in (((1,),), ((1,), False)):
        return
    for weighted, scale in _operands(b, pairs.args[0], MUL):
        down = _product(b, weighted)
        gate = _gate(b, down.rows) if down else None
        up = _product(b, gate.of) if gate else None
        if down is None or gate is None or up is None or up.experts != down.experts:
            continue
        count, rows, width = *b.shape(down.experts), b.shape(up.rows)[0], b.shape(down.weight)[2]
        if not rows or count % rows or total.outputs[0].dtype != b.type(pairs.args[0]).dtype:
            continue
        shapes = b.shape(pairs.args[0]), b.shape(total.args[0]), b.shape(scale)
        if shapes != ((count, width), (rows, count // rows, width), (count, 1)):
            continue
        floats = up.rows, up.weight, up.bias, down.weight, down.bias
        if len({b.type(v).dtype for v in floats if v is not None}) == 1:
            yield (*floats, up.experts), scale, gate


def _product(b: Rewriter, value: Ref) -> Product | None:
    node = _made(b, value, EXPERT_LINEAR)
    if node is not None:
        x, weight, experts = node.args
        return Product(x, weight, None, experts)
    for made, added in _operands(b, value, ADD):
        node, index = _made(b, made, EXPERT_LINEAR), _made(b, added, INDEX)
        if node is None or index is None:
            continue
        x, weight, experts = node.args
        bias = index.args[0]
        experts_wide = b.shape(weight)[0], b.shape(weight)[2]
        if index.args[1] == (experts,) and b.shape(bias) == experts_wide:
            return Product(x, weight, bias, experts)
    return None


def _gate(b: Rewriter, value: Ref) -> Gate | None:
    return _squared(b, value) or _activation(b, value) or _halves(b, value) or _interleaved(b, value)


def _squared(b: Rewriter, value: Ref) -> Gate | None:
    node = b.producer(value)
    if node is None or node.args[1:] not in SQUARES.get(node.op, ()):
        return None
    inner = _made(b, node.args[0], RELU)
    return Gate("relu_squared", inner.args[0]) if inner else None


def _activation(b: Rewriter, value: Ref) -> Gate | None:
    node = b.producer(value)
    if node is None:
        return None
    name = PLAIN.get(node.op, "")
    if node.op == GELU:
        name = APPROXIMATE.get(str(node.arg(1, "approximate", "none")), "")
    return Gate(name, node.args[0]) if name else None


def _halves(b: Rewriter, value: Ref) -> Gate | None:
    """The first half of the columns through an activation, times the second half."""
    for first, second in _operands(b, value, MUL):
        activation, split = _activation(b, first), _made(b, second, SPLIT)
        if activation is None or split is None or (activation.of.name, second.name) != split.values:
            continue
        half = b.shape(split.args[0])[1] // 2
        if split.args[1:] in (((half, half), 1), ((half, half), -1)) and not split.kwargs:
            return Gate(f"{activation.name}_gated", split.args[0])
    return None


def _interleaved(b: Rewriter, value: Ref) -> Gate | None:
    """Even columns are the gate, odd ones the values: ``(values + 1) · gate · sigmoid(alpha · gate)``, both clamped."""
    for raised, soft in _operands(b, value, MUL):
        values, one = _with_number(b, raised, ADD)
        for gate, sigmoid in _operands(b, soft, MUL):
            inner = _made(b, sigmoid, SIGMOID)
            of, alpha = _with_number(b, inner.args[0], MUL) if inner else (None, 0.0)
            low, high = _made(b, gate, CLAMP), _made(b, values, CLAMP)
            if of != gate or one != 1 or low is None or high is None:
                continue
            bounds = [(n.arg(1, "min"), n.arg(2, "max")) for n in (low, high)]
            limit = bounds[0][1]
            if limit is None or bounds != [(None, limit), (-limit, limit)]:
                continue
            even, odd = _made(b, low.args[0], SLICE), _made(b, high.args[0], SLICE)
            if even is None or odd is None or even.args[0] != odd.args[0]:
                continue
            width = b.shape(even.args[0])[1]
            if width % 2 == 0 and even.args[1:] == (1, 0, width, 2) and odd.args[1:] == (1, 1, width, 2):
                return Gate("interleaved", even.args[0], (float(alpha), float(limit)))
    return None


def _made(b: Rewriter, value: Ref | None, op: str) -> Node | None:
    return b.producer(value, op) if value is not None else None


def _operands(b: Rewriter, value: Ref, op: str) -> list[tuple[Ref, Ref]]:
    """Return the two tensors that make a value by `op`, in both orders; nothing if another operator makes it."""
    node = b.producer(value, op)
    if node is None or node.kwargs or len(node.uses) != 2 or len(node.args) != 2:
        return []
    x, y = node.args
    return [(x, y), (y, x)]


def _with_number(b: Rewriter, value: Ref, op: str) -> tuple[Ref | None, float]:
    """Return the tensor and the number that make a value by `op`; no tensor if another operator makes it."""
    node = b.producer(value, op)
    if node is None or node.kwargs or len(node.uses) != 1 or len(node.args) != 2:
        return None, 0.0
    x, number = node.args
    return (x, float(number)) if isinstance(x, Ref) and isinstance(number, int | float) else (None, 0.0)


__all__ = ["EXPERTS", "raise_expert_blocks"]
