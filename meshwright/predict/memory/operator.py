"""The memory of one operator while it runs: results, tensors saved by autograd, workspaces, and new gradients.

Each table row was found by tracking the allocations of torch 2.13 (`tests/cost/test_memory.py` checks them). Sizes are
bytes on the rank; counts are in units of the first input.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.graph import DTYPES, Graph, Node, TensorType, of_aten
from meshwright.cost.operator_tables import (
    ATTENTION,
    BROADCASTS,
    CONVOLUTIONS,
    EXPERT_LINEAR,
    EXPERTS,
    NOT_THROUGH,
    THROUGH,
    VIEWS,
)
from meshwright.ops.saved import RMS_NORM, fused_attention
from meshwright.predict.memory.allocator import Heap, Storage
from meshwright.predict.memory.bias_sum import bias_sum_bytes
from meshwright.predict.memory.experts import backward_bytes, forward_bytes
from meshwright.predict.memory.recompute import Notes

DROPOUT = "meshwright.dropout"
TINY_BYTES = 256  # an operator's own saved tensors up to this size are not recomputed (`runtime.recompute`)


class OperatorMemory:
    """The operators of a program. `values` is the memory of live values; `again` names the recomputed operators;
    `device` is the type of the device."""

    def __init__(
        self,
        heap: Heap,
        notes: Notes,
        graph: Graph,
        values: Mapping[str, Storage],
        again: Collection[str],
        device: str,
    ) -> None:
        self.heap, self.notes, self.graph, self.types = heap, notes, graph, graph.types
        self.values, self.again, self.device = values, again, device

    def computed(self, node: Node, extra_bytes: int) -> tuple[list[Storage], list[Storage]]:
        """Allocate an operator's results and the extra tensors that autograd saves, each with one use."""
        heap = self.heap
        wanted = [u in self.graph.needs_grad for u in node.uses]
        before, beside = workspace(node, self.types, wanted, self.device)
        scratch = heap.new(before)
        made = [heap.new(t.size_bytes) for t in node.outputs]
        extra = [heap.new(extra_bytes)] if extra_bytes else []
        heap.passing(beside)
        heap.drop(scratch)
        return made, extra

    def watch(self, node: Node, made: list[Storage], extra: list[Storage], own: tuple[int, ...]) -> None:
        """Record the results of a recomputed operator, and what autograd saves of it: its `own` results and `extra`."""
        read = [self.values[u] for u in node.uses]
        if node.op == DROPOUT and extra:  # its mask is drawn apart
            (mask,) = extra
            self.notes.watch(extra, (), lambda _: [self._drawn(node, mask.size_bytes)])
            self.notes.watch(made, [*read, mask], lambda _: self.computed(node, 0)[0])
            return
        large = [s for s in extra if s.size_bytes > TINY_BYTES]
        mine = [
            k
            for k, (v, s) in enumerate(zip(node.values, made, strict=True))
            if v in self.again or (k in own and s.size_bytes > TINY_BYTES)
        ]

        def run(_: list[Storage]) -> list[Storage]:
            results, beside = self.computed(node, sum(s.size_bytes for s in large))
            for k, storage in enumerate(results):
                if k not in mine:
                    self.heap.drop(storage)
            return [*(results[k] for k in mine), *beside]

        self.notes.watch([*(made[k] for k in mine), *large], read, run)

    def _drawn(self, node: Node, size_bytes: int) -> Storage:
        """Allocate a mask, drawn from uniform numbers in f32."""
        numbers = self.heap.new(DTYPES["f32"] * size_bytes)
        mask = self.heap.new(size_bytes)
        self.heap.drop(numbers)
        return mask

    def gradients(
        self, node: Node, arrived: Sequence[Storage], wanted: Sequence[bool]
    ) -> list[tuple[str, Storage]]:
        """Return the gradients of the `wanted` inputs, by value."""
        found: list[tuple[str, Storage]] = []
        plan = gradients_of(node, self.types, wanted, self.device)
        scratch = self.heap.new(plan.before)
        for port, size in plan.made:
            made = self.heap.hold(arrived[0]) if size is None else self.heap.new(size)
            found.append((node.uses[port], made))
        self.heap.passing(plan.beside)
        self.heap.drop(scratch)
        return found


Types = Mapping[str, TensorType]

# Forward, in units of the first input: (made before the results and held beside them, made after).
FORWARD: dict[str, tuple[float, float]] = {
    "meshwright.dropout": (1.25, 0),
    "meshwright.cross_entropy_split": (2, 0),
    "meshwright.batch_norm_sync": (1, 1),
    "aten.logsumexp.default": (1, 0),  # what lies above the largest, then its exponentials in the same memory
}
BIASES = {"aten.linear.default": 2, "aten.addmm.default": 0}  # the port of the bias


def _rows(names: str, before: float) -> dict[str, tuple[float, float]]:
    """Return a row, of what is made before the results, for each of these overloads of aten."""
    return dict.fromkeys(of_aten(names), (before, 0))


