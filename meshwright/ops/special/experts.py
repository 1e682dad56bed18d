"""The block of experts: rows through the two products of each of their experts, weighted and summed."""

from __future__ import annotations

from meshwright.core.graph import Node, Ref
from meshwright.ops.rule import Rule, RuleDim
from meshwright.ops.special.build import Special, Types, make

INTERLEAVED = "interleaved"  # its halves are every other column


def experts(node: Node, types: Types) -> Rule:
    """``t k!, g k! (h | h), (g (h | h)), g h m, (g m), (t s!), (t s!) -> t m``: a sum over experts and inner widths.

    Experts (in contiguous blocks), rows and the last width may be sharded; the inner width where no bias is added
    once for the full sum and where columns of a gate are halves.
    """
    x, _, up_bias, down, down_bias, pairs, _ = node.args[:7]
    gate = node.args[7]
    t, k = types[x.name].shape
    g, n, m = types[down.name].shape
    sizes = {"t": t, "s": types[pairs.name].shape[0] // max(t, 1), "g": g, "k": k, "m": m}
    unsharded = {"s", "k"}
    wide: RuleDim = ("h",)
    narrow: RuleDim = ("h",)
    if gate.endswith("_gated"):
        sizes |= {"h": 2 * n, "h.0": n, "h.1": n}
        narrow = ("h.0",)
    elif gate == INTERLEAVED:
        sizes |= {"h": n, "q": 2}
        wide = ("h", "q")
        unsharded.add("q")
    else:
        sizes["h"] = n
    if down_bias is not None:
        unsharded.add("h")
    ports: list[list[RuleDim]] = [[("t",), ("k",)]]
    ports.append([("g",), ("k",), wide])
    if isinstance(up_bias, Ref):
        ports.append([("g",), wide])
    ports.append([("g",), narrow, ("m",)])
    if isinstance(down_bias, Ref):
        ports.append([("g",), ("m",)])
    ports += [[("t", "s")], [("t", "s")]]
    return make(ports, [[("t",), ("m",)]], sizes, unsharded=unsharded, outer={"g"})


EXPERTS: dict[str, Special] = {"meshwright.experts": experts}
