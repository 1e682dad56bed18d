"""Why operators are sharded as they are: strategy, price, layouts that neighbours need, and alternatives.

A plan file alone gives the shardings, the reasons, and the next best if a search recorded it. The model adds the
neighbours, and a cluster the seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.core.graph import DTYPES, MOVES, PIN, TRANSFERS, Node
from meshwright.core.layout import TensorLayout, normalize, only_axes
from meshwright.core.mesh import Mesh
from meshwright.errors import PlanError, did_you_mean
from meshwright.partition import Partition
from meshwright.pipeline.of_plan import place_of
from meshwright.plan.plan import Plan
from meshwright.predict.price import Price
from meshwright.redistribute import describe
from meshwright.redistribute.steps import LOCAL
from meshwright.report.diff import LAYER, cut_words, layout_words, short
from meshwright.report.layers_of_file import matching_modules, modules_of
from meshwright.report.plan_table import cut_text


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of an operator in a step: computation, collectives inside it, and reshards of its inputs."""

    forward: float
    backward: float
    communication: float

    @property
    def total(self) -> float:
        """The sum of all seconds."""
        return self.forward + self.backward + self.communication


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One edge of an operator.

    `name` and `operator` are those of the other end; `has` is the layout of the value, `asks` the layout needed,
    `moves` what is sent for it in forward and backward, in `seconds` (None: unknown).
    """

    incoming: bool
    name: str
    operator: str
    has: str
    asks: str
    moves: tuple[str, str]
    seconds: float | None


@dataclass(frozen=True)
class Choice:
    """One operator's strategy and what is known about it. `batch`: its letters that count examples."""

    node: str
    module: str
    operator: str
    cut: str
    why: str = ""
    next: str = ""
    source: str = ""
    factors: tuple[tuple[str, str], ...] = ()
    batch: tuple[str, ...] = ()
    seconds: Seconds | None = None
    neighbours: tuple[Neighbour, ...] = ()
    times: int = 1  # how many layers it stands for, in a file that says each kind of layer twice


def matching(plan: Plan, pattern: str) -> tuple[str, ...]:
    """Return the nodes that a pattern matches: ``%linear_3`` (or without %) one node, ``blocks.*.up`` or
    ``blocks.0-5.up`` those of modules.

    Modules inside match, too. A layer that a plan file leaves out has the nodes of the one that stands for it. Raises
    PlanError when there is none.
    """
    name = pattern.removeprefix("%")
    if name in plan.strategies:
        return (name,)
    found = tuple(matching_modules(plan, pattern))
    if not found:
        modules = {m for each in modules_of(plan).values() for m in each if m}
        folded = {LAYER.sub("*", m) for m in modules}
        operators = sum(plan.times.get(n, 1) for n in plan.strategies)
        raise PlanError(
            f"no operator or module of the plan matches {pattern!r}",
            why=f"it has {operators} operators in {len(modules)} modules",
            hint=did_you_mean(pattern, modules | folded if len(pattern) > 2 else folded),
        )
    return found


def choices(
    plan: Plan, names: Iterable[str], parts: Partition | None, prices: Sequence[Price] = ()
) -> list[Choice]:
    """Return what is known about each of the nodes.

    `prices`: that of the program or, if places of a pipeline have separate meshes, of each of theirs.
    """
    known: dict[int, dict[str, Node]] = {}
    whole, every, found = plan, parts, list[Choice]()
    for name in names:
        place = place_of(whole, name)
        price = prices[place] if prices else None
        plan, parts = whole.of_place(place), every.of_place(place) if every is not None else None
        if place not in known:
            known[place] = {n.name: n for n in parts.resharded.graph.nodes} if parts is not None else {}
        nodes = known[place]
        op, module = plan.about.get(name, ("", ""))
        node = nodes.get(name)
        edges: tuple[Neighbour, ...] = ()
        batch = _batch(parts, name) if parts is not None else ()
        cut = cut_words(plan.strategies[name], plan.mesh)
        if parts is not None and node is not None:
            edges, cut = neighbours(parts, node, price), cut_text(parts, node)
        found.append(
            Choice(
                node=name,
                module=module,
                operator=short(op),
                cut=cut,
                why=plan.reasons.get(name, ""),
                next=_with_batch(plan.nexts.get(name, ""), batch),
                source=node.source if node is not None else "",
                factors=_factors(parts, name) if parts is not None else (),
                batch=batch,
                seconds=_seconds(price, name, edges) if price is not None else None,
                neighbours=edges,
                times=plan.times.get(name, 1),
            )
        )
    return found


def folded(found: Sequence[Choice]) -> list[tuple[str, int, Choice]]:
    """Return (module with the layer's number replaced, count, the first of them) of choices that differ in nothing
    else.
    """
    grouped: dict[tuple[object, ...], list[Choice]] = {}
    for c in found:
        seconds = None if c.seconds is None else tuple(f"{s:.2e}" for s in (c.seconds.total,))
        where = LAYER.sub("*", c.module or f"%{c.node}")
        grouped.setdefault((where, c.operator, c.cut, c.why, LAYER.sub("*", c.next), seconds), []).append(c)
    rows: list[tuple[str, int, Choice]] = []
    for (where, *_), same in grouped.items():
        first = same[0]
        one = len({c.module or c.node for c in same}) == 1 and first.times == 1
        rows.append(
            ((first.module or f"%{first.node}") if one else str(where), sum(c.times for c in same), first)
        )
    return rows


