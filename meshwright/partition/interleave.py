"""Interleave half-batches in one program, so that computation overlaps with communication (`interleave=n`).

Each half-batch ("copy") is a local program for its share of a (micro-)batch. `interleaved` joins them into one program:
a copy computes until it has started a reshard, then the next copy runs. So each waits while the others compute.
Autograd runs the same order in reverse, since a start and its wait are each other's backward and all copies share one
root. Parameters, and gathered parameters, are read by all copies. (Compare DualPipe, and MindSpore's
MicroBatchInterleaved.)

One order serves forward and backward, whose collectives are at different places: an all-reduce forward follows a
row-parallel product, one backward precedes a column-parallel product. Which order hides most depends on the ratio of
communication to computation, so the planner tries them:

    halves    A turn ends at both places and, if a copy computes long in between, in the middle too. Copies are one turn
              apart. Half of another copy's computation overlaps with each collective, in both directions. A slow link
              is idle in between: the next collective starts only after the computation that waits for the last one.
    level     A turn ends at both places, and copies run side by side: of two consecutive collectives, one has much
              computation to overlap with.
    backward  A turn ends where backward communicates only: the next collective is always ready, and all of backward's
              computation overlaps with it; forward, half as much, overlaps with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import PIN, RESHARD, START, TO_DEVICE, WAIT, Graph, Input, Node, Ref
from meshwright.core.techniques import TURNS
from meshwright.partition.overlap import TOKEN
from meshwright.partition.recompute import VIEWS

# Matrix products → the number of terms of each element of the result.
PRODUCTS = {
    **dict.fromkeys(("linear", "mm", "bmm", "matmul"), "row"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), "window"),
    "scaled_dot_product_attention": "keys",
}

STARTED, SUMMED = "_start", "_sum"  # suffixes of the names of starts and of sums of copies

Said = TypeVar("Said")


@dataclass(frozen=True)
class _Turns:
    """An interleaving order.

    `everywhere`: turns also end at collectives of forward. `halved`: long turns are split in two. `apart`: the number
    of turns between a copy and the one before it.
    """

    everywhere: bool
    halved: bool
    apart: int


ORDERS: Mapping[str, _Turns] = {
    "halves": _Turns(True, True, 1),
    "level": _Turns(True, False, 0),
    "backward": _Turns(False, False, 0),
}
assert tuple(ORDERS) == TURNS


@dataclass(frozen=True)
class Interleaved:
    """The interleaved program, and the copy of each node and batch input (except shared ones)."""

    graph: Graph
    copy_of: Mapping[str, int]


def interleaved(
    copies: Sequence[Graph],
    added: Collection[str],
    carried: Mapping[str, str],
    time: Collection[str],
    leading: Sequence[Graph],
    turns: str = TURNS[0],
    apart: Collection[str] = (),
) -> Interleaved:
    """Join copies into one program.

    - `added`: results that are sums over the copies.
    - `carried`: input → the value that replaces it, which a copy passes on to the next.
    - `time`: the axes on which copies differ.
    - `leading`: the copies of one rank, the same for all ranks, whose sizes determine the turns. Shards may be uneven,
      and ranks with different turns would start their collectives in different orders.
    - `turns`: the interleaving order.
    - `apart`: results that the program returns for each copy, under the names of `named`.
    """
    work = _Merge(copies, added, carried, time, leading, ORDERS[turns], apart)
    return Interleaved(work.graph(), work.copy_of)


def named(name: str, copy: int) -> str:
    """Return the name of a value of a copy."""
    return f"copy{copy}_{name}"


def original(name: str, copy: int) -> str:
    """Return the name that a value of a copy has in the program of one copy."""
    return name.removeprefix(f"copy{copy}_")


def of_one(node: Node, copy_of: Mapping[str, int]) -> Node:
    """Return the node of a copy under its name in the program of one copy."""
    copy = copy_of.get(node.name)
    return node if copy is None else replace(node, name=original(node.name, copy))


def in_copies(said: Mapping[str, Said], copies: int) -> Mapping[str, Said]:
    """Return a mapping by values, repeated for the values of all copies."""
    return said if copies == 1 else {named(k, c): v for k, v in said.items() for c in range(copies)}


def shared(copy: Graph, carried: Collection[str], time: Collection[str]) -> set[str]:
    """Return the values that all copies read: parameters, and gathered parameters, which are gathered once."""
    found = {i.name for i in copy.inputs if i.role != "batch"}
    for node in copy.nodes:
        moves = node.op in (RESHARD, START, WAIT, TO_DEVICE) and found.issuperset(node.uses)
        if moves and _axes(node).isdisjoint(time) and not any(use in carried for use in node.uses):
            found.update(node.values)
    return found


class _Merge:
    def __init__(
        self,
        copies: Sequence[Graph],
        added: Collection[str],
        carried: Mapping[str, str],
        time: Collection[str],
        leading: Sequence[Graph],
        order: _Turns,
        apart: Collection[str],
    ) -> None:
        self.apart = apart
        self.copies, self.added, self.carried = copies, added, carried
        self.leading, self.order = leading, order
        self.copy_of: dict[str, int] = {}
        self.shared = shared(copies[0], carried, time)

    def graph(self) -> Graph:
        """The program."""
        first = self.copies[0]
        inputs = [i for i in first.inputs if i.role != "batch"]
        for copy, graph in enumerate(self.copies):
            for entry in graph.inputs:
                if entry.role == "batch":
                    inputs.append(self._input(entry, copy))
        nodes = list(self._in_turns())
        wanted = dict.fromkeys(v for _, v in (*first.outputs, *first.mutations))
        for value in wanted:
            if value not in self.shared:
                nodes += self._together(value)
        each = ((k, v, c) for k, v in first.outputs if v in self.apart for c in range(len(self.copies)))
        outputs = (*first.outputs, *((named(label, copy), named(value, copy)) for label, value, copy in each))
        return replace(first, inputs=tuple(inputs), nodes=tuple(nodes), outputs=outputs)

    def _input(self, entry: Input, copy: int) -> Input:
        self.copy_of[named(entry.name, copy)] = copy
        return replace(entry, name=named(entry.name, copy))

    def _name(self, value: str, copy: int) -> str:
        """Return the name under which a copy reads a value."""
        if value in self.carried and copy:
            return named(self.carried[value], copy - 1)
        return value if value in self.shared else named(value, copy)

    # ------------------------------------------------------------ turns

    def _in_turns(self) -> Iterator[Node]:
        """Yield the nodes of all copies in their order of execution: one turn of each."""
        turns = [self._turns_of(copy) for copy in range(len(self.copies))]
        needs = [[_needs(turn) for turn in mine] for mine in turns]
        there, done = {*self.copy_of, *self.shared}, [0] * len(turns)
        there -= {v for mine in turns for turn in mine for n in turn for v in n.values}
        while any(done[copy] < len(turns[copy]) for copy in range(len(turns))):
            moved = False
            for copy, mine in enumerate(turns):
                # A copy follows the one before it, so that short turns of one overlap with long turns of the other.
                waits = copy and done[copy] + self.order.apart >= done[copy - 1] < len(turns[copy - 1])
                if waits or done[copy] == len(mine):
                    continue
                if not there.issuperset(needs[copy][done[copy]]):
                    continue  # a buffer of the copy before is not computed yet
                for node in mine[done[copy]]:
                    there.update(node.values)
                    yield node
                done[copy], moved = done[copy] + 1, True
            assert moved, "copies wait for each other"

    def _turns_of(self, copy: int) -> list[list[Node]]:
        """Return the turns of a copy: those of the leading rank, by name. A rank without elements of an operator has no
        helpers of it, and helpers that the leading rank has not go with the node that follows them."""
        leading = _turns(list(self._program(copy, self.leading[copy])), self.order.halved)
        number = {node.name: place for place, turn in enumerate(leading) for node in turn}
        turns: list[list[Node]] = [[] for _ in leading]
        helpers: list[Node] = []
        for node, _, _ in self._program(copy, self.copies[copy]):
            helpers.append(node)
            if node.name in number:
                turns[number[node.name]] += helpers
                helpers = []
        assert not helpers, f"%{helpers[-1].name} is no node of the leading rank"
        return turns

    def _program(self, copy: int, graph: Graph) -> Iterator[tuple[Node, float, bool]]:
        """Yield the nodes of a rank's program of a copy, with the work of each and whether a turn ends there."""
        for node in graph.nodes:
            mine = self._renamed(node, copy)
            if mine is None:
                continue
            if node.op == RESHARD and _sends(node) and graph.consumers[node.name]:
                start = mine.name + STARTED
                half = ((Ref(mine.uses[0]),), (node.args[1],), (node.args[2],))
                flag = (any(node.needs_grad),)
                self.copy_of[start] = copy
                yield (
                    Node(start, START, half, (), (TOKEN,), flag, node.module, node.source),
                    0.0,
                    self._ends(node),
                )
                yield replace(mine, op=WAIT, args=(Ref(start), 0)), 0.0, False
            else:
                yield mine, _work(node, graph), False

    def _ends(self, reshard: Node) -> bool:
        forward, backward = (any(kind in COLLECTIVES for kind, *_ in half) for half in reshard.args[1:3])
        return self.order.everywhere or (backward and not forward)

    def _renamed(self, node: Node, copy: int) -> Node | None:
        """Return a node with a copy's names; None for a shared node that another copy has run."""
        if self.shared.issuperset(node.values):
            return node if copy == 0 else None
        mine = replace(node, name=named(node.name, copy))
        self.copy_of[mine.name] = copy
        return mine.with_uses(self._name(use, copy) for use in node.uses)

    # ------------------------------------------------------------ results

    def _together(self, value: str) -> Iterator[Node]:
        """Yield the nodes that join a result of all copies under its name: their sum, or the last one's value."""
        kind = self.copies[0].types[value]
        flag = value in self.copies[0].needs_grad
        last = len(self.copies) - 1
        if value not in self.added:
            yield Node(value, PIN, (Ref(named(value, last)),), (), (kind,), (flag,))
            return
        total = named(value, 0)
        for copy in range(1, len(self.copies)):
            name = value if copy == last else f"{value}{SUMMED}{copy}"
            terms = (Ref(total), Ref(named(value, copy)))
            yield Node(name, "aten.add.Tensor", terms, (), (kind,), (flag,))
            total = name


