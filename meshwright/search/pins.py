"""What the user pinned: cuts by module and letter, and cuts of tensors at points that annotations marked.

`mw.shard` and `mw.reshard` leave identity nodes ``meshwright.pin`` in the captured graph. Each carries a specification:
the *site* (one annotated call), its role (an input or the output of it) and the cut of every dim, as numbers
of blocks or as a device layout. Blocks become mesh axes here: dims that are one factor of the annotated
operator share their axes, the first factor takes the first axes of the mesh.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import StrategyError, did_you_mean
from meshwright.graph import Graph, Node
from meshwright.layout import TensorLayout, normalize
from meshwright.mesh import Axis, Mesh, prime_factors
from meshwright.ops.rule import dim_letters, is_whole
from meshwright.ops.strategy import Strategy, at_path, cut, fits, layouts, splittable, unit_leaves, units
from meshwright.search.options import Scene, options

PIN = "meshwright.pin.default"
Seeds = dict[str, dict[str, Strategy]]  # axis → node → single-axis strategy


@dataclass(frozen=True)
class PinSpec:
    """The specification of one marked point."""

    node: Node
    site: int
    role: str
    blocks: tuple[int, ...] | None  # number of blocks per dim
    layout: Mapping[str, Any] | None  # a device layout
    name: str  # what was annotated, for messages

    @property
    def wished(self) -> bool:
        """The mark carries a cut."""
        return self.blocks is not None or self.layout is not None


def pin_specs(graph: Graph) -> list[PinSpec]:
    """The marked points of a graph."""
    found = []
    for node in graph.nodes:
        if node.op == PIN:
            data = json.loads(node.args[1])
            blocks = tuple(data["blocks"]) if data.get("blocks") is not None else None
            found.append(
                PinSpec(node, data["site"], data["role"], blocks, data.get("layout"), data.get("name", ""))
            )
    return found


def renumber(graph: Graph) -> Graph:
    """Sites numbered in order of appearance, so that two captures of one model are equal."""
    order: dict[int, int] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == PIN:
            data = json.loads(node.args[1])
            data["site"] = order.setdefault(data["site"], len(order))
            node = replace(node, args=(node.args[0], json.dumps(data, sort_keys=True)))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def mesh_of_pins(graph: Graph) -> Mesh | None:
    """The mesh that the device layouts of a graph describe, if they agree on one."""
    matrices = {json.dumps(s.layout["mesh"], sort_keys=True) for s in pin_specs(graph) if s.layout}
    if len(matrices) != 1:
        return None
    data = json.loads(matrices.pop())
    return Mesh.of(dict(zip(data["aliases"], data["matrix"], strict=True)), order=data.get("ranks") or ())


def region(graph: Graph, specs: Iterable[PinSpec]) -> frozenset[str]:
    """The nodes of annotated calls: on a way from an input mark to the output mark of one site."""
    by_site: dict[int, list[PinSpec]] = {}
    for spec in specs:
        by_site.setdefault(spec.site, []).append(spec)
    inside: set[str] = set()
    for marks in by_site.values():
        starts = {s.node.name for s in marks if s.role == "in"}
        ends = {s.node.name for s in marks if s.role == "out"}
        ahead = _reach(graph, starts, forward=True)
        back = _reach(graph, ends, forward=False)
        inside |= (ahead & back) | starts | ends
        if not ends:
            inside |= starts
    return frozenset(inside)


def given_values(graph: Graph, specs: Iterable[PinSpec]) -> frozenset[str]:
    """What an annotated operator is to take as the user cut it: marked inputs with a wish, and what leaves
    an output mark without one (which is no wish, so it follows)."""
    found = {s.node.values[0] for s in specs if s.role == "in" and s.wished}
    return frozenset(found | {s.node.uses[0] for s in specs if s.role == "out" and not s.wished})


def _reach(graph: Graph, start: set[str], *, forward: bool) -> set[str]:
    found = set(start)
    for node in graph.nodes if forward else reversed(graph.nodes):
        if forward:
            near = (graph.producers[u].name for u in node.uses if u in graph.producers)
        else:
            near = (c.name for v in node.values for c, _ in graph.consumers[v])
        if any(n in found for n in near):
            found.add(node.name)
    return found


# ---------------------------------------------------------------- pins by module and letter


def module_seeds(scene: Scene, pins: Mapping[str, Mapping[str, Any]]) -> Seeds:
    """Seeds from ``{"blocks.*.mlp.up": {"n": "tp"}}``: every operator in a matching module that reads a parameter.

    Raises StrategyError for a pattern that matches nothing, an unknown letter, or a cut the operator cannot take.
    """
    seeds: Seeds = {}
    modules = sorted({n.module for n in scene.graph.nodes if n.module})
    parameters = {i.name for i in scene.graph.inputs if i.role == "parameter"}
    for pattern, cuts in pins.items():
        matched = [
            n for n in scene.graph.nodes if fnmatch.fnmatchcase(n.module, pattern) or f"%{n.name}" == pattern
        ]
        if not matched:
            raise StrategyError(
                f"no module of the model matches {pattern!r}",
                hint=did_you_mean(pattern, modules),
                why=f"{len(modules)} modules have operators",
            )
        chosen = [n for n in matched if parameters.intersection(n.uses)] or matched
        for letter, axes in cuts.items():
            takers = [n for n in chosen if letter in scene.site(n.name).trees]
            if not takers:
                known = {x for n in chosen for x in splittable(scene.site(n.name))}
                raise StrategyError(
                    f"no operator of {pattern!r} has a factor {letter!r}",
                    where=chosen[0].where,
                    hint=did_you_mean(letter, known) + f" ({chosen[0].op})",
                )
            names = (axes,) if isinstance(axes, str) else tuple(axes)
            run = [a for name in names for a in scene.mesh.resolve(name)]
            for node in takers:
                _cut_letter(scene, seeds, node, letter, run)
    return seeds


def _cut_letter(scene: Scene, seeds: Seeds, node: Node, letter: str, axes: Sequence[str]) -> None:
    site = scene.site(node.name)
    if is_whole(site.rule, letter):
        raise StrategyError(
            f"{letter} of {node.op} must stay whole",
            why=site.rule.why_whole or "each result needs all of its elements",
            where=node.where,
            hint="it can be cut by " + ", ".join(splittable(site)),
        )
    tree = site.trees[letter]
    unit = best_unit(scene, node, letter, axes)
    grown = tree
    for axis in axes:
        if unit is None or not fits(grown, unit, scene.mesh, axis):
            raise StrategyError(
                f"cannot cut {letter} of {node.op} over {scene.mesh.show(axes)}",
                why=f"{letter} is {TensorLayout((tree,))} and would need {scene.mesh.count(axes)} blocks",
                where=node.where,
                hint="fewer ranks on that axis, or another factor",
            )
        grown = cut(grown, unit, axis)
        seeds.setdefault(axis, {})[node.name] = Strategy(((letter, cut(tree, unit, axis)),))


def best_unit(
    scene: Scene, node: Node, letter: str, axes: Sequence[str]
) -> tuple[tuple[int, ...], ...] | None:
    """Where to cut a letter: the first place that nothing in the graph must keep whole and that has room for the axes.

    Of a fused qkv ``(3 heads 8)`` that is the heads. Without such a place, the first with room; without
    room, the first.
    """
    tree, held = scene.site(node.name).trees[letter], scene.factors.held[node.name, letter]
    found = units(tree)
    roomy = [u for u in found if min(at_path(tree, path).size for path in u) >= scene.mesh.count(axes)]
    free = [u for u in roomy if not any(held[i] for i in unit_leaves(tree, u))]
    return next(iter((*free, *roomy, *found)), None)


# ---------------------------------------------------------------- marked points


def mark_seeds(scene: Scene, specs: Sequence[PinSpec]) -> Seeds:
    """Seeds for the marked points. Raises StrategyError for cuts the operator or the mesh cannot take."""
    seeds: Seeds = {}
    by_site: dict[int, list[PinSpec]] = {}
    for spec in specs:
        by_site.setdefault(spec.site, []).append(spec)
    for marks in by_site.values():
        chosen: dict[tuple[str, int], list[str]] = {}
        groups: dict[Any, tuple[int, list[str], str]] = {}
        for spec in sorted(marks, key=lambda s: s.role != "in"):
            _check_rank(spec)
            if spec.layout is not None:
                for dim, axes in enumerate(_layout_axes(scene.mesh, spec)):
                    chosen[spec.node.name, dim] = axes
            elif spec.blocks is not None:
                _allot(scene, spec, groups, chosen)
        for spec in (m for m in marks if m.wished):
            for dim in range(len(spec.node.outputs[0].shape)):
                axes = chosen.get((spec.node.name, dim), [])
                letters = dim_letters(scene.site(spec.node.name).rule.inputs[0][dim])
                if axes and not letters:
                    raise StrategyError(
                        f"dim {dim} of {spec.name} has size 1 and cannot be cut", where=spec.node.where
                    )
                if axes:
                    _cut_letter(scene, seeds, spec.node, letters[0], axes)
            for axis in scene.mesh.sizes:
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
            f"the strategy of {spec.name} has {count} entries for a tensor of {len(shape)} dims",
            why=f"the tensor is {spec.node.outputs[0]}",
            where=spec.node.where,
            hint="one entry for each dim; 1 keeps it whole",
        )
    for dim, (blocks, n) in enumerate(zip(spec.blocks or (), shape, strict=False)):
        if blocks > n:
            raise StrategyError(
                f"cannot cut dim {dim} of {spec.name} into {blocks} blocks",
                why=f"the tensor is {spec.node.outputs[0]}: the dim has {n} elements",
                where=spec.node.where,
                hint=f"at most {n} blocks",
            )


def _layout_axes(mesh: Mesh, spec: PinSpec) -> list[list[str]]:
    assert spec.layout is not None
    data = spec.layout["mesh"]
    sizes = [p for n in data["matrix"] for p in (prime_factors(n) or (1,))]
    ranks = tuple(data.get("ranks") or range(mesh.size))
    asked = ", ".join(f"{a}={n}" for a, n in zip(data["aliases"], data["matrix"], strict=True))
    if sizes != [a.size for a in mesh.axes] or ranks != mesh.order:
        raise StrategyError(
            f"the device matrix {tuple(data['matrix'])} of {spec.name} does not fit the mesh {mesh}",
            where=spec.node.where,
            hint=f"plan with mesh=mw.Mesh.of({asked})",
        )
    run, place = {}, 0
    for alias, n in zip(data["aliases"], data["matrix"], strict=True):
        count = len(prime_factors(n) or (1,))
        run[alias] = [a.name for a in mesh.axes[place : place + count]]
        place += count
    return [[a for alias in dim for a in run[alias]] for dim in spec.layout["dims"]]


def _allot(
    scene: Scene,
    spec: PinSpec,
    groups: dict[Any, tuple[int, list[str], str]],
    chosen: dict[tuple[str, int], list[str]],
) -> None:
    """Give the dims of one mark their axes; dims that are one factor of the annotated operator share them."""
    assert spec.blocks is not None
    needed = math.prod(spec.blocks)
    if needed > scene.mesh.size:
        raise StrategyError(
            f"the strategy {spec.blocks} of {spec.name} needs {needed} ranks, there are {scene.mesh.size}",
            where=spec.node.where,
            hint="fewer cuts; a product below the number of ranks repeats the computation",
        )
    mine: set[str] = set()
    for dim, blocks in enumerate(spec.blocks):
        key = _factor(scene, spec, dim)
        known = groups.get(key) if key is not None else None
        if spec.role == "in" and known is not None and known[0] != blocks:
            raise StrategyError(
                f"the strategies of {spec.name} cut one factor in two ways",
                why=f"dim {dim} of %{spec.node.uses[0]} into {blocks}, {known[2]} into {known[0]}",
                where=spec.node.where,
                hint="a contracted dim is cut alike in both operands: ((a, b), (b, c)) for a matmul",
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
            axes = _axes_for(scene.mesh, blocks, first, taken)
            if axes is None:
                raise StrategyError(
                    f"cannot cut dim {dim} of {spec.name} into {blocks} blocks on {scene.mesh.size} ranks",
                    why=f"the mesh {scene.mesh} is {' × '.join(str(a.size) for a in scene.mesh.axes)}, and "
                    + (
                        f"{sorted(taken)} are used by other dims"
                        if taken
                        else f"no axes multiply to {blocks}"
                    ),
                    where=spec.node.where,
                    hint="a divisor of the number of ranks, and a product of all cuts that divides it",
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


PROBE = Mesh((Axis("probe", 1),), (("probe", ("probe",)),))


def _factor(scene: Scene, spec: PinSpec, dim: int) -> tuple[str, str] | None:
    """The factor of the annotated operator that a marked dim is: (node, letter), found through views and casts."""
    probe = Scene(scene.graph, scene.factors, PROBE)
    site = probe.site(spec.node.name)
    letters = dim_letters(site.rule.inputs[0][dim])
    if not letters or not units(site.trees[letters[0]]):
        return None
    tree = site.trees[letters[0]]
    start = layouts(site, Strategy(((letters[0], cut(tree, units(tree)[0], "probe")),))).outputs[0]
    state, value = normalize(start, PROBE), spec.node.values[0] if spec.role == "in" else spec.node.uses[0]
    for _ in range(32):
        near = scene.graph.consumers[value][:1] if spec.role == "in" else ()
        node, port = near[0] if near else (scene.graph.producers.get(value), -1)
        if node is None or node.op == PIN:
            return None
        rule = probe.site(node.name).rule
        for option in options(probe, node, "probe", Strategy()):
            ports = probe.ports(node, option)
            here = ports.inputs[port] if port >= 0 else ports.outputs[0]
            if option.cuts and normalize(here.forward, PROBE) == state:
                follower = rule.flattened or (len(node.uses) == 1 and bool(rule.terms))
                if not follower:
                    return node.name, option.cuts[0][0]
                onward = ports.outputs[0] if port >= 0 else ports.inputs[0]
                state = normalize(onward.forward, PROBE)
                value = node.values[0] if port >= 0 else node.uses[0]
                break
        else:
            return None
    return None
