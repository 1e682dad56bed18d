"""Pointwise operators that are linear for some arguments. A constant added on each rank would count once per rank."""

from __future__ import annotations

from meshwright.core.graph import Node, Ref
from meshwright.ops.rule import Rule
from meshwright.ops.special.build import Special, Types, letters, line, text_of


def summed(node: Node, types: Types) -> Rule:
    """`x + alpha · y` is linear in both; `x + 1.0` is not."""
    if sum(isinstance(a, Ref) for a in node.args[:2]) == 2:
        return line(node, types, "... + ... -> ...")
    other = next((a for a in node.args[:2] if not isinstance(a, Ref)), None)
    return line(node, types, "... -> ..." if other == 0 else "... ~> ...")


def divided(node: Node, types: Types) -> Rule:
    """Linear in the numerator, unless it rounds."""
    arrow = "~>" if node.kwarg("rounding_mode") else "->"
    return line(node, types, f"... {arrow} ..." if len(node.uses) == 1 else f"..., @... {arrow} ...")


def cast(node: Node, types: Types) -> Rule:
    """Linear while it stays among floats (or among integers), since rounding is no part of the algebra."""
    source, target = types[node.uses[0]], node.outputs[0]
    kept = target.is_float or (not source.is_float and target.dtype != "b8")
    extra = ", @_" * (len(node.uses) - 1)
    return line(node, types, f"...{extra} {'->' if kept else '~>'} ...")


def chosen(node: Node, types: Types) -> Rule:
    """`where`: linear in the branches that are tensors, if the others are zero."""
    ports = ["@...", *("..." for a in node.args[1:] if isinstance(a, Ref))]
    constants = [a for a in node.args[1:] if not isinstance(a, Ref)]
    linear = len(ports) > 1 and all(c == 0 for c in constants)
    return line(
        node,
        types,
        f"{', '.join(ports[:2])}{' + ...' if len(ports) > 2 else ''} {'->' if linear else '~>'} ...",
    )


def masked_fill(node: Node, types: Types) -> Rule:
    """Linear where zeros are filled in."""
    if isinstance(node.args[2], Ref):
        return line(node, types, "..., @... + ... -> ...")
    return line(node, types, f"..., @... {'->' if node.args[2] == 0 else '~>'} ...")


def interpolated(node: Node, types: Types) -> Rule:
    """`lerp(x, y, w) = x + w · (y - x)`."""
    return line(node, types, "... + ..., @... -> ..." if len(node.uses) == 3 else "... + ... -> ...")


def prelu(node: Node, types: Types) -> Rule:
    """One slope, or one for each channel (dim 1)."""
    source, slope = (types[u].shape for u in node.uses)
    if slope in ((), (1,)) or len(source) < 2:
        return line(node, types, "..., _ ~> ...")
    names = text_of(letters(len(source)))
    return line(node, types, f"{names}, a1 ~> {names}")


POINTWISE: dict[str, Special] = {
    **{
        f"aten.{n}": summed
        for n in ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar")
    },
    **{f"aten.{n}": divided for n in ("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")},
    **{f"aten.{n}": cast for n in ("_to_copy.default", "to.dtype", "to.dtype_layout", "type_as.default")},
    **{f"aten.{n}": chosen for n in ("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")},
    **{f"aten.{n}": masked_fill for n in ("masked_fill.Scalar", "masked_fill.Tensor")},
    **{f"aten.{n}": interpolated for n in ("lerp.Tensor", "lerp.Scalar")},
    "aten.prelu.default": prelu,
}