def _turns(program: Sequence[tuple[Node, float, bool]], halved: bool) -> list[list[Node]]:
    """Split a copy's program into turns.

    Each ends where the copy waits for a reshard that it has started. If `halved`, turns of more than average work are
    split in two.
    """
    stretches: list[list[tuple[Node, float]]] = [[]]
    for node, work, starts in program:
        stretches[-1].append((node, work))
        if starts:
            stretches.append([])
    average = sum(work for _, work, _ in program) / len(stretches)
    found: list[list[Node]] = []
    for stretch in stretches:
        total, so_far, turn = sum(work for _, work in stretch), 0.0, list[Node]()
        for node, work in stretch:
            if halved and so_far and total > average and so_far + work / 2 >= total / 2:
                found.append(turn)
                turn, total = [], 0.0
            turn.append(node)
            so_far += work
        found.append(turn)
    return [turn for turn in found if turn]


def _needs(turn: Sequence[Node]) -> set[str]:
    """Return the values that a turn reads and does not compute."""
    found, made = set[str](), set[str]()
    for node in turn:
        found.update(use for use in node.uses if use not in made)
        made.update(node.values)
    return found


def _work(node: Node, graph: Graph) -> float:
    """Estimate the work of an operator: multiplications of a product, elements of anything else."""
    if node.op in VIEWS or node.op in (PIN, RESHARD, START, WAIT):
        return 0.0
    made = sum(math.prod(t.shape) for t in node.outputs)
    name = node.op.split(".")[1]
    if name in PRODUCTS and len(node.uses) > 1:
        first, second = (graph.types[use].shape for use in node.uses[:2])
        match PRODUCTS[name]:
            case "row":
                return made * first[-1]
            case "keys":
                return 2.0 * math.prod(first) * second[-2]
            case "window":
                return made * math.prod(second[1:])
    return 4.0 * made


def _sends(reshard: Node) -> bool:
    """Return whether a reshard has a collective that can be started. Regathers in backward run where they are read."""
    kinds = {kind for half in reshard.args[1:3] for kind, *_ in half}
    return not kinds.isdisjoint(COLLECTIVES) and not reshard.kwarg("again")


def _axes(node: Node) -> set[str]:
    """Return the axes over which a reshard or a flight communicates or slices; a wait has those of its start."""
    if node.op in (WAIT, TO_DEVICE):
        return set()
    halves = list(node.args[1:3])
    if node.op == START:
        halves = [one for half in halves for one in half]
    return {axis for half in halves for _, axes, _, _ in half for axis in axes.split(".")}


__all__ = ["Interleaved", "in_copies", "interleaved", "named", "original", "shared"]
