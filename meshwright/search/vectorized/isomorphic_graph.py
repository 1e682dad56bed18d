"""A graph whose axes are to be searched as arrays: its variables, and what is isomorphic in it, found once.

Variables are those of a space: nodes, hubs, parameters. Hubs and parameters with as many ports are a sort, and all
reshards that may be are the rows of a table. `prices.py` prices what some axes may do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.graph import Graph
from meshwright.core.placement import hosted_values
from meshwright.cost.cluster import Cluster
from meshwright.redistribute.price_matrix import Table, Value
from meshwright.search.solve.eliminate_batched import Rounds, ends_of
from meshwright.search.space.codes import NodeCodes
from meshwright.search.space.constraints import Seeds
from meshwright.search.space.demands import Demands, Holding
from meshwright.search.space.host_transfers import crossings
from meshwright.search.space.parameters import Storage
from meshwright.search.space.wiring import End, Wiring
from meshwright.search.vectorized.kinds import Sheets, kinds_of
from meshwright.search.vectorized.memory import Columns, columns_of
from meshwright.search.vectorized.sizes import Floats, Numbers, Values

TO_RESULT = -1  # in place of a variable: what goes to a result of the program, which is replicated
BACK = -1  # in place of a table: what comes back to its own variable, or goes to a result


@dataclass(frozen=True)
class Sort:
    """Hubs or parameters with as many ports: their variables [V], and nodes and ports [V, ports]. Parameters of one
    sort take the same memory, and each stands for as many (`owners`)."""

    variables: Numbers
    nodes: Numbers
    ports: Numbers
    structure: int
    graded: bool
    hosted: bool
    owners: int
    holding: Holding | None
    columns: Numbers


@dataclass(frozen=True)
class Edges:
    """All reshards that may be, in columns. `gathers`: which row of `IsomorphicGraph.gathered` says what of it memory
    takes."""

    times: Floats
    source: Numbers
    out: Numbers
    target: Numbers
    port: Numbers
    structure: Numbers
    column: Numbers
    graded: Numbers
    table: Numbers
    gathers: Numbers


class IsomorphicGraph:
    """A graph whose axes are to be searched, and what is isomorphic in it."""

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
        demands: Demands | None = None,
    ) -> None:
        """`seeds`: the user's shardings; `hosts`: the nodes that the host runs; `demands`: what memory takes, without
        which no byte has a price."""
        self.cluster, self.table, self.storage = cluster, table, storage
        self.codes, self.names = codes, list(codes)
        self.nodes = {name: number for number, name in enumerate(codes)}
        self.variable = {v: number for number, v in enumerate(wiring.variables)}
        self.sheets = Sheets(graph, cluster, table.mesh, kinds_of(codes, graph, seeds or {}, hosts))
        self.values = Values(values)
        self.times = np.array([wiring.times[name] for name in codes], dtype=np.float64)
        self.wiring, self.demands = wiring, demands or Demands((), {}, {})
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
        self.gathered = list({(0.0,): None} | dict.fromkeys(map(tuple, self.demands.gathers.values())))
        self.edges = self._columns(wiring, pairs, graph)
        self.charges: Columns = columns_of(self.demands.charges, self.nodes, self.values)

    def _sorted(
        self, found: Mapping[str, Sequence[End]], kind: str, graph: Graph, hosted: Collection[str]
    ) -> list[Sort]:
        """By the number of ports, and parameters by what else tells them apart."""
        sorts: dict[tuple[int, int, bool, bool, int, Holding | None], list[str]] = defaultdict(list)
        for name, ends in found.items():
            structure, owners, holding = -1, 1, None
            if kind == "parameter":
                structure, owners = self.values.structure[name], self.wiring.owners[name]
                holding = self.demands.holdings.get(name)
            sorts[len(ends), structure, name in graph.needs_grad, name in hosted, owners, holding].append(
                name
            )
        return [
            Sort(
                np.array([self.variable[kind, name] for name in names]),
                np.array([[self.nodes[node] for node, _ in found[name]] for name in names]),
                np.array([[port for _, port in found[name]] for name in names]),
                structure,
                graded,
                there,
                owners,
                holding,
                np.array([self.values.column[name] for name in names]),
            )
            for (_, structure, graded, there, owners, holding), names in sorts.items()
        ]

    def _columns(self, wiring: Wiring, pairs: Sequence[tuple[int, int]], graph: Graph) -> Edges:
        tables = {tuple(ends): number for number, ends in enumerate(self.rounds.ends.tolist())}
        inputs = {node.name: len(node.uses) for node in graph.nodes}
        kept = {row: number for number, row in enumerate(self.gathered)}
        rows = []
        for edge, (u, v) in zip(wiring.edges, pairs, strict=True):
            (kind, name), out, _, port, value = edge
            rows.append((
                u,
                inputs[name] + out if kind == "node" else -1,
                v,
                port,
                self.values.structure[value],
                self.values.column[value],
                wiring.sends_gradient(edge),
                tables.get((min(u, v), max(u, v)), BACK),
                kept[tuple(self.demands.gathers.get(edge, (0.0,)))],
            ))  # fmt: skip
        times = np.array(list(wiring.edges.values()), dtype=np.float64)
        return Edges(times, *np.array(rows, dtype=np.int64).reshape(-1, 9).T)


__all__ = ["BACK", "TO_RESULT", "Edges", "IsomorphicGraph", "Sort"]
