"""Whether an annotated operator takes its inputs as the user cut them: refused where it cannot, noted where
it does not.

One annotated operator (`mw.shard(torch.softmax, …)`) has a strategy that means just this operator, so a cut of
something that it needs whole is a mistake. An annotated module or a function of several operators is given
layouts for its inputs; what is inside may want others, and then values move, which the plan says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from meshwright.errors import StrategyError
from meshwright.graph import PIN, Graph, Node
from meshwright.layout import TensorLayout, dim_axes, normalize, only_axes
from meshwright.ops.factors import Site
from meshwright.ops.rule import RuleDim, dim_letters, is_whole
from meshwright.ops.strategy import WHOLE, Strategy, layouts, merge, splittable
from meshwright.search.marks import PinSpec, marks_of_sites, operators, site_region
from meshwright.search.options import Scene, options


def check_annotated(scene: Scene, specs: Iterable[PinSpec], assignment: Mapping[str, Strategy]) -> list[str]:
    """Notes on annotated inputs that move before they are used.

    Raises StrategyError where one operator was told to cut what it must keep whole.
    """
    notes: list[str] = []
    for marks in marks_of_sites(specs).values():
        inside = site_region(scene.graph, marks)
        alone = len(operators(scene, inside)) == 1
        for spec in (m for m in marks if m.role == "in" and m.wished):
            for node, port in _takers(scene.graph, spec.node, inside):
                if alone:
                    _check_whole(scene, spec, node, port, assignment)
                moved = _move(scene, spec.node, node, port, assignment)
                if moved:
                    notes.append(f"{spec.what}: {moved} ({spec.node.where})")
    return list(dict.fromkeys(notes))


def _takers(graph: Graph, mark: Node, inside: frozenset[str]) -> Iterator[tuple[Node, int]]:
    return ((c, p) for c, p in graph.consumers[mark.values[0]] if c.op != PIN and c.name in inside)


def _check_whole(
    scene: Scene, spec: PinSpec, node: Node, port: int, assignment: Mapping[str, Strategy]
) -> None:
    site = scene.site(node.name)
    (have,) = scene.ports(spec.node, assignment[spec.node.name]).outputs
    for dim, (given, letters) in enumerate(zip(have.dims, site.rule.inputs[port], strict=True)):
        held = [x for x in dim_letters(letters) if is_whole(site.rule, x)]
        axes = dim_axes(given)
        if axes and held and not _takes(scene, node, port, have, axes):
            raise StrategyError(
                f"the {spec.what} cuts dim {dim} of {spec.node.outputs[0]} into {scene.mesh.count(axes)} blocks, "
                f"which {node.op} must keep whole",
                why=site.rule.why_whole or _why(site, letters),
                where=spec.node.where,
                hint=f'mw.rule({node.op.removesuffix(".default")!r}, "…") says how it can be cut, or 1 for that dim'
                if site.rule.why_whole.startswith("no rule is known")
                else "1 for that dim; it can be cut by " + (", ".join(splittable(site)) or "nothing"),
            )


def _takes(scene: Scene, node: Node, port: int, have: TensorLayout, axes: Iterable[str]) -> bool:
    """Whether a strategy of the node gives a port these splits: of a dim of several letters, some may be whole (the
    channels of a group, the rows of a window) while others are split."""
    fixed, split = WHOLE, []
    for axis in axes:
        split.append(axis)
        wanted = normalize(only_axes(have.forward, split), scene.mesh)
        for option in options(scene, node, axis, fixed):
            grown = merge(fixed, option)
            found = layouts(scene.site(node.name), grown).inputs[port].forward
            if option.cuts and normalize(found, scene.mesh) == wanted:
                fixed = grown
                break
        else:
            return False
    return True


def _why(site: Site, dim: RuleDim) -> str:
    """What of a dim can be split: ``the dim is 4 runs of 2 elements, each of which stays whole``."""
    sizes = [site.rule.sizes[x] for x in dim_letters(dim)]
    runs = math.prod(n for x, n in zip(dim_letters(dim), sizes, strict=True) if not is_whole(site.rule, x))
    if runs == 1:
        return "each result needs all of its elements"
    return f"the dim is {runs} runs of {math.prod(sizes) // runs} elements, each of which stays whole"


def _move(scene: Scene, mark: Node, node: Node, port: int, assignment: Mapping[str, Strategy]) -> str:
    (have,) = scene.ports(mark, assignment[mark.name]).outputs
    want = scene.ports(node, assignment[node.name]).inputs[port]
    if normalize(have.forward, scene.mesh) == normalize(want.forward, scene.mesh):
        return ""
    return f"%{mark.uses[0]} is {have.forward} as annotated, {node.op} takes it as {want.forward}, so it is moved"
