"""The prices of a full graph beside rows that stand, found for all isomorphic nodes at once: a `Space` as arrays.

Variables are those of a space: nodes, hubs, parameters. Nodes whose states are equal rows are a sheet; hubs between the
same ports of the same sheets have one union of layouts, parameters that are read there too; and reshards between the
same layouts of values of one structure are priced together. What one node after the other takes a third of a
millisecond for, a thousand take together. Under a limit of memory bytes have a price, too (`demands.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.host import transfer_seconds
from meshwright.search.solve.eliminate_batched import Tables, same_columns
from meshwright.search.space.families import Rows
from meshwright.search.space.host_transfers import Crossing
from meshwright.search.space.layouts import Port, key_of, union
from meshwright.search.space.memory import gathered_elements
from meshwright.search.vectorized import redistribution as ways_of
from meshwright.search.vectorized.isomorphic_graph import BACK, TO_RESULT, IsomorphicGraph, Sort
from meshwright.search.vectorized.parameters import Stored, all_stored
from meshwright.search.vectorized.redistribution import Ways, ways
from meshwright.search.vectorized.sizes import Floats, Numbers


@dataclass(frozen=True)
class _Pairs:
    """Reshards between the layouts of two ports, of values of one structure: `edges` as they are listed. `again`:
    states that are gathered again; `gathers`: bytes of an element at each instant that a reader keeps of what it
    gathers for itself."""

    edges: Numbers
    have: Port
    want: Port
    structure: int
    graded: bool
    again: np.ndarray
    gathers: tuple[float, ...]


class Priced:
    """The options and their prices."""

    def __init__(
        self,
        isomorphic: IsomorphicGraph,
        axes: Sequence[int],
        now: Rows | None = None,
        per_byte: Floats | None = None,
    ) -> None:
        """Each node keeps its row (without `now` replicated on all axes) or takes one option on some axes; `per_byte`:
        the price of a byte at each instant."""
        if now is None:
            now = np.zeros((len(isomorphic.names), len(isomorphic.table.bits)), dtype=np.int8)
        sheets = list(isomorphic.sheets.on(axes, now))
        self.isomorphic, self.sheets, self.per_byte = isomorphic, sheets, per_byte
        count = len(isomorphic.variable)
        self.sheet_of, self.place = np.zeros((2, count), dtype=np.int64)  # of nodes; which column of it
        self.group: Numbers = np.zeros(count, dtype=np.int64)  # variables with equal layouts at all ports
        self.states: Numbers = np.zeros(count, dtype=np.int64)
        self.stored: list[tuple[Numbers, Stored, Numbers]] = []  # parameters, storages, which of them
        self.again: dict[int, np.ndarray] = {}  # group of parameters → states that are gathered again
        # variables and what comes back to them, goes to results or crosses
        self.back: list[tuple[int, Floats]] = []
        self.ports: list[dict[int, Port]] = []  # of each group, by port; -1 is that of a hub or parameter
        seconds: list[tuple[Numbers, Floats]] = []
        for number, sheet in enumerate(sheets):
            self.sheet_of[sheet.members] = number
            self._join(sheet.members, dict(enumerate(sheet.ports)), len(sheet.rows))
            seconds.append((sheet.members, sheet.seconds * isomorphic.times[sheet.members]))
        for sort in isomorphic.hubs:
            for some, use in self._unions(sort):
                self._join(sort.variables[some], {-1: use}, len(use.forward))
        for sort in isomorphic.parameters:
            for some, use in self._unions(sort):
                stored, which = self._stored(sort, some, use)
                if stored.again.any():
                    self.again[len(self.ports)] = stored.is_again
                self._join(sort.variables[some], {-1: stored.states}, len(stored.is_again))
                self.stored.append((sort.variables[some], stored, which))
                seconds.append((sort.variables[some], stored.least[:, which]))
        self.tables = Tables(isomorphic.rounds, self.states)
        for variables, amount in seconds:
            self.tables.add_states(variables, amount)
        for crossing in isomorphic.crossings:
            self._cross(crossing)
        kept = self._reshards()
        self._seconds_of_pairs = self.tables.entries
        if per_byte is not None:
            self._seconds_of_pairs = self.tables.entries.copy()
            self._weigh(per_byte, kept)

    def _cross(self, crossing: Crossing) -> None:
        """Add what goes between a device and its host."""
        isomorphic, node = self.isomorphic, self.isomorphic.nodes[crossing.node]
        value, port = isomorphic.of_graph[crossing.value], self.ports[self.group[node]][crossing.port]
        size_bytes = value.itemsize * isomorphic.table.local_elements(value, port.forward)
        seconds = crossing.times * np.asarray(transfer_seconds(size_bytes, isomorphic.cluster))
        self.tables.add_states(np.array([node]), seconds[:, None])
        self.back.append((node, seconds))

    def _join(self, variables: Numbers, ports: dict[int, Port], states: int) -> None:
        self.group[variables], self.states[variables] = len(self.ports), states
        self.ports.append(ports)

    def _unions(self, sort: Sort) -> Iterator[tuple[Numbers, Port]]:
        """Those of a sort that have the same ports of the same sheets, and the layouts of these."""
        keys = np.concatenate([self.sheet_of[sort.nodes], sort.ports], axis=1).T
        for some in same_columns(keys):
            ends = zip(self.sheet_of[sort.nodes[some[0]]].tolist(), sort.ports[some[0]].tolist(), strict=True)
            yield some, union([self.sheets[sheet].ports[port] for sheet, port in ends])

    def _stored(self, sort: Sort, some: Numbers, use: Port) -> tuple[Stored, Numbers]:
        """The storages of those of a sort that are of one size, and which of these each parameter is."""
        isomorphic = self.isomorphic
        columns, which = np.unique(sort.columns[some], return_inverse=True)
        sizes = isomorphic.values.sizes[sort.structure].take(columns)
        table, cluster, holding = isomorphic.table, isomorphic.cluster, sort.holding
        how = replace(isomorphic.storage, again=self.per_byte is not None)
        kept = holding is not None and holding.kept
        stored = all_stored(sizes, use, sort.graded, cluster, table, how, sort.hosted, kept)
        stored = replace(stored, owners=sort.owners)
        if self.per_byte is not None and holding is not None:
            stored = stored.priced(holding, self.per_byte)
        return stored, which

    # ------------------------------------------------------------------------------------------------ reshards

    def _reshards(self) -> list[_Pairs]:
        """All prices of reshards, those of values of one number of places with one run of the formulas. Returns those
        of which readers keep what they gather."""
        found: dict[int, list[_Pairs]] = defaultdict(list)
        kept: list[_Pairs] = []
        for pairs in self._pairs():
            kept += [pairs] if any(pairs.gathers) else []
            found[self.isomorphic.values.sizes[pairs.structure].places if self._plain(pairs) else -1].append(
                pairs
            )
        for pairs in found.pop(-1, ()):
            self._add(pairs, self._one_by_one(pairs))
        for places, many in found.items():
            rows: list[tuple[np.ndarray, np.ndarray]] = []
            for pairs in many:
                rows.append(_every(pairs.have.forward, pairs.want.forward))
                if pairs.graded:
                    rows.append(_every(pairs.want.backward, pairs.have.backward))
            known = ways(
                self.isomorphic.table,
                places,
                np.concatenate([source for source, _ in rows]),
                np.concatenate([target for _, target in rows]),
            )
            start = 0
            for pairs in many:
                count = len(pairs.have.forward) * len(pairs.want.forward)
                self._add(pairs, self._seconds(pairs, known, start, count))
                start += count * (2 if pairs.graded else 1)
        return kept

    def _plain(self, pairs: _Pairs) -> bool:
        sizes = self.isomorphic.values.sizes[pairs.structure]
        return sizes.plain and len(self.isomorphic.table.bits) * max(1, sizes.places) <= ways_of.BITS

    def _pairs(self) -> Iterator[_Pairs]:
        edges = self.isomorphic.edges
        to_result = edges.target == TO_RESULT
        target = np.where(to_result, -1, self.group[edges.target])
        keys = np.stack(
            [
                self.group[edges.source],
                edges.out,
                target,
                edges.port,
                edges.structure,
                edges.graded,
                edges.gathers,
            ]
        )
        axes = len(self.isomorphic.table.bits)
        whole = Port(np.zeros((1, axes), np.int8), np.zeros((1, axes), bool))
        for some in same_columns(keys):
            source, out, goal, port, structure, graded, gathers = keys[:, some[0]].tolist()
            have, want = self.ports[source][out], self.ports[goal][port] if goal >= 0 else whole
            again = self.again.get(source, np.zeros(len(have.forward), dtype=bool))
            yield _Pairs(some, have, want, structure, bool(graded), again, self.isomorphic.gathered[gathers])

    def _seconds(self, pairs: _Pairs, known: Ways, start: int, count: int) -> Floats:
        """[states, states, edges] of some edges, each as often as it is in the model."""
        columns, which = np.unique(self.isomorphic.edges.column[pairs.edges], return_inverse=True)
        sizes = self.isomorphic.values.sizes[pairs.structure].take(columns)
        shape = len(pairs.have.forward), len(pairs.want.forward)
        seconds = known.seconds(slice(start, start + count), sizes).reshape(*shape, -1)
        if pairs.graded:
            back = known.seconds(slice(start + count, start + 2 * count), sizes)
            seconds = seconds + back.reshape(*shape[::-1], -1).transpose(1, 0, 2)
        return seconds[:, :, which] * self.isomorphic.edges.times[pairs.edges]

    def _one_by_one(self, pairs: _Pairs) -> Floats:
        """The same for values whose places are not apart, or too many."""
        columns, which = np.unique(self.isomorphic.edges.column[pairs.edges], return_inverse=True)
        table, have, want = self.isomorphic.table, pairs.have, pairs.want
        found: list[Floats] = []
        for column in columns.tolist():
            value = self.isomorphic.values.sizes[pairs.structure].values[column]
            seconds = table.seconds(value, have.forward, want.forward)
            if pairs.graded:
                seconds = seconds + table.seconds(value, want.backward, have.backward).T
            found.append(seconds)
        return np.stack(found, axis=-1)[:, :, which] * self.isomorphic.edges.times[pairs.edges]

    def _add(self, pairs: _Pairs, seconds: Floats) -> None:
        edges, at = self.isomorphic.edges, pairs.edges
        if pairs.again.any():  # what is gathered again is what its reader keeps
            other = key_of(pairs.have.forward)[:, None] != key_of(pairs.want.forward)[None, :]
            seconds = np.where((pairs.again[:, None] & other)[:, :, None], np.inf, seconds)
        source, target, table = edges.source[at], edges.target[at], edges.table[at]
        back = table == BACK
        if back.any():
            own = seconds[:, 0] if target[0] == TO_RESULT else np.diagonal(seconds).T
            for variable, column in zip(source[back].tolist(), np.flatnonzero(back).tolist(), strict=True):
                self.tables.add_states(np.array([variable]), own[:, [column]])
                self.back.append((variable, own[:, column]))
        self._add_pairs(pairs, np.flatnonzero(~back), seconds)

    def _add_pairs(self, pairs: _Pairs, some: Numbers, seconds: Floats) -> None:
        """Add [states, states, edges] to the tables of some of the edges."""
        edges, at = self.isomorphic.edges, pairs.edges
        before = edges.source[at[some]] < edges.target[at[some]]
        for ahead in (True, False):
            here = some[before == ahead]
            if len(here):
                part = seconds[:, :, here] if len(here) < len(at) else seconds
                self.tables.add_pairs(edges.table[at[here]], part if ahead else part.transpose(1, 0, 2))

    # ------------------------------------------------------------------------------------------------ memory

    def _weigh(self, per_byte: Floats, kept: Sequence[_Pairs]) -> None:
        """Add what the bytes of operators cost, and of what their readers gather for themselves."""
        isomorphic = self.isomorphic
        for charges in isomorphic.charges.by(self.group):
            group, port, structure = self.group[charges.nodes[0]], charges.port, charges.structure
            held = np.minimum(
                self._elements(structure, charges.columns, self.ports[group][port]), charges.most
            )
            if charges.share is not None:
                port, structure = charges.share
                held = held * self._shares(structure, charges.shared, self.ports[group][port])
            self.tables.add_states(charges.nodes, held * (charges.each @ per_byte))
        for pairs in kept:
            columns = isomorphic.edges.column[pairs.edges]
            held, wanted = (self._elements(pairs.structure, columns, p) for p in (pairs.have, pairs.want))
            price = float(np.array(pairs.gathers) @ per_byte)
            every = np.arange(len(pairs.edges))
            self._add_pairs(pairs, every, price * gathered_elements(held, wanted))

    def _elements(self, structure: int, columns: Numbers, port: Port) -> Floats:
        """Return the elements that a rank holds of values of one structure in each state of a port: [states,
        values]."""
        sizes = self.isomorphic.values.sizes[structure]
        if not sizes.plain:
            held = self.isomorphic.table.local_elements(sizes.values[0], port.forward)
            return np.repeat(held[:, None], len(columns), axis=1)
        which, of = np.unique(columns, return_inverse=True)
        return sizes.take(which).elements(self.isomorphic.table, port.forward)[:, of]

    def _shares(self, structure: int, columns: Numbers, port: Port) -> Floats:
        """Return the share that a rank holds of values of one structure: [states, values]."""
        whole = Port(np.zeros_like(port.forward[:1]), port.grad[:1])
        return self._elements(structure, columns, port) / self._elements(structure, columns, whole)

    def pairs_of_seconds(self) -> dict[tuple[int, int], Floats]:
        """The seconds of all pairs, whatever a byte costs."""
        tables = self.tables
        return {
            (u, v): tables.table(self._seconds_of_pairs, number)
            for number, (u, v) in enumerate(tables.rounds.ends.tolist())
        }

    # ------------------------------------------------------------------------------------------------ answers

    def rows(self, states: Numbers) -> Rows:
        """The row of every node [nodes, axes] that a choice is."""
        found = np.zeros((len(self.isomorphic.names), len(self.isomorphic.table.bits)), dtype=np.int8)
        for sheet in self.sheets:
            found[sheet.members] = sheet.rows[states[sheet.members]]
        return found


MakePriced = Callable[[Sequence[int], Rows | None], Priced]
"""`Priced` of some graph and price of a byte: what some axes may do beside rows."""


def _every(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row of the one beside each of the other."""
    return np.repeat(source, len(target), axis=0), np.tile(target, (len(source), 1))


__all__ = ["MakePriced", "Priced"]
