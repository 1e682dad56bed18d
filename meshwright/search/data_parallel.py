"""Data parallel: every node is sharded in the factor that counts examples."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from meshwright.core.graph import Node
from meshwright.errors import StrategyError
from meshwright.ops.strategy import Strategy, units
from meshwright.search.option_tables import Choices, State, Turn
from meshwright.search.scene import Scene


def batch_options(menu: Choices, marks: Mapping[str, tuple[bool, ...]]) -> tuple[int, ...]:
    """The shardings of a node's batch factor, those that its output has first. `marks`: letter → leaves that count
    examples."""
    site = menu.site
    kept: list[tuple[bool, int]] = []
    number, letter = 0, ""
    for option, entry in enumerate(menu.entries):
        if entry.letter:
            number, letter = (number + 1 if entry.letter == letter else 0), entry.letter
            found = marks[letter]
            if number < len(found) and found[number] and len(found) == len(units(site.trees[letter])):
                kept.append((not any(letter in given for given in site.rule.output_letters), option))
    return tuple(option for _, option in sorted(kept, key=lambda k: k[0]))


def _batch_options(scene: Scene) -> list[tuple[int, ...]]:
    """Those of every node; nodes that share options and marks share them."""
    batch, known = scene.factors.batch, dict[Hashable, tuple[int, ...]]()
    found: list[tuple[int, ...]] = []
    for node, menu in zip(scene.board.nodes, scene.board.menus, strict=True):
        marks = {letter: batch.get((node.name, letter), ()) for letter in menu.choices.letters}
        key = (id(menu.choices), *marks.values())
        if key not in known:
            known[key] = batch_options(menu.choices, marks)
        found.append(known[key])
    return found


def assign_batch(scene: Scene, states: list[State], axes: tuple[str, ...], nodes: tuple[Node, ...]) -> None:
    """Shard nodes by their batch factor over the axes, one after the other; replicated where none may be split.
    `states` has what each node of the graph does so far."""
    board = scene.board
    sizes = [(axis, scene.mesh.sizes[axis]) for axis in axes]
    if board.batch is None:
        board.batch = _batch_options(scene)
    known: dict[Hashable, State] = {}
    for node in nodes:
        number = board.number[node.name]
        if splits := board.batch[number]:
            key = (id(before := states[number]), splits)
            if key not in known:
                known[key] = before.after(*_turns(before, splits, sizes))
            states[number] = known[key]


def by_batch(scene: Scene, axes: tuple[str, ...]) -> dict[str, Strategy]:
    """Data parallel over the axes: the strategy of every node."""
    states = scene.board.start()
    assign_batch(scene, states, axes, scene.graph.nodes)
    return scene.board.strategies(states)


def _turns(state: State, splits: tuple[int, ...], sizes: Sequence[tuple[str, int]]) -> Iterator[Turn]:
    """On each axis the first sharding that has room for it beside those taken."""
    rooms, blocks = state.menu.rooms, dict(state.blocks)
    for axis, members in sizes:
        for option in splits:
            taken = blocks.get(option, 1) * members
            if taken <= rooms[option]:
                blocks[option] = taken
                yield option, axis, members
                break


def check_batch(scene: Scene, axes: tuple[str, ...]) -> None:
    """Raise StrategyError when the batch cannot be sharded over the axes."""
    members = scene.mesh.count(axes)
    sized = [(i, i.type.shape[i.batch_dim]) for i in scene.graph.input_of("batch") if i.batch_dim is not None]
    if not sized and members > 1:
        raise StrategyError(
            "no dim of the batch is known to count examples",
            why="data parallel splits the examples; the batch has "
            + (", ".join(f"{i.target} {i.type}" for i in scene.graph.input_of("batch")) or "no tensors"),
            hint="give a batch whose tensors share their first dim, or shard operators with mw.shard",
        )
    for entry, count in sized:
        if count < members:
            raise StrategyError(
                f"a batch of {count} cannot be split over {members} ranks",
                why=f"{entry.target} is {entry.type} and {scene.mesh.show(axes)} has {members} ranks",
                hint=f"a batch of at least {members}, or at most {count} ranks for data parallel",
            )
