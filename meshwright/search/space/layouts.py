"""All layouts of a value that a search may meet, numbered, and the seconds from each to each.

Values with the same sub-dims share one numbering and one price matrix: q, k and v of 32 layers are three tensors here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.redistribute.price_matrix import PARTIAL, REPLICATED, Table, Value
from meshwright.search.space.codes import Codes

Known = tuple[Value, bytes]
SMALL = 1 << 15  # entries of a matrix that is worth remembering for the next space
SLIGHTLY_LESS = 1 - 2**-21  # more than two roundings to float32 add


@dataclass(frozen=True)
class Port:
    """The layouts of one port (or hub) over its states: codes forward, and where the gradient is partial."""

    forward: Codes  # int8[states, axes]
    grad: np.ndarray  # bool[states, axes]

    @functools.cached_property
    def backward(self) -> Codes:
        """The codes of the gradient: sharded where the value is sharded, partial where it says so, else replicated."""
        codes = self.forward.copy()
        codes[codes == PARTIAL] = REPLICATED
        codes[self.grad] = PARTIAL
        return codes

    def take(self, states: np.ndarray) -> Port:
        """Some of the states."""
        return Port(self.forward[states], self.grad[states])

    def keys(self) -> np.ndarray:
        """One key for each state; equal keys are equal layouts."""
        return key_of(2 * self.forward + self.grad)


def key_of(codes: Codes) -> np.ndarray:
    """Rows of codes as strings of bytes, which sort and compare quickly."""
    rows = np.ascontiguousarray(codes, dtype=np.int8)
    return rows.view(f"S{rows.shape[1]}").ravel()


def union(ports: list[Port]) -> Port:
    """The distinct layouts of several ports."""
    forward = np.concatenate([p.forward for p in ports])
    grad = np.concatenate([p.grad for p in ports])
    both = Port(forward, grad)
    _, first = np.unique(both.keys(), return_index=True)
    return both.take(first)


@dataclass
class Prices:
    """Seconds between layouts, computed once for each kind of value."""

    table: Table
    # what other spaces found of the same layouts
    known: dict[Known, np.ndarray] = field(default_factory=dict)
    _seen: dict[Value, list[Codes]] = field(default_factory=dict)
    _keys: dict[Value, np.ndarray] = field(default_factory=dict)
    _seconds: dict[Value, np.ndarray] = field(default_factory=dict)
    # by identity, with the first one like it
    _ports: dict[int, tuple[Port, Port]] = field(default_factory=dict)
    _first: dict[tuple[tuple[int, ...], bytes, bytes], Port] = field(default_factory=dict)
    _places: dict[tuple[Value, int, bool], tuple[np.ndarray, np.ndarray | None]] = field(default_factory=dict)
    _between: dict[tuple[Value, int, int, bool, float], np.ndarray] = field(default_factory=dict)
    _met: dict[tuple[Value, int, bool], Port] = field(default_factory=dict)

    def meet(self, value: Value, port: Port, needs_grad: bool) -> None:
        """Say that a value may have these layouts; before any price is asked."""
        port = self._same(port)
        if (value, id(port), needs_grad) in self._met:
            return
        self._met[value, id(port), needs_grad] = port
        rows = self._seen.setdefault(value, [])
        rows.append(port.forward)
        if needs_grad:
            rows.append(port.backward)

    def rough(self) -> Prices:
        """The same prices as float32, none of them higher."""
        for value in self._seen:
            self._matrix(value)
        lower = {value: (SLIGHTLY_LESS * m).astype(np.float32) for value, m in self._seconds.items()}
        return replace(self, _seconds=lower, _between={})

    def between(
        self, value: Value, have: Port, want: Port, needs_grad: bool, times: float = 1.0
    ) -> np.ndarray:
        """Forward and backward seconds of so many reshards: float64[states of have, states of want]. Whoever asks for
        the same is given one array, which nobody writes to."""
        have, want = self._same(have), self._same(want)
        key = (value, id(have), id(want), needs_grad, times)
        found = self._between.get(key)
        if found is None:
            found = self._between[key] = self._between_ports(value, have, want, needs_grad, times)
        return found

    def _between_ports(
        self, value: Value, have: Port, want: Port, needs_grad: bool, times: float
    ) -> np.ndarray:
        """Priced for the distinct layouts of the two, forward and backward together, and then spread over states."""
        matrix = self._matrix(value)
        (rows, row), (columns, column) = (self._layouts(value, port, needs_grad) for port in (have, want))
        seconds = matrix.take(rows[0], axis=0).take(columns[0], axis=1)
        if needs_grad:
            seconds += matrix.take(columns[1], axis=0).take(rows[1], axis=1).T
        if times != 1:
            seconds *= seconds.dtype.type(times)
        if row is not None:
            seconds = seconds.take(row, axis=0)
        return seconds if column is None else seconds.take(column, axis=1)

    def _layouts(self, value: Value, port: Port, needs_grad: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """The numbers of a port's distinct layouts, forward and backward [2, layouts], and [states] which it is; None
        where each state has one of its own, in this order."""
        key = (value, id(port), needs_grad)
        if key not in self._places:
            keys = self._keys[value]
            forward = np.searchsorted(keys, key_of(port.forward))
            backward = np.searchsorted(keys, key_of(port.backward)) if needs_grad else forward
            both, which = np.unique(forward * len(keys) + backward, return_inverse=True)
            if len(both) == len(forward):
                self._places[key] = (np.stack([forward, backward]), None)
            else:
                self._places[key] = (np.stack(np.divmod(both, len(keys))), which)
        return self._places[key]

    def _same(self, port: Port) -> Port:
        """The first port met with these layouts. Ports are kept, so that none gets the identity of another."""
        known = self._ports.get(id(port))
        if known is None:
            layouts = (port.forward.shape, port.forward.tobytes(), port.grad.tobytes())
            known = self._ports[id(port)] = (port, self._first.setdefault(layouts, port))
        return known[1]

    def _matrix(self, value: Value) -> np.ndarray:
        if value not in self._seconds:
            self._price_all()
        return self._seconds[value]

    def _price_all(self) -> None:
        """The prices of all values that were met, in as few calls as can be."""
        asked: dict[Value, tuple[Known, Codes]] = {}
        for value, met in self._seen.items():
            if value in self._seconds:
                continue
            rows = np.concatenate(met)
            self._keys[value], first = np.unique(key_of(rows), return_index=True)
            key = (value, self._keys[value].tobytes())
            if key in self.known:
                self._seconds[value] = self.known[key]
            else:
                asked[value] = (key, rows[first])
        found = self.table.among([(value, rows) for value, (_, rows) in asked.items()])
        for (value, (key, _)), seconds in zip(asked.items(), found, strict=True):
            seconds[np.isnan(seconds)] = np.inf  # a layout that the value cannot have
            self._seconds[value] = seconds
            if seconds.size <= SMALL:
                self.known[key] = seconds
