"""What one node may do on one mesh axis, and what it costs its neighbours.

Strategies are built one prime axis at a time, slowest link first; on one axis a node is cut in one unit of one letter,
lets a pending sum through, or is whole. The cost of an option is the bytes a rank moves, forward and backward, to bring
values from the layouts its decided neighbours have to those it asks for (ring formulas: Patarasu & Yuan 2009). It is a
comparison between options of one node on one axis, not a price in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.graph import Graph, Node
from meshwright.layout import TensorLayout, normalize, only_axes
from meshwright.mesh import Mesh
from meshwright.ops.factors import Factors, Site
from meshwright.ops.strategy import WHOLE, Ports, Strategy, cut, fits, layouts, merge, splittable, units

Assignment = dict[str, Strategy]

CREATES = ("aten.full.default", "aten.arange.default", "aten.arange.start", "aten.arange.start_step")


@dataclass(frozen=True)
class Scene:
    """What every search looks at: the graph, its factors and the mesh."""

    graph: Graph
    factors: Factors
    mesh: Mesh

    def site(self, name: str) -> Site:
        """The site of a node."""
        return self.factors.sites[name]

    def ports(self, node: Node, strategy: Strategy) -> Ports:
        """Port layouts of a node."""
        return layouts(self.site(node.name), strategy)

    def seen_on(self, layout: TensorLayout, axis: str) -> TensorLayout:
        """A layout on one axis alone, in normal form, without the gradient half."""
        return normalize(only_axes(layout.forward, (axis,)), self.mesh)


def options(scene: Scene, node: Node, axis: str, fixed: Strategy) -> Iterator[Strategy]:
    """What a node may do on an axis beside what is fixed on others; single-axis strategies, whole first."""
    yield WHOLE
    site, taken = scene.site(node.name), dict(fixed.cuts)
    for letter in splittable(site):
        tree = site.trees[letter]
        for unit in units(tree):
            if fits(taken.get(letter, tree), unit, scene.mesh, axis):
                yield Strategy(((letter, cut(tree, unit, axis)),))
    for ports in _through(site):
        yield Strategy(through=((axis, ports),))


def _through(site: Site) -> Iterator[tuple[int, ...]]:
    """Choices of one pending port per term."""
    if not site.rule.terms or len(site.rule.outputs) != 1:
        return
    choices: list[tuple[int, ...]] = [()]
    for term in site.rule.terms:
        choices = [(*c, p) for c in choices for p in term]
    yield from (tuple(sorted(c)) for c in choices)


def moved_bytes(have: TensorLayout, want: TensorLayout, size_bytes: int, members: int) -> float:
    """Bytes a rank sends to go from one single-axis layout to another of the same value."""
    share = size_bytes * (members - 1) / members
    if have == want:
        return 0.0
    if have.pending:
        return share if want.split_axes else 0.0 if want.pending else 2 * share
    if have.split_axes:
        return share / members if want.split_axes else 0.0 if want.pending else share
    return 0.0  # whole → split is a slice, whole → pending a mask


@dataclass(frozen=True, order=True)
class Score:
    """How good an option is: the user's word first, then bytes, then the number of transitions that cost
    something, then what stays uncut."""

    broken: int
    moved: float
    transitions: int
    repeats: int


def score(
    scene: Scene,
    node: Node,
    option: Strategy,
    axis: str,
    decided: Mapping[str, TensorLayout],
    wanted: Mapping[tuple[str, int], TensorLayout],
    given: frozenset[str] = frozenset(),
) -> Score:
    """The score of a single-axis option against decided neighbours.

    `decided` has the single-axis layout of values whose producer is decided (the gradient of a whole value counts as
    whole); `wanted` the single-axis layouts, with gradients, that decided consumers ask for at (consumer,
    port). Values in `given` are cut as the user said; an option that takes one otherwise breaks that.
    """
    graph, members = scene.graph, scene.mesh.sizes[axis]
    ports = scene.ports(node, option)
    moved, transitions, broken = 0.0, 0, 0

    def add(have: TensorLayout, want: TensorLayout, size_bytes: int) -> None:
        nonlocal moved, transitions
        cost = moved_bytes(have, want, size_bytes, members)
        moved, transitions = moved + cost, transitions + (cost > 0)

    seen: set[tuple[str, TensorLayout]] = set()
    for value, asked in zip(node.uses, ports.inputs, strict=True):
        want = normalize(only_axes(asked, (axis,)), scene.mesh)
        if (value, want) in seen:
            continue
        seen.add((value, want))
        if _shared(scene, node, value, want, wanted):
            continue
        size = graph.types[value].size_bytes
        needs_grad = value in graph.needs_grad
        if value in decided:
            add(decided[value], want.forward, size)
            broken += value in given and decided[value] != want.forward
            if needs_grad:
                add(want.backward, _gradient_of(decided[value]), size)
        elif needs_grad and want.grad:
            # A parameter takes the layout it is used in and pays the reduction of its gradient; what is not
            # decided yet is counted alike.
            add(want.backward, TensorLayout(want.dims), size)
    for value, layout in zip(node.values, ports.outputs, strict=True):
        have = scene.seen_on(layout, axis)
        size = graph.types[value].size_bytes
        asked_by_layout: set[TensorLayout] = set()
        for consumer, port in graph.consumers[value]:
            if (consumer.name, port) in wanted:
                asked_by_layout.add(wanted[consumer.name, port])
        for want in asked_by_layout:
            add(have, want.forward, size)
            if value in graph.needs_grad:
                add(want.backward, _gradient_of(have), size)
    return Score(broken, moved, transitions, 0 if option.cuts else 1)


def _shared(
    scene: Scene,
    node: Node,
    value: str,
    want: TensorLayout,
    wanted: Mapping[tuple[str, int], TensorLayout],
) -> bool:
    """Another consumer asks for the same pair already: a reshard is paid once for all who want it (q, k and v)."""
    return any(
        c.name != node.name and wanted.get((c.name, port)) == want for c, port in scene.graph.consumers[value]
    )


def _gradient_of(value: TensorLayout) -> TensorLayout:
    """The usual layout of a value's gradient: split where it is split, else whole."""
    return TensorLayout(value.dims)


def combine(scene: Scene, assignment: Assignment, node: Node, option: Strategy) -> None:
    """Add a single-axis option to what a node has on the axes before."""
    if option is not WHOLE:
        assignment[node.name] = merge(assignment[node.name], option)
