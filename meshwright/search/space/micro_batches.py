"""Bytes of a step in micro-batches, from those of a full batch: of all states of a space, and of one choice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.core.remembered import cached_on_first
from meshwright.search.solve import Memory
from meshwright.search.space.build import Space
from meshwright.search.space.memory import INSTANTS, gathered_bytes, summed_bytes

States = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ChosenBytes:
    """The bytes of one choice at each instant: `amounts` of its variables [variables, instants], and `pairs` of what
    readers gather for themselves [pairs, instants]."""

    amounts: np.ndarray
    pairs: np.ndarray

    @staticmethod
    def of(memory: Memory, states: States) -> ChosenBytes:
        """Return those of a choice out of those of all."""
        amounts = np.stack([rows[s] for rows, s in zip(memory.amounts, states, strict=True)])
        pairs = [block[:, states[u], states[v]] for (u, v), block in memory.pairs.items()]
        return ChosenBytes(amounts, np.array(pairs).reshape(len(pairs), memory.instants))

    def totals(self) -> np.ndarray:
        """The bytes float64[instants], added up as `Memory.totals` does, to the last bit."""
        return np.concatenate([self.amounts, self.pairs]).sum(axis=0)


@dataclass(frozen=True)
class MicroBatches:
    """A step in `count` micro-batches, of which `in_flight` are there at once. `parted`: accumulated gradients are
    sharded as they are stored; those of `host_parameters` always are."""

    count: int
    in_flight: float = 1.0
    parted: bool = False
    host_parameters: Collection[str] = ()

    def memory(self, space: Space, whole: Memory) -> Memory:
        """Return the bytes of a space, from those of a full batch."""
        if self.count == 1:
            return whole
        amounts = [self._others(a, whole.instants) for a in whole.amounts]
        for name, v in _parameters(space):
            summed = self._summed(space, name, len(whole.amounts[v]))
            amounts[v] = self._owned(whole.amounts[v], gathered_bytes(space, name), summed)
        several = (1 + self._more(whole.instants))[:, None, None]
        return Memory(tuple(amounts), {key: several * block for key, block in whole.pairs.items()})

    def chosen(self, space: Space, states: States, whole: ChosenBytes) -> ChosenBytes:
        """Return the bytes of a choice, from those of a full batch."""
        if self.count == 1:
            return whole
        instants = whole.amounts.shape[1]
        amounts = self._others(whole.amounts, instants)
        owned = [v for _, v in _parameters(space)]
        summed = _summed_of(space, states, self)
        amounts[owned] = self._owned(whole.amounts[owned], _gathered_of(space, states), summed)
        return ChosenBytes(amounts, (1 + self._more(instants)) * whole.pairs)

    def _others(self, amounts: np.ndarray, instants: int) -> np.ndarray:
        return (1 + self._more(instants)) * amounts / self.count

    def _owned(self, amounts: np.ndarray, gathered: np.ndarray, summed: np.ndarray) -> np.ndarray:
        """Of parameters: with what each of the others in flight gathered, and gradients of those before."""
        instants = amounts.shape[1]
        return amounts + self._more(instants) * gathered[:, None] + summed[:, None] * _beside(instants)

    def _more(self, instants: int) -> np.ndarray:
        """How many more than one are there at each instant. A layer is computed again of one of them."""
        flying = _beside(instants)
        flying[3:] = 0.0
        return (self.in_flight - 1) * flying

    def _summed(self, space: Space, name: str, states: int) -> np.ndarray:
        if name not in space.graph.needs_grad or name in space.hosted:
            return np.zeros(states)
        return summed_bytes(space, name, parted=self.parted or name in self.host_parameters)


def _beside(instants: int) -> np.ndarray:
    """Ones where there is something of the other micro-batches: nothing is left of them at the update."""
    found = np.ones(instants)
    found[INSTANTS.index("the update")] = 0.0
    return found


def _parameters(space: Space) -> Iterator[tuple[str, int]]:
    return ((name, number) for (kind, name), number in space.variable.items() if kind == "parameter")


@cached_on_first
def _gathered_of(space: Space, states: States) -> np.ndarray:
    """Return the bytes of each parameter that a micro-batch gathers: float64[parameters]."""
    return np.array([gathered_bytes(space, name)[states[v]] for name, v in _parameters(space)])


@cached_on_first
def _summed_of(space: Space, states: States, asked: MicroBatches) -> np.ndarray:
    """Return the bytes of the accumulated gradient of each parameter: float64[parameters]."""
    most = [space.unary[v].shape[1] for _, v in _parameters(space)]
    rows = zip(_parameters(space), most, strict=True)
    return np.array([asked._summed(space, name, n)[states[v]] for (name, v), n in rows])


__all__ = ["ChosenBytes", "MicroBatches"]
