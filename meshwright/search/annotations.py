"""Checks that an annotated operator can take its inputs as the user sharded them: raises where it cannot, remarks where
it does not.

One annotated operator (`mw.shard(torch.softmax, …)`) has a strategy that means just this operator, so a sharding of
something that it needs replicated is a mistake. An annotated module or a function of several operators is given
layouts for its inputs; what is inside may want others, and then values move, which the plan says.

What the user marked inside the model: `mw.shard` and `mw.reshard` leave identity nodes ``meshwright.pin``.

Each carries a specification: the *site* (one annotated call), its role (an input or the output of it) and the sharding
of every dim, as numbers of blocks or as a device layout. Blocks become mesh axes here: dims that are one factor of the
annotated operator share their axes, the first factor takes the first axes of the mesh."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.graph import PIN, Graph, Node
from meshwright.core.layout import TensorLayout, dim_axes, normalize, only_axes
from meshwright.core.mesh import Axis, Mesh, prime_factors
from meshwright.errors import StrategyError
from meshwright.ops.factors import Site
from meshwright.ops.rule import RuleDim, dim_letters, must_replicate
from meshwright.ops.strategy import UNSHARDED, Strategy, layouts, merge, split_unit, splittable, units
from meshwright.search.context import SearchContext, options
from meshwright.search.pins import Seeds, cut_letter


def check_annotated(
    context: SearchContext, specs: Iterable[PinSpec], assignment: Mapping[str, Strategy]
) -> list[str]:
    """Notes on annotated inputs that move before they are used.

    Raises StrategyError where one operator was to shard what it must keep replicated.
    """
    notes: list[str] = []
    for marks in marks_of_sites(specs).values():
        inside = site_region(context.graph, marks)
        alone = len(operators(context, inside)) == 1
        for spec in (m for m in marks if m.role == "in" and m.constrains):
            for node, port in _takers(context.graph, spec.node, inside):
                if alone:
                    _check_whole(context, spec, node, port, assignment)
                moved = _move(context, spec.node, node, port, assignment)
                if moved:
                    notes.append(f"{spec.what}: {moved} ({spec.node.where})")
    return list(dict.fromkeys(notes))


def _takers(graph: Graph, mark: Node, inside: frozenset[str]) -> Iterator[tuple[Node, int]]:
    return ((c, p) for c, p in graph.consumers[mark.values[0]] if c.op != PIN and c.name in inside)


def _check_whole(
    context: SearchContext, spec: PinSpec, node: Node, port: int, assignment: Mapping[str, Strategy]
) -> None:
    site = context.site(node.name)
    (have,) = context.ports(spec.node, assignment[spec.node.name]).outputs
    for dim, (given, letters) in enumerate(zip(have.dims, site.rule.inputs[port], strict=True)):
        held = [x for x in dim_letters(letters) if must_replicate(site.rule, x)]
        axes = dim_axes(given)
        if axes and held and not _takes(context, node, port, have, axes):
            raise StrategyError(
                f"the {spec.what} splits dim {dim} of {spec.node.outputs[0]} into {context.mesh.count(axes)} blocks, "
                f"which {node.op} must keep whole",
                why=site.rule.why_replicated or _why(site, letters),
                where=spec.node.where,
                hint=f'mw.rule({node.op.removesuffix(".default")!r}, "…") says how it can be split, or 1 for that dim'
                if site.rule.why_replicated.startswith("no rule is known")
                else "1 for that dim; it can be split by " + (", ".join(splittable(site)) or "nothing"),
            )


def _takes(context: SearchContext, node: Node, port: int, have: TensorLayout, axes: Iterable[str]) -> bool:
    """True if a strategy of the node gives a port these splits. Of a dim of several letters, some may be replicated
    (the channels of a group, the rows of a window) while others are split."""
    fixed, split = UNSHARDED, []
    for axis in axes:
        split.append(axis)
        wanted = normalize(only_axes(have.forward, split), context.mesh)
        for option in options(context, node, axis, fixed):
            grown = merge(fixed, option)
            found = layouts(context.site(node.name), grown).inputs[port].forward
            if option.splits and normalize(found, context.mesh) == wanted:
                fixed = grown
                break
        else:
            return False
    return True


def _why(site: Site, dim: RuleDim) -> str:
    """Describe what of a dim can be split: ``the dim is 4 runs of 2 elements, each of which stays unsplit``."""
    sizes = [site.rule.sizes[x] for x in dim_letters(dim)]
    runs = math.prod(
        n for x, n in zip(dim_letters(dim), sizes, strict=True) if not must_replicate(site.rule, x)
    )
    if runs == 1:
        return "each result needs all of its elements"
    return f"the dim is {runs} runs of {math.prod(sizes) // runs} elements, each of which stays unsplit"


def _move(
    context: SearchContext, mark: Node, node: Node, port: int, assignment: Mapping[str, Strategy]
) -> str:
    (have,) = context.ports(mark, assignment[mark.name]).outputs
    want = context.ports(node, assignment[node.name]).inputs[port]
    if normalize(have.forward, context.mesh) == normalize(want.forward, context.mesh):
        return ""
    return f"%{mark.uses[0]} is {have.forward} as annotated, {node.op} takes it as {want.forward}, so it is moved"


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
    def constrains(self) -> bool:
        """The mark carries a sharding."""
        return self.blocks is not None or self.layout is not None

    @property
    def tensor(self) -> str:
        """The sharded tensor, for messages: ``%w: f32[8, 4]``."""
        return f"%{self.node.uses[0]}: {self.node.outputs[0]}"

    @property
    def what(self) -> str:
        """The annotation, for messages."""
        return (
            f"layout of {self.name}" if self.name == "mw.reshard" else f"{self.role}_strategy of {self.name}"
        )


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
    """Sites numbered in order of appearance, so that two captures of one model are equal; a mark's own line becomes
    that of its node (torch.export remembers lines of `forward` methods only)."""
    order: dict[int, int] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == PIN:
            data = json.loads(node.args[1])
            data["site"] = order.setdefault(data["site"], len(order))
            where = data.pop("where", "") or node.source
            node = replace(node, args=(node.args[0], json.dumps(data, sort_keys=True)), source=where)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def mesh_of_pins(graph: Graph) -> Mesh | None:
    """The mesh that the device layouts of a graph describe, if they agree on one."""
    found = {json.dumps(s.layout["mesh"], sort_keys=True): s for s in pin_specs(graph) if s.layout}
    if not found:
        return None
    shapes = [json.loads(m) for m in found]
    data = shapes[0]
    if len(shapes) > 1:
        # (2, 4) and (2, 2, 2) are names for runs of the same axes.
        if len({(_primes(m["matrix"]), tuple(m.get("ranks") or ())) for m in shapes}) == 1:
            return Mesh.of(ranks=math.prod(data["matrix"]), order=data.get("ranks") or ())
        raise StrategyError(
            f"the layouts of the model describe {len(shapes)} meshes",
            why="; ".join(
                f"{tuple(m['matrix'])} in the {s.what}" for m, s in zip(shapes, found.values(), strict=True)
            ),
            where=" and ".join(dict.fromkeys(s.node.where for s in found.values())),
            hint="matrices whose dims multiply to the same prime factors in the same order, as (2, 4) and (2, 2, 2)",
        )
    return Mesh.of(dict(zip(data["aliases"], data["matrix"], strict=True)), order=data.get("ranks") or ())


def region(graph: Graph, specs: Iterable[PinSpec]) -> frozenset[str]:
    """The nodes of annotated calls: on a way from an input mark to the output mark of one site."""
    regions = [site_region(graph, marks) for marks in marks_of_sites(specs).values()]
    return frozenset().union(*regions)


def site_region(graph: Graph, marks: Iterable[PinSpec]) -> frozenset[str]:
    """The nodes of one annotated call, marks included."""
    starts = {s.node.name for s in marks if s.role == "in"}
    ends = {s.node.name for s in marks if s.role == "out"}
    between = _reach(graph, starts, forward=True) & _reach(graph, ends, forward=False)
    return frozenset(between | starts | ends)


def marks_of_sites(specs: Iterable[PinSpec]) -> dict[int, list[PinSpec]]:
    """The marked points of each annotated call."""
    found: dict[int, list[PinSpec]] = {}
    for spec in specs:
        found.setdefault(spec.site, []).append(spec)
    return found


def operators(context: SearchContext, names: Iterable[str]) -> list[str]:
    """The nodes among these that do more than hand one tensor on: no marks, views or casts."""
    inside = set(names)
    return [
        n.name
        for n in context.graph.nodes
        if n.name in inside
        and n.op != PIN
        and not (
            context.site(n.name).rule.flattened or (len(n.uses) == 1 and context.site(n.name).rule.terms)
        )
    ]


def given_values(graph: Graph, specs: Iterable[PinSpec]) -> frozenset[str]:
    """List the values that an annotated operator takes as the user sharded them: marked inputs with an annotation, and
    the operands of an output mark without one (which constrains nothing, so it follows)."""
    found = {s.node.values[0] for s in specs if s.role == "in" and s.constrains}
    return frozenset(found | {s.node.uses[0] for s in specs if s.role == "out" and not s.constrains})


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


# ---------------------------------------------------------------- from blocks to axes


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
            hint="one entry for each dim; 1 keeps it whole",
        )
    for dim, (blocks, n) in enumerate(zip(spec.blocks or (), shape, strict=False)):
        if blocks > n:
            raise StrategyError(
                f"the {spec.what} splits dim {dim} of %{spec.node.uses[0]} into {blocks} blocks",
                why=f"the tensor is {spec.node.outputs[0]}: the dim has {n} element{'s' * (n != 1)}",
                where=spec.node.where,
                hint=f"at most {n}" if n > 1 else "1",
            )


def _primes(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(p for n in sizes for p in prime_factors(n))


def _layout_axes(mesh: Mesh, spec: PinSpec) -> list[list[str]]:
    assert spec.layout is not None
    data = spec.layout["mesh"]
    ranks = tuple(data.get("ranks") or range(mesh.size))
    asked = ", ".join(f"{a}={n}" for a, n in zip(data["aliases"], data["matrix"], strict=True))
    order = f", order={list(ranks)}" if data.get("ranks") else ""
    if _primes(data["matrix"]) != _primes([a.size for a in mesh.axes]) or ranks != mesh.order:
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
