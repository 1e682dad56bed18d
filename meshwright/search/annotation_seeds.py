"""Annotations as seeds of a search: numbers of blocks and device layouts become axes of the mesh.

Dims that are one factor of the annotated operator share their axes; the first factor takes the first axes of the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.core.graph import PIN
from meshwright.core.layout import normalize
from meshwright.core.mesh import Axis, Mesh, prime_factors
from meshwright.errors import StrategyError
from meshwright.ops.rule import dim_letters
from meshwright.ops.strategy import Strategy, layouts, split_unit, units
from meshwright.search.annotations import PinSpec, marks_of_sites, operators, primes, site_region
from meshwright.search.context import SearchContext, options
from meshwright.search.pins import Seeds, cut_letter


def mark_seeds(context: SearchContext, specs: Sequence[PinSpec]) -> Seeds:
    """Seeds for the marked points. Raises StrategyError for shardings the operator or the mesh cannot take."""
    seeds: Seeds = {}
    for marks in marks_of_sites(specs).values():
        alone = len(operators(context, site_region(context.graph, marks))) == 1
        chosen: dict[tuple[str, int], list[str]] = {}
        groups: dict[Any, tuple[int, list[str], str]] = {}
        for spec in sorted(marks, key=lambda s: s.role != "in"):
            _check_rank(spec)
            if spec.layout is not None:
                for dim, axes in enumerate(_layout_axes(context.mesh, spec)):
                    chosen[spec.node.name, dim] = axes
            elif spec.blocks is not None:
                _allot(context, spec, groups, chosen, alone=alone)
        for spec in (m for m in marks if m.constrains):
            for dim in range(len(spec.node.outputs[0].shape)):
                axes = chosen.get((spec.node.name, dim), [])
                letters = dim_letters(context.site(spec.node.name).rule.inputs[0][dim])
                if axes and not letters:
                    raise StrategyError(
                        f"the {spec.what} splits dim {dim}, which has one element",
                        why=f"the tensor is {spec.node.outputs[0]}",
                        where=spec.node.where,
                        hint="1 (or None) for that dim",
                    )
                if axes:
                    cut_letter(context, seeds, spec.node, letters[0], axes)
            for axis in context.mesh.sizes:
                seeds.setdefault(axis, {}).setdefault(spec.node.name, Strategy())
    return seeds


def _check_rank(spec: PinSpec) -> None:
    shape = spec.node.outputs[0].shape
    count = (
        len(spec.blocks)
        if spec.blocks is not None
        else len(spec.layout["dims"])
        if spec.layout
        else len(shape)
    )
    if count != len(shape):
        raise StrategyError(
            f"the {spec.what} has {count} {'entry' if count == 1 else 'entries'} for a tensor of {len(shape)} dims",
            why=f"the tensor is {spec.tensor}",
            where=spec.node.where,
            hint="one entry for each dim; 1 leaves it unsplit",
        )
    for dim, (blocks, n) in enumerate(zip(spec.blocks or (), shape, strict=False)):
        if blocks > n:
            raise StrategyError(
                f"the {spec.what} splits dim {dim} of %{spec.node.uses[0]} into {blocks} blocks",
                why=f"the tensor is {spec.node.outputs[0]}: the dim has {n} element{'s' * (n != 1)}",
                where=spec.node.where,
                hint=f"at most {n}" if n > 1 else "1",
            )


def _layout_axes(mesh: Mesh, spec: PinSpec) -> list[list[str]]:
    assert spec.layout is not None
    data = spec.layout["mesh"]
    ranks = tuple(data.get("ranks") or range(mesh.size))
    asked = ", ".join(f"{a}={n}" for a, n in zip(data["aliases"], data["matrix"], strict=True))
    order = f", order={list(ranks)}" if data.get("ranks") else ""
    if primes(data["matrix"]) != primes([a.size for a in mesh.axes]) or ranks != mesh.order:
        raise StrategyError(
            f"the device matrix {tuple(data['matrix'])} of {spec.name} does not fit the mesh {mesh}",
            why=_unlike(data, mesh, ranks),
            where=spec.node.where,
            hint=f"plan with mesh=mw.Mesh.of({asked}{order}), and use one device matrix throughout the model",
        )
    run, place, axes = {}, 0, [a.name for a in mesh.axes if a.size > 1]
    for alias, n in zip(data["aliases"], data["matrix"], strict=True):
        count = len(prime_factors(n))
        run[alias] = axes[place : place + count]
        place += count
    return [[a for alias in dim for a in run[alias]] for dim in spec.layout["dims"]]


def _unlike(data: Mapping[str, Any], mesh: Mesh, ranks: tuple[int, ...]) -> str:
    total = math.prod(data["matrix"])
    if total != mesh.size:
        return f"it has {total} ranks, the mesh has {mesh.size}"
    if ranks != mesh.order:
        return f"its ranks are in the order {list(ranks)}, those of the mesh in {list(mesh.order)}"
    return f"its dims are not those of the mesh, {' × '.join(str(a.size) for a in mesh.axes)}"


def _allot(
    context: SearchContext,
    spec: PinSpec,
    groups: dict[Any, tuple[int, list[str], str]],
    chosen: dict[tuple[str, int], list[str]],
    *,
    alone: bool,
) -> None:
    """Give the dims of one mark their axes; dims that are one factor of the annotated operator share them.

    One operator (`alone`) must have one sharding for each factor; a module or function of several moves what differs.
    """
    assert spec.blocks is not None
    needed = math.prod(spec.blocks)
    if needed > context.mesh.size:
        raise StrategyError(
            f"the {spec.what} needs {needed} ranks, there are {context.mesh.size}",
            why=f"{' · '.join(map(str, spec.blocks))} = {needed} blocks of {spec.tensor}, mesh {context.mesh}",
            where=spec.node.where,
            hint="fewer splits; a product below the number of ranks repeats the computation",
        )
    mine: set[str] = set()
    for dim, blocks in enumerate(spec.blocks):
        key = _factor(context, spec, dim)
        known = groups.get(key) if key is not None else None
        if alone and spec.role == "in" and known is not None and known[0] != blocks:
            raise StrategyError(
                f"the strategies of {spec.name} split one factor in two ways",
                why=f"dim {dim} of %{spec.node.uses[0]} into {blocks}, {known[2]} into {known[0]}",
                where=spec.node.where,
                hint="a contracted dim is split the same in both operands: ((a, b), (b, c)) for a matmul",
            )
        if blocks == 1:
            if known is None and key is not None and spec.role == "in":
                groups[key] = (1, [], f"dim {dim} of %{spec.node.uses[0]}")
            continue
        if known is not None and known[0] == blocks:
            axes = known[1]
        else:
            taken = mine | {a for k, (_, axes, _) in groups.items() if spec.role == "in" for a in axes}
            first = known[1] if known is not None else []
            axes = _axes_for(context.mesh, blocks, first, taken)
            if axes is None and not alone:  # other inputs may use the same axes for factors of their own
                axes = _axes_for(context.mesh, blocks, first, mine)
            if axes is None:
                raise StrategyError(
                    f"the {spec.what} splits dim {dim} of {spec.tensor} into {blocks} blocks, "
                    f"which {context.mesh.size} ranks cannot do",
                    why=f"the mesh {context.mesh} is {' × '.join(str(a.size) for a in context.mesh.axes)}, and "
                    + (
                        f"other dims use {context.mesh.count(taken)} of it"
                        if taken
                        else f"no part of that is {blocks}"
                    ),
                    where=spec.node.where,
                    hint=f"one of {_possible(context.mesh, taken)}; their product divides the number of ranks",
                )
            if key is not None and known is None:
                groups[key] = (blocks, axes, f"dim {dim} of %{spec.node.uses[0]}")
        mine.update(axes)
        chosen[spec.node.name, dim] = axes


def _axes_for(mesh: Mesh, blocks: int, first: list[str], taken: set[str]) -> list[str] | None:
    """The earliest axes whose sizes multiply to `blocks`, beginning with `first`."""
    free = [a for a in mesh.axes if a.name not in taken and a.name not in first and a.size > 1]
    start = first if blocks % max(mesh.count(first), 1) == 0 else []
    need = blocks // mesh.count(start)
    for count in range(len(free) + 1):
        for some in itertools.combinations(free, count):
            if math.prod(a.size for a in some) == need:
                return [*start, *(a.name for a in some)]
    return None


def _possible(mesh: Mesh, taken: Iterable[str]) -> str:
    """``1, 2, 4``: the shardings that are left."""
    left = [a.size for a in mesh.axes if a.name not in set(taken)]
    return ", ".join(
        map(
            str, sorted({math.prod(c) for n in range(len(left) + 1) for c in itertools.combinations(left, n)})
        )
    )


PROBE = Mesh((Axis("probe", 1),), (("probe", ("probe",)),))


def _factor(context: SearchContext, spec: PinSpec, dim: int) -> tuple[str, str] | None:
    """The factor of the annotated operator that a marked dim is: (node, letter), found through views and casts."""
    probe = SearchContext(context.graph, context.factors, PROBE)
    site = probe.site(spec.node.name)
    letters = dim_letters(site.rule.inputs[0][dim])
    if not letters or not units(site.trees[letters[0]]):
        return None
    tree = site.trees[letters[0]]
    start = layouts(site, Strategy(((letters[0], split_unit(tree, units(tree)[0], "probe")),))).outputs[0]
    state, value = normalize(start, PROBE), spec.node.values[0] if spec.role == "in" else spec.node.uses[0]
    for _ in range(32):
        near = context.graph.consumers[value][:1] if spec.role == "in" else ()
        node, port = near[0] if near else (context.graph.producers.get(value), -1)
        if node is None or node.op == PIN:
            return None
        rule = probe.site(node.name).rule
        for option in options(probe, node, "probe", Strategy()):
            ports = probe.ports(node, option)
            here = ports.inputs[port] if port >= 0 else ports.outputs[0]
            if option.splits and normalize(here.forward, PROBE) == state:
                follower = rule.flattened or (len(node.uses) == 1 and bool(rule.terms))
                if not follower:
                    return node.name, option.splits[0][0]
                onward = ports.outputs[0] if port >= 0 else ports.inputs[0]
                state = normalize(onward.forward, PROBE)
                value = node.values[0] if port >= 0 else node.uses[0]
                break
        else:
            return None
    return None


__all__ = ["mark_seeds"]
