"""What the bytes of a choice depend on besides its states: of operators, of parameters, and of what readers gather."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.search.space.wiring import Edge

Each = Sequence[float]  # bytes at each of the instants


@dataclass(frozen=True)
class Charge:
    """Bytes that a state of an operator takes: `each` at an instant for every element that a rank holds of `value` at a
    port, and for no more than `most` of them; times the share that it holds of the value at another port, if given."""

    node: str
    port: int
    value: str
    each: Each
    most: float = math.inf
    share: tuple[int, str] | None = None


@dataclass(frozen=True)
class Holding:
    """All that the bytes of a parameter depend on, besides how it is used and stored.

    `count`: how many of the model's parameters it stands for; `item`, `moments`: bytes of an element and of its
    moments; `copied`: of its copies in an update of all parameters at once; `kept`: backward reads the gathered value;
    `here`, `updated_here`: on the device between its uses, during the update; `head`: the last product reads it;
    `summed`: gradients of micro-batches are accumulated, `parted` in shards as they are stored. From `alone_bytes` on a
    gradient is in no bucket's buffer. `layered`: there is an instant at which a layer is computed again.
    """

    count: int
    item: int
    moments: int
    copied: int
    trained: bool
    kept: bool
    here: bool
    updated_here: bool
    head: bool
    alone_bytes: int
    summed: bool = False
    parted: bool = False
    layered: bool = False

    def taken(
        self,
        elements: np.ndarray,
        kept_elements: np.ndarray,
        summed_elements: np.ndarray,
        waits: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """At each instant, for arrays of elements on a rank as stored, of those gathered until backward, of the
        gradient between micro-batches, and of whether its gradient waits in a bucket."""
        item, moments = self.item, self.moments
        buffered = waits & (elements * item < self.alone_bytes) & self.trained
        loss = self.count * elements * (item * self.here + moments + item * buffered)
        if self.summed:
            summed = elements if self.parted else summed_elements
            there = buffered & (summed == elements)  # in the bucket's buffer
            loss = loss + self.count * item * np.where(there, 0.0, summed)
        if self.kept and self.trained:  # gathered ones are on the device, wherever the parts lie
            loss = loss + self.count * item * kept_elements
        weights = item * (self.here or (self.trained and self.updated_here))
        update = self.count * elements * (weights + item * self.trained + moments + self.copied)
        head = loss + np.where(buffered, 0.0, elements * item) if self.head and self.trained else loss
        return (loss, update, head, head) if self.layered else (loss, update, head)


@dataclass(frozen=True)
class Demands:
    """All that the bytes of a choice depend on, besides its states: of operators, of parameters by name, and of the
    edges over which a reader itself gathers a weight that autograd saves: bytes of an element at each instant."""

    charges: Sequence[Charge]
    holdings: Mapping[str, Holding]
    gathers: Mapping[Edge, Each]

    def in_pieces(self, micro_batches: int, *, parted: bool = False) -> Demands:
        """With activations of a micro-batch, and gradients of those before, `parted` as they are stored."""
        if micro_batches == 1:
            return self
        charges = [replace(c, each=[a / micro_batches for a in c.each]) for c in self.charges]
        summed = {
            name: replace(h, summed=h.trained, parted=parted or not h.here)
            for name, h in self.holdings.items()
        }
        return Demands(charges, summed, self.gathers)


__all__ = ["Charge", "Demands", "Each", "Holding"]
