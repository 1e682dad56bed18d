"""Data parallel: every node is sharded in the factor that counts examples."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from meshwright.core.graph import Node
from meshwright.errors import StrategyError
from meshwright.ops.batch import units_of_examples
from meshwright.ops.strategy import Strategy
from meshwright.search.context import SearchContext
from meshwright.search.option_tables import Choices, State, Turn
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.constraints import rows_of
from meshwright.search.to_plan import pass_gradients_back


def batch_options(table: Choices, marks: Mapping[str, tuple[bool, ...]]) -> tuple[int, ...]:
    """The shardings of a node's batch factor, those that its output has first. `marks`: letter → leaves that count
    examples."""
    site = table.site
    counting = {
        letter: units_of_examples(site.trees[letter], found) for letter, found in marks.items() if any(found)
    }
    kept: list[tuple[bool, int]] = []
    for option, entry in enumerate(table.entries):
        if entry.letter and entry.unit in counting.get(entry.letter, ()):
            kept.append((not any(entry.letter in given for given in site.rule.output_letters), option))
    return tuple(option for _, option in sorted(kept, key=lambda k: k[0]))


def _batch_options(context: SearchContext) -> list[tuple[int, ...]]:
    """Those of every node; nodes that share options and marks share them."""
    batch, known = context.factors.batch, dict[Hashable, tuple[int, ...]]()
    found: list[tuple[int, ...]] = []
    for node, table in zip(context.option_tables.nodes, context.option_tables.tables, strict=True):
        marks = {letter: batch.get((node.name, letter), ()) for letter in table.choices.letters}
        key = (id(table.choices), *marks.values())
        if key not in known:
            known[key] = batch_options(table.choices, marks)
        found.append(known[key])
    return found


def assign_batch(
    context: SearchContext, states: list[State], axes: tuple[str, ...], nodes: tuple[Node, ...]
) -> None:
    """Shard nodes by their batch factor over the axes, one after the other; replicated where none may be split.
    `states` has what each node of the graph does so far."""
    option_tables = context.option_tables
    sizes = [(axis, context.mesh.sizes[axis]) for axis in axes]
    if option_tables.batch is None:
        option_tables.batch = _batch_options(context)
    known: dict[Hashable, State] = {}
    for node in nodes:
        number = option_tables.number[node.name]
        if splits := option_tables.batch[number]:
            key = (id(before := states[number]), splits)
            if key not in known:
                known[key] = before.after(*_turns(before, splits, sizes))
            states[number] = known[key]


def by_batch(context: SearchContext, axes: tuple[str, ...]) -> dict[str, Strategy]:
    """Data parallel over the axes: the strategy of every node."""
    states = context.option_tables.start()
    assign_batch(context, states, axes, context.graph.nodes)
    return context.option_tables.strategies(states)


def by_batch_rows(context: SearchContext, codes: Mapping[str, NodeCodes]) -> dict[str, np.ndarray] | None:
    """Return data parallel over all axes as rows of options; None if the options lack a part of it.

    Partial gradients of weights pass through what the weights pass through, a cast or a transpose. Only then is the
    gradient of a weight that is stored sharded scattered where it is gathered, and not reduced before.
    """
    strategies = by_batch(context, tuple(a.name for a in context.mesh.axes if a.size > 1))
    passing = dict(strategies)
    pass_gradients_back(context, passing)
    found = (rows_of(codes, each, context.mesh) for each in (passing, strategies))
    return next((rows for rows in found if rows is not None), None)


def _turns(state: State, splits: tuple[int, ...], sizes: Sequence[tuple[str, int]]) -> Iterator[Turn]:
    """On each axis the first sharding that has room for it beside those taken."""
    rooms, blocks = state.table.rooms, dict(state.blocks)
    for axis, members in sizes:
        for option in splits:
            taken = blocks.get(option, 1) * members
            if taken <= rooms[option]:
                blocks[option] = taken
                yield option, axis, members
                break


def check_batch(context: SearchContext, axes: tuple[str, ...]) -> None:
    """Raise StrategyError when the batch cannot be sharded over the axes."""
    members = context.mesh.count(axes)
    sized = [
        (i, i.type.shape[i.batch_dim]) for i in context.graph.input_of("batch") if i.batch_dim is not None
    ]
    if not sized and members > 1:
        raise StrategyError(
            "no dim of the batch is known to count examples",
            why="data parallel splits the examples; the batch has "
            + (", ".join(f"{i.target} {i.type}" for i in context.graph.input_of("batch")) or "no tensors"),
            hint="give a batch whose tensors share their first dim, or shard operators with mw.shard",
        )
    for entry, count in sized:
        if count < members:
            raise StrategyError(
                f"a batch of {count} cannot be split over {members} ranks",
                why=f"{entry.target} is {entry.type} and {context.mesh.show(axes)} has {members} ranks",
                hint=f"a batch of at least {members}, or at most {count} ranks for data parallel",
            )
