"""``fusion`` as groups of module patterns: each names parameters of the model, and no parameter is in two groups."""

from __future__ import annotations

from meshwright.errors import PlanError, did_you_mean
from meshwright.graph import Graph
from meshwright.plan import Plan
from meshwright.techniques import matches


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
