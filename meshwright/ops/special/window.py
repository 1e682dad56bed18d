"""Convolutions and pools: windows that slide over the dims of an image.

Where a dim of n elements gives n / stride windows (as padding is usually chosen), its elements are ``(y s!)``: y
windows, each beginning s elements after the one before. So y may be sharded. A rank holds the elements at which its
windows begin. Elements beyond those belong to the neighbours (a halo), and the operator fetches them. A dim with
another number of windows stays unsharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import Special, Types, line, make, shapes_in, text_of


@dataclass(frozen=True)
class Window:
    """Windows along one dim, `stride` elements apart.

    Each reaches from `before` elements before its start to `after` elements beyond the start of the next one.
    """

    stride: int
    before: int
    after: int


@dataclass(frozen=True)
class Windows:
    """The windows of an operator, one for each dim of the image (None: that dim stays unsharded).

    `fill` is the value outside the image. `padding_at` and `ceil_at` are the positions of these arguments.
    """

    dims: tuple[Window | None, ...]
    fill: float
    padding: tuple[int, ...]
    padding_at: int
    ceil_at: int | None = None


def _each(value: int | tuple[int, ...] | None, count: int, default: int) -> tuple[int, ...]:
    """Return an argument as one number for each dim."""
    if value is None or value == ():
        return (default,) * count
    given = value if isinstance(value, tuple) else (value,)
    return tuple(int(v) for v in given) * (count if len(given) == 1 else 1)


def _window(size: int, made: int, kernel: int, stride: int, padding: int, dilation: int) -> Window | None:
    """Return the windows of a dim, or None unless their number times the stride is its size."""
    reach = dilation * (kernel - 1) + 1
    if made < 2 or size != stride * made or (size + 2 * padding - reach) // stride + 1 != made:
        return None
    return Window(stride, padding, max(reach - stride - padding, 0))


def windows_of(node: Node, image: tuple[int, ...], weight: tuple[int, ...] = ()) -> Windows | None:
    """Return the windows of a convolution or pool over an image of this shape; None for other operators.

    `weight` is the shape of a convolution's weight.
    """
    stem = node.op.split(".")[1]
    if "conv" in stem:
        return _of_convolution(node, image, weight[2:])
    if stem.startswith(("max_pool", "avg_pool")) and len(node.outputs) == 1:
        return _of_pool(node, image, stem)
    return None


def _of_convolution(node: Node, image: tuple[int, ...], kernel: tuple[int, ...]) -> Windows | None:
    if is_transposed(node):
        return None
    count = len(kernel)
    stride = _each(node.arg(3, "stride", 1), count, 1)
    dilation = _each(node.arg(5, "dilation", 1), count, 1)
    given = node.arg(4, "padding", 0)
    if given == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(t % 2 for t in total):
            return None
        padding = tuple(t // 2 for t in total)
    else:
        padding = _each(0 if given == "valid" else given, count, 0)
    dims = zip(image[-count:], node.outputs[0].shape[-count:], kernel, stride, padding, dilation, strict=True)
    return Windows(tuple(_window(*dim) for dim in dims), 0.0, padding, 4)


def _of_pool(node: Node, image: tuple[int, ...], stem: str) -> Windows | None:
    count, largest = int(stem[8]), stem.startswith("max")
    kernel = _each(node.arg(1, "kernel_size"), count, 1)
    given = node.arg(2, "stride", ())
    stride = kernel if given is None or given == () else _each(given, count, 1)
    padding = _each(node.arg(3, "padding", 0), count, 0)
    dilation = _each(node.arg(4, "dilation", 1), count, 1) if largest else (1,) * count
    if not largest and any(padding) and not node.arg(5, "count_include_pad", True):
        return None  # the divisor is smaller at the image's edges
    dims = zip(image[-count:], node.outputs[0].shape[-count:], kernel, stride, padding, dilation, strict=True)
    found = tuple(_window(*dim) for dim in dims)
    ceil_at = 5 if largest else 4
    if None in found and node.arg(ceil_at, "ceil_mode", False):
        return None  # the window that is not full may be that of an unsharded dim
    return Windows(found, -math.inf if largest else 0.0, padding, 3, ceil_at)


def is_transposed(node: Node) -> bool:
    """Return whether a convolution is transposed."""
    return "transpose" in node.op or (node.op == "aten.convolution.default" and bool(node.args[6]))


def groups_of(node: Node) -> int:
    """Return the number of groups of a convolution."""
    if node.op == "aten.convolution.default":
        return int(node.arg(8, "groups", 1))
    return int(node.arg(6, "groups", 1))


Dims = tuple[list[RuleDim], list[RuleDim], dict[str, int], set[str], set[str]]


def _image(windows: Windows | None, before: tuple[int, ...], after: tuple[int, ...]) -> Dims:
    """Return rule dims of an image and of its result, sizes, unsharded letters, letters split contiguously."""
    source: list[RuleDim] = []
    made: list[RuleDim] = []
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    outer: set[str] = set()
    found = windows.dims if windows is not None else (None,) * len(before)
    for i, (window, n, m) in enumerate(zip(found, before, after, strict=True)):
        if window is None:
            source.append((f"h{i}",))
            made.append((f"y{i}",))
            sizes |= {f"h{i}": n, f"y{i}": m}
            whole |= {f"h{i}", f"y{i}"}
            continue
        source.append((f"y{i}", f"s{i}") if window.stride > 1 else (f"y{i}",))
        made.append((f"y{i}",))
        sizes[f"y{i}"] = m
        outer.add(f"y{i}")
        if window.stride > 1:
            sizes[f"s{i}"] = window.stride
            whole.add(f"s{i}")
    return source, made, sizes, whole, outer


def convolution(node: Node, types: Types) -> Rule:
    """``n (g i) (y s!) (x t!), (g o) i kh! kw! (+ (g o)) -> n (g o) y x`` for strides s and t.

    A dim whose windows do not match its strides is ``h!`` and ``y!``. Transposed, the weight is ``(g i) o kh! kw!``.
    """
    x, w = shapes_in(node, types)[:2]
    spatial, groups = len(w) - 2, groups_of(node)
    batch: list[RuleDim] = [("n",)] if len(x) == spatial + 2 else []
    dims = x[-spatial:], node.outputs[0].shape[-spatial:]
    source, made, sizes, whole, outer = _image(windows_of(node, x, w), *dims)
    kernel = [f"k{i}" for i in range(spatial)]
    flipped = is_transposed(node)
    weight: list[RuleDim] = [("g", "i"), ("o",)] if flipped else [("g", "o"), ("i",)]
    first, second = w[0] // groups, w[1]
    sizes |= {"g": groups, "i": first if flipped else second, "o": second if flipped else first}
    sizes |= dict(zip(kernel, w[2:], strict=True)) | ({"n": x[0]} if batch else {})
    ports = [[*batch, ("g", "i"), *source], [*weight, *((k,) for k in kernel)]]
    terms: list[tuple[int, ...]] = [(0, 1)]
    if len(node.uses) > 2:
        ports.append([("g", "o")])
        terms.append((2,))
    whole |= {*kernel} | ({"g"} if groups == 1 else set())
    return make(ports, [[*batch, ("g", "o"), *made]], sizes, unsharded=whole, outer=outer, terms=terms)


def pool(arrow: str, spatial: int) -> Special:
    """Batch, channels and the dims that windows slide over may be sharded; ``->`` where a partial sum may pass."""

    def rule(node: Node, types: Types) -> Rule:
        image = shapes_in(node, types)[0]
        lead: list[RuleDim] = [(f"a{i}",) for i in range(len(image) - spatial)]
        windows = windows_of(node, image)
        source, made, sizes, whole, outer = _image(
            windows, image[-spatial:], node.outputs[0].shape[-spatial:]
        )
        sizes |= {name: n for (name,), n in zip(lead, image, strict=False)}
        outputs = [[*lead, *made]] * len(node.outputs)
        terms = [(0,)] if arrow == "->" else []
        return make([[*lead, *source]], outputs, sizes, unsharded=whole, outer=outer, terms=terms)

    return rule


def average(spatial: int) -> Special:
    """An adaptive average. Over the full image it is a mean, whose dims may be sharded."""

    def rule(node: Node, types: Types) -> Rule:
        image = shapes_in(node, types)[0]
        if any(n != 1 for n in node.outputs[0].shape[-spatial:]):
            return pool("->", spatial)(node, types)
        lead, dims = (
            text_of(f"{s}{i}" for i in range(n)) for s, n in (("a", len(image) - spatial), ("h", spatial))
        )
        return line(node, types, f"{lead} {dims} -> {lead} {text_of(['1'] * spatial)}")

    return rule
