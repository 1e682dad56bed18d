"""The memory of a block of experts while it runs (`runtime/kernels/expert_block.py`), on one rank.

Routing is taken to be even: a rank with a share of the experts has that share of the pairs of a row and an expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.core.graph import DTYPES, Node, Ref, TensorType

Types = Mapping[str, TensorType]
NUMBER = 8  # bytes of the number of a row or an expert

# In units of the rows between the products: made beside them while the gate is computed, kept with its result for its
# backward, and the most while that runs. Counted on torch 2.13.
GATES: dict[str, tuple[int, int, int]] = {"interleaved": (5, 5, 9), "relu_squared": (2, 2, 7)}
HALVES, PLAIN = (2, 2, 7), (1, 1, 4)


class _Rows:
    """Bytes of the rows of one rank's pairs, by what they hold."""

    def __init__(self, node: Node, types: Types) -> None:
        x, up, *_, weights = (types[u] for u in node.uses)
        down, (out,) = types[node.args[3].name], node.outputs
        item, rounded = DTYPES[x.dtype], DTYPES[out.dtype]
        experts, width, wide = up.shape
        total = node.arg(10, "total", experts)
        self.pairs = math.prod(weights.shape)
        self.count = self.pairs * experts // max(total, 1)
        self.every = experts == total
        self.x, self.inner = self.count * width * item, self.count * wide * item
        self.gated, self.made = self.count * down.shape[1] * item, self.count * down.shape[2] * item
        self.rounded, self.result = self.count * out.shape[1] * rounded, out.size_bytes
        self.order = 3 * NUMBER * self.count
        self.scale = DTYPES[weights.dtype] // item  # a product of rows and weights has the wider dtype
        self.cast = 0 if item == rounded else x.shape[0] * down.shape[2] * item
        self.rows = x.shape[0]
        self.biased = isinstance(node.args[4], Ref)
        gate = node.args[7]
        self.gate = GATES.get(gate, HALVES if gate.endswith("_gated") else PLAIN)

    def summing(self, rows: int, item: int, width: int) -> int:
        """Return the bytes beside rows and sum while the choices of each row are added up."""
        if self.every:
            return rows
        wide = max(4, item)  # an f32 sum, and the rows of one choice at a time, which are r / s
        return self.rows * width * wide + (rows + rows * wide // item) // max(
            self.pairs // max(self.rows, 1), 1
        )


def forward_bytes(node: Node, types: Types) -> int:
    """Return the most bytes beside the results, and beside what is saved, at one time of forward."""
    rows = _Rows(node, types)
    item, width = DTYPES[node.outputs[0].dtype], node.outputs[0].shape[1]
    phases = (
        rows.x,
        rows.gate[0] * rows.gated,
        rows.gated + rows.made,
        2 * rows.made if rows.biased else 0,
        rows.made + rows.rounded,
        rows.rounded + rows.summing(rows.rounded, item, width) + rows.result,
    )
    return rows.order + max(max(phases) - rows.result, 0)


def backward_bytes(node: Node, types: Types, wanted: Sequence[bool]) -> int:
    """Return the most bytes beside the gradients at one time of backward."""
    rows, (x, up, *_) = _Rows(node, types), (types[u] for u in node.uses)
    wide = rows.scale > 1
    forth, kept, most = rows.gate
    scaled = (rows.scale + wide) * rows.gated  # and brought back to the dtype of the rows
    bias = max(2, rows.scale + wide) * rows.made if rows.biased else 0
    of_x, of_up = x.size_bytes * wanted[0], up.size_bytes * wanted[1]  # gradients that are made last
    phases = [
        kept * rows.gated + rows.cast + rows.made - of_x - of_up,
        kept * rows.gated + rows.made + rows.gated + max(scaled, bias) - of_x - of_up,
        (most + (wide and forth == 1)) * rows.gated - of_x - of_up,
    ]
    if wanted[1]:
        phases.append(rows.inner + rows.x - of_x)
    if wanted[0]:
        phases.append(rows.inner + rows.x + rows.summing(rows.x, DTYPES[x.dtype], x.shape[1]))
    return rows.order + max(0, *phases)


__all__ = ["backward_bytes", "forward_bytes"]
