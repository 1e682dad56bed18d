"""Plan each kind of layer once: of a run of equal layers the first two stand for all.

The first copy of a block reads what comes before the stretch, the second its predecessor, and so do all after it. So
what can differ between neighbours of equal strategies occurs among the first two copies and the readers of the last:
the second copy counts for itself and those left out, an edge counts as often as its reader. What is read after the
stretch is read of the second copy.

Copies stay apart where they differ in more than `capture.fold` looks at: a pin, a value that others read, a parameter
shared with another place. There the run is split; each piece is a run of its own.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from meshwright.core.folding import Block, Folding
from meshwright.core.graph import Graph, Node
from meshwright.core.remembered import cached_on_first
from meshwright.ops.factors import Factors

T = TypeVar("T")


@dataclass(frozen=True)
class Folded:
    """A graph in which layers of one kind occur at most twice, and what its parts stand for in the full one.

    `weight`: node → how many nodes of the full graph it stands for (1 for a first copy, repeats - 1 for a second,
    1 elsewhere). `value_weight`: value or input → how many of the full graph are read by the same kinds of readers:
    a value that a first copy hands on counts for all that are handed on within the run. `same`: node, result or
    own input of a second copy → that of the first copy, which takes the same strategy. `nodes` and `inputs`: name in
    the full graph → the name here that stands for it. `kinds`: nodes that differ in more than the graph says (pins).
    """

    graph: Graph
    full: Graph
    weight: Mapping[str, int]
    value_weight: Mapping[str, int]
    same: Mapping[str, str]
    nodes: Mapping[str, str]
    inputs: Mapping[str, str]
    runs: tuple[_Run, ...] = ()
    kinds: Mapping[str, Hashable] = field(default_factory=dict)

    @property
    def repeats(self) -> tuple[int, ...]:
        """How often the layer of each folded run occurs in the full graph."""
        return tuple(run.count for run in self.runs if run.count > 2)

    @property
    def is_whole(self) -> bool:
        """Nothing is folded: the graph is the full one."""
        return self.graph is self.full

    def unfold(self, per_node: Mapping[str, T]) -> dict[str, T]:
        """Names of the full graph's nodes → what the node that stands for them has."""
        return {name: per_node[here] for name, here in self.nodes.items()}

    def unfold_values(self, per_value: Mapping[str, T]) -> dict[str, T]:
        """Names of the full graph's results → what the result that stands for them has."""
        return {name: per_value[here] for name, here in self.values.items()}

    def unfold_inputs(self, per_input: Mapping[str, T]) -> dict[str, T]:
        """Names of the full graph's inputs → what the input that stands for them has; a layer's own by its port."""
        return {name: per_input[here] for name, here in self.inputs.items()}

    @functools.cached_property
    def known(self) -> dict[Hashable, object]:
        """The cache of `cached_on_first`."""
        return {}

    @functools.cached_property
    def values(self) -> dict[str, str]:
        """Results of the full graph → results here that stand for them."""
        found: dict[str, str] = {}
        for node, here in zip(self.full.nodes, self.nodes.values(), strict=True):
            if len(node.outputs) == 1:
                found[node.name] = here
            else:
                found.update((f"{node.name}.{i}", f"{here}.{i}") for i in range(len(node.outputs)))
        return found


def without_folds(graph: Graph) -> Folded:
    """Nothing folded."""
    nodes, inputs = {n.name: n.name for n in graph.nodes}, {i.name: i.name for i in graph.inputs}
    ones = dict.fromkeys(graph.types, 1)
    return Folded(graph, graph, dict.fromkeys(nodes, 1), ones, {}, nodes, inputs)


