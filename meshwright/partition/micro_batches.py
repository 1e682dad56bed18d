"""The local programs of a rank for a batch in micro-batches, split by their dependences in time.

- A `Round` runs before the first forward: terms that depend on the batch only (the count of labels) are computed for
  every micro-batch, summed, and reduced over the ranks once. Sums of sums take another round.
- `programs` are the forward passes of the micro-batches, which read those sums. So every backward has the true
  denominators, and gradients are those of the full batch (those of a mean of means are not).
- `late` computes results that are sums over micro-batches (the loss) from the accumulated terms, after the last one.

`carried` are the buffers that a micro-batch passes on to the next (running statistics).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.core.collectives import COLLECTIVES
from meshwright.core.graph import DTYPES, RESHARD, START, Graph, Input, Node, Ref, prune, verify
from meshwright.core.layout import TensorLayout
from meshwright.core.remembered import cached_on_first
from meshwright.ops.batch import example_reducers
from meshwright.partition import Partition
from meshwright.partition.insert_reshards import local_type, step_texts
from meshwright.partition.interleave import Interleaved, interleaved, shared
from meshwright.partition.localize import SUM_OF_COUNTS
from meshwright.partition.time_axis import early_values
from meshwright.redistribute import TWO_CORE_GLOO, redistribute
from meshwright.redistribute.steps import origin

SUM = "boundary"  # the role of an input that another of these programs computes


@dataclass(frozen=True)
class Round:
    """Sums over the full batch: a program for each micro-batch, and `sums`, which reduces their accumulated results."""

    terms: tuple[Graph, ...]
    sums: Graph


@dataclass(frozen=True)
class MicroBatches:
    """The programs of one rank."""

    rounds: tuple[Round, ...]
    programs: tuple[Graph, ...]
    late: Graph
    carried: tuple[tuple[str, str], ...]  # input → the value that replaces it
    # node or input → its copy, where programs have several
    copy_of: Mapping[str, int] = field(default_factory=dict)


def micro_batches_of(parts: Partition, rank: int) -> MicroBatches:
    """Return the programs of a rank under a plan with micro-batches."""
    cut = [_Cut(parts, number, parts.local(number)) for number in parts.of_rank(rank)]
    first = cut[0]
    rounds = tuple(
        Round(tuple(c.terms(number) for c in cut), first.sums(number)) for number in range(first.rounds)
    )
    late, carried = first.late(), _carried(parts)
    programs = tuple(c.program() for c in cut)
    if parts.copies == 1:
        return MicroBatches(rounds, programs, late, carried)
    leading = programs if rank == 0 else tuple(_programs(parts, parts.of_rank(0)))
    groups = (slice(n, n + parts.copies) for n in range(0, len(programs), parts.copies))
    merged = [_merged(parts, programs[group], late, leading[group]) for group in groups]
    return MicroBatches(rounds, tuple(m.graph for m in merged), late, carried, merged[0].copy_of)


def full_batch(parts: Partition, rank: int) -> MicroBatches:
    """Return the one program of a rank under a plan without micro-batches: nothing runs before or after it."""
    graph = parts.local(rank)
    return MicroBatches((), (graph,), replace(graph, inputs=(), nodes=(), outputs=(), mutations=()), ())


@cached_on_first
def first_program(parts: Partition, rank: int) -> Interleaved:
    """Return the program of the first interleaved copies, for a timeline.

    `rank` is a rank of the plan's mesh in the first micro-batch.
    """
    mine, first = parts.of_rank(rank)[: parts.copies], parts.of_rank(0)[: parts.copies]
    programs = list(_programs(parts, mine))
    leading = programs if mine == first else list(_programs(parts, first))
    return _merged(parts, programs, _Cut(parts, rank, parts.local(rank)).late(), leading)


def _programs(parts: Partition, numbers: Iterable[int]) -> Iterator[Graph]:
    for number in numbers:
        yield _Cut(parts, number, parts.local(number)).program()


def nothing_to_hide(parts: Partition) -> tuple[str, ...]:
    """Return a remark if half-batches are interleaved but send nothing that could be hidden."""
    if parts.copies == 1:
        return ()
    program = first_program(parts, parts.plan.mesh.rank(origin(parts.plan.mesh)))
    if any(node.op == START and node.name in program.copy_of for node in program.graph.nodes):
        return ()
    return (
        f"interleave={parts.copies} has nothing to hide: no operator sends activations under this plan, so it only "
        "makes operators smaller",
    )


def _merged(parts: Partition, copies: Sequence[Graph], late: Graph, leading: Sequence[Graph]) -> Interleaved:
    added = [entry.name for entry in late.inputs]
    plan, carried = parts.plan, dict(_carried(parts))
    layouts, time = parts.resharded.layouts, set(plan.mesh.time)
    apart = {value for _, value in copies[0].outputs if time.intersection(layouts[value].split_axes)}
    found = interleaved(copies, added, carried, plan.mesh.time, leading, plan.turns, apart)
    _checked(found.graph)
    return found


@cached_on_first
def first_micro_batch(parts: Partition, rank: int) -> MicroBatches:
    """Return the programs of the first micro-batch only, which is the largest, for prices and tables."""
    cut = _Cut(parts, rank, parts.local(rank))
    rounds = tuple(Round((cut.terms(number),), cut.sums(number)) for number in range(cut.rounds))
    return MicroBatches(rounds, (cut.program(),), cut.late(), _carried(parts))


def how_often(parts: Partition, programs: MicroBatches) -> Callable[[str], int]:
    """Return how often a step runs a node of the first micro-batch's program; shared nodes run once for all."""
    time = parts.plan.mesh.time
    once = shared(programs.programs[0], dict(programs.carried), time) if parts.copies > 1 else ()
    return lambda name: parts.micro_batches // (parts.copies if name in once else 1)


