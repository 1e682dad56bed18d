"""Pins of the user: shardings of the operators of modules, by letter, ``{"blocks.*.up": {"n": "tp"}}``, and of
parameters by the number of a dim, ``{"blocks.*.up.weight": {"0": "tp"}}``. ``batch`` is the letter of examples."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.graph import Graph, Input, Node
from meshwright.core.layout import Dim, show_dim
from meshwright.errors import StrategyError, a_type, did_you_mean
from meshwright.ops.batch import batch_units
from meshwright.ops.factors import Site
from meshwright.ops.rule import SIZED, dim_letters, must_replicate
from meshwright.ops.strategy import Strategy, at_path, fits, split_unit, splittable, unit_leaves, units, ways
from meshwright.search.context import SearchContext

BATCH = "batch"  # what plans are shown with where a letter counts examples
Seeds = dict[str, dict[str, Strategy]]  # axis → node → single-axis strategy


@dataclass(frozen=True)
class Pin:
    """One constraint of a pattern: a letter of these operators is sharded over a run of prime axes."""

    pattern: str
    letter: str
    axes: tuple[str, ...]
    nodes: tuple[Node, ...]


# What a weight may go through before its operator reads it: autocast casts it, experts transpose theirs.
BEFORE = {"aten._to_copy.default", "aten.permute.default"}


def module_seeds(context: SearchContext, pins: Mapping[str, Mapping[str, Any]]) -> Seeds:
    """Seeds from ``{"blocks.*.mlp.up": {"n": "tp"}}``: every operator in a matching module that reads a parameter.

    Raises StrategyError for a pattern that matches nothing, an unknown letter, or a sharding the operator cannot take.
    """
    seeds: Seeds = {}
    for pin in _resolved(context, pins):
        for node in pin.nodes:
            cut_letter(context, seeds, node, pin.letter, pin.axes)
    return seeds


def overlaps(context: SearchContext, pins: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note for every two patterns that pin different factors of one operator: it takes both.

    Raises StrategyError where they pin the same factor differently, and as `module_seeds` does.
    """
    said: dict[str, list[Pin]] = {}
    found: dict[tuple[str, str], tuple[Node, Pin, Pin]] = {}
    for pin in _resolved(context, pins):
        for node in pin.nodes:
            for other in said.setdefault(node.name, []):
                if other.pattern == pin.pattern:
                    continue
                if other.letter != pin.letter:
                    found.setdefault((other.pattern, pin.pattern), (node, other, pin))
                elif other.axes != pin.axes:
                    both = (
                        f"{p.pattern!r} splits {p.letter} over {context.mesh.show(p.axes)}"
                        for p in (other, pin)
                    )
                    raise StrategyError(
                        f"two pins split {pin.letter} of {node.op} in {node.module or f'%{node.name}'} differently",
                        why=", ".join(both),
                        where=node.where,
                        hint="patterns that do not overlap, or one pin with all the axes of the factor",
                    )
            said[node.name].append(pin)
    return [
        f"the pins of {one.pattern!r} and {two.pattern!r} both hold for {node.module or f'%{node.name}'}: "
        f"{one.letter} over {context.mesh.show(one.axes)} and {two.letter} over {context.mesh.show(two.axes)}"
        for node, one, two in found.values()
    ]


def _resolved(context: SearchContext, pins: Mapping[str, Mapping[str, Any]]) -> Iterator[Pin]:
    """Each constraint with the operators that it is for. Raises StrategyError."""
    check_pins(pins)
    modules = sorted({n.module for n in context.graph.nodes if n.module})
    parameters = {i.name for i in context.graph.inputs if i.role == "parameter"}
    for node in context.graph.nodes:
        if node.op in BEFORE and parameters.intersection(node.uses):
            parameters.update(node.values)
    for pattern, splits in pins.items():
        matched = [
            n
            for n in context.graph.nodes
            if fnmatch.fnmatchcase(n.module, pattern) or f"%{n.name}" == pattern
        ]
        named = () if matched else _parameters(context.graph, pattern)
        if not matched and not named:
            names = sorted(
                target for i in context.graph.input_of("parameter") for target in (i.target, *i.ties)
            )
            raise StrategyError(
                f"no module of the model matches {pattern!r}, nor does a parameter",
                hint=did_you_mean(pattern, [*modules, *names]),
                why=f"{len(modules)} modules have operators, and there are {len(names)} parameters",
            )
        for entry in named:
            yield from _of_parameter(context, pattern, entry, splits)
        if named:
            continue
        readers = [n for n in matched if parameters.intersection(n.uses)]
        chosen = [n for n in readers if n.op not in BEFORE] or readers or matched
        for letter, axes in splits.items():
            takers: dict[str, list[Node]] = {}
            for nodes in (chosen, readers):
                for node in nodes if not takers else ():
                    if own := _letter(context, node, letter):
                        takers.setdefault(own, []).append(node)
            if not takers:
                site = context.site(chosen[0].name)
                raise StrategyError(
                    f"no operator of {pattern!r} has a factor {letter!r}",
                    why=f"{chosen[0].op} has {_letters_text(site)}",
                    where=chosen[0].where,
                    hint=did_you_mean(str(letter), {*splittable(site), BATCH}),
                )
            for own, nodes in takers.items():
                yield Pin(pattern, own, _run(context, pattern, letter, axes, nodes[0]), tuple(nodes))


