"""Checks that an annotated operator can take its inputs as the user sharded them: raises where it cannot, remarks where
it does not.

One annotated operator (`mw.shard(torch.softmax, …)`) has a strategy that means just this operator, so a sharding of
something that it needs replicated is a mistake. An annotated module or a function of several operators is given
layouts for its inputs; what is inside may want others, and then values move, which the plan says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from meshwright.core.graph import PIN, Graph, Node
from meshwright.core.layout import TensorLayout, dim_axes, normalize, only_axes
from meshwright.errors import StrategyError
from meshwright.ops.factors import Site
from meshwright.ops.rule import RuleDim, dim_letters, must_replicate
from meshwright.ops.strategy import UNSHARDED, Strategy, layouts, merge, splittable
from meshwright.search.annotations import PinSpec, marks_of_sites, operators, site_region
from meshwright.search.context import SearchContext, options


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
                f"which {node.op} needs replicated",
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


__all__ = ["check_annotated"]
