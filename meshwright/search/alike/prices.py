"""The prices of a whole graph beside rows that stand, found for all that is alike at once: a `Space` as arrays.

Variables are those of a space: nodes, hubs, parameters. Nodes whose states are equal rows are a sheet; hubs between the
same ports of the same sheets have one union of layouts, parameters that are read there too; and reshards between the
same layouts of values of one structure are priced together. What one node after the other takes a third of a
millisecond for, a thousand take together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.cluster import Cluster
from meshwright.cost.host import transfer_seconds
from meshwright.graph import Graph
from meshwright.places import hosted_values
from meshwright.redistribute.matrix import Table, Value
from meshwright.search.alike.kinds import Sheet, Sheets, kinds_of
from meshwright.search.alike.parameters import Stored, all_stored
from meshwright.search.alike.sizes import Floats, Numbers, Values
from meshwright.search.alike.ways import Ways, ways
from meshwright.search.solve.rounds import Rounds, Tables, ends_of, same_columns
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.crossings import Crossing, crossings
from meshwright.search.space.families import Rows
from meshwright.search.space.given import Seeds
from meshwright.search.space.layouts import Port, union
from meshwright.search.space.parameters import Storage
from meshwright.search.space.wiring import End, Wiring

TO_RESULT = -1  # in place of a variable: what goes to a result of the program, which is whole
BACK = -1  # in place of a table: what comes back to its own variable, or goes to a result


@dataclass(frozen=True)
class _Sort:
    """Hubs or parameters with as many ports: their variables [V], and nodes and ports [V, ports]."""

    variables: Numbers
    nodes: Numbers
    ports: Numbers
    structure: int
    graded: bool
    hosted: bool
    columns: Numbers


@dataclass(frozen=True)
class _Edges:
    """All reshards that may be, in columns."""

    times: Floats
    source: Numbers
    out: Numbers
    target: Numbers
    port: Numbers
    structure: Numbers
    column: Numbers
    graded: Numbers
    table: Numbers


@dataclass(frozen=True)
class _Pairs:
    """Reshards between the layouts of two ports, of values of one structure: `edges` as they are listed."""

    edges: Numbers
    have: Port
    want: Port
    structure: int
    graded: bool


class Alike:
    """A graph whose axes are to be searched, and what is alike in it."""

    def __init__(
        self,
        graph: Graph,
        codes: Mapping[str, NodeCodes],
        values: Mapping[str, Value],
        wiring: Wiring,
        cluster: Cluster,
        table: Table,
        storage: Storage,
        seeds: Seeds | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        """`seeds`: the user's cuts; `hosts`: the nodes that the host runs."""
        self.cluster, self.table, self.storage = cluster, table, storage
        self.codes, self.names = codes, list(codes)
        self.nodes = {name: number for number, name in enumerate(codes)}
        self.variable = {v: number for number, v in enumerate(wiring.variables)}
        self.sheets = Sheets(graph, cluster, table.mesh, kinds_of(codes, graph, seeds or {}, hosts))
        self.values = Values(values)
        self.times = np.array([wiring.times[name] for name in codes], dtype=np.float64)
        self.owners = np.array([wiring.owners.get(name, 1) for _, name in wiring.variables], dtype=np.float64)
        self.crossings = list(crossings(graph, wiring, hosts))
        self.of_graph = values
        hosted = hosted_values(graph, hosts)
        self.hubs = self._sorted(wiring.hubs, "hub", graph, ())
        self.parameters = self._sorted(wiring.parameters, "parameter", graph, hosted)
        pairs = [(self.variable[s], self.variable.get(t, TO_RESULT)) for s, _, t, _, _ in wiring.edges]
        self.rounds = Rounds(
            len(self.variable), ends_of([p for p in pairs if len(set(p)) == 2 and p[1] >= 0])
        )
        self.edges = self._columns(wiring, pairs, graph)

    def _sorted(
        self, found: Mapping[str, Sequence[End]], kind: str, graph: Graph, hosted: Collection[str]
    ) -> list[_Sort]:
        """By the number of ports, and parameters by what else tells them apart."""
        sorts: dict[tuple[int, int, bool, bool], list[str]] = defaultdict(list)
        for name, ends in found.items():
            structure = self.values.structure[name] if kind == "parameter" else -1
            sorts[len(ends), structure, name in graph.needs_grad, name in hosted].append(name)
        return [
            _Sort(
                np.array([self.variable[kind, name] for name in names]),
                np.array([[self.nodes[node] for node, _ in found[name]] for name in names]),
                np.array([[port for _, port in found[name]] for name in names]),
                structure,
                graded,
                there,
                np.array([self.values.column[name] for name in names]),
            )
            for (_, structure, graded, there), names in sorts.items()
        ]

    def _columns(self, wiring: Wiring, pairs: Sequence[tuple[int, int]], graph: Graph) -> _Edges:
        tables = {tuple(ends): number for number, ends in enumerate(self.rounds.ends.tolist())}
        inputs = {node.name: len(node.uses) for node in graph.nodes}
        rows = []
        for ((kind, name), out, _, port, value), (u, v) in zip(wiring.edges, pairs, strict=True):
            rows.append((
                u,
                inputs[name] + out if kind == "node" else -1,
                v,
                port,
                self.values.structure[value],
                self.values.column[value],
                value in graph.needs_grad,
                tables.get((min(u, v), max(u, v)), BACK),
            ))  # fmt: skip
        times = np.array(list(wiring.edges.values()), dtype=np.float64)
        return _Edges(times, *np.array(rows, dtype=np.int64).reshape(-1, 8).T)

    # ------------------------------------------------------------------------------------------------ prices

    def priced(self, axes: Sequence[int], now: Rows) -> Priced:
        """The problem in which each node keeps its row or takes one option on some axes."""
        return Priced(self, list(self.sheets.on(axes, now)))