def _letter(context: SearchContext, node: Node, constraint: str) -> str:
    """The letter of an operator that a constraint names, if it has one: ``batch``, as plans are shown, is the one that
    counts examples."""
    site = context.site(node.name)
    if constraint in site.trees or constraint != BATCH:
        return constraint if constraint in site.trees else ""
    return next((letter for letter, _ in batch_units(site, context.factors)), "")


def _run(
    context: SearchContext, pattern: str, what: str, axes: str | Sequence[str], taker: Node
) -> tuple[str, ...]:
    """The prime axes that a constraint names. Raises StrategyError where one is named twice."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    run = tuple(a for name in names for a in context.mesh.resolve(name))
    if len(set(run)) != len(run):
        raise StrategyError(
            f"the pin of {pattern!r} uses an axis twice for {what}",
            why=f"{names} is {', '.join(run)} on the mesh {context.mesh}",
            where=taker.where,
            hint="name each axis once",
        )
    return run


def _parameters(graph: Graph, pattern: str) -> tuple[Input, ...]:
    """The parameters one of whose names matches."""
    return tuple(
        entry
        for entry in graph.input_of("parameter")
        if any(fnmatch.fnmatchcase(target, pattern) for target in (entry.target, *entry.ties))
    )


def _of_parameter(
    context: SearchContext, pattern: str, entry: Input, splits: Mapping[str, Any]
) -> Iterator[Pin]:
    """The constraints on a parameter: of each operator that reads it, the factor that the dim is. Raises
    StrategyError."""
    rank = len(entry.type.shape)
    for dim, axes in splits.items():
        if not str(dim).isdigit() or int(dim) >= rank:
            raise StrategyError(
                f"the pin of {pattern!r} splits {dim!r} of a parameter",
                why=f"{entry.target} is {entry.type}: its dims are {', '.join(map(str, range(rank))) or 'none'}",
                hint='{"blocks.*.up.weight": {"0": "tp"}} splits the first dim; letters are of modules: '
                '{"blocks.*.up": {"n": "tp"}}',
            )
        for node, port in context.graph.consumers[entry.name]:
            site = context.site(node.name)
            found = dim_letters(site.rule.inputs[port][int(dim)])
            letter = next((x for x in found if x in {*splittable(site)}), "")
            if not letter:
                raise StrategyError(
                    f"dim {dim} of {entry.target} cannot be split",
                    why=f"{node.op} reads it, and has {_letters_text(site)}",
                    where=node.where,
                    hint="another dim, or none",
                )
            yield Pin(pattern, letter, _run(context, pattern, f"dim {dim}", axes, node), (node,))


def pinned_kinds(graph: Graph, pins: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Node → the patterns that match it: layers that are pinned differently are of different kinds."""
    known: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[str, ...]] = {}
    named = {pattern[1:] for pattern in pins if pattern.startswith("%")}
    inputs = {entry.name: p for p in pins for entry in _parameters(graph, p)} if pins else {}
    for node in graph.nodes if pins else ():
        matched = known.get(node.module)
        if matched is None:
            matched = tuple(p for p in pins if fnmatch.fnmatchcase(node.module, p))
            known[node.module] = matched
        if node.name in named:
            matched = (*matched, f"%{node.name}")
        matched = (*matched, *(inputs[use] for use in node.uses if use in inputs))
        if matched:
            found[node.name] = matched
    return found


