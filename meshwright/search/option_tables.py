"""A graph in numbers, for searches that go from node to node: values, readers, and the options of each node.

What the nodes of a graph may do on one mesh axis, as small integers.

Layouts are separable by axis, so an option of a node needs one code for each of its ports: where the value lies on that
axis alone. Which options there are, and their codes, follow from the letters of a rule where each dim is one letter:
nodes that differ in sizes alone share `Choices`, which are made once. Nodes of one signature share an `OptionTable`,
which adds how many blocks there is room for. A `State` is the options with what was chosen on the axes before; what a
search asks of it in its inner loop are list look-ups.

Codes: 0 replicated, 1 partial, 2 replicated with a partial gradient, 3 and more sharded, a number for each place.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from meshwright.core.graph import Graph
from meshwright.core.layout import Dim, SubDim, dim_axes, normalize_dim
from meshwright.core.mesh import Axis, Mesh
from meshwright.ops.batch import batch_units
from meshwright.ops.factors import Factors, Site
from meshwright.ops.rule import dim_letters
from meshwright.ops.strategy import UNSHARDED, Strategy, at_path, split_unit, splittable, through_ports, ways


class OptionTables:
    """Nodes and values by number: `uses[n]` and `makes[n]` list values, `readers[v]` and `maker[v]` nodes (-1: none).

    `near[n]`: the nodes that read what n makes, then those that make what it reads, as often as they do. Each rank
    keeps an example for each of `micro_batches`.
    """

    def __init__(self, graph: Graph, factors: Factors, mesh: Mesh, micro_batches: int = 1) -> None:
        self.mesh, self.micro_batches = mesh, micro_batches
        self.nodes = graph.nodes
        self.number = {n.name: k for k, n in enumerate(graph.nodes)}
        self.values = list(graph.types)
        value = {name: k for k, name in enumerate(self.values)}
        self.value = value
        self.size_bytes = [t.size_bytes for t in graph.types.values()]
        self.graded = [any(node.needs_grad) for node in graph.nodes]
        self.has_grad = [name in graph.needs_grad for name in self.values]
        self.uses = [tuple([value[u] for u in n.uses]) for n in graph.nodes]
        self.makes = [tuple([value[v] for v in n.values]) for n in graph.nodes]
        self.maker = [-1] * len(self.values)
        self.readers: list[list[int]] = [[] for _ in self.values]
        for number, (uses, makes) in enumerate(zip(self.uses, self.makes, strict=True)):
            for v in uses:
                self.readers[v].append(number)
            for v in makes:
                self.maker[v] = number
        self.near = [
            [*(r for v in makes for r in self.readers[v]), *(m for v in uses if (m := self.maker[v]) >= 0)]
            for uses, makes in zip(self.uses, self.makes, strict=True)
        ]
        self.tables = self._tables(factors)
        self.kinds = self._kinds()
        self.batch: list[tuple[int, ...]] | None = None  # per node, the options that shard its batch factor
        self.remembered: dict[Hashable, list[int]] = {}  # what a search found on an axis of the same kind

    def _tables(self, factors: Factors) -> list[OptionTable]:
        places: Places = {}
        known: dict[Hashable, OptionTable] = {}
        by_shape: dict[Hashable, Choices] = {}
        found: list[OptionTable] = []
        for node in self.nodes:
            site = factors.sites[node.name]
            examples = next(batch_units(site, factors), None) if self.micro_batches > 1 else None
            key = (site.signature, examples)
            table = known.get(key)
            if table is None:
                shape = shape_of(site)
                if (choices := by_shape.get(shape)) is None:
                    choices = by_shape[shape] = Choices(site, places)
                table = known[key] = OptionTable(site, choices, examples, self.micro_batches)
            found.append(table)
        return found

    def start(self) -> list[State]:
        """Per node, that nothing is chosen yet."""
        return [table.start for table in self.tables]

    def strategies(self, states: list[State]) -> dict[str, Strategy]:
        """Return the chosen strategies, by the names of nodes."""
        return {node.name: state.strategy for node, state in zip(self.nodes, states, strict=True)}

    def _kinds(self) -> list[int]:
        """Nodes whose options compare equally where their neighbours do: the same options, equal bytes, gradients and
        repeats."""
        known: dict[Hashable, int] = {}
        found: list[int] = []
        for table, uses, makes in zip(self.tables, self.uses, self.makes, strict=True):
            values = (*uses, *makes)
            repeats = tuple(map(uses.index, uses)) if len(set(uses)) < len(uses) else ()
            key = (id(table), *[(self.size_bytes[v], self.has_grad[v]) for v in values], repeats)
            found.append(known.setdefault(key, len(known)))
        return found


REPLICATED, PARTIAL, GRAD, SPLIT = 0, 1, 2, 3
HERE = "here"  # the one axis of the tables
Unit = tuple[tuple[int, ...], ...]
Places = dict[tuple[tuple[int, Dim], ...], int]  # the sharded dims of a value, in normal form → code
Turn = tuple[int, str, int]  # an option, the axis on which it is taken, and that axis' members
ALL = (SubDim(0, (HERE,)),)  # a dim that is sharded as one, whatever its size: that is the value's own
NONE = frozenset[int]()


@dataclass(frozen=True, slots=True)
class Entry:
    """One option: replicated, a split of one unit of a letter, or `through` ports."""

    letter: str = ""
    unit: Unit = ()
    through: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PortCodes:
    """Per option, the code of each input port and of each output port."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