def folded(graph: Graph, folding: Folding, kinds: Mapping[str, Hashable] | None = None) -> Folded:
    """The graph with at most two copies of each kind of layer.

    `kinds` tells nodes apart that the graph does not (pins): layers whose nodes have different ones stay apart.
    """
    if not folding.blocks:
        return without_folds(graph)
    view = _View(graph, folding.blocks)
    for name, kind in (kinds or {}).items():
        view.set_apart(name, kind)
    runs = [run for number in range(len(folding.blocks)) for run in view.runs(number)]
    if all(run.count < 2 for run in runs):
        return without_folds(graph)
    return replace(_reduced(view, runs), kinds=kinds or {})


@cached_on_first
def shortened(folds: Folded, copies: tuple[int, ...]) -> Graph:
    """The full graph with so many copies left of each run of layers that is folded (at least 2): what grows with the
    number of layers follows from two such graphs. One object, so that what is found of a graph is remembered with it.
    """
    if not copies:
        return folds.graph
    long = [run for run in folds.runs if run.count > 2]
    return _cut(folds.full, [(run, max(2, n)) for run, n in zip(long, copies, strict=True)])


def unfolding(folds: Folded, factors: Factors) -> Callable[[Graph], Factors]:
    """Return a function that derives the analysis of the full graph from that of the folded one."""
    light = replace(folds, full=folds.graph)  # does not hold the full graph
    return lambda full: unfold_factors(replace(light, full=full), factors)


