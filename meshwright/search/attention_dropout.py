"""What dropout of attention costs, as a remark of a plan.

PyTorch's fused kernels draw dropout themselves, and would draw another one on each number of ranks. A plan drops what
one device does, so its attention computes the probabilities in full and drops some of them (`runtime/kernels`).
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.graph import Node
from meshwright.cost.machine import seconds
from meshwright.cost.operator_tables import ATTENTION
from meshwright.cost.operators import work
from meshwright.ops.analysis import factors_of
from meshwright.ops.saved import fused_attention
from meshwright.plan.plan import Plan
from meshwright.search.layer_groups import folded
from meshwright.search.wanted import Wanted

WORTH = 0.05  # of the plan's seconds: what costs less is not mentioned
DROPOUT = 4  # the argument of attention


def with_attention_dropout(made: Plan, wanted: Wanted) -> Plan:
    """The plan, with a remark where dropout of attention takes a good part of its step."""
    request, step = wanted.request, made.claims.get("step_seconds")
    dropped = [n for n in wanted.graph.nodes if _drops(n)]
    if request is None or not step or not dropped:
        return made
    lost = _lost_seconds(wanted) / request.cluster.ranks
    if lost < WORTH * step:
        return made
    return made.with_notes(
        f"attention dropout takes at least {lost:.3g} s of a step of {step:.3g} s ({len(dropped)}×, "
        f"{dropped[0].where}): the probabilities are computed in full, and kept for backward or computed again, "
        "because PyTorch's fused kernels would drop others on each number of ranks; with a dropout of 0 in the model's "
        "attention (attention_dropout or attn_pdrop in many configurations) it is one fused kernel"
    )


def _drops(node: Node) -> bool:
    return node.op in ATTENTION and bool(node.arg(DROPOUT, "dropout_p", 0.0))


def _lost_seconds(wanted: Wanted) -> float:
    """Seconds that one device would save without dropout of attention."""
    assert wanted.request is not None
    folds, cluster = folded(wanted.graph, wanted.folding), wanted.request.cluster
    graph, sites = folds.graph, factors_of(folds.graph).sites

    def takes(node: Node, wants: list[bool]) -> float:
        rule = sites[node.name].rule
        done = work(node, rule, rule.sizes, graph.types, wants, device=cluster.device_type)
        return float(sum(seconds(done, cluster.device, cluster.measured)))

    found = 0.0
    for node in filter(_drops, graph.nodes):
        wants = [u in graph.needs_grad for u in node.uses]
        without = replace(node, args=(*node.args[:DROPOUT], 0.0, *node.args[DROPOUT + 1 :]))
        if fused_attention(without, graph.types, wants, cluster.device_type):
            found += folds.weight.get(node.name, 1) * (takes(node, wants) - takes(without, wants))
    return found


__all__ = ["with_attention_dropout"]
