"""Products whose dims depend on ranks, equations or groups: matmul, addmm, einsum, convolution, pooling."""

from __future__ import annotations

import re

from meshwright.graph import Node
from meshwright.ops.rule import Rule, bind, parse_pattern
from meshwright.ops.special.build import (
    Special,
    Types,
    broadcast,
    letters,
    line,
    make,
    shapes_in,
    text_of,
    whole,
)


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
    """``bias + m k, k n -> m n``, the bias broadcasting."""
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
        return whole(node, types, f"the equation {equation!r} takes a diagonal or names no result")

    def spread(term: str) -> str:
        return text_of(
            t if t == "..." else ("u" + t.lower() if t.isupper() else t)
            for t in re.findall(r"\.\.\.|\w", term)
        )

    return line(node, types, f"{', '.join(spread(t) for t in left.split(','))} -> {spread(right)}")


def convolution(node: Node, types: Types) -> Rule:
    """``n (g i) h! w!, (g o) i kh! kw! (+ (g o)) -> n (g o) y! x!``; transposed, the weight is ``(g i) o kh! kw!``."""
    x, w = shapes_in(node, types)[:2]
    general = node.op == "aten.convolution.default"
    transposed = (general and bool(node.args[6])) or "transpose" in node.op
    spatial = len(w) - 2
    batch = "n " if len(x) == spatial + 2 else ""
    groups = groups_of(node)
    before, kernel, after = (text_of(f"{s}{i}!" for i in range(spatial)) for s in ("h", "k", "y"))
    g = f"g{'!' if groups == 1 else ''}"
    weight = f"({g} i) o" if transposed else f"({g} o) i"
    bias = f" + ({g} o)" if len(node.uses) > 2 else ""
    text = f"{batch}({g} i) {before}, {weight} {kernel}{bias} -> {batch}({g} o) {after}"
    return _with_size(node, types, text, "g", groups)


def groups_of(node: Node) -> int:
    """The groups of a convolution."""
    if node.op == "aten.convolution.default":
        return int(node.arg(8, "groups", 1))
    return int(node.arg(6, "groups", 1))


def _with_size(node: Node, types: Types, text: str, letter: str, size: int) -> Rule:
    """A line in which the size of one letter is an argument: solved with a port that shows it."""
    shown = text.replace("~>", f", @{letter} ~>") if "~>" in text else text.replace("->", f", @{letter} ->")
    shapes = tuple(t.shape for t in node.outputs)
    bound = bind(parse_pattern(shown), (*shapes_in(node, types), (size,)), shapes)
    return make(
        bound.inputs[:-1],
        bound.outputs,
        bound.sizes,
        whole=bound.whole,
        inside=bound.inside,
        terms=bound.terms,
    )


def pool(arrow: str, spatial: int) -> Special:
    """Batch and channels may be cut, the image stays whole."""

    def rule(node: Node, types: Types) -> Rule:
        source = shapes_in(node, types)[0]
        lead = letters(len(source) - spatial)
        before, after = ([f"{s}{i}!" for i in range(spatial)] for s in ("h", "y"))
        out = ", ".join([text_of([*lead, *after])] * len(node.outputs))
        return line(node, types, f"{text_of([*lead, *before])} {arrow} {out}")

    return rule


def grouped_mm(node: Node, types: Types) -> Rule:
    """Rows sorted by expert times the weight of each: widths may be cut (every expert on every rank)."""
    return line(node, types, "t! k, g! k n, @g! -> t! n")


def _pools(arrow: str, spatial: int, names: str) -> dict[str, Special]:
    return {f"aten.{name}": pool(arrow, spatial) for name in names.split()}


PRODUCTS: dict[str, Special] = {
    "aten.matmul.default": matmul,
    "aten.addmm.default": addmm,
    "aten.baddbmm.default": addmm,
    "aten.einsum.default": einsum,
    "transformers.grouped_mm_fallback.default": grouped_mm,
    **{f"aten.{n}": convolution for n in (
        "conv1d.default", "conv2d.default", "conv3d.default", "conv1d.padding", "conv2d.padding", "convolution.default",
        "conv_transpose1d.default", "conv_transpose2d.input")},
    **_pools("~>", 1, "max_pool1d.default"),
    **_pools("~>", 2, "max_pool2d.default max_pool2d_with_indices.default adaptive_max_pool2d.default "
             "upsample_bicubic2d.vec"),
    **_pools("~>", 3, "max_pool3d.default"),
    **_pools("->", 1, "avg_pool1d.default adaptive_avg_pool1d.default upsample_nearest1d.vec"),
    **_pools("->", 2, "avg_pool2d.default adaptive_avg_pool2d.default _adaptive_avg_pool2d.default "
             "upsample_bilinear2d.vec upsample_nearest2d.vec"),
    **_pools("->", 3, "avg_pool3d.default adaptive_avg_pool3d.default"),
}  # fmt: skip