def unfold_factors(folds: Folded, factors: Factors) -> Factors:
    """The analysis of the full graph from that of the folded one."""
    sites = {n.name: replace(factors.sites[folds.nodes[n.name]], node=n) for n in folds.full.nodes}
    letters = [(name, here, x) for name, here in folds.nodes.items() for x in factors.sites[here].trees]
    return Factors(
        sites,
        {**folds.unfold_inputs(factors.dims), **folds.unfold_values(factors.dims)},
        {(name, x): factors.batch[here, x] for name, here, x in letters},
        {(name, x): factors.unsharded[here, x] for name, here, x in letters},
        folds.unfold_inputs(factors.batch_inputs),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` equal copies from node number `start`."""

    start: int
    length: int
    count: int
    own: tuple[tuple[int, int], ...]  # (node number in the copy, port) that read an input of the copy's own

    def copy(self, number: int) -> range:
        return range(self.start + number * self.length, self.start + (number + 1) * self.length)


@dataclass
class _View:
    """Which copy of which block each name belongs to, and where copies differ."""

    graph: Graph
    blocks: tuple[Block, ...]
    starts: list[int] = field(init=False)
    places: dict[str, int] = field(init=False)
    own: list[tuple[tuple[int, int], ...]] = field(init=False)
    owners: dict[str, tuple[int, int]] = field(init=False)  # own input → (block, copy)
    marks: list[dict[int, set[Hashable]]] = field(init=False)  # block → copy → what sets it apart
    handed_on: list[set[int]] = field(init=False)  # block → nodes of a copy that the next one reads
    ends: list[set[int]] = field(init=False)  # block → copies that others than the next read

    def __post_init__(self) -> None:
        names = [n.name for n in self.graph.nodes]
        self.places = dict(zip(names, range(len(names)), strict=True))
        self.starts = [b.start for b in self.blocks]
        self.marks = [{} for _ in self.blocks]
        self.ends = [set() for _ in self.blocks]
        inputs = {i.name: i for i in self.graph.inputs}
        self.own = [_own_ports(self.graph, b, inputs) for b in self.blocks]
        self.handed_on = [self._handed_on(b) for b in self.blocks]
        self._own_inputs()
        self._readers(inputs)
        self._mutations()

    def number(self, value: str) -> int:
        """The number of the node that makes a value; -1 for an input."""
        found = self.places.get(value)
        return self.places.get(value.rpartition(".")[0], -1) if found is None else found

    def place(self, number: int) -> tuple[int, int] | None:
        """(block, copy) of a node."""
        at = bisect.bisect_right(self.starts, number) - 1
        if number < 0 or at < 0 or number >= self.blocks[at].stop:
            return None
        return at, (number - self.blocks[at].start) // self.blocks[at].length

    def mark(self, place: tuple[int, int], what: Hashable) -> None:
        """Set a copy apart from those that are not marked alike."""
        self.marks[place[0]].setdefault(place[1], set()).add(what)

    def _handed_on(self, block: Block) -> set[int]:
        """Which nodes of a copy the next one reads."""
        second = block.start + block.length
        read = (u for n in self.graph.nodes[second : second + block.length] for u in n.uses)
        return {n - block.start for n in map(self.number, read) if block.start <= n < second}

    def _own_inputs(self) -> None:
        nodes, self.owners = self.graph.nodes, {}
        inputs = {i.name: i for i in self.graph.inputs if i.batch_dim is not None or i.ties}
        for number, (block, own) in enumerate(zip(self.blocks, self.own, strict=True)):
            by_node = {i: [p for j, p in own if j == i] for i, _ in own}
            for copy in range(block.repeats):
                base, here = block.start + copy * block.length, (number, copy)
                for i, ports in by_node.items():
                    uses = nodes[base + i].uses
                    for name in map(uses.__getitem__, ports):
                        other = self.owners.setdefault(name, here)
                        if other != here:
                            self.mark(other, other)
                            self.mark(here, here)
                        if name in inputs:
                            self.mark(here, (i, inputs[name].batch_dim, len(inputs[name].ties)))

    def _readers(self, inputs: Mapping[str, object]) -> None:
        """Count the readers of a copy's values. Later copies read from outside what the first one reads."""
        edges = [0, *itertools.chain(*((b.start + b.length, b.stop) for b in self.blocks))]
        edges.append(len(self.graph.nodes))
        for low, high in zip(edges[::2], edges[1::2], strict=True):
            for reader in range(low, high):
                here = self.place(reader)
                for value in self.graph.nodes[reader].uses:
                    self._read(value, here, inputs)
        for _, value in self.graph.outputs:
            self._read(value, None, inputs)

    def _read(self, value: str, here: tuple[int, int] | None, inputs: Mapping[str, object]) -> None:
        if value in inputs:
            owner = self.owners.get(value)
            if owner is not None and owner != here:
                self.mark(owner, owner)
        elif (place := self.place(number := self.number(value))) is not None and place != here:
            self.ends[place[0]].add(place[1])
            offset = (number - (block := self.blocks[place[0]]).start) % block.length
            if offset not in self.handed_on[place[0]]:  # its other copies have no reader like that
                self.mark(place, (offset, "read"))

    def _mutations(self) -> None:
        if not self.graph.mutations:
            return
        names = {i.target: i.name for i in self.graph.inputs}
        for target, value in self.graph.mutations:
            number = self.number(value)
            place = self.place(number)
            if place is not None:
                block, name = self.blocks[place[0]], names.get(target, target)
                own = self.owners.get(name) == place
                offset = (number - block.start) % block.length
                self.mark(place, (offset, value[len(self.graph.nodes[number].name) :], "" if own else name))

    def set_apart(self, name: str, kind: Hashable) -> None:
        """Mark the copy of a node with the node's kind."""
        number = self.places.get(name, -1)
        if (place := self.place(number)) is not None:
            block = self.blocks[place[0]]
            self.mark(place, ((number - block.start) % block.length, "kind", kind))

    def runs(self, number: int) -> Iterator[_Run]:
        """The stretches of equal copies of a block."""
        block, marks = self.blocks[number], self.marks[number]
        edges = {0, block.repeats, *(c + 1 for c in self.ends[number] if c + 1 < block.repeats)}
        for copy in marks:
            for edge in (copy, copy + 1):
                if 0 < edge < block.repeats and marks.get(edge) != marks.get(edge - 1):
                    edges.add(edge)
        for low, high in itertools.pairwise(sorted(edges)):
            yield _Run(block.start + low * block.length, block.length, high - low, self.own[number])


def _own_ports(graph: Graph, block: Block, inputs: Mapping[str, object]) -> tuple[tuple[int, int], ...]:
    """The ports at which each copy reads an input of its own."""
    found: list[tuple[int, int]] = []
    for i in range(block.length):
        first, second = (graph.nodes[block.start + k * block.length + i].uses for k in (0, 1))
        for port, (a, b) in enumerate(zip(first, second, strict=True)):
            if a != b and a in inputs and b in inputs:
                found.append((i, port))
    return tuple(found)


def _reduced(view: _View, runs: list[_Run]) -> Folded:
    graph = view.graph
    names = list(view.places)
    stand = names.copy()
    inputs = {i.name: i.name for i in graph.inputs}
    for run in (r for r in runs if r.count > 2):
        second, last = run.copy(1), run.copy(run.count - 1)
        stand[second.stop : last.stop] = names[second.start : second.stop] * (run.count - 2)
        here = _own_names(graph, run, 1)
        for copy in range(2, run.count):
            inputs.update(zip(_own_names(graph, run, copy), here, strict=True))
    nodes = dict(zip(names, stand, strict=True))
    small = _cut(graph, [(run, 2) for run in runs])
    weight, value_weight, same = _weights(small, graph, runs)
    return Folded(small, graph, weight, value_weight, same, nodes, inputs, tuple(runs))


def _own_names(graph: Graph, run: _Run, copy: int) -> list[str]:
    """The inputs of a copy's own, by the ports that read them."""
    base = run.copy(copy).start
    return [graph.nodes[base + i].uses[port] for i, port in run.own]


def _cut(graph: Graph, kept: Sequence[tuple[_Run, int]]) -> Graph:
    """The graph with the first so many copies of each run; what was read of the last copy is read of the last kept."""
    renamed: dict[str, str] = {}
    gone: set[str] = set()
    nodes: list[Node] = []
    low = 0
    for run, copies in kept:
        if copies >= run.count:
            continue
        last = run.copy(copies - 1)
        for i, j in zip(run.copy(run.count - 1), last, strict=True):
            renamed.update(zip(graph.nodes[i].values, graph.nodes[j].values, strict=True))
        for copy in range(copies, run.count):
            gone.update(_own_names(graph, run, copy))
        nodes += graph.nodes[low : last.stop]
        low = run.copy(run.count - 1).stop
    nodes += graph.nodes[low:]
    if not renamed:
        return graph
    made = {v for n in nodes for v in n.values} | {i.name for i in graph.inputs if i.name not in gone}
    return replace(
        graph,
        inputs=tuple(i for i in graph.inputs if i.name not in gone),
        nodes=tuple(_reading(n, renamed) for n in nodes),
        outputs=tuple((label, renamed.get(value, value)) for label, value in graph.outputs),
        mutations=tuple((t, v) for t, v in graph.mutations if v in made),
    )


def _reading(node: Node, renamed: Mapping[str, str]) -> Node:
    uses = node.uses
    if not any(u in renamed for u in uses):
        return node
    return node.with_uses(renamed.get(u, u) for u in uses)


def _weights(
    small: Graph, graph: Graph, runs: list[_Run]
) -> tuple[dict[str, int], dict[str, int], dict[str, str]]:
    weight = dict.fromkeys((n.name for n in small.nodes), 1)
    value_weight = dict.fromkeys(small.types, 1)
    same: dict[str, str] = {}
    for run in (r for r in runs if r.count > 1):
        first, second = ([graph.nodes[i] for i in run.copy(k)] for k in (0, 1))
        times = run.count - 1
        here = {v for n in first for v in n.values}
        handed_on = here.intersection(u for n in second for u in n.uses)
        for one, two in zip(first, second, strict=True):
            weight[two.name], same[two.name] = times, one.name
            for a, b in zip(one.values, two.values, strict=True):
                same[b] = a
                value_weight[a if a in handed_on else b] = times
        own = (_own_names(graph, run, k) for k in (0, 1))
        for a, b in zip(*own, strict=True):
            same[b], value_weight[b] = a, times
    return weight, value_weight, same