# Backward, likewise, beside the gradients.
BACKWARD: dict[str, tuple[float, float]] = {
    "aten.cross_entropy_loss.default": (1, 0),
    "aten.nll_loss_nd.default": (0, 0),
    "meshwright.dropout": (1, 0),
    "meshwright.cross_entropy_split": (1, 0),
    "meshwright.batch_norm_sync": (3, 0),
    "aten.logsumexp.default": (2, 0),  # the differences, and their exponentials
    # Formulas of several operators, whose values live until the last has run. Measured on torch 2.13.
    **dict.fromkeys(("aten.pow.Tensor_Scalar", "aten.square.default", "aten.rsqrt.default"), (2, 0)),
    **dict.fromkeys(("aten.reciprocal.default", "aten.cos.default", "aten.atan.default"), (2, 0)),
    **dict.fromkeys(("aten.sqrt.default", "aten.log1p.default", "aten.expm1.default"), (1, 0)),
    **dict.fromkeys(("aten.sin.default", "aten.abs.default"), (1, 0)),
    **dict.fromkeys(("aten.var.dim", "aten.std.dim", "aten.linalg_vector_norm.default"), (1, 0)),
    **dict.fromkeys(("aten.amax.default", "aten.amin.default", "aten.prod.dim_int"), (1, 0)),
    **dict.fromkeys(("aten.maximum.default", "aten.minimum.default"), (1, 0)),
    "aten.cosine_similarity.default": (3, 0),  # beside its directions, which are saved
    **_rows("i0 aminmax var_mean var_mean.dim var_mean.correction std_mean std_mean.dim std_mean.correction "
            "linalg_norm linalg_slogdet linalg_eigh linalg_eigvalsh linalg_svdvals linalg_svd linalg_matrix_power", 1),
    **_rows("linalg_solve linalg_solve_triangular", 1.25),
    **_rows("nanmean", 1.5),
    **_rows("linalg_inv linalg_inv_ex linalg_det quantile quantile.scalar", 2),
    **_rows("asinh atanh logaddexp2 special_entr special_erfcx linalg_cholesky linalg_cholesky_ex linalg_qr", 3),
    **_rows("special_ndtr special_ndtri special_i0e", 4),
    **_rows("special_i1", 4.25),
    **_rows("special_log_ndtr", 6),
    **_rows("special_i1e", 6.25),
    **_rows("linalg_pinv linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor pinverse", 12),
    **_rows("linalg_matrix_exp", 47),
    "aten.cumsum.default": (2, 0),
    "aten.erf.default": (4, 0),
}  # fmt: skip
# Beside these, boolean masks of so many elements for each one of the first input.
MASKS: dict[str, int] = {
    **dict.fromkeys(("aten.clamp.default", "aten.maximum.default", "aten.minimum.default"), 2),
    **dict.fromkeys(("aten.fmax.default", "aten.fmin.default"), 2),
    **dict.fromkeys(("aten.clamp_min.default", "aten.clamp_max.default"), 1),
    **dict.fromkeys(
        ("aten.amax.default", "aten.amin.default", "aten.prod.dim_int", "aten.aminmax.default"), 1
    ),
}
COUNTED = ("aten.amax.default", "aten.amin.default")  # the mask is summed as i64
DIVIDE = "aten.div.Tensor"
# Losses that are reduced go back by two products, and by one where they are not.
REDUCED_LOSSES = {
    "aten.mse_loss.default",
    "aten.l1_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.binary_cross_entropy_with_logits.default",
}

# Gradients that are views of the gradient that comes in.
PASSED = THROUGH | VIEWS | {"aten.cat.default", "aten.stack.default"}


# oneDNN, which convolves on a CPU, brings images and weights into blocks of so many channels and back; fewer than that
# of an image's own colours stay. What cuDNN takes on a GPU is not known beforehand; the same is assumed.
BLOCK, COLOURS = 16, 3


@dataclass(frozen=True)
class Gradients:
    """The gradients of a node. `made` maps ports to bytes of new memory, or None if the gradient shares incoming
    memory.

    `before` and `beside` are bytes of workspace, from the start or at the end.
    """

    made: tuple[tuple[int, int | None], ...]
    before: float = 0
    beside: float = 0


def workspace(node: Node, types: Types, wanted: Sequence[bool], device: str) -> tuple[float, float]:
    """Return the bytes of workspace that an operator needs in forward: from the start, and at the end."""
    if node.op in ATTENTION:
        q, k = (types[u].size_bytes for u in node.uses[:2])
        scores = _scores(node, types, wanted, device)
        return 0, scores + q + k if scores else 0
    if node.op in CONVOLUTIONS:
        x, w, y = _blocked(node, types)
        return 0, max(x + w + y - node.outputs[0].size_bytes, y)
    if node.op == EXPERT_LINEAR:
        rows, order = _pairs(node, types)
        return 0, max(rows, node.outputs[0].size_bytes) + order
    if node.op == EXPERTS:
        return 0, forward_bytes(node, types)
    if node.op == RMS_NORM and device == "cpu":
        wide = _wide_bytes(node, types)
        return 0, wide if wide > node.outputs[0].size_bytes else 0  # the result, before it is narrowed
    row = FORWARD.get(node.op)
    if row is None:
        return 0, 0
    size = types[node.uses[0]].size_bytes
    return row[0] * size, row[1] * size


