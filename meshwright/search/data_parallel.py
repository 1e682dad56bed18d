"""Data parallel: every node is cut in the factor that counts examples."""

from __future__ import annotations

from meshwright.errors import StrategyError
from meshwright.graph import Node
from meshwright.ops.strategy import WHOLE, Strategy, cut, fits, splittable, units
from meshwright.search.options import Assignment, Scene, combine


def batch_option(scene: Scene, node: Node, axis: str, fixed: Strategy) -> Strategy:
    """The node cut by its batch factor over an axis; whole when it has none that may be split."""
    site, taken = scene.site(node.name), dict(fixed.cuts)
    candidates: list[tuple[bool, Strategy]] = []
    for letter in splittable(site):
        marks = scene.factors.batch.get((node.name, letter), ())
        tree = site.trees[letter]
        for number, unit in enumerate(units(tree)):
            if (
                len(marks) == len(units(tree))
                and marks[number]
                and fits(taken.get(letter, tree), unit, scene.mesh, axis)
            ):
                in_output = any(letter in site.rule.letters(p) for p in site.rule.outputs)
                candidates.append((not in_output, Strategy(((letter, cut(tree, unit, axis)),))))
    return min(candidates, key=lambda c: c[0])[1] if candidates else WHOLE


def assign_batch(
    scene: Scene, assignment: Assignment, axes: tuple[str, ...], nodes: tuple[Node, ...]
) -> None:
    """Cut nodes by their batch factor over the axes, one after the other."""
    for axis in axes:
        for node in nodes:
            combine(scene, assignment, node, batch_option(scene, node, axis, assignment[node.name]))


def check_batch(scene: Scene, axes: tuple[str, ...]) -> None:
    """Raise StrategyError when the batch cannot be cut over the axes."""
    members = scene.mesh.count(axes)
    sized = [(i, i.type.shape[i.batch_dim]) for i in scene.graph.input_of("batch") if i.batch_dim is not None]
    if not sized and members > 1:
        raise StrategyError(
            "no dim of the batch is known to count examples",
            why="data parallel cuts the examples; the batch has "
            + (", ".join(f"{i.target} {i.type}" for i in scene.graph.input_of("batch")) or "no tensors"),
            hint="give a batch whose tensors share their first dim, or cut operators with mw.shard",
        )
    for entry, count in sized:
        if count < members:
            raise StrategyError(
                f"a batch of {count} cannot be cut over {members} ranks",
                why=f"{entry.target} is {entry.type} and {scene.mesh.show(axes)} has {members} ranks",
                hint=f"a batch of at least {members}, or at most {count} ranks for data parallel",
            )
