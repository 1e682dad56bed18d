"""Sharding strategies of a node: a strategy gives each split letter its axes, and the layout of every port follows.

The algebra of gradients: an axis is *live* in a node when it splits one of its letters, or when an input or the
gradient of an output is partial on it. A value that is partial on an axis has a gradient that is replicated on it. An
input that is neither split nor partial on a live axis has a gradient that is partial on it. A split value has a split
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.core.layout import Cat, Dim, Item, SubDim, TensorLayout, dim_axes, show_dim
from meshwright.core.mesh import Mesh
from meshwright.errors import StrategyError
from meshwright.ops.factors import Site
from meshwright.ops.rule import must_replicate


@dataclass(frozen=True)
class Strategy:
    """The sharding of one node.

    `splits` maps letters to their sub-dims with axes. `through` maps axes to the input ports that are partial on them
    and leave the output partial (one port for each term of the rule). `grad` has the axes on which the gradients of
    the outputs are partial.
    """

    splits: tuple[tuple[str, Dim], ...] = ()
    through: tuple[tuple[str, tuple[int, ...]], ...] = ()
    grad: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{letter}={show_dim(dim)}" for letter, dim in self.splits]
        parts += [f"partial {axis} through {'+'.join(map(str, ports))}" for axis, ports in self.through]
        parts += [f"grad {'.'.join(self.grad)}"] if self.grad else []
        return " ".join(parts) or "replicated"


UNSHARDED = Strategy()


def units(tree: Dim) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the ways to split a letter once. Each is a set of sub-dims (paths), one per part of a concatenation."""
    found: list[tuple[tuple[int, ...], ...]] = []
    for place, item in enumerate(tree):
        if isinstance(item, SubDim):
            found.append(((place,),))
            continue
        options = [units(part) for part in item.parts]
        for j in range(min(map(len, options))):
            found.append(tuple((place, p, *path) for p, o in enumerate(options) for path in o[j]))
    return tuple(found)


