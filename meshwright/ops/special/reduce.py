"""Operators along dims that are given as arguments: sums, means, maxima, softmax, sort, scans."""

from __future__ import annotations

import math

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule
from meshwright.ops.special.build import (
    Special,
    Types,
    dims_of,
    letters,
    line,
    shapes_in,
    shapes_out,
    text_of,
)


def _reduced(node: Node, types: Types, dims: tuple[int, ...], keep: bool, mark: str, arrow: str) -> Rule:
    source = shapes_in(node, types)[0]
    before = letters(len(source), dict.fromkeys(dims, mark))
    after = [("1" if keep else "") if i in dims else n for i, n in enumerate(letters(len(source)))]
    outputs = ", ".join([text_of(a for a in after if a)] * len(node.outputs))
    return line(node, types, f"{text_of(before)} {arrow} {outputs}")


def summed(node: Node, types: Types) -> Rule:
    """A sum: reduced dims may be sharded and leave the result partial."""
    return _total(node, types)


def meaned(node: Node, types: Types) -> Rule:
    """A mean: like a sum, divided by the global count."""
    return _total(node, types)


def _total(node: Node, types: Types) -> Rule:
    rank = len(shapes_in(node, types)[0])
    full = node.op.endswith(".default")
    dims = tuple(range(rank)) if full else dims_of(node.arg(1, "dim"), rank)
    keep = not full and bool(node.arg(2, "keepdim", False))
    return _reduced(node, types, dims, keep, "", "->")


def reduced(dim_at: int = 1, keep_at: int = 2, default: int | None = None) -> Special:
    """A reduction that needs all elements at once (maximum, norm, variance)."""

    def rule(node: Node, types: Types) -> Rule:
        source, result = shapes_in(node, types)[0], node.outputs[0].shape
        given = node.arg(dim_at, "dim", default)
        dims = dims_of(given if not isinstance(given, bool) else None, len(source))
        keep = len(result) == len(source) and math.prod(source) > 0 and bool(source)
        return _reduced(node, types, dims, keep and bool(node.arg(keep_at, "keepdim", False)), "!", "~>")

    return rule


def all_reduced(node: Node, types: Types) -> Rule:
    """A reduction over all elements that needs them at once."""
    return _reduced(node, types, tuple(range(len(shapes_in(node, types)[0]))), False, "!", "~>")


def quantiles(node: Node, types: Types) -> Rule:
    """``a0 a1!, @q! ~> q! a0``: reduced, once for each number of a tensor of them."""
    source, wanted = shapes_in(node, types)
    given, rank = node.arg(2, "dim"), len(source)
    dims = dims_of(given, rank)
    keep = bool(node.arg(3, "keepdim", False))
    before = text_of(letters(rank, dict.fromkeys(dims, "!")))
    after = [("1" if keep else "") if i in dims else n for i, n in enumerate(letters(rank))]
    many = ["q!"] * len(wanted)
    return line(node, types, f"{before}, @{text_of(many)} ~> {text_of(many + [a for a in after if a])}")


def renorm(node: Node, types: Types) -> Rule:
    """``a0! a1 a2! ~> a0! a1 a2!``: each slice of a dim has a norm of its own."""
    rank = len(shapes_in(node, types)[0])
    dim = int(node.args[2]) % rank
    text = text_of(letters(rank, {i: "!" for i in range(rank) if i != dim}))
    return line(node, types, f"{text} ~> {text}")


def along(arrow: str, dim_at: int = 1, default: int | None = -1) -> Special:
    """Same shape in and out, one dim (or some) unsharded: softmax, scans, flips."""

    def rule(node: Node, types: Types) -> Rule:
        source = shapes_in(node, types)[0]
        given = node.arg(dim_at, "dim" if dim_at == 1 else "dims", default)
        text = text_of(letters(len(source), dict.fromkeys(dims_of(given, len(source)), "!")))
        return line(node, types, f"{text} {arrow} {', '.join([text] * len(node.outputs))}")

    return rule


def resized(arrow: str, dim_at: int = 1, default: int = -1) -> Special:
    """One dim unsharded, of another size in the result: topk, diff, glu."""

    def rule(node: Node, types: Types) -> Rule:
        source = shapes_in(node, types)[0]
        dim = dims_of(node.arg(dim_at, "dim", default), len(source))[0]
        text = text_of(letters(len(source), {dim: "!"}))
        after = letters(len(source))
        after[dim] = "z!"
        extra = f" + {text_of(_other(letters(len(source)), dim, 'y!'))}" * (len(node.uses) - 1)
        return line(node, types, f"{text}{extra} {arrow} {', '.join([text_of(after)] * len(node.outputs))}")

    return rule


