"""Memory of operators, in columns: those of one group of nodes, port and structure are priced together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.search.solve.eliminate_batched import same_columns
from meshwright.search.space.demands import Charge
from meshwright.search.vectorized.sizes import Floats, Numbers, Values


@dataclass(frozen=True)
class Charges:
    """Charges of different nodes at one port, for values of one structure: `columns` of these [n], bytes of an element
    at each instant [n, instants], and the `most` elements that count [n]. `share`: the port and the structure of the
    values of which the held share counts, with `shared`, their columns [n]."""

    nodes: Numbers
    port: int
    structure: int
    columns: Numbers
    each: Floats
    most: Floats
    share: tuple[int, int] | None
    shared: Numbers


@dataclass(frozen=True)
class Columns:
    """All charges of a graph: [charges] each, `each` [charges, instants], `shared` [port, structure, column]: -1 if the
    share of no other value counts."""

    nodes: Numbers
    ports: Numbers
    structures: Numbers
    columns: Numbers
    limited: Numbers
    each: Floats
    most: Floats
    shared: Numbers

    def by(self, group: Numbers) -> Iterator[Charges]:
        """Those of nodes of one group [nodes], in which layouts are the same at all ports."""
        keys = np.stack([group[self.nodes], self.ports, self.structures, self.limited, *self.shared[:2]])
        for at in same_columns(keys):
            port, structure = self.shared[:2, at[0]].tolist()
            yield Charges(
                self.nodes[at],
                int(self.ports[at[0]]),
                int(self.structures[at[0]]),
                self.columns[at],
                self.each[at],
                self.most[at],
                (port, structure) if port >= 0 else None,
                self.shared[2, at],
            )


def columns_of(charges: Sequence[Charge], nodes: Mapping[str, int], values: Values) -> Columns:
    """Charges in columns, those of one node, port and size added up; `nodes`: the number of each."""
    found: dict[tuple[int, int, int, int, float, int, int, int], Floats] = {}
    for charge in charges:
        value, (port, shared) = charge.value, charge.share or (-1, "")
        key = (
            nodes[charge.node],
            charge.port,
            values.structure[value],
            values.column[value],
            charge.most,
            port,
            values.structure[shared] if shared else -1,
            values.column[shared] if shared else -1,
        )
        each = np.array(charge.each, dtype=np.float64)
        found[key] = found[key] + each if key in found else each
    node, port, structure, column = np.array([key[:4] for key in found], dtype=np.int64).reshape(-1, 4).T
    shared = np.array([key[5:] for key in found], dtype=np.int64).reshape(-1, 3).T
    most = np.array([key[4] for key in found])
    each = np.array(list(found.values())).reshape(len(found), len(charges[0].each) if charges else 0)
    return Columns(node, port, structure, column, np.isfinite(most).astype(np.int64), each, most, shared)


__all__ = ["Charges", "Columns", "columns_of"]
