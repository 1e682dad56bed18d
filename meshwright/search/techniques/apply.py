"""The techniques that a user asked for, put into a plan one after the other.

``fusion`` as groups of module patterns: each names parameters of the model, and no parameter is in two groups.

Micro-batches (`micro_batches=n`): the plan says what they make inexact. How programs are split in time is
`partition/time_axis.py`.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.graph import Graph
from meshwright.core.techniques import Techniques, matches
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError, did_you_mean
from meshwright.ops.analysis import factors_of
from meshwright.ops.batch import example_reducers
from meshwright.plan.plan import Plan
from meshwright.search.techniques.offload import save_activations
from meshwright.search.techniques.optimizer_parallel import optimizer_parallel
from meshwright.search.techniques.recompute import recompute


def apply(graph: Graph, plan: Plan, techniques: Techniques, cluster: Cluster | None = None) -> Plan:
    """The plan with techniques. With a cluster a budget of recompute is spent by its seconds, else by FLOPs. Raises
    PlanError for what cannot be."""
    plan = replace(plan, techniques=techniques)
    plan = fusion(graph, optimizer_parallel(graph, plan))
    return micro_batches(graph, save_activations(graph, recompute(graph, plan, cluster)))


def fusion(graph: Graph, plan: Plan) -> Plan:
    """The plan, if its groups can be. Raises PlanError for a pattern that matches nothing, or a parameter in two."""
    groups = plan.techniques.fusion_groups
    owner_of = {name: i.target for i in graph.input_of("parameter") for name in (i.target, *i.ties)}
    parameters = list(owner_of)
    modules = sorted({p.rpartition(".")[0] for p in parameters if "." in p})
    owner: dict[str, int] = {}
    for number, patterns in enumerate(groups):
        for pattern in patterns:
            matched = [p for p in parameters if matches(pattern, p)]
            if not matched:
                raise PlanError(
                    f"no parameter of the model is in {pattern!r}",
                    why="fusion groups name modules or parameters, with * for any characters",
                    hint=did_you_mean(pattern, [*modules, *parameters]),
                )
            for name in dict.fromkeys(owner_of[p] for p in matched):
                if owner.setdefault(name, number) != number:
                    raise PlanError(
                        f"{name} is in two fusion groups, {groups[owner[name]]} and {patterns}",
                        why="a gradient is reduced once",
                        hint="leave it in one of them",
                    )
    return plan


def micro_batches(graph: Graph, plan: Plan) -> Plan:
    """The plan with a note that names what is inexact, or what was asked for in vain."""
    count, asked = plan.techniques.pieces, plan.techniques
    if asked.gradient_accumulation_shard:
        split = asked.optimizer_parallel >= 2 or any(e.name in plan.hubs for e in graph.input_of("parameter"))
        needed = "micro_batches" if count == 1 else "" if split else "optimizer_parallel=2 or 3"
        if needed:
            plan = plan.with_notes(f"gradient_accumulation_shard changes nothing without {needed}")
    if not asked.recompute_communication and "again" not in plan.keeps.values():
        plan = plan.with_notes("recompute_communication=False changes nothing: nothing is computed again")
    if asked.prefetch != 1 and not any(e.name in plan.hubs for e in graph.input_of("parameter")):
        plan = plan.with_notes(f"prefetch={asked.prefetch} changes nothing: no weight is stored sharded")
    found = example_reducers(graph, factors_of(graph)) if count > 1 else []
    if not found:
        return plan
    names = ", ".join(f"%{n.name}" for n in found[:4]) + (
        f" and {len(found) - 4} more" if len(found) > 4 else ""
    )
    return plan.with_notes(
        f"inexact by design: {names} ({found[0].op}, {found[0].where}): their statistics are those of each of "
        f"{plan.techniques.pieces_text}, not of the batch, and so loss and gradients are not the full batch's"
    )


__all__ = ["apply"]