def _pairs(node: Node, types: Types) -> tuple[int, int]:
    """Return the bytes of the rows that experts multiply, one for each pair, and of their order."""
    x, _, pairs = (types[u] for u in node.uses)
    return math.prod(pairs.shape) * x.shape[1] * DTYPES[x.dtype], 8 * math.prod(pairs.shape)


def _wide_bytes(node: Node, types: Types) -> int:
    """Return the bytes of the first input in the dtype in which a CPU normalises: f32 at least."""
    source = types[node.uses[0]]
    return math.prod(source.shape) * max(DTYPES[source.dtype], DTYPES["f32"])


def _rms_norm_backward(node: Node, types: Types, wanted: Sequence[bool]) -> int:
    """Return the workspace of an RMS norm's backward on a CPU, beside what arrives, what was saved, and gradients.

    In its last formula, of the mean square, five tensors of the input's shape live: the gradient so far, that of the
    mean, the power, and two products. What arrived and the normalised rows are gone by then.
    """
    wide, size = _wide_bytes(node, types), types[node.uses[0]].size_bytes
    weighted = len(wanted) > 1 and wanted[1]
    if not wanted[0]:
        return wide if wide == size else 2 * wide
    return 5 * wide - 2 * size - (wide if weighted else 0)


def _blocked(node: Node, types: Types) -> tuple[int, int, int]:
    """Return the bytes of a convolution's image, weight and result in blocks of channels."""
    image, weight = (types[u] for u in node.uses[:2])
    spatial = len(weight.shape) - 2

    def padded(kind: TensorType, dims: Sequence[int]) -> int:
        size = kind.size_bytes
        for dim in dims:
            channels = kind.shape[dim]
            size = size * -(-channels // BLOCK) * BLOCK // max(channels, 1)
        return size

    colours = image.shape[-spatial - 1]
    x = 0 if colours <= COLOURS else padded(image, [-spatial - 1])
    return x, padded(weight, [0] if colours <= COLOURS else [0, 1]), padded(node.outputs[0], [-spatial - 1])


def _scores(node: Node, types: Types, wanted: Sequence[bool], device: str) -> int:
    """Return the bytes of an attention's scores without a fused kernel; 0 with one."""
    q, k = (types[u] for u in node.uses[:2])
    if fused_attention(node, types, wanted, device):
        return 0
    return math.prod((*q.shape[:-1], k.shape[-2])) * DTYPES[q.dtype]


def gradients_of(node: Node, types: Types, wanted: Sequence[bool], device: str = "cpu") -> Gradients:
    """Return the gradients of a node, port by port."""
    made: list[tuple[int, int | None]] = []
    full = max((t.size_bytes for t in node.outputs), default=0)
    shape = node.outputs[0].shape
    beside = 0
    for port, name in enumerate(node.uses):
        if not wanted[port]:
            continue
        kind = types[name]
        same = math.prod(kind.shape) == math.prod(shape)
        passes = node.op in PASSED and NOT_THROUGH.get(node.op) != port
        if passes and (same or node.op not in BROADCASTS):
            made.append((port, None))
            continue
        if node.op in BROADCASTS and not same and not passes:
            beside = full  # made in full, then summed
        made.append((port, kind.size_bytes))
    if node.op in CONVOLUTIONS:
        beside = sum(_blocked(node, types))
    elif node.op in ATTENTION:
        # The gradient of the probabilities and of the scores; the inputs' own gradients come when one of them is gone.
        inputs = sum(types[u].size_bytes for u in node.uses[:2])
        beside = max(2 * _scores(node, types, wanted, device) - inputs, 0)
    elif node.op == EXPERT_LINEAR:  # the rows' gradients, in the order of experts and in their own
        rows, order = _pairs(node, types)
        beside = full + 2 * rows - types[node.uses[0]].size_bytes + 2 * order
    elif node.op == EXPERTS:
        beside = backward_bytes(node, types, wanted)
    elif node.op == RMS_NORM and device == "cpu":
        beside = _rms_norm_backward(node, types, wanted)
    elif device == "cuda" and (bias := BIASES.get(node.op)) is not None and any(wanted[bias : bias + 1]):
        width = shape[-1]
        beside = bias_sum_bytes(math.prod(shape) // max(width, 1), width)
    row = BACKWARD.get(node.op, (0, 0))
    if node.op == DIVIDE and wanted[-1] and len(wanted) == 2:  # the quotient, and that over the denominator
        row = (2, 0)
    elif node.op in REDUCED_LOSSES and not shape:
        row = (1, 0)
    size = types[node.uses[0]].size_bytes if node.uses else 0
    before = row[0] * size
    if node.op in MASKS:
        elements = math.prod(types[node.uses[0]].shape)
        counted = (
            DTYPES["i64"] * elements - size if node.op in COUNTED else 0
        )  # gone before the gradient comes
        before = max(before, counted) + MASKS[node.op] * elements
    return Gradients(tuple(made), before, max(row[1] * size, beside))


__all__ = ["OperatorMemory"]
