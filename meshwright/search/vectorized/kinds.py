"""Nodes that differ in sizes alone, and the states that they have on one axis beside what is decided on the others.

A *kind* is nodes of one operator, one rule, sub-dims of one form and equal options. Those of a kind whose states are
equal rows are a *sheet*: one array of codes for all of them, and their seconds as columns of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.graph import Graph, Node, map_refs
from meshwright.core.layout import Dim, SubDim
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.cost.host import place
from meshwright.cost.machine import seconds
from meshwright.cost.operator_tables import ATTENTION, VIEWS
from meshwright.cost.operators import work
from meshwright.ops.collectives import WITH_COLLECTIVES
from meshwright.ops.saved import KEEPS
from meshwright.ops.saved_extra import EXTRA
from meshwright.search.solve.eliminate_batched import same_columns
from meshwright.search.space.cache import kind_of
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.constraints import Seeds, constraints_of, forced, no_room, numbers_of
from meshwright.search.space.families import Rows, block_counts, distinct, letters_held, moved_on, together
from meshwright.search.space.layouts import Port
from meshwright.search.space.nodes import NodeStates, node_states
from meshwright.search.vectorized.sizes import Floats, Numbers


@dataclass(frozen=True)
class Kind:
    """Nodes by number, the codes of one of them, and the sizes of the leaves of each [nodes, leaves]. What only sizes
    tell apart is priced in arrays, unless the operator's work asks for more of them (`single`: they are all the same).
    `constraints`: what the user asks of each, axis → number of an option; `host`: it runs there."""

    codes: NodeCodes
    members: Numbers
    leaf_sizes: Floats
    single: bool
    constraints: Mapping[str, int]
    host: bool


@dataclass(frozen=True)
class Sheet:
    """Nodes of one kind with equal states: rows of options, the layouts of each port, seconds [states, nodes]."""

    kind: Kind
    members: Numbers
    rows: Rows
    ports: tuple[Port, ...]
    forward: Floats
    backward: Floats
    talk: Floats

    @property
    def seconds(self) -> Floats:
        """All that a node takes."""
        return self.forward + self.backward + self.talk

    def states(self, codes: NodeCodes, column: int) -> NodeStates:
        """Those of one of the nodes."""
        seconds = (a[:, column] for a in (self.forward, self.backward, self.talk))
        return NodeStates(codes, self.rows, self.ports, *seconds)


def kinds_of(
    codes: Mapping[str, NodeCodes], graph: Graph, seeds: Seeds, hosts: Collection[str]
) -> list[Kind]:
    """The kinds of all nodes, numbered in the order of `codes`. What users ask of nodes (`seeds`), and whether the host
    runs them, tells them apart too."""
    found: dict[tuple[Hashable, tuple[tuple[str, int], ...], bool], list[int]] = defaultdict(list)
    every = list(codes.values())
    asked = {name for nodes in seeds.values() for name in nodes}
    for number, (name, node) in enumerate(codes.items()):
        constraints = numbers_of(node, constraints_of(seeds, name)) if name in asked else {}
        found[_key(node, graph), tuple(constraints.items()), name in hosts].append(number)
    return [
        Kind(
            every[members[0]],
            np.array(members),
            np.stack([every[n].leaf_sizes for n in members]),
            _is_special(every[members[0]].node),
            dict(constraints),
            host,
        )
        for (_, constraints, host), members in found.items()
    ]


def _is_special(node: Node) -> bool:
    """True if the cost of a node depends on more than the sizes of its letters on a rank."""
    return (
        node.op in ATTENTION
        or node.op in EXTRA
        or node.op in WITH_COLLECTIVES
        or not isinstance(KEEPS.get(node.op, ""), str)
    )


def _key(codes: NodeCodes, graph: Graph) -> Hashable:
    node, rule = codes.node, codes.site.rule
    if _is_special(node):
        return kind_of(codes, graph)
    literals = (
        ()
        if node.op in VIEWS
        else (map_refs(node.args, lambda _: None), map_refs(node.kwargs, lambda _: None))
    )
    return (
        node.op,
        repr(literals),
        tuple([(graph.types[u].dtype, u in graph.needs_grad) for u in node.uses]),
        tuple([t.dtype for t in node.outputs]),
        node.needs_grad,
        tuple(map(id, (rule.inputs, rule.outputs, rule.terms, rule.replicated, rule.reduced_inside))),
        tuple([(letter, _form(tree)) for letter, tree in codes.site.trees.items()]),
        tuple(map(id, (codes.options, codes.spill, codes.starts, codes.forward, codes.grad, codes.splits))),
    )


def _form(tree: Dim) -> Hashable:
    """A tree without its sizes."""
    return tuple([None if isinstance(i, SubDim) else tuple([_form(p) for p in i.parts]) for i in tree])


class Sheets:
    """Makes the sheets of one axis."""

    def __init__(self, graph: Graph, cluster: Cluster, mesh: Mesh, kinds: list[Kind]) -> None:
        self.graph, self.cluster, self.mesh, self.kinds = graph, cluster, mesh, kinds
        self.sizes = np.array([a.size for a in mesh.axes], dtype=np.float64)

    def on(self, axes: Sequence[int], now: Rows) -> Iterator[Sheet]:
        """The sheets of all nodes: each has the row that stands now [nodes, axes], and those in which the given axes
        take one of its options together."""
        for kind in self.kinds:
            rows = now[kind.members]
            for at in same_columns(rows.T.astype(np.int64)):
                yield from self._lawful(kind, at, together(kind.codes, rows[at[0]], axes, self.sizes))

    def _lawful(self, kind: Kind, at: Numbers, choices: Rows) -> Iterator[Sheet]:
        """`families.legal`, for the nodes `at` of a kind at once: those that are left with equal rows go together."""
        codes, leaf_sizes = kind.codes, kind.leaf_sizes[at]
        counts = block_counts(codes, choices, self.sizes)
        roomy = np.all(counts[:, None, :] <= leaf_sizes, axis=2)  # [rows, nodes]
        for some in same_columns(np.array(roomy, dtype=np.int64)):
            room: np.ndarray = roomy.take(some[0], axis=1)
            if room.all():
                yield from self._constrained(kind, at[some], distinct(choices))
                continue
            tight = choices[~room]
            moved, alive = moved_on(
                codes,
                np.tile(tight, (len(some), 1)),
                self.sizes,
                np.repeat(leaf_sizes[some], len(tight), axis=0),
            )
            moved = moved.reshape(len(some), -1)
            keys = np.concatenate([moved, alive.reshape(len(some), -1)], axis=1)
            for few in same_columns(keys.T.astype(np.int64)):
                rows = choices.copy()
                rows[~room] = moved[few[0]].reshape(tight.shape)
                gone = np.flatnonzero(~room)[~alive.reshape(len(some), -1)[few[0]]]
                yield from self._constrained(kind, at[some[few]], distinct(np.delete(rows, gone, axis=0)))

    def _constrained(self, kind: Kind, at: Numbers, rows: Rows) -> Iterator[Sheet]:
        """`given.honoured`, for the nodes `at` at once."""
        if not kind.constraints:
            yield self._sheet(kind, at, rows)
            return
        rows = forced(rows, kind.constraints, self.mesh)
        counts = block_counts(kind.codes, rows, self.sizes)
        roomy = np.all(counts[:, None, :] <= kind.leaf_sizes[at], axis=2)
        for some in same_columns(np.array(roomy, dtype=np.int64)):
            room = roomy[:, some[0]]
            if not room.any():
                raise no_room(kind.codes, kind.constraints)
            yield self._sheet(kind, at[some], rows[room])

    def _sheet(self, kind: Kind, at: Numbers, rows: Rows) -> Sheet:
        codes, members = kind.codes, kind.members[at]
        shape = len(rows), len(at)
        if kind.single:
            found = node_states(codes, lambda *_: rows, self.graph, self.mesh, self.cluster, host=kind.host)
            parts = (np.broadcast_to(a[:, None], shape) for a in (found.forward, found.backward, found.talk))
            return Sheet(kind, members, rows, found.ports, *parts)
        ports = tuple(
            Port(forward[rows], grad[rows]) for forward, grad in zip(codes.forward, codes.grad, strict=True)
        )
        held = np.ceil(kind.leaf_sizes[at] / block_counts(codes, rows, self.sizes)[:, None, :])
        count = len(rows) * len(at)
        local = letters_held(codes, held.reshape(count, -1) if held.size else np.ones((count, 0)))
        wanted = [u in self.graph.needs_grad for u in codes.node.uses]
        where = "cpu" if kind.host else self.cluster.device_type
        done = work(codes.node, codes.site.rule, local, self.graph.types, wanted, device=where)
        forward, backward = (
            np.broadcast_to(np.asarray(half, dtype=np.float64), (count,)).reshape(shape)
            for half in seconds(done, *place(self.cluster, kind.host))
        )
        return Sheet(kind, members, rows, ports, forward, backward, np.zeros(shape))