def check_pins(pins: Any) -> None:
    shape = '{"blocks.*.up": {"n": "tp"}}'
    if not isinstance(pins, Mapping):
        raise StrategyError(
            f"pins={pins!r} is {a_type(pins)}",
            why="pins map patterns of module names to factors, and factors to axes",
            hint=f"pins={shape}",
        )
    for pattern, splits in pins.items():
        # A dim of a parameter may be named by its number.
        names = [pattern, *(k for k in (splits if isinstance(splits, Mapping) else ()) if type(k) is not int)]
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise StrategyError(
                f"pins={pins!r:.80} has {wrong[0]!r} where a name is expected",
                why=f"it is {a_type(wrong[0])}; module patterns, factors and dim numbers are strings",
                hint=f'{shape}, or {{"blocks.*.up.weight": {{"0": "tp"}}}}',
            )
        if not isinstance(splits, Mapping):
            raise StrategyError(
                f"the pin of {pattern!r} is {splits!r}",
                why="a pin says which factor is split over which axis",
                hint=shape,
            )
        for letter, axes in splits.items():
            names = (axes,) if isinstance(axes, str) else axes
            if not isinstance(names, Sequence) or not all(isinstance(a, str) for a in names):
                raise StrategyError(
                    f"the pin of {pattern!r} splits {letter} over {axes!r}",
                    why="a factor is split over mesh axes, given by name: one, or a tuple of them",
                    hint=f'{shape}, or {{"n": ("dp", "tp")}}; the mesh says how many blocks that is',
                )


def _letters_text(site: Site) -> str:
    """``d0=8, n=96, s=12 (kept full)``: the factors of a node with their sizes."""
    words = (
        f"{x}={n}" + (" (kept full)" if must_replicate(site.rule, x) else "")
        for x, n in site.rule.sizes.items()
        if x in site.trees and not x.startswith(SIZED)
    )
    return ", ".join(words) or "no factors"


def cut_letter(context: SearchContext, seeds: Seeds, node: Node, letter: str, axes: Sequence[str]) -> None:
    """Seeds that shard a letter of a node over axes. Raises StrategyError where it cannot be."""
    site = context.site(node.name)
    if must_replicate(site.rule, letter):
        raise StrategyError(
            f"{letter} of {node.op} may not be sharded",
            why=site.rule.why_replicated or "each result needs all of its elements",
            where=node.where,
            hint="it can be split by " + (", ".join(splittable(site)) or "nothing"),
        )
    for axis in axes:
        before = seeds.get(axis, {}).get(node.name, Strategy())
        other = next((x for x, _ in before.splits if x != letter), None)
        if other is not None:
            raise StrategyError(
                f"the axis {context.mesh.show((axis,))!r} is used twice in {node.op}, for {other} and for {letter}",
                why="an axis can split one factor of an operator",
                where=node.where,
                hint="use another axis for one of them",
            )
    tree = site.trees[letter]
    unit = best_unit(context, node, letter, axes)
    grown = tree
    for axis in axes:
        if unit is None or not fits(grown, unit, context.mesh, axis):
            raise StrategyError(
                f"cannot split {letter} of {node.op} over {context.mesh.show(axes)}",
                why=f"{letter} is {show_dim(tree)} and would need {context.mesh.count(axes)} blocks",
                where=node.where,
                hint=f"at most {_room(tree)} ranks on that axis, or another factor: {_letters_text(site)}",
            )
        grown = split_unit(grown, unit, axis)
        seeds.setdefault(axis, {})[node.name] = Strategy(((letter, split_unit(tree, unit, axis)),))


def _room(tree: Dim) -> int:
    """The largest number of blocks a letter can be split into."""
    return max((min(at_path(tree, path).size for path in u) for u in units(tree)), default=1)


def best_unit(
    context: SearchContext, node: Node, letter: str, axes: Sequence[str]
) -> tuple[tuple[int, ...], ...] | None:
    """Where to shard a letter: the first place that nothing in the graph must keep replicated and that has room for the
    axes.

    Of a fused qkv ``(3 heads 8)`` that is the heads. Without such a place, the first with room; without
    room, the first.
    """
    site, held = context.site(node.name), context.factors.unsharded[node.name, letter]
    tree, found = site.trees[letter], ways(site, letter)
    roomy = [u for u in found if min(at_path(tree, path).size for path in u) >= context.mesh.count(axes)]
    free = [u for u in roomy if not any(held[i] for i in unit_leaves(tree, u))]
    return next(iter((*free, *roomy, *found)), None)
