"""Scaled dot product attention: batch, heads, groups of heads, and queries may be sharded."""

from __future__ import annotations

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import Special, Types, make, replicated, shapes_in


def attention(node: Node, types: Types) -> Rule:
    """``b (g r) q e!, b g k! e!, b g k! f, (@mask) -> b (g r) q f``; linear in the values."""
    q, k, v, *rest = shapes_in(node, types)
    lead = len(q) - 2
    if not len(q) == len(k) == len(v) or q[: max(lead - 1, 0)] != k[: max(lead - 1, 0)] or k[:-2] != v[:-2]:
        return replicated(node, types, "its tensors broadcast against each other")
    sizes = {"q": q[-2], "e": q[-1], "k": k[-2], "f": v[-1]}
    batch: list[RuleDim] = [(f"b{i}",) for i in range(lead - 1)]
    sizes |= {f"b{i}": n for i, n in enumerate(q[: max(lead - 1, 0)])}
    heads_q: list[RuleDim] = []
    heads_k: list[RuleDim] = []
    if lead:
        heads_q, heads_k = [("g", "r")], [("g",)]
        sizes |= {"g": k[-3], "r": q[-3] // k[-3]}
        if sizes["r"] == 1:
            heads_q = [("g",)]
            del sizes["r"]
    ports: list[list[RuleDim]] = [
        [*batch, *heads_q, ("q",), ("e",)],
        [*batch, *heads_k, ("k",), ("e",)],
        [*batch, *heads_k, ("k",), ("f",)],
    ]
    full: list[RuleDim] = [*batch, *heads_q, ("q",), ("k",)]
    for mask in rest:
        ports.append([d if n != 1 else () for d, n in zip(full[len(full) - len(mask) :], mask, strict=True)])
    return make(ports, [[*batch, *heads_q, ("q",), ("f",)]], sizes, unsharded={"e", "k"}, terms=[(2,)])


ATTENTION: dict[str, Special] = {"aten.scaled_dot_product_attention.default": attention}
