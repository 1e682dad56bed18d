"""Check a plan against the rules of its graph: splits, hubs, kept values, states, stages."""

from __future__ import annotations

from meshwright.core.layout import TensorLayout, dim_axes, dim_size, show_dim, without_axes
from meshwright.errors import PlanError, did_you_mean
from meshwright.ops.factors import Factors
from meshwright.plan.file import AGAIN
from meshwright.plan.plan import Plan

KEPT_AS = ("again", "slice", "host", "slice host")


def check_shardings(plan: Plan, factors: Factors) -> None:
    """Raise PlanError unless every operator and value of the graph can be sharded as the plan says."""
    for own in plan.own:
        check_shardings(own, factors)
    for name, site in factors.sites.items():
        for letter, dim in plan.strategies[name].splits:
            tree = site.trees.get(letter)
            if tree is None or without_axes(dim, dim_axes(dim)) != tree:
                sizes = ", ".join(f"{x}={show_dim(t)}" for x, t in site.trees.items())
                raise PlanError(
                    f"the plan splits {letter}={show_dim(dim)} of %{name} ({site.node.op})",
                    why=f"its factors are {sizes}",
                    where=site.node.where,
                    hint=AGAIN,
                )
    _check_hubs(plan, factors)
    _check_keeps(plan, factors)
    _check_states(plan)
    _check_stages(plan, factors)
    for name in sorted(plan.hosts - set(factors.sites)):
        raise PlanError(f"the plan runs %{name} on the host", why="the model has no such node", hint=AGAIN)
    for name, layout in plan.inputs.items():
        shape = tuple(map(dim_size, factors.dims[name]))
        if layout.shape != shape or layout.partial:
            raise PlanError(
                f"the plan has the input %{name} as {layout}",
                why="an input is given as it is, not as terms of a sum"
                if layout.partial
                else f"its shape is {list(shape)}",
                hint=AGAIN,
            )


def _check_hubs(plan: Plan, factors: Factors) -> None:
    for name, layout in plan.hubs.items():
        if name not in factors.dims:
            raise PlanError(
                f"the plan has a hub of %{name}", why="the model has no value of this name", hint=AGAIN
            )
        shape = tuple(map(dim_size, factors.dims[name]))
        if layout.shape != shape:
            raise PlanError(
                f"the plan has the hub of %{name} as {layout}",
                why=f"its shape is {list(shape)}",
                hint=AGAIN,
            )
    for name in sorted(plan.again - set(plan.hubs)):
        raise PlanError(
            f"the plan recomputes %{name} in backward", why="it has no hub to recompute", hint=AGAIN
        )


def _check_keeps(plan: Plan, factors: Factors) -> None:
    made = {value for site in factors.sites.values() for value in site.node.values}
    for name, how in plan.keeps.items():
        if name not in made:
            raise PlanError(
                f"the plan says how %{name} is kept",
                why="no operator makes a value of this name",
                hint=AGAIN,
            )
        if how not in KEPT_AS:
            raise PlanError(
                f"the plan keeps %{name} as {how!r}",
                why="a value is kept as autograd does, or " + ", ".join(map(repr, KEPT_AS)),
                hint=did_you_mean(how, KEPT_AS),
            )


def _check_stages(plan: Plan, factors: Factors) -> None:
    for name in plan.stages:
        if name not in factors.sites:
            raise PlanError(f"the plan has a stage for %{name}", why="the model has no such node", hint=AGAIN)
    latest: dict[str, int] = {}  # value → the latest stage that it follows from
    for name, site in factors.sites.items():
        before = max((latest.get(u, 0) for u in site.node.uses), default=0)
        if plan.stages.get(name, before) < before:
            raise PlanError(
                f"the plan has %{name} in stage {plan.stages[name]}",
                why=f"it reads what is made in stage {before}",
                where=site.node.where,
                hint=AGAIN,
            )
        latest.update(dict.fromkeys(site.node.values, plan.stages.get(name, before)))
    count = plan.techniques.pipeline
    found = {*plan.stages.values()}
    wanted = {*range(count)} if count > 1 else set[int]()
    if found != wanted:
        missing = sorted(wanted - found)
        raise PlanError(
            f"the plan asks for {count} pipeline stages",
            why=f"stage {missing[0]} has no operator"
            if wanted > found
            else "its operators have other stages",
            hint=AGAIN,
        )


def _check_states(plan: Plan) -> None:
    for name, layout in plan.states.items():
        entry = plan.inputs.get(name)
        if entry is None or layout.shape != entry.shape or layout.partial or not _within(layout, entry):
            raise PlanError(
                f"the plan updates %{name} as {layout}",
                why="the model has no input of this name"
                if entry is None
                else f"it enters as {entry}: an update may be split further, and no less",
                hint=AGAIN,
            )


def _within(part: TensorLayout, full: TensorLayout) -> bool:
    """True if leaving out the axes that only `part` has gives the dims of `full`, so these axes are the minor ones."""
    more = set(part.split_axes) - set(full.split_axes)
    return tuple(without_axes(d, more) for d in part.dims) == full.dims
