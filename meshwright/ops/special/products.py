"""Products whose dims depend on the number of dims, an equation or groups: matmul, addmm, einsum, distances.

Convolutions and pools are in `window.py`.
"""

from __future__ import annotations

import re

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import (
    Special,
    Types,
    broadcast,
    letters,
    line,
    make,
    replicated,
    shapes_in,
    text_of,
)
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


def inner(node: Node, types: Types) -> Rule:
    """``... k, ... k -> ... ...``: all pairs of rows."""
    x, y = shapes_in(node, types)
    if not x or not y:
        return line(node, types, "..., ... -> ...")
    left, right = (letters(len(s) - 1, stem=stem) for s, stem in ((x, "a"), (y, "b")))
    return line(node, types, f"{text_of([*left, 'k'])}, {text_of([*right, 'k'])} -> {text_of(left + right)}")


def tensordot(node: Node, types: Types) -> Rule:
    """``a0 k0, k0 b1 -> a0 b1``, with a letter ``k`` for each pair of contracted dims."""
    x, y = shapes_in(node, types)
    pairs = [(int(i) % len(x), int(j) % len(y)) for i, j in zip(node.args[2], node.args[3], strict=True)]
    if any(x[i] != y[j] for i, j in pairs):
        return replicated(node, types, "a contracted dim of size 1 broadcasts")
    left, right = letters(len(x)), letters(len(y), stem="b")
    for n, (i, j) in enumerate(pairs):
        left[i] = right[j] = f"k{n}"
    kept = [name for name in left + right if not name.startswith("k")]
    return line(node, types, f"{text_of(left)}, {text_of(right)} -> {text_of(kept)}")


def _both(node: Node, types: Types) -> tuple[list[str], tuple[int, ...], list[list[RuleDim]]]:
    """Return, for two tensors that broadcast, the names and sizes of all dims and the dims of each tensor."""
    shapes = shapes_in(node, types)
    rank = max(map(len, shapes))
    wide = [(1,) * (rank - len(s)) + s for s in shapes]
    full = tuple(m if n == 1 else n for n, m in zip(*wide, strict=True))
    names = letters(rank)
    return names, full, [broadcast(s, names, full) for s in shapes]


def cross(node: Node, types: Types) -> Rule:
    """``a0 s!, a0 s! -> a0 s!``: products of vectors along a dim, linear in both."""
    names, full, ports = _both(node, types)
    held = names[int(node.kwarg("dim", -1)) % len(names)]
    sizes = dict(zip(names, full, strict=True))
    return make(ports, [[(n,) for n in names]], sizes, unsharded={held}, terms=[(0, 1)])


def vecdot(node: Node, types: Types) -> Rule:
    """``a0 k, a0 k -> a0``: a product of vectors along a dim."""
    names, full, ports = _both(node, types)
    dim = int(node.kwarg("dim", -1)) % max(len(full), 1)
    kept: list[RuleDim] = [(n,) for i, n in enumerate(names) if i != dim]
    return make(ports, [kept], dict(zip(names, full, strict=True)), terms=[(0, 1)])


def distance(dim_at: int | None) -> Special:
    """One number for each pair of vectors along a dim (the last, if its argument is None), which stays unsharded."""

    def rule(node: Node, types: Types) -> Rule:
        names, full, ports = _both(node, types)
        if not names:
            return replicated(node, types, "it reads two numbers")
        dim = -1 if dim_at is None else int(node.arg(dim_at, "dim", 1))
        held = names[dim % len(names)]
        one: list[RuleDim] = [()] if len(node.outputs[0].shape) == len(full) else []
        result: list[RuleDim] = []
        for name in names:
            result += one if name == held else [(name,)]
        return make(ports, [result], dict(zip(names, full, strict=True)), unsharded={held})

    return rule


def grid_sampler(node: Node, types: Types) -> Rule:
    """``n c h! w!, @n y x p! -> n c y x``: places of an image, in which the result is linear."""
    rank = len(node.outputs[0].shape) - 2
    image, made = text_of(letters(rank, dict.fromkeys(range(rank), "!"))), text_of(letters(rank, stem="y"))
    return line(node, types, f"n c {image}, @n {made} p! -> n c {made}")


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
    "aten.inner.default": inner,
    "aten.tensordot.default": tensordot,
    "aten.linalg_vecdot.default": vecdot,
    "aten.linalg_cross.default": cross,
    "aten.cosine_similarity.default": distance(2),
    "aten.pairwise_distance.default": distance(None),
    "aten.grid_sampler.default": grid_sampler,
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