class _Cut:
    """The local program of one micro-batch, to be split into programs in time."""

    def __init__(self, parts: Partition, number: int, graph: Graph) -> None:
        self.parts, self.number, self.graph = parts, number, graph
        self.time = frozenset(parts.plan.mesh.time)
        early = early_values(graph, graph.nodes)
        self.added = [n for n in graph.nodes if early.issuperset(n.values) and self._adds_up(n)]
        self.early = [n for n in graph.nodes if early.issuperset(n.values)]
        self._sums = {n.name for n in self.added}
        self.level = self._levels()
        self.rounds = max((self.level[n.name] for n in self.added), default=0)

    def _adds_up(self, node: Node) -> bool:
        if node.op == SUM_OF_COUNTS:
            return not self.time.isdisjoint(node.args[1])
        steps = self.parts.resharded.pairs[node.name].forward if node.op == RESHARD else ()
        return any(s.kind in COLLECTIVES and self.time.intersection(s.axes) for s in steps)

    def _levels(self) -> dict[str, int]:
        """Return the number of rounds that must precede each value."""
        level = {i.name: 0 for i in self.graph.inputs}
        for node in self.early:
            found = max((level.get(u, 0) for u in node.uses), default=0) + (node.name in self._sums)
            level.update(dict.fromkeys(node.values, found))
        return level

    def _of_round(self, number: int) -> list[Node]:
        return [n for n in self.added if self.level[n.name] == number + 1]

    def terms(self, number: int) -> Graph:
        """Return the program of one micro-batch in a round."""
        wanted = dict.fromkeys(n.uses[0] for n in self._of_round(number))
        nodes = tuple(n for n in self.early if n.name not in self._sums and self.level[n.values[0]] <= number)
        before = [n.name for n in self.added if self.level[n.name] <= number]
        return self._program(nodes, before, tuple((v, v) for v in wanted))

    def sums(self, number: int) -> Graph:
        """Return the program from the terms of all micro-batches to the sums over all ranks."""
        nodes, outputs = [], []
        for node in self._of_round(number):
            made = self._over_ranks(node)
            nodes += [made] if made is not None else []
            outputs.append((node.name, node.name if made is not None else node.uses[0]))
        wanted = dict.fromkeys(n.uses[0] for n in self._of_round(number))
        inputs = tuple(self._boundary(name) for name in wanted)
        return _checked(
            replace(self.graph, inputs=inputs, nodes=tuple(nodes), outputs=tuple(outputs), mutations=())
        )

    def program(self) -> Graph:
        """Return the forward program of this micro-batch."""
        nodes = tuple(n for n in self.graph.nodes if n.name not in self._sums)
        return self._program(nodes, [n.name for n in self.added], self.graph.outputs, self.graph.mutations)

    def late(self) -> Graph:
        """Return the program from the accumulated terms of results to their values on one device."""
        layouts, entries = self.parts.resharded.layouts, {i.target: i.name for i in self.graph.inputs}
        wants = {value: TensorLayout.replicated(layouts[value].shape) for _, value in self.graph.outputs}
        wants |= {value: self.parts.plan.inputs[entries[target]] for target, value in self.graph.mutations}
        nodes: list[Node] = []
        outputs: list[tuple[str, str]] = []
        for value, want in wants.items():
            if self.time.isdisjoint(layouts[value].partial):
                continue
            name = f"{value.replace('.', '_')}_all"
            made = self._moved(value, self._over_time(layouts[value]), want, name)
            nodes += [made] if made is not None else []
            outputs.append((value, made.name if made is not None else value))
        inputs = tuple(self._boundary(value) for value, _ in outputs)
        return _checked(
            replace(self.graph, inputs=inputs, nodes=tuple(nodes), outputs=tuple(outputs), mutations=())
        )

    # -------------------------------------------------- pieces

    def _program(
        self,
        nodes: tuple[Node, ...],
        made_before: Iterable[str],
        outputs: tuple[tuple[str, str], ...],
        mutations: tuple[tuple[str, str], ...] = (),
    ) -> Graph:
        """Return a program of some nodes, without unread inputs and nodes."""
        before = tuple(self._boundary(name) for name in made_before)
        graph = prune(replace(self.graph, nodes=nodes, outputs=outputs, mutations=mutations))
        read = {u for n in graph.nodes for u in n.uses} | {v for _, v in (*outputs, *mutations)}
        inputs = tuple(i for i in (*graph.inputs, *before) if i.name in read)
        return _checked(replace(graph, inputs=inputs))

    def _boundary(self, name: str) -> Input:
        return Input(name, SUM, name, self.graph.types[name])

    def _over_ranks(self, node: Node) -> Node | None:
        """Return a sum over time and ranks without the time; None if no rank is left."""
        if node.op == SUM_OF_COUNTS:
            axes = tuple(a for a in node.args[1] if a not in self.time)
            return replace(node, args=(node.args[0], axes)) if axes else None
        layouts = self.parts.resharded.layouts
        return self._moved(
            node.uses[0], self._over_time(layouts[node.uses[0]]), layouts[node.name], node.name
        )

    def _over_time(self, layout: TensorLayout) -> TensorLayout:
        pending = tuple(a for a in layout.partial if a not in self.time)
        return TensorLayout(layout.dims, pending)

    def _moved(self, value: str, have: TensorLayout, want: TensorLayout, name: str) -> Node | None:
        """Return a reshard without gradient; None if it does nothing."""
        parts, kind = self.parts, self.graph.types[value]
        prices = parts.plan.prices or TWO_CORE_GLOO
        steps = redistribute(have, want, parts.plan.mesh, DTYPES[kind.dtype], prices)
        if not steps:
            return None
        made = local_type(replace(kind, shape=want.shape), want, parts.plan.mesh, self.number)
        return Node(name, RESHARD, (Ref(value), step_texts(steps), ()), (), (made,), (False,))


def _checked(graph: Graph) -> Graph:
    """Check a graph whose inputs may be results of another one, and return it. Raises GraphError."""
    verify(replace(graph, inputs=tuple(replace(i, role="batch") for i in graph.inputs)))
    return graph


def _carried(parts: Partition) -> tuple[tuple[str, str], ...]:
    """Return the buffers whose new values depend on one micro-batch, and are not sums over them."""
    graph, layouts = parts.resharded.graph, parts.resharded.layouts
    if not graph.mutations:
        return ()
    sources = {node.name for node in example_reducers(graph, parts.factors)}
    own: set[str] = set()
    for node in graph.nodes:
        if node.name in sources or own.intersection(node.uses):
            own.update(node.values)
    entries, time = {i.target: i.name for i in graph.inputs}, set(parts.plan.mesh.time)
    return tuple(
        (entries[target], value)
        for target, value in graph.mutations
        if value in own and time.isdisjoint(layouts[value].partial)
    )
