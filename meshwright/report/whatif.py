"""One thing changed in a plan: another shape, another storage of parameters.

Each returns a plan that is priced as any other; what cannot be changed raises PlanError that says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright.errors import PlanError
from meshwright.graph import Graph
from meshwright.layout import (
    Dim,
    SubDim,
    TensorLayout,
    dim_axes,
    leaves,
    map_leaves,
    show_dim,
    without_axes,
)
from meshwright.mesh import Mesh
from meshwright.ops.factors import Factors
from meshwright.ops.strategy import Strategy
from meshwright.plan import Plan, fingerprint
from meshwright.search.finish import input_layouts
from meshwright.search.options import Scene

LEVELS = {
    0: "every rank keeps all optimizer states of its parameters",
    1: "optimizer states are split over the ranks that hold the same parameter",
    2: "their gradients too",
    3: "the parameters too, gathered again in backward",
}


# ---------------------------------------------------------------- another shape


def transferred(plan: Plan, graph: Graph, factors: Factors, what: str) -> Plan:
    """The plan for the same model captured in another shape: the same cuts of dims of other sizes.

    `what` names the change for messages. Raises PlanError when the operators are others, or a dim has too few elements.
    """
    plan = plan.unfolded(graph)
    names = [n.name for n in graph.nodes]
    if names != list(plan.strategies) or {i.name for i in graph.inputs} != set(plan.inputs):
        more = len(set(names) ^ set(plan.strategies))
        raise PlanError(
            f"with {what} the model is another program",
            why=f"{more} operators differ" if more else "its operators come in another order",
            hint="plan it anew: meshwright plan MODEL with the shape",
        )
    strategies = {
        name: _resized(
            s, factors.sites[name].trees, plan.mesh, f"{what}: %{name} ({factors.sites[name].node.op})"
        )
        for name, s in plan.strategies.items()
    }

    def laid(name: str, layout: TensorLayout) -> TensorLayout:
        dims = tuple(
            _dim(new, old, plan.mesh, f"{what}: %{name}")
            for new, old in zip(factors.dims[name], layout.dims, strict=True)
        )
        return replace(layout, dims=dims)

    return replace(
        plan,
        fingerprint=fingerprint(graph),
        strategies=strategies,
        inputs={name: laid(name, layout) for name, layout in plan.inputs.items()},
        hubs={name: laid(name, layout) for name, layout in plan.hubs.items()},
        claims={},
        nexts={},
    )


def _resized(strategy: Strategy, trees: Mapping[str, Dim], mesh: Mesh, where: str) -> Strategy:
    cuts = tuple((letter, _dim(trees.get(letter, ()), dim, mesh, where)) for letter, dim in strategy.cuts)
    return replace(strategy, cuts=cuts)


def _dim(new: Dim, old: Dim, mesh: Mesh, where: str) -> Dim:
    """The axes of a dim on another of the same structure."""
    axes = [leaf.axes for leaf in leaves(old)]
    if without_axes(old, dim_axes(old)) == new:
        return old
    if len(axes) != len(list(leaves(new))):
        if not any(axes):
            return new
        raise PlanError(
            f"{where} is cut as {show_dim(old)}, and is now {show_dim(new)}",
            why="its sub-dims are others",
            hint="plan it anew: meshwright plan MODEL with the shape",
        )
    order = iter(axes)

    def put(leaf: SubDim) -> SubDim:
        mine = next(order)
        if leaf.size < mesh.count(mine):
            raise PlanError(
                f"{where} cannot be cut over {mesh.show(mine)}",
                why=f"{leaf.size} elements are fewer than {mesh.count(mine)} ranks",
                hint="a larger shape, or a plan of its own",
            )
        return SubDim(leaf.size, mine)

    return map_leaves(new, put)


# ---------------------------------------------------------------- another storage


def stored(plan: Plan, graph: Graph, factors: Factors, level: int) -> tuple[Plan, str]:
    """The plan with parameters stored by a level of optimizer parallel (0 to 3), and a remark.

    Split storage takes the axes on which a parameter's gradient is a sum (they hold the same parameter), as the minor
    axes of the first of its sub-dims that divides, else of the first that has room; a parameter without room stays.
    """
    if level not in LEVELS:
        raise PlanError(
            f"optimizer_parallel={level} is no level", hint="; ".join(f"{k}: {v}" for k, v in LEVELS.items())
        )
    plan = plan.unfolded(graph)
    inputs, hubs = dict(plan.inputs), dict(plan.hubs)
    again = set(plan.again)
    used = input_layouts(Scene(graph, factors, plan.mesh), plan.strategies)
    full = 0
    trained = [i for i in graph.input_of("parameter") if i.needs_grad]
    for entry in trained:
        use = hubs.pop(entry.name, used[entry.name])
        again.discard(entry.name)
        inputs[entry.name] = use
        axes = plan.mesh.sort(a for a in use.grad if plan.mesh.sizes[a] > 1)
        cut = _stored(use, axes, plan.mesh) if level and axes else None
        if cut is not None:
            inputs[entry.name], hubs[entry.name] = cut, use
            if level == 3:
                again.add(entry.name)
        full += cut is None
    remark = ""
    if level == 1:
        remark = "as 2: a gradient is reduced straight to the part that is stored"
    elif level and full:
        remark = f"{full} of {len(trained)} parameters have no dim to split and stay"
    return replace(plan, inputs=inputs, hubs=hubs, again=frozenset(again), claims={}, nexts={}), remark


def _stored(use: TensorLayout, axes: Iterable[str], mesh: Mesh) -> TensorLayout | None:
    """A layout with more axes as the minor ones of one sub-dim, its gradient reduced on them."""
    axes = tuple(axes)
    rooms: list[tuple[bool, int, int]] = []  # (leaves a rest, dim, leaf)
    for d, dim in enumerate(use.dims):
        for number, leaf in enumerate(leaves(dim)):
            ranks = mesh.count((*leaf.axes, *axes))
            if leaf.size >= ranks:
                rooms.append((leaf.size % ranks != 0, d, number))
    if not rooms:
        return None
    _, at, place = min(rooms)
    count = iter(range(1 << 30))

    def put(leaf: SubDim) -> SubDim:
        return SubDim(leaf.size, (*leaf.axes, *axes)) if next(count) == place else leaf

    dims = tuple(map_leaves(dim, put) if d == at else dim for d, dim in enumerate(use.dims))
    return TensorLayout(dims, use.pending, tuple(a for a in use.grad if a not in axes))
