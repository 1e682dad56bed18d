"""Products whose dims depend on the number of dims, an equation or groups: matmul, addmm, einsum.

Convolutions and pools are in `window.py`.
"""

from __future__ import annotations

import re

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule
from meshwright.ops.special.build import Special, Types, broadcast, line, make, replicated, shapes_in, text_of
from meshwright.ops.special.window import average, convolution, pool


def matmul(node: Node, types: Types) -> Rule:
    """``... m k, ... k n -> ... m n``, where a vector has ``k`` alone."""
    x, y = shapes_in(node, types)[:2]
    left = "k" if len(x) == 1 else "... m k"
    right = "k" if len(y) == 1 else "... k n" if len(y) > 2 or len(x) > 2 else "k n"
    if len(x) == 2 and len(y) == 2:
        left = "m k"
    out = (
        ("... " if "..." in left + right else "") + ("m " if len(x) > 1 else "") + ("n" if len(y) > 1 else "")
    )
    return line(node, types, f"{left}, {right} -> {out}")


def addmm(node: Node, types: Types) -> Rule:
    """``bias + m k, k n -> m n``, where the bias broadcasts."""
    bias, x, _ = shapes_in(node, types)
    names = ["b", "m", "n"] if len(x) == 3 else ["m", "n"]
    full = node.outputs[0].shape
    batch = [("b",)] if len(x) == 3 else []
    sizes = dict(zip(names, full, strict=True)) | {"k": x[-1]}
    return make(
        [broadcast(bias, names, full), [*batch, ("m",), ("k",)], [*batch, ("k",), ("n",)]],
        [[(n,) for n in names]],
        sizes,
        terms=[(0,), (1, 2)],
    )


def einsum(node: Node, types: Types) -> Rule:
    """The equation is the rule."""
    equation = str(node.args[0]).replace(" ", "")
    left, found, right = equation.partition("->")
    if not found or any(len(set(term)) != len(term) for term in left.replace("...", "").split(",")):
        return replicated(node, types, f"the equation {equation!r} takes a diagonal or names no result")

    def spread(term: str) -> str:
        return text_of(
            t if t == "..." else ("u" + t.lower() if t.isupper() else t)
            for t in re.findall(r"\.\.\.|\w", term)
        )

    return line(node, types, f"{', '.join(spread(t) for t in left.split(','))} -> {spread(right)}")


def grouped_mm(node: Node, types: Types) -> Rule:
    """Rows sorted by expert, times the weight of each: widths may be sharded (every expert is on every rank)."""
    return line(node, types, "t! k, g! k n, @g! -> t! n")


def expert_linear(node: Node, types: Types) -> Rule:
    """Pairs of a row and an expert, (t s): the row times the expert's matrix.

    Rows, their choices and widths may be sharded (every expert is on every rank).
    """
    x, weight, pairs = shapes_in(node, types)
    sizes = {"t": x[0], "s": pairs[0] // max(x[0], 1), "g": weight[0], "k": x[1], "n": weight[2]}
    return make(
        [[("t",), ("k",)], [("g",), ("k",), ("n",)], [("t", "s")]],
        [[("t", "s"), ("n",)]],
        sizes,
        unsharded={"g"},
        terms=[(0, 1)],
    )


def _pools(arrow: str, spatial: int, names: str) -> dict[str, Special]:
    return {f"aten.{name}": pool(arrow, spatial) for name in names.split()}


def _averages(spatial: int, names: str) -> dict[str, Special]:
    return {f"aten.{name}": average(spatial) for name in names.split()}


PRODUCTS: dict[str, Special] = {
    "aten.matmul.default": matmul,
    "aten.addmm.default": addmm,
    "aten.baddbmm.default": addmm,
    "aten.einsum.default": einsum,
    "transformers.grouped_mm_fallback.default": grouped_mm,
    "meshwright.expert_linear": expert_linear,
    **{f"aten.{n}": convolution for n in (
        "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "convolution.default",
        "conv_transpose1d.default", "conv_transpose2d.input")},
    **_pools("~>", 1, "max_pool1d.default"),
    **_pools("~>", 2, "max_pool2d.default max_pool2d_with_indices.default adaptive_max_pool2d.default "
             "upsample_bicubic2d.vec"),
    **_pools("~>", 3, "max_pool3d.default"),
    **_pools("->", 1, "avg_pool1d.default upsample_nearest1d.vec"),
    **_pools("->", 2, "avg_pool2d.default upsample_bilinear2d.vec upsample_nearest2d.vec"),
    **_pools("->", 3, "avg_pool3d.default"),
    **_averages(1, "adaptive_avg_pool1d.default"),
    **_averages(2, "adaptive_avg_pool2d.default _adaptive_avg_pool2d.default"),
    **_averages(3, "adaptive_avg_pool3d.default"),
}  # fmt: skip