def entries_of(site: Site) -> Iterator[Entry]:
    """All options of a site on one axis, replicated first."""
    yield Entry()
    for letter in splittable(site):
        for unit in ways(site, letter):
            yield Entry(letter, unit)
    for ports in through_ports(site):
        yield Entry(through=ports)


def shape_of(site: Site) -> Hashable:
    """The key on which options and codes depend; without sizes, if all dims are single letters of one sub-dim."""
    rule, trees = site.rule, site.trees
    plain = all(len(tree) == 1 and type(tree[0]) is SubDim for tree in trees.values() if tree)
    if not plain or any(len(dim) > 1 for port in (*rule.inputs, *rule.outputs) for dim in port):
        return site.signature
    parts = (rule.inputs, rule.outputs, rule.terms, rule.replicated, rule.reduced_inside, rule.outer)
    return (*map(id, parts), *[(letter, len(tree)) for letter, tree in trees.items()])


class Choices:
    """The options of all nodes whose sites have one shape (`shape_of`)."""

    def __init__(self, site: Site, places: Places) -> None:
        self.site, self.places = site, places
        self.entries = tuple(entries_of(site))
        self.letters = tuple(dict.fromkeys(e.letter for e in self.entries if e.letter))
        self._codes: dict[int, PortCodes] = {}

    def codes(self, members: int) -> PortCodes:
        """The codes of the ports under each option, on an axis of some members."""
        if members not in self._codes:
            mesh = Mesh((Axis(HERE, members),), ((HERE, (HERE,)),))
            rows = [self._row(entry, mesh) for entry in self.entries]
            self._codes[members] = PortCodes(tuple(r[0] for r in rows), tuple(r[1] for r in rows))
        return self._codes[members]

    def _row(self, entry: Entry, mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The algebra of `ops.strategy.layouts` for a single axis."""
        rule = self.site.rule
        if entry.through:
            inputs = (PARTIAL if p in entry.through else GRAD for p in range(len(rule.inputs)))
            return tuple(inputs), (PARTIAL,) * len(rule.outputs)
        if not entry.letter:
            return (REPLICATED,) * len(rule.inputs), (REPLICATED,) * len(rule.outputs)
        x = entry.letter
        splits = {x: split_unit(self.site.trees[x], entry.unit, HERE)}
        holds, gives = (
            [x in letters for letters in ports] for ports in (rule.input_letters, rule.output_letters)
        )
        sums = x not in rule.reduced_inside
        enter = (
            {t[0] for t in rule.terms if not any(holds[p] for p in t)}
            if sums and gives and not gives[0]
            else ()
        )
        inputs = [
            self._place(port, splits, mesh) if held else PARTIAL if p in enter else GRAD
            for p, (port, held) in enumerate(zip(rule.inputs, holds, strict=True))
        ]
        outputs = [
            self._place(port, splits, mesh) if given else PARTIAL if sums else REPLICATED
            for port, given in zip(rule.outputs, gives, strict=True)
        ]
        return tuple(inputs), tuple(outputs)

    def _place(self, port: tuple[tuple[str, ...], ...], splits: dict[str, Dim], mesh: Mesh) -> int:
        (letter,) = splits
        found: list[tuple[int, Dim]] = []
        follows = self.site.rule.follows
        for number, letters in enumerate(port):
            if letter in dim_letters(letters) or any(
                follows[x][0] == letter for x in letters if x in follows
            ):
                dim = self.site.dim(letters, splits)
                if dim_axes(dim):
                    dim = normalize_dim(dim, mesh)
                    found.append((number, ALL if len(dim) == 1 and type(dim[0]) is SubDim else dim))
        return self.places.setdefault(tuple(found), SPLIT + len(self.places)) if found else REPLICATED


class OptionTable:
    """The options of all nodes with one rule and equal factors.

    `examples`: the letter and unit that are split into `micro_batches` before they are split over ranks.
    """

    def __init__(
        self, site: Site, choices: Choices, examples: tuple[str, Unit] | None, micro_batches: int
    ) -> None:
        self.site, self.choices, self.entries = site, choices, choices.entries

        def room(entry: Entry) -> int:
            blocks = min(at_path(site.trees[entry.letter], path).pieces for path in entry.unit)
            return max(1, blocks // micro_batches if (entry.letter, entry.unit) == examples else blocks)

        # The blocks that each option has room for: one where there are no elements; 0 stands for any number, for which
        # replicated values and partial sums have room.
        self.rooms = tuple([room(e) if e.letter else 0 for e in choices.entries])
        self.start = State(self)

    def option_of(self, strategy: Strategy, axis: str) -> int:
        """The option that a single-axis strategy is."""
        if not strategy.splits and not strategy.through:
            return 0
        letter = strategy.splits[0][0] if strategy.splits else ""
        return next(
            o
            for o, entry in enumerate(self.entries)
            if entry.letter == letter and o and self.strategy([(o, axis, 1)]) == strategy
        )

    def strategy(self, turns: list[Turn]) -> Strategy:
        """Merge the options chosen on one axis after the other into one strategy."""
        splits: dict[str, Dim] = {}
        through: list[tuple[str, tuple[int, ...]]] = []
        for option, axis, _ in turns:
            entry = self.entries[option]
            if entry.letter:
                tree = splits.get(entry.letter) or self.site.trees[entry.letter]
                if len(tree) == 1 and type(only := tree[0]) is SubDim:
                    splits[entry.letter] = (only.on((*only.axes, axis)),)
                else:
                    splits[entry.letter] = split_unit(tree, entry.unit, axis)
            elif entry.through:
                through.append((axis, entry.through))
        return Strategy(tuple(splits.items()), tuple(through)) if splits or through else UNSHARDED


@dataclass(eq=False)
class State:
    """The options and what was chosen on the axes before; `blocks`: option → the blocks its unit is split into."""

    table: OptionTable
    turns: tuple[Turn, ...] = ()
    blocks: dict[int, int] = field(default_factory=dict)
    _after: dict[tuple[Turn, ...], State] = field(default_factory=dict)
    _closed: dict[int, frozenset[int]] = field(default_factory=dict)

    @functools.cached_property
    def strategy(self) -> Strategy:
        """The choices as a strategy: one object for all nodes in this state."""
        return self.table.strategy(list(self.turns))

    def closed(self, members: int) -> frozenset[int]:
        """The options without room for one more axis of some members."""
        found = self._closed.get(members)
        if found is None:
            blocks = self.blocks
            tight = [
                o for o, room in enumerate(self.table.rooms) if room and room < blocks.get(o, 1) * members
            ]
            found = self._closed[members] = frozenset(tight) if tight else NONE
        return found

    def after(self, *turns: Turn) -> State:
        """The state with more axes, on which an option other than replicated is taken."""
        if not turns:
            return self
        found = self._after.get(turns)
        if found is None:
            blocks = dict(self.blocks)
            for option, _, members in turns:
                if self.table.rooms[option]:
                    blocks[option] = blocks.get(option, 1) * members
            found = self._after[turns] = State(self.table, (*self.turns, *turns), blocks)
        return found