def _other(names: list[str], dim: int, name: str) -> list[str]:
    return [name if i == dim else n for i, n in enumerate(names)]


def roll(node: Node, types: Types) -> Rule:
    """Rolled dims stay unsharded. Without dims the tensor is rolled as if flat."""
    source = shapes_in(node, types)[0]
    text = text_of(letters(len(source), dict.fromkeys(dims_of(node.arg(2, "dims", ()), len(source)), "!")))
    return line(node, types, f"{text} -> {text}")


def fft(default: int | tuple[int, ...] | None, lengths: bool = True) -> Special:
    """A transform over some dims; the length of each may change. Without dims: over the last ones if `lengths` can be
    given and are, else over those by default (None: all)."""

    def rule(node: Node, types: Types) -> Rule:
        source = shapes_in(node, types)[0]
        given = node.arg(2 if lengths else 1, "dim", default)
        sizes: tuple[int, ...] | None = node.arg(1, "s", None) if lengths else None
        if given is None and isinstance(sizes, tuple):
            given = tuple(range(-len(sizes), 0))
        dims = dims_of(given, len(source))
        after = [f"f{i}!" if i in dims else n for i, n in enumerate(letters(len(source)))]
        return line(
            node, types, f"{text_of(letters(len(source), dict.fromkeys(dims, '!')))} -> {text_of(after)}"
        )

    return rule


def stft(node: Node, types: Types) -> Rule:
    """Spectra of windows along the last dim: what comes before it stays. Real results have a dim of pairs."""
    (*before, _), *window = shapes_in(node, types)
    kept = text_of(letters(len(before)))
    pair = " z!" * (len(shapes_out(node)[0]) - len(before) - 2)
    return line(node, types, f"{kept} t!{', w!' * len(window)} -> {kept} f! k!{pair}")


def _named(names: str, special: Special) -> dict[str, Special]:
    return {f"aten.{name}": special for name in names.split()}


REDUCE: dict[str, Special] = {
    **_named("sum.default sum.dim_IntList", summed),
    **_named("mean.default mean.dim", meaned),
    **_named("amax.default amin.default", reduced()),
    **_named("max.dim min.dim any.dim all.dim argmax.default argmin.default prod.dim_int median.dim logsumexp.default "
             "nansum.default any.dims all.dims", reduced()),
    **_named("var.correction std.correction var_mean.correction count_nonzero.dim_IntList", reduced(keep_at=99)),
    **_named("std_mean.correction aminmax.default", reduced(keep_at=99)),
    **_named("var.dim std.dim var_mean.dim std_mean.dim", reduced(keep_at=3)),
    **_named("nanmedian.dim nanmean.default", reduced()),
    **_named("mode.default", reduced(default=-1)),
    **_named("linalg_vector_norm.default norm.ScalarOpt_dim linalg_norm.default linalg_norm.ord_str quantile.scalar "
             "nanquantile.scalar", reduced(2, 3)),
    **_named("quantile.default nanquantile.default", quantiles),
    **_named("renorm.default", renorm),
    **_named("kthvalue.default", reduced(2, 3)),
    **_named("max.default min.default any.default all.default prod.default median.default norm.Scalar "
             "count_nonzero.default var.default std.default var_mean.default std_mean.default "
             "nanmedian.default", all_reduced),
    **_named("softmax.int _softmax.default log_softmax.int _log_softmax.default", along("~>")),
    **_named("cumprod.default logcumsumexp.default cummax.default cummin.default sort.default "
             "argsort.default", along("~>")),
    **_named("cumsum.default flip.default", along("->")),
    **_named("sort.stable argsort.stable", along("~>", 2)),
    **_named("topk.default", resized("~>", 2)),
    **_named("glu.default", resized("~>")),
    **_named("diff.default", resized("->", 2)),
    **_named("roll.default", roll),
    **{f"aten.fft_{one}{n}.default": fft(default)
       for one in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
       for n, default in (("", -1), ("2", (-2, -1)), ("n", None))},
    **_named("fft_fftshift.default fft_ifftshift.default", fft(None, lengths=False)),
    "aten.stft.default": stft,
}  # fmt: skip
