"""Losses: dims of examples are reduced and leave the loss partial; classes are reduced inside."""

from __future__ import annotations

from meshwright.core.graph import Node
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import Special, Types, broadcast, letters, make, shapes_in

NONE, MEAN, SUM = 0, 1, 2


def classes(inside: bool) -> Special:
    """``n c^ d, @n d (, @c!) ~> `` (or ``~> n d``): cross entropy with its class dim reduced inside, or unsharded."""

    def rule(node: Node, types: Types) -> Rule:
        x, _, *weight = shapes_in(node, types)
        names = letters(len(x))
        at = 0 if len(x) == 1 else 1
        names[at] = "c"
        rest: list[RuleDim] = [(n,) for n in names if n != "c"]
        probabilities = types[node.uses[1]].is_float
        cut = inside and not probabilities and not weight
        ports = [
            [(n,) for n in names],
            [(n,) for n in names] if probabilities else rest,
            *([("c",)] for _ in weight),
        ]
        return make(
            ports,
            [rest if reduction_of(node) == NONE else []],
            dict(zip(names, x, strict=True)),
            unsharded=() if cut else {"c"},
            inside={"c"} if cut else (),
            why="" if cut else "class weights and class probabilities need all classes",
        )

    return rule


def reduction_at(node: Node) -> int:
    """Return the position of the reduction among the arguments."""
    at = {
        "cross_entropy_loss": 3,
        "nll_loss_nd": 3,
        "binary_cross_entropy": 3,
        "binary_cross_entropy_with_logits": 4,
    }
    return at.get(node.op.split(".")[1], 2)


def reduction_of(node: Node) -> int:
    """Return the reduction: 0 none, 1 mean, 2 sum."""
    return int(node.arg(reduction_at(node), "reduction", MEAN))


def pairwise(node: Node, types: Types) -> Rule:
    """``..., ... ~> `` (or ``~> ...``): one term per element."""
    sources = shapes_in(node, types)
    full = max(sources, key=len)
    full = tuple(
        max(s[i - len(full) + len(s)] if i >= len(full) - len(s) else 1 for s in sources)
        for i in range(len(full))
    )
    names = letters(len(full))
    ports = [broadcast(s, names, full) for s in sources]
    result = [] if reduction_of(node) else [(n,) for n in names]
    return make(ports, [result], dict(zip(names, full, strict=True)))


LOSS: dict[str, Special] = {
    "aten.cross_entropy_loss.default": classes(inside=True),
    "aten.nll_loss_nd.default": classes(inside=False),
    **{f"aten.{n}.default": pairwise for n in (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "soft_margin_loss")},
}  # fmt: skip