class Priced:
    """What can be chosen, and what it costs."""

    def __init__(self, alike: Alike, sheets: list[Sheet]) -> None:
        self.alike, self.sheets = alike, sheets
        count = len(alike.variable)
        self.sheet_of, self.place = np.zeros((2, count), dtype=np.int64)  # of nodes; which column of it
        self.group: Numbers = np.zeros(count, dtype=np.int64)  # variables with equal layouts at all ports
        self.states: Numbers = np.zeros(count, dtype=np.int64)
        self.stored: list[
            tuple[Numbers, Port, Stored, Numbers]
        ] = []  # parameters, use, storages, which of them
        self.back: list[
            tuple[int, Floats]
        ] = []  # variables and what comes back to them, goes to results or crosses
        self.ports: list[dict[int, Port]] = []  # of each group, by port; -1 is that of a hub or parameter
        seconds: list[tuple[Numbers, Floats]] = []
        for number, sheet in enumerate(sheets):
            self.sheet_of[sheet.members] = number
            self._join(sheet.members, dict(enumerate(sheet.ports)), len(sheet.rows))
            seconds.append((sheet.members, sheet.seconds * alike.times[sheet.members]))
        for sort in alike.hubs:
            for some, use in self._unions(sort):
                self._join(sort.variables[some], {-1: use}, len(use.forward))
        for sort in alike.parameters:
            for some, use in self._unions(sort):
                self._join(sort.variables[some], {-1: use}, len(use.forward))
                stored, which = self._stored(sort, some, use)
                self.stored.append((sort.variables[some], use, stored, which))
                owners = alike.owners[sort.variables[some]]
                seconds.append((sort.variables[some], stored.least[:, which] * owners))
        self.tables = Tables(alike.rounds, self.states)
        for variables, amount in seconds:
            self.tables.add_states(variables, amount)
        for crossing in alike.crossings:
            self._cross(crossing)
        self._reshards()

    def _cross(self, crossing: Crossing) -> None:
        """Add what goes between a device and its host."""
        alike, node = self.alike, self.alike.nodes[crossing.node]
        value, port = alike.of_graph[crossing.value], self.ports[self.group[node]][crossing.port]
        size_bytes = value.itemsize * alike.table.local_elements(value, port.forward)
        seconds = crossing.times * np.asarray(transfer_seconds(size_bytes, alike.cluster))
        self.tables.add_states(np.array([node]), seconds[:, None])
        self.back.append((node, seconds))

    def _join(self, variables: Numbers, ports: dict[int, Port], states: int) -> None:
        self.group[variables], self.states[variables] = len(self.ports), states
        self.ports.append(ports)

    def _unions(self, sort: _Sort) -> Iterator[tuple[Numbers, Port]]:
        """Those of a sort that have the same ports of the same sheets, and the layouts of these."""
        keys = np.concatenate([self.sheet_of[sort.nodes], sort.ports], axis=1).T
        for some in same_columns(keys):
            ends = zip(self.sheet_of[sort.nodes[some[0]]].tolist(), sort.ports[some[0]].tolist(), strict=True)
            yield some, union([self.sheets[sheet].ports[port] for sheet, port in ends])

    def _stored(self, sort: _Sort, some: Numbers, use: Port) -> tuple[Stored, Numbers]:
        """The storages of those of a sort that are of one size, and which of these each parameter is."""
        alike = self.alike
        columns, which = np.unique(sort.columns[some], return_inverse=True)
        sizes = alike.values.sizes[sort.structure].take(columns)
        table, cluster = alike.table, alike.cluster
        return all_stored(sizes, use, sort.graded, cluster, table, alike.storage, sort.hosted), which

    # ------------------------------------------------------------------------------------------------ reshards

    def _reshards(self) -> None:
        """All prices of reshards, those of values of one number of places with one run of the formulas."""
        found: dict[int, list[_Pairs]] = defaultdict(list)
        for pairs in self._pairs():
            found[self.alike.values.sizes[pairs.structure].places if self._plain(pairs) else -1].append(pairs)
        for pairs in found.pop(-1, ()):
            self._add(pairs, self._one_by_one(pairs))
        for places, many in found.items():
            rows: list[tuple[np.ndarray, np.ndarray]] = []
            for pairs in many:
                rows.append(_every(pairs.have.forward, pairs.want.forward))
                if pairs.graded:
                    rows.append(_every(pairs.want.backward, pairs.have.backward))
            known = ways(
                self.alike.table,
                places,
                np.concatenate([source for source, _ in rows]),
                np.concatenate([target for _, target in rows]),
            )
            start = 0
            for pairs in many:
                count = len(pairs.have.forward) * len(pairs.want.forward)
                self._add(pairs, self._seconds(pairs, known, start, count))
                start += count * (2 if pairs.graded else 1)

    def _plain(self, pairs: _Pairs) -> bool:
        return self.alike.values.sizes[pairs.structure].plain

    def _pairs(self) -> Iterator[_Pairs]:
        edges = self.alike.edges
        to_result = edges.target == TO_RESULT
        target = np.where(to_result, -1, self.group[edges.target])
        keys = np.stack(
            [self.group[edges.source], edges.out, target, edges.port, edges.structure, edges.graded]
        )
        axes = len(self.alike.table.bits)
        whole = Port(np.zeros((1, axes), np.int8), np.zeros((1, axes), bool))
        for some in same_columns(keys):
            source, out, goal, port, structure, graded = keys[:, some[0]].tolist()
            want = self.ports[goal][port] if goal >= 0 else whole
            yield _Pairs(some, self.ports[source][out], want, structure, bool(graded))

    def _seconds(self, pairs: _Pairs, known: Ways, start: int, count: int) -> Floats:
        """[states, states, edges] of some edges, each as often as it is in the model."""
        columns, which = np.unique(self.alike.edges.column[pairs.edges], return_inverse=True)
        sizes = self.alike.values.sizes[pairs.structure].take(columns)
        shape = len(pairs.have.forward), len(pairs.want.forward)
        seconds = known.seconds(slice(start, start + count), sizes).reshape(*shape, -1)
        if pairs.graded:
            back = known.seconds(slice(start + count, start + 2 * count), sizes)
            seconds = seconds + back.reshape(*shape[::-1], -1).transpose(1, 0, 2)
        return seconds[:, :, which] * self.alike.edges.times[pairs.edges]

    def _one_by_one(self, pairs: _Pairs) -> Floats:
        """The same for a value whose places are not apart."""
        (value,) = self.alike.values.sizes[pairs.structure].values
        table, have, want = self.alike.table, pairs.have, pairs.want
        seconds = table.seconds(value, have.forward, want.forward)
        if pairs.graded:
            seconds = seconds + table.seconds(value, want.backward, have.backward).T
        return seconds[:, :, None] * self.alike.edges.times[pairs.edges]

    def _add(self, pairs: _Pairs, seconds: Floats) -> None:
        edges, at = self.alike.edges, pairs.edges
        source, target, table = edges.source[at], edges.target[at], edges.table[at]
        back = table == BACK
        if back.any():
            own = seconds[:, 0] if target[0] == TO_RESULT else np.diagonal(seconds).T
            for variable, column in zip(source[back].tolist(), np.flatnonzero(back).tolist(), strict=True):
                self.tables.add_states(np.array([variable]), own[:, [column]])
                self.back.append((variable, own[:, column]))
        for ahead in (True, False):
            some = np.flatnonzero(~back & ((source < target) == ahead))
            if len(some):
                part = seconds[:, :, some] if len(some) < len(at) else seconds
                self.tables.add_pairs(table[some], part if ahead else part.transpose(1, 0, 2))

    # ------------------------------------------------------------------------------------------------ answers

    def rows(self, states: Numbers) -> Rows:
        """The row of every node [nodes, axes] that a choice is."""
        found = np.zeros((len(self.alike.names), len(self.alike.table.bits)), dtype=np.int8)
        for sheet in self.sheets:
            found[sheet.members] = sheet.rows[states[sheet.members]]
        return found


def _every(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row of the one beside each of the other."""
    return np.repeat(source, len(target), axis=0), np.tile(target, (len(source), 1))


__all__ = ["Alike", "Priced"]