def ways(site: Site, letter: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the ways to split a letter of a node once: its `units`, or the first one if blocks must be contiguous."""
    found = units(site.trees[letter])
    if letter not in site.rule.outer:
        return found
    return found[:1] if isinstance(site.trees[letter][0], SubDim) else ()


def split_unit(tree: Dim, unit: tuple[tuple[int, ...], ...], axis: str) -> Dim:
    """Return the tree with one more axis (the minor one) on the sub-dims of a unit."""
    result = list(tree)
    for place, item in enumerate(tree):
        inner = tuple(path[1:] for path in unit if path[0] == place)
        if not inner:
            continue
        if isinstance(item, SubDim):
            result[place] = item.on((*item.axes, axis))
        else:
            parts = list(item.parts)
            for p in range(len(parts)):
                mine = tuple(path[1:] for path in inner if path[0] == p)
                if mine:
                    parts[p] = split_unit(parts[p], mine, axis)
            result[place] = Cat(tuple(parts))
    return tuple(result)


def at_path(tree: Dim, path: tuple[int, ...]) -> SubDim:
    """Return the sub-dim at a path."""
    item = tree[path[0]]
    return item if isinstance(item, SubDim) else at_path(item.parts[path[1]], path[2:])


def fits(tree: Dim, unit: tuple[tuple[int, ...], ...], mesh: Mesh, axis: str) -> bool:
    """Return whether a unit has elements for one more axis."""
    return all(
        (sub := at_path(tree, path)).pieces >= mesh.count(sub.axes) * mesh.sizes[axis]
        and axis not in sub.axes
        for path in unit
    )


def unit_leaves(tree: Dim, unit: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the positions of a unit's sub-dims among the leaves of a letter, left to right."""
    order = list(leaf_paths(tree))
    return tuple(order.index(path) for path in unit)


def leaf_paths(tree: Dim, start: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the paths of the sub-dims of a letter, left to right."""
    for place, item in enumerate(tree):
        if isinstance(item, SubDim):
            yield (*start, place)
        else:
            for number, part in enumerate(item.parts):
                yield from leaf_paths(part, (*start, place, number))


def splittable(site: Site) -> Iterator[str]:
    """Yield the letters of a node that may be split."""
    for letter, tree in site.trees.items():
        if tree and not must_replicate(site.rule, letter) and ways(site, letter):
            yield letter


def through_ports(site: Site) -> Iterator[tuple[int, ...]]:
    """Yield the ways in which a partial sum may pass through a node: one partial port for each term of its rule."""
    if not site.rule.terms or len(site.rule.outputs) != 1:
        return
    choices: list[tuple[int, ...]] = [()]
    for term in site.rule.terms:
        choices = [(*c, p) for c in choices for p in term]
    yield from (tuple(sorted(c)) for c in choices)


@dataclass(frozen=True)
class Ports:
    """The layouts that a strategy requires of each input port and produces at each output port."""

    inputs: tuple[TensorLayout, ...]
    outputs: tuple[TensorLayout, ...]


def layouts(site: Site, strategy: Strategy) -> Ports:
    """Return the layout of every port under a strategy, with gradients (as if every value needed one).

    Raises StrategyError when a letter is split that may not be, or when a partial sum enters an operator that is not
    linear in it.
    """
    rule, splits = site.rule, dict(strategy.splits)
    axes_of = {letter: dim_axes(tree) for letter, tree in splits.items()}
    for letter in splits:
        if must_replicate(rule, letter) and axes_of[letter]:
            raise StrategyError(
                f"{letter} of {site.node.op} may not be sharded",
                why=rule.why_replicated or "each result needs all of its elements",
                where=site.node.where,
                hint="shard another letter: " + ", ".join(splittable(site)),
            )
    for letter in rule.outer.intersection(axes_of):
        first, *inner = splits[letter]
        if not isinstance(first, SubDim) or any(dim_axes((item,)) for item in inner):
            raise StrategyError(
                f"{letter} of {site.node.op} can only be split into contiguous blocks",
                why=f"{show_dim(splits[letter])} interleaves its elements, and windows reach over to the neighbours",
                where=site.node.where,
                hint="split its outermost factor, or another letter: " + ", ".join(splittable(site)),
            )
    holds, gives = rule.input_letters, rule.output_letters
    pending_in: list[set[str]] = [set() for _ in rule.inputs]
    pending_out: list[set[str]] = [set() for _ in rule.outputs]
    grad_in: list[set[str]] = [set() for _ in rule.inputs]
    for letter, axes in axes_of.items():
        for axis in axes:
            if letter not in rule.reduced_inside:
                for o, given in enumerate(gives):
                    if letter not in given:
                        pending_out[o].add(axis)
                if gives and letter not in gives[0]:
                    for term in rule.terms:
                        if not any(letter in holds[p] for p in term):
                            pending_in[term[0]].add(axis)
            for p, held in enumerate(holds):
                if letter not in held and axis not in pending_in[p]:
                    grad_in[p].add(axis)
    for axis, ports in strategy.through:
        if not rule.terms or any(len(set(term) & set(ports)) != 1 for term in rule.terms):
            raise StrategyError(
                f"a sum partial on {axis} cannot pass through {site.node.op}",
                why="the operator is not linear in it"
                if not rule.terms
                else "one factor of every term must be partial",
                where=site.node.where,
            )
        for p in range(len(rule.inputs)):
            (pending_in if p in ports else grad_in)[p].add(axis)
        for out in pending_out:
            out.add(axis)
    for axis in strategy.grad:
        for p in range(len(rule.inputs)):
            if axis not in pending_in[p] and not any(axis in axes_of.get(x, ()) for x in holds[p]):
                grad_in[p].add(axis)
    inputs: list[TensorLayout] = []
    for p, port in enumerate(rule.inputs):
        dims = tuple([site.dim(d, splits) for d in port])
        split = {a for x, axes in axes_of.items() if x in holds[p] for a in axes}
        inputs.append(TensorLayout(dims, tuple(pending_in[p]), tuple(grad_in[p] - pending_in[p] - split)))
    outputs: list[TensorLayout] = []
    for o, port in enumerate(rule.outputs):
        dims = tuple([site.dim(d, splits) for d in port])
        split = {a for x, axes in axes_of.items() if x in gives[o] for a in axes}
        outputs.append(
            TensorLayout(dims, tuple(pending_out[o]), tuple(set(strategy.grad) - pending_out[o] - split))
        )
    return Ports(tuple(inputs), tuple(outputs))


def merge(first: Strategy, second: Strategy) -> Strategy:
    """Join two strategies over different axes. Axes of the second become the minor ones."""
    splits = dict(first.splits)
    for letter, tree in second.splits:
        splits[letter] = _overlay(splits[letter], tree) if letter in splits else tree
    return Strategy(
        tuple(splits.items()),
        (*first.through, *second.through),
        tuple(dict.fromkeys((*first.grad, *second.grad))),
    )


def _overlay(tree: Dim, other: Dim) -> Dim:
    return tuple([_overlay_item(x, y) for x, y in zip(tree, other, strict=True)])


def _overlay_item(x: Item, y: Item) -> Item:
    if isinstance(x, SubDim) and isinstance(y, SubDim):
        return x.on((*x.axes, *y.axes))
    assert isinstance(x, Cat) and isinstance(y, Cat), (x, y)
    return Cat(tuple([_overlay(p, q) for p, q in zip(x.parts, y.parts, strict=True)]))


def split_axes(strategy: Strategy) -> Mapping[str, tuple[str, ...]]:
    """Return the split letters, mapped to the axes that split them."""
    return {letter: dim_axes(tree) for letter, tree in strategy.splits if dim_axes(tree)}
