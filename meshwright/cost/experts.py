"""The work of a block of experts on one rank: two products forward and four in backward, and the moves around them.

Only pairs of a row and an expert of this rank count. Routing is taken to be even: a rank with a share of the experts
has that share of the pairs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.graph import DTYPES, Node, Ref, TensorType
from meshwright.ops.rule import Rule

Amount = Any  # float, or a float64 array with an entry for each strategy
Pair = tuple[Amount, Amount]  # forward, backward


@dataclass(frozen=True)
class ExpertWork:
    """FLOPs of the products, bytes that move beside them, and bytes that move before and after: forward, backward."""

    flops: Pair
    moved: Pair
    passes: Pair


def expert_work(
    node: Node,
    rule: Rule,
    local: Mapping[str, Any],
    types: Mapping[str, TensorType],
    inputs: Sequence[Amount],
    wanted: Sequence[bool],
) -> ExpertWork:
    """Return the work of `meshwright.experts`; `inputs`: bytes of each port here, `wanted`: which need a gradient.

    Passes: rows are put into the order of experts and back, gated, weighted and summed.
    """
    up, down = 1, 3 if isinstance(node.args[2], Ref) else 2
    item, rounded = DTYPES[types[node.uses[0]].dtype], DTYPES[node.outputs[0].dtype]
    pairs = _elements(rule.inputs[-2][0], local) * (local["g"] / rule.sizes["g"])
    row, wide = local["k"], _elements(rule.inputs[up][2], local)
    narrow, made = _elements(rule.inputs[down][1], local), local["m"]
    first, second = 2.0 * pairs * row * wide, 2.0 * pairs * narrow * made
    x_rows, inner, gated, results = (item * pairs * n for n in (row, wide, narrow, made))
    biased = (len(rule.inputs) - 5) * (inner + results) / 2  # of two biases each is added to one product
    gate = inner + 3 * gated
    out = local["t"] * made * rounded
    forward = x_rows + inner + inputs[up] + gated + results + inputs[down]
    passes = 2 * x_rows + gate + 3 * biased + results + 3 * pairs * made * rounded + out
    if not any(wanted):
        return ExpertWork((first + second, 0.0), (forward, 0.0), (passes, 0.0))
    flops, backward = second, 2 * results + 2 * gated + inputs[down]
    back = 2 * results + 2 * gate + 3 * gated + 2 * inner + biased
    if wanted[down]:
        flops, backward = flops + second, backward + gated + results + inputs[down]
        back = back + 2 * gated
    for port, moves in ((up, 2 * x_rows), (0, 3 * x_rows + inputs[0])):
        if wanted[port]:
            flops, backward = flops + first, backward + x_rows + inner + inputs[up]
            back = back + moves
    return ExpertWork((first + second, flops), (forward, backward), (passes, back))


def _elements(letters: Sequence[str], local: Mapping[str, Any]) -> Amount:
    return functools.reduce(operator.mul, (local[x] for x in letters), 1.0)


__all__ = ["Amount", "ExpertWork", "Pair", "expert_work"]
