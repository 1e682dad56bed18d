"""Data parallel: every node is cut in the factor that counts examples."""

from __future__ import annotations

from meshwright.errors import StrategyError
from meshwright.graph import Node
from meshwright.ops.strategy import units
from meshwright.search.options import Assignment, Scene


def batch_options(scene: Scene, node: Node) -> list[int]:
    """The cuts of a node's batch factor, those that its output has first."""
    menu = scene.board.menus[scene.board.number[node.name]]
    kept: list[tuple[bool, int]] = []
    number, letter = 0, ""
    for option, entry in enumerate(menu.entries):
        if not entry.letter:
            continue
        number, letter = (number + 1 if entry.letter == letter else 0), entry.letter
        marks = scene.factors.batch.get((node.name, letter), ())
        if number < len(marks) and marks[number] and len(marks) == len(units(menu.site.trees[letter])):
            rule = menu.site.rule
            kept.append((not any(letter in rule.letters(p) for p in rule.outputs), option))
    return [option for _, option in sorted(kept, key=lambda k: k[0])]


def assign_batch(
    scene: Scene, assignment: Assignment, axes: tuple[str, ...], nodes: tuple[Node, ...]
) -> None:
    """Cut nodes by their batch factor over the axes, one after the other; whole where none may be split."""
    board, mesh = scene.board, scene.mesh
    for node in nodes:
        cuts = board.batch.get(node.name)
        if cuts is None:
            cuts = board.batch[node.name] = batch_options(scene, node)
        if cuts:
            state = board.menus[board.number[node.name]].state(assignment[node.name], mesh)
            for axis in axes:
                members = mesh.sizes[axis]
                closed = state.closed(members)
                option = next((o for o in cuts if o not in closed), 0)
                state = state.after(option, axis, members)
            assignment[node.name] = state.strategy


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
