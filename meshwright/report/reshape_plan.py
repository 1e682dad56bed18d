"""A plan's shardings on more or fewer ranks: every layout for an axis of another size.

Each named axis keeps the prime axes that it has in common with the old one, from the fastest on. The rest of the new
axis replaces the rest of the old one, wherever that splits something. So twice as many nodes split into twice as many
blocks, and half as many into half.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from meshwright.core.graph import Graph
from meshwright.core.layout import Dim, SubDim, TensorLayout, dim_axes, map_leaves
from meshwright.core.mesh import Mesh
from meshwright.errors import PlanError
from meshwright.ops.strategy import Strategy
from meshwright.plan.plan import Plan


@dataclass(frozen=True)
class _Run:
    """`old` prime axes of a named axis, slowest first, and the `new` ones that replace them.

    An axis that both have in common changes its name at most, and is a run of one.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]


def on_other_ranks(plan: Plan, graph: Graph, mesh: Mesh, world: Mesh | None = None) -> Plan:
    """Return the plan with the same shardings on `mesh`, whose named axes are the plan's with other sizes.

    `world` is the mesh of all ranks, if the plan has stages. Claims and prices are dropped, since they belong to other
    ranks. Raises PlanError if a dim has fewer elements than blocks, or if replaced axes are not used together.
    """
    if plan.techniques.shard_size:
        raise PlanError(
            f"shard_size={plan.techniques.shard_size} says over how many of these ranks states are split",
            hint="make a new plan for these ranks",
        )
    if plan.own or plan.mesh.order != tuple(range(plan.mesh.size)):
        raise PlanError(
            "a plan whose ranks have meshes or an order of their own stays on its ranks",
            hint="make a new plan for these ranks",
        )
    plan = plan.unfolded(graph)
    runs = _runs(plan.mesh, mesh)

    def laid(layouts: Mapping[str, TensorLayout]) -> dict[str, TensorLayout]:
        return {name: moved(layout) for name, layout in layouts.items()}

    @functools.cache
    def moved(layout: TensorLayout) -> TensorLayout:
        dims = tuple(_dim(dim, runs, mesh) for dim in layout.dims)
        return TensorLayout(dims, _each(layout.partial, runs), _each(layout.grad, runs))

    @functools.cache
    def cut(strategy: Strategy) -> Strategy:
        splits = ((letter, dim, _dim(dim, runs, mesh)) for letter, dim in strategy.splits)
        return Strategy(
            tuple((letter, new) for letter, old, new in splits if dim_axes(new) or not dim_axes(old)),
            tuple(
                (axis, ports)
                for ports in dict.fromkeys(ports for _, ports in strategy.through)
                for axis in _each(tuple(a for a, p in strategy.through if p == ports), runs)
            ),
            _each(strategy.grad, runs),
        )

    inputs = laid(plan.inputs)
    hubs = {name: hub for name, hub in laid(plan.hubs).items() if hub != inputs.get(name)}
    return replace(
        plan,
        mesh=mesh,
        world=world,
        prices=None,
        strategies={name: cut(strategy) for name, strategy in plan.strategies.items()},
        inputs=inputs,
        hubs=hubs,
        again=plan.again & hubs.keys(),
        states=laid(plan.states),
        claims={},
        nexts={},
        notes=(),
    )


def _runs(old: Mesh, new: Mesh) -> list[_Run]:
    """Return the replacement of each prime axis of the old mesh."""
    found: list[_Run] = []
    names = dict(new.names)
    for name, run in old.names:
        if name not in names:
            raise PlanError(f"the mesh {new} has no axis {name!r}", why=f"the plan is for {old}")
        before = [axis for axis in run if old.sizes[axis] > 1]
        after = [axis for axis in names[name] if new.sizes[axis] > 1]
        while before and after and old.sizes[before[-1]] == new.sizes[after[-1]]:
            found.append(_Run((before.pop(),), (after.pop(),)))
        if after and old.count(run) == 1:
            raise PlanError(
                f"the plan splits nothing over {name!r}, which had one rank",
                why=f"{new.count(after)} ranks there would all do the same",
                hint="make a new plan for these ranks",
            )
        if after and not before:
            # More ranks: the slowest remaining axis takes them, and splits further.
            last = found.pop()
            before, after = [*last.old], [*after, *last.new]
        if before:
            found.append(_Run(tuple(before), tuple(after)))
    return found


def _dim(dim: Dim, runs: Iterable[_Run], mesh: Mesh) -> Dim:
    return map_leaves(dim, lambda leaf: _leaf(leaf, runs, mesh))


def _leaf(leaf: SubDim, runs: Iterable[_Run], mesh: Mesh) -> SubDim:
    if not leaf.axes:
        return leaf
    axes = _in_order(leaf.axes, runs)
    if mesh.count(axes) > leaf.pieces:
        raise PlanError(
            f"{leaf.pieces} elements cannot be split over {mesh.show(axes)}",
            why=f"they are fewer than {mesh.count(axes)} ranks",
            hint="make a new plan for these ranks",
        )
    return leaf.on(axes)


def _in_order(axes: tuple[str, ...], runs: Iterable[_Run]) -> tuple[str, ...]:
    """Return split axes, the slowest first, with each run replaced."""
    found, left = list[str](), list(axes)
    of = {axis: run for run in runs for axis in run.old}
    while left:
        run = of[left[0]]
        if not run.new:
            left.pop(0)
        elif tuple(left[: len(run.old)]) == run.old:
            found += run.new
            left = left[len(run.old) :]
        else:
            raise _apart(run, axes)
    return tuple(found)


def _each(axes: tuple[str, ...], runs: Iterable[_Run]) -> tuple[str, ...]:
    """Return the axes of a partial sum with each run replaced; their order has no meaning."""
    found = list[str]()
    for run in runs:
        here = [axis for axis in axes if axis in run.old]
        if here and run.new:
            if len(here) < len(run.old):
                raise _apart(run, axes)
            found += run.new
    return tuple(sorted(found))


def _apart(run: _Run, axes: tuple[str, ...]) -> PlanError:
    return PlanError(
        f"{', '.join(run.old)} become {', '.join(run.new)} on the other ranks",
        why=f"the plan has some of them apart, in {', '.join(axes)}",
        hint="make a new plan for these ranks",
    )
