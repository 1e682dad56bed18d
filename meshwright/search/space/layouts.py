"""All layouts of a value that a search may meet, numbered, and the seconds from each to each.

Values with the same sub-dims share one numbering and one price matrix: q, k and v of 32 layers are three tensors here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from meshwright.redistribute.matrix import PENDING, WHOLE, Table, Value
from meshwright.search.space.codes import Codes

Known = tuple[Value, bytes]
SMALL = 1 << 15  # entries of a matrix that is worth remembering for the next space


@dataclass(frozen=True)
class Port:
    """The layouts of one port (or hub) over its states: codes forward, and where the gradient is pending."""

    forward: Codes  # int8[states, axes]
    grad: np.ndarray  # bool[states, axes]

    @functools.cached_property
    def backward(self) -> Codes:
        """The codes of the gradient: cut where the value is cut, pending where it says so, else whole."""
        codes = self.forward.copy()
        codes[codes == PENDING] = WHOLE
        codes[self.grad] = PENDING
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
    known: dict[Known, np.ndarray] = field(
        default_factory=dict
    )  # what other spaces found of the same layouts
    _seen: dict[Value, list[Codes]] = field(default_factory=dict)
    _keys: dict[Value, np.ndarray] = field(default_factory=dict)
    _seconds: dict[Value, np.ndarray] = field(default_factory=dict)
    _places: dict[tuple[Value, int, bool], tuple[Port, np.ndarray]] = field(default_factory=dict)
    _between: dict[tuple[Value, int, int, bool], np.ndarray] = field(default_factory=dict)
    _met: dict[tuple[Value, int, bool], Port] = field(default_factory=dict)

    def meet(self, value: Value, port: Port, needs_grad: bool) -> None:
        """Say that a value may have these layouts; before any price is asked."""
        if (value, id(port), needs_grad) in self._met:
            return
        self._met[value, id(port), needs_grad] = port  # kept, so that no other port gets its identity
        rows = self._seen.setdefault(value, [])
        rows.append(port.forward)
        if needs_grad:
            rows.append(port.backward)

    def between(self, value: Value, have: Port, want: Port, needs_grad: bool) -> np.ndarray:
        """Forward and backward seconds of a reshard: float64[states of have, states of want]."""
        key = (value, id(have), id(want), needs_grad)
        found = self._between.get(key)
        if found is None:
            found = self._between[key] = self._between_ports(value, have, want, needs_grad)
        return found

    def _between_ports(self, value: Value, have: Port, want: Port, needs_grad: bool) -> np.ndarray:
        seconds = self.forward(value, have, want)
        return seconds + self.backward(value, have, want) if needs_grad else seconds

    def forward(self, value: Value, have: Port, want: Port) -> np.ndarray:
        """The first half of `between`."""
        return self._matrix(value)[self._index(value, have, False)[:, None], self._index(value, want, False)]

    def backward(self, value: Value, have: Port, want: Port) -> np.ndarray:
        """The second half of `between`."""
        return self._matrix(value)[self._index(value, want, True)[:, None], self._index(value, have, True)].T

    def _index(self, value: Value, port: Port, backward: bool) -> np.ndarray:
        """The numbers of a port's layouts. Ports are kept, so that none gets the identity of another."""
        key = (value, id(port), backward)
        if key not in self._places:
            codes = port.backward if backward else port.forward
            self._places[key] = (port, np.searchsorted(self._keys[value], key_of(codes)))
        return self._places[key][1]

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
            self._seconds[value] = seconds
            if seconds.size <= SMALL:
                self.known[key] = seconds