def _factors(parts: Partition, name: str) -> tuple[tuple[str, str], ...]:
    """Return each factor of an operator and its size: (letter, ``1024``); `batch` if it counts examples."""
    site = parts.factors.sites[name]
    batch = _batch(parts, name)
    shown: list[tuple[str, str]] = []
    for letter, tree in site.trees.items():
        size = layout_words(TensorLayout((tree,)), parts.plan.mesh)
        text = str(TensorLayout((tree,)))[1:-1] if size == "replicated" else size
        shown.append(("batch" if letter in batch else letter, text))
    return tuple(shown)


def _with_batch(text: str, batch: Iterable[str]) -> str:
    """Return ``d0=dp n=tp`` with the letters that count examples named ``batch``."""
    for letter in batch:
        text = re.sub(rf"(?<![\w.]){re.escape(letter)}=", "batch=", text)
    return text


def _batch(parts: Partition, name: str) -> tuple[str, ...]:
    trees = parts.factors.sites[name].trees
    return tuple(letter for letter in trees if any(parts.factors.batch.get((name, letter), ())))


def _seconds(price: Price, name: str, edges: Iterable[Neighbour]) -> Seconds | None:
    own = price.by_node.get(name)
    if own is None:
        return None
    sent = own.forward_talk_seconds + own.backward_talk_seconds
    sent += math.fsum(e.seconds or 0.0 for e in edges if e.incoming)
    return Seconds(own.forward_seconds, own.backward_seconds, sent)


def neighbours(parts: Partition, node: Node, price: Price | None) -> tuple[Neighbour, ...]:
    """Return the producers of an operator's inputs, then the consumers of its results."""
    graph = parts.resharded.graph
    found: list[Neighbour] = []
    for port, use in enumerate(node.uses):
        asks = parts.resharded.ports[node.name].inputs[port]
        source, way = _source(parts, use)
        producer = graph.producers.get(source)
        who = (
            (producer.module or f"%{producer.name}", short(producer.op))
            if producer
            else _input(parts, source)
        )
        found.append(_edge(parts, True, who, parts.resharded.layouts[source], asks, way, price))
    for value in node.values:
        for consumer, port, way in _consumers(parts, value):
            asks = parts.resharded.ports[consumer.name].inputs[port]
            who = (consumer.module or f"%{consumer.name}", short(consumer.op))
            found.append(_edge(parts, False, who, parts.resharded.layouts[value], asks, way, price))
    return tuple(dict.fromkeys(found))


def _input(parts: Partition, name: str) -> tuple[str, str]:
    entry = next(i for i in parts.resharded.graph.inputs if i.name == name)
    return (entry.target if entry.role != "constant" else f"%{entry.name}", entry.role)


def _source(parts: Partition, use: str) -> tuple[str, list[Node]]:
    """Return the value behind reshards, and these."""
    way: list[Node] = []
    node = parts.resharded.graph.producers.get(use)
    while node is not None and node.op in MOVES:
        way.insert(0, node)
        use = node.uses[0]
        node = parts.resharded.graph.producers.get(use)
    return use, way


def _consumers(
    parts: Partition, value: str, way: Sequence[Node] = ()
) -> Iterable[tuple[Node, int, list[Node]]]:
    """Yield the operators that read a value, through reshards."""
    for node, port in parts.resharded.graph.consumers[value]:
        if node.op in MOVES:
            yield from _consumers(parts, node.name, (*way, node))
        elif node.op != PIN:
            yield node, port, list(way)


def _edge(
    parts: Partition,
    incoming: bool,
    who: tuple[str, str],
    has: TensorLayout,
    asks: TensorLayout,
    way: Sequence[Node],
    price: Price | None,
) -> Neighbour:
    mesh = parts.plan.mesh
    halves: tuple[list[str], list[str]] = ([], [])
    for node in way:
        if node.op in TRANSFERS:
            halves[0].append(node.op.removeprefix("meshwright."))
            continue
        pair, itemsize = parts.resharded.pairs[node.name], DTYPES[node.outputs[0].dtype]
        backward = pair.backward if any(node.needs_grad) else ()
        for steps, half in zip((pair.forward, backward), halves, strict=True):
            half += [describe(s, mesh, itemsize) for s in steps if s.kind not in LOCAL]
    seconds = None if price is None else math.fsum(t for n in way for t in price.by_reshard[n.name])
    texts = (shown(has, mesh), shown(asks, mesh))
    return Neighbour(incoming, *who, *texts, (", ".join(halves[0]), ", ".join(halves[1])), seconds)


def shown(layout: TensorLayout, mesh: Mesh) -> str:
    """Return a layout in its simplest form, by the user's names of the axes and without a split in time."""
    ranks = [a.name for a in mesh.axes if a.name not in mesh.time]
    return layout_words(normalize(only_axes(layout.forward, ranks), mesh), mesh)
