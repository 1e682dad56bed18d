"""Normalisations: over the last dims, over groups of channels, over the batch."""

from __future__ import annotations

from meshwright.core.graph import Node, Ref
from meshwright.ops.rule import Rule
from meshwright.ops.special.build import Special, Types, letters, line, make, replicated, shapes_in, text_of


def layer_norm(node: Node, types: Types) -> Rule:
    """``... h!, h!, h! ~> ... h!``, with one ``h`` for each normalised dim."""
    source = shapes_in(node, types)[0]
    last = len(node.args[1])
    lead, names = letters(len(source) - last), [f"h{i}!" for i in range(last)]
    ports = [text_of([*lead, *names]), *[text_of(names)] * (len(node.uses) - 1)]
    results = [text_of([*lead, *names])]
    results += [text_of([*lead, *["1"] * last])] * (len(node.outputs) - 1)  # mean and 1/deviation
    return line(node, types, f"{', '.join(ports)} ~> {', '.join(results)}")


def group_norm(node: Node, types: Types) -> Rule:
    """``n (g c!) h! w!, (g c!), (g c!) ~> n (g c!) h! w!``."""
    source = shapes_in(node, types)[0]
    groups = int(node.args[1])
    spatial = [f"h{i}" for i in range(len(source) - 2)]
    x = [("n",), ("g", "c"), *((s,) for s in spatial)]
    sizes = {
        "n": source[0],
        "g": groups,
        "c": source[1] // groups,
        **dict(zip(spatial, source[2:], strict=True)),
    }
    return make([x, *[[("g", "c")]] * (len(node.uses) - 1)], [x], sizes, unsharded={"c", *spatial})


def instance_norm(node: Node, types: Types) -> Rule:
    """``n c h! w!, c, c ~> n c h! w!``; running statistics are means over the batch, which it then needs."""
    source = shapes_in(node, types)[0]
    if any(isinstance(arg, Ref) for arg in node.args[3:5]):
        return replicated(node, types, "its running statistics are means over all examples")
    x = text_of(["n", "c", *(f"h{i}!" for i in range(len(source) - 2))])
    return line(node, types, f"{', '.join([x, *['c'] * (len(node.uses) - 1)])} ~> {x}")


def batch_norm(node: Node, types: Types) -> Rule:
    """``n^ c h^ w^, c, c, c, c ~> n^ c h^ w^, c, c, c, c``: statistics are those of the full batch.

    In evaluation the statistics are inputs, and nothing is reduced.
    """
    source = shapes_in(node, types)[0]
    x = text_of(["n^", "c", *(f"h{i}^" for i in range(len(source) - 2))])
    ports = [x, *["c"] * (len(node.uses) - 1)]
    results = [x, *("c" if t.shape == source[1:2] else "none!" for t in node.outputs[1:])]
    return line(node, types, f"{', '.join(ports)} ~> {', '.join(results)}")


def is_training(node: Node) -> bool:
    """Return whether the statistics of the batch itself are used."""
    if node.op == "aten._native_batch_norm_legit_no_training.default":
        return False
    if node.op == "aten._native_batch_norm_legit.no_stats":
        return bool(node.args[3])
    return bool(node.args[5]) or not isinstance(node.args[3], Ref)


NORM: dict[str, Special] = {
    "aten.layer_norm.default": layer_norm,
    "aten.native_layer_norm.default": layer_norm,
    "aten.rms_norm.default": layer_norm,
    "aten.group_norm.default": group_norm,
    "aten.instance_norm.default": instance_norm,
    "aten._native_batch_norm_legit_functional.default": batch_norm,
    "aten._native_batch_norm_legit_no_training.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm,
    "aten.batch_norm.default": batch_norm,
}
