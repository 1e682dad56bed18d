"""The work of an operator on one rank: FLOPs, bytes moved through memory and kernels started, forward and backward.

All of it follows from the operator's rule: the size of a tensor is the product of its letters' sizes, and a product of
two tensors costs 2 FLOPs for every combination of their letters. Sizes may be numpy arrays with an entry for each
strategy, so a search prices all strategies of an operator in one call. Nothing here branches on a size.

Backward reads the gradients of the results and the tensors that autograd saved (`ops/saved.py`), and writes the
gradient of every input that needs one. `operator_tables.py` lists the exceptions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.core.graph import DTYPES, Node, TensorType
from meshwright.cost.experts import Amount, Pair, expert_work
from meshwright.cost.operator_tables import (
    ATTENTION,
    BAG,
    BROADCASTS,
    CONVOLUTIONS,
    ELEMENT_FLOPS,
    EXPERT_LINEAR,
    EXPERTS,
    LAUNCHES,
    LIKES,
    LOOKUPS,
    MASKED,
    NOT_THROUGH,
    PASSES,
    PIECES,
    PRODUCTS,
    REPEATS,
    THROUGH,
    UNFUSED,
    VIEWS,
)
from meshwright.ops.rule import Port, Rule
from meshwright.ops.saved import fused_attention, saved
from meshwright.ops.saved_extra import EXTRA


@dataclass(frozen=True)
class Work:
    """One call of an operator on one rank.

    `kind` is ``matmul``, ``attention``, ``causal`` (attention with a causal mask, in one kernel), ``conv``, ``memory``
    or ``free`` (a view: nothing runs). Amounts are floats, or float64 arrays over strategies. Bytes count every read
    and write of device memory. The FLOPs of ``memory`` are those of `ELEMENT_FLOPS`. `passes_forward` and
    `passes_backward` are bytes that move before or after the arithmetic, not beside it. `name` is the operator's in
    `Measured.operators`, ``layer_norm``. `bias_bytes`: those that backward adds up for the gradient of a bias. `call`:
    its name in `Measured.calls` (`cost/calls.py`), if it is one call.
    """

    kind: str
    dtype: str
    flops_forward: Amount
    flops_backward: Amount
    bytes_forward: Amount
    bytes_backward: Amount
    launches_forward: Amount
    launches_backward: Amount
    passes_forward: Amount = 0.0
    passes_backward: Amount = 0.0
    name: str = ""
    bias_bytes: Amount = 0.0
    call: str = ""


TILE = 128  # queries, and keys, that a GPU's kernel of attention computes together: fewer take as long


def work(
    node: Node,
    rule: Rule,
    local: Mapping[str, Any],
    types: Mapping[str, TensorType],
    needs_grad: Sequence[bool],
    *,
    copies: bool = False,
    device: str = "cpu",
) -> Work:
    """Return the work of a node on a rank.

    `local` maps letters of the rule (a part as ``s.0``) to the number of elements on the rank, a number or an array.
    `types` maps values to dtype and global shape. `needs_grad` says for each port whether its gradient is needed.
    `copies`: the node is a view that must copy because of the strides of its input (`cost/strides.py`). `device`: the
    type of the device, whose kernels of attention differ.
    """
    sizes = _Sizes(node, rule, local, types, tuple(needs_grad))
    op = node.op
    if op == EXPERTS:
        return sizes.experts()
    if op in PRODUCTS:
        return sizes.product()
    if op in CONVOLUTIONS:
        return sizes.convolution()
    if op in ATTENTION:
        return sizes.attention(device)
    if op in VIEWS or op in REPEATS or op in PIECES:
        return sizes.view(copies)
    return sizes.memory()


class _Sizes:
    """The sizes of one node's tensors on a rank, and its work."""

    def __init__(
        self,
        node: Node,
        rule: Rule,
        local: Mapping[str, Any],
        types: Mapping[str, TensorType],
        needs_grad: tuple[bool, ...],
    ) -> None:
        self.node, self.rule, self.local, self.types = node, rule, local, types
        flows = any(node.needs_grad)
        self.wanted = tuple(flows and w for w in needs_grad)
        self.ports = [types[u] for u in node.uses]
        self.inputs = [self._bytes(p, t) for p, t in zip(rule.inputs, self.ports, strict=True)]
        self.outputs = [self._bytes(p, t) for p, t in zip(rule.outputs, node.outputs, strict=True)]
        # The incoming gradients: those of results that need one.
        self.gradients = _sum(
            b for b, t in zip(self.outputs, node.outputs, strict=True) if flows and t.is_float
        )
        self.dtype = next((t.dtype for t in (*node.outputs, *self.ports) if t.is_float), "f32")

    def _elements(self, letters: Sequence[str]) -> Amount:
        return functools.reduce(operator.mul, (self.local[x] for x in letters), 1.0)

    def _bytes(self, port: Port, kind: TensorType) -> Amount:
        return self._elements([x for dim in port for x in dim]) * DTYPES[kind.dtype]

    def _letters(self, *ports: Port) -> list[str]:
        return list(dict.fromkeys(x for port in ports for dim in port for x in dim))

    def _made(self, kind: str, flops: Pair, moved: Pair, launches: Pair, **more: Any) -> Work:
        return Work(kind, self.dtype, *flops, *moved, *launches, **more)

    # -------------------------------------------------- products

    def product(self) -> Work:
        """Count 2 FLOPs for each combination of the factors' letters.

        Backward has one such product for each factor that needs a gradient, and a sum for a bias that does.
        """
        rule, node = self.rule, self.node
        factors = max(rule.terms, key=len, default=()) or tuple(range(min(2, len(self.inputs))))
        letters = self._letters(*(rule.inputs[p] for p in factors), *rule.outputs)
        # a row meets the weight of one expert only
        if node.op.startswith("transformers.grouped_mm") or node.op == EXPERT_LINEAR:
            letters = self._letters(rule.inputs[0], *rule.outputs)
        flops = 2.0 * self._elements(letters)
        (out,) = self.outputs
        back_flops, back_bytes, launches, bias = 0.0, 0.0, 0, 0.0
        for port, wanted in enumerate(self.wanted):
            if not wanted:
                continue
            launches += 1
            back_bytes = back_bytes + out + self.inputs[port]
            if port in factors:
                back_flops = back_flops + flops
                back_bytes = back_bytes + _sum(self.inputs[p] for p in factors if p != port)
            else:
                bias = bias + out
        moved = _sum(self.inputs) + out, back_bytes
        if node.op == EXPERT_LINEAR:
            return self._in_order((flops, back_flops), moved)
        return self._made("matmul", (flops, back_flops), moved, (1, launches), bias_bytes=bias)

    def _in_order(self, flops: Pair, moved: Pair) -> Work:
        """Return products of rows that are put into the order of experts and back."""
        node, rule = self.node, self.rule
        (out,), wanted = self.outputs, any(self.wanted)
        rows = self._elements(self._letters(rule.inputs[2], rule.inputs[0])) * DTYPES[self.ports[0].dtype]
        back = 2.0 * (out + rows * self.wanted[1]) + (3.0 * rows + self.inputs[0]) * self.wanted[0]
        forward, backward = LAUNCHES[node.op]
        return self._made(
            "matmul",
            flops,
            moved,
            (forward, backward * wanted),
            passes_forward=2.0 * (rows + out),
            passes_backward=back * wanted,
        )

    def experts(self) -> Work:
        """Count the products of a block of experts, and the passes around them."""
        done = expert_work(self.node, self.rule, self.local, self.types, self.inputs, self.wanted)
        forward, backward = LAUNCHES[EXPERTS]
        made = self._made("matmul", done.flops, done.moved, (forward, backward * any(self.wanted)))
        # Of the rows, as products are: weights of choices, and so the sum, may be wider.
        dtype = self.ports[0].dtype
        return replace(made, dtype=dtype, passes_forward=done.passes[0], passes_backward=done.passes[1])

    def convolution(self) -> Work:
        """Count 2 FLOPs for each element of the weight and position of the result (of the input, if transposed)."""
        rule, node = self.rule, self.node
        transposed = "transpose" in node.op or (node.op == "aten.convolution.default" and bool(node.args[6]))
        flops = 2.0 * self._elements(
            self._letters(rule.inputs[1], rule.inputs[0] if transposed else rule.outputs[0])
        )
        (out,) = self.outputs
        count = sum(self.wanted[:2])
        back = _sum(
            out + 2 * self.inputs[p] if p < 2 else out + self.inputs[p]
            for p, w in enumerate(self.wanted)
            if w
        )
        return self._made(
            "conv", (flops, flops * count), (_sum(self.inputs) + out, back), (1, int(any(self.wanted)))
        )

    def attention(self, device: str) -> Work:
        """Count two products forward; backward five (the scores again), or four if the probabilities were saved.

        Where a GPU has no kernel, it runs as the products and the passes over all scores, one after the other. A causal
        mask skips the blocks above the diagonal if a rank holds all queries.
        """
        rule, node = self.rule, self.node
        q, k, v = rule.inputs[:3]
        pairs = self._elements(self._letters(q, k[:-1]))  # (query, key, width) of all heads
        values = self._elements(self._letters(q[:-1], v))
        fused = node.op in ATTENTION and fused_attention(node, self.types, self.wanted, device)
        if fused and device == "cuda":
            tiles = _in_tiles(self._elements(q[-2])) * _in_tiles(self._elements(k[-2]))
            pairs, values = pairs * tiles, values * tiles
        causal, share = fused and bool(node.arg(5, "is_causal", False)), 1.0
        if causal and q[-2]:
            queries = q[-2][0]
            share = np.where(np.asarray(self.local[queries]) == rule.sizes[queries], 0.5, 1.0)
            share = float(share) if share.ndim == 0 else share
        out = self.outputs[0]
        ends = _sum(self.inputs) + out
        scores = self._elements(self._letters(q[:-1], k[:-1])) * DTYPES[self.ports[0].dtype]
        wanted = any(self.wanted)
        if fused:
            forward = 2.0 * share * (pairs + values)
            backward = 2.0 * share * (3 * pairs + 2 * values)
            moved, back = ends, 2 * ends
            launches = (1, 1)
        else:  # scores, mask, softmax, dropout and back: each reads and writes all pairs
            dropped = bool(node.arg(4, "dropout_p", 0.0))
            forward, backward = 2.0 * (pairs + values), 4.0 * (pairs + values)
            steps = 2 + 2 * (len(rule.inputs) > 3 or bool(node.arg(5, "is_causal", False))) + 3 * dropped
            passes = ((2 + steps) * scores, (6 + 2 * dropped) * scores)
            launches = (4 + steps // 2, 8 + dropped)
            if node.op in ATTENTION and fused_attention(node, self.types, self.wanted):
                return self._unfused((forward, backward), (ends, 2 * ends), launches, passes)
            moved, back = ends + passes[0], 2 * ends + passes[1]
        return self._made(
            "causal" if causal else "attention",
            (forward, backward if wanted else 0.0),
            (moved, back if wanted else 0.0),
            (launches[0], launches[1] if wanted else 0),
            name=MASKED if len(rule.inputs) > 3 else "",
        )

    def _unfused(self, flops: Pair, moved: Pair, launches: tuple[int, int], passes: Pair) -> Work:
        """Return attention that only this device runs without a kernel of its own: its products are products."""
        wanted = any(self.wanted)
        return self._made(
            "matmul",
            (flops[0], flops[1] * wanted),
            (moved[0], moved[1] * wanted),
            (launches[0], launches[1] * wanted),
            passes_forward=passes[0],
            passes_backward=passes[1] * wanted,
            name=UNFUSED,
        )

    # -------------------------------------------------- memory

    def view(self, copies: bool) -> Work:
        """Count nothing, or a copy. The gradient of pieces is written in full, that of repetitions is summed."""
        op, wanted = self.node.op, any(self.wanted)
        out = _sum(self.outputs)
        forward = 2 * out if copies else 0.0
        backward: Amount = 0.0
        launches = 0
        if wanted and op == "aten.slice.Tensor":
            backward, launches = 2 * out + self.inputs[0], 2  # zeros, then the piece
        elif wanted and (op in REPEATS or op in PIECES):
            backward, launches = out + self.inputs[0], 1
        kind = "memory" if copies or launches else "free"
        return self._made(kind, (0.0, 0.0), (forward, backward), (int(copies), launches))

    def memory(self) -> Work:
        """Count reads of inputs, and writes of results and of extra saved tensors; backward as the module says."""
        node, op = self.node, self.node.op
        kept = saved(node, self.types, self.wanted)
        extra = self._extra(kept.extra_bytes)
        first = self.inputs[0] if self.inputs else 0.0
        more = PASSES.get(op, (0, 0))
        forward = _sum(self.inputs) + _sum(self.outputs) + extra + more[0] * first
        if op in LOOKUPS:
            forward = forward - self.inputs[LOOKUPS[op]] + self._looked_up()
        elif op in LIKES:
            forward = forward - first
        backward, count = self._backward(kept.inputs, kept.outputs, extra)
        backward = backward + more[1] * first * any(self.wanted)
        heavy = ELEMENT_FLOPS.get(op)
        flops: tuple[Amount, Amount] = (0.0, 0.0)
        if heavy:
            elements = self._largest()
            flops = heavy[0] * elements, heavy[1] * elements * bool(count)
        launches = LAUNCHES.get(op, (1, count))
        starts = launches[0], launches[1] if count else 0
        return self._made("memory", flops, (forward, backward), starts, name=short_name(op))

    def _looked_up(self) -> Amount:
        """Return the bytes of the rows that a look-up reads."""
        return self.outputs[0] * (self.rule.sizes["s"] if self.node.op == BAG else 1)

    def _largest(self) -> Amount:
        """Return the elements of the first input or result, whichever is larger; without a table of a look-up."""
        found = [self.outputs[0] / DTYPES[self.node.outputs[0].dtype]]
        if self.node.op == BAG:
            return self._looked_up() / DTYPES[self.node.outputs[0].dtype]
        if self.inputs and self.node.op not in LOOKUPS:
            found.append(self.inputs[0] / DTYPES[self.ports[0].dtype])
        return functools.reduce(np.maximum, found) if len(found) > 1 else found[0]

    def _backward(self, inputs: Sequence[int], outputs: Sequence[int], extra: Amount) -> tuple[Amount, int]:
        """Return bytes and kernels of the gradients of a memory-bound operator."""
        op, result = self.node.op, self.rule.outputs[0]
        reads = _sum(self.inputs[p] for p in inputs) + _sum(self.outputs[o] for o in outputs) + extra
        if op in LOOKUPS:
            table = LOOKUPS[op]
            ids = _sum(x for port, x in enumerate(self.inputs) if port != table)
            rows = self.gradients + (self._looked_up() if op == BAG else self.gradients)
            found = self.inputs[table] + rows + ids  # zeros for the table, then the rows added
            return (found, 2) if any(self.wanted) else (0.0, 0)
        total: Amount = 0.0
        count = 0
        for port, wanted in enumerate(self.wanted):
            if not wanted:
                continue
            same = self.rule.inputs[port] == result
            if op in THROUGH and NOT_THROUGH.get(op) != port and (same or op not in BROADCASTS):
                continue
            if op in BROADCASTS and not same:
                made = 0.0 if op in THROUGH else 2 * self.gradients
                total, count = (
                    total + made + self.gradients + self.inputs[port],
                    count + 1 + (op not in THROUGH),
                )
            else:
                total, count = total + self.inputs[port], count + 1
        if count:
            total = total + reads + self.gradients
        if op not in BROADCASTS:  # one kernel computes the gradients of all inputs
            count = min(count, 1)
        return total, count

    def _extra(self, whole_bytes: int) -> Amount:
        """Return the bytes saved beside inputs and results, scaled to the rank by the first input."""
        if not whole_bytes or self.node.op not in EXTRA or not self.inputs:
            return 0.0
        return self.inputs[0] * (whole_bytes / max(self.ports[0].size_bytes, 1))


def _in_tiles(places: Amount) -> Amount:
    """Return how many times as many places full tiles have."""
    found = np.ceil(np.asarray(places) / TILE) * TILE / np.maximum(places, 1.0)
    return float(found) if found.ndim == 0 else found


def short_name(op: str) -> str:
    """Return an operator's name without its namespace and overload: ``aten.add.Tensor`` → ``add``."""
    return op.partition(".")[2].partition(".")[0]


def _sum(amounts: Any) -> Amount:
    return functools.reduce(operator.add, amounts, 0.0)


__all__ = ["Amount", "Work", "work"]
