"""The repeated blocks of a graph (the layers of a transformer), as `capture.fold` finds them and searches use them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """`repeats` consecutive equal blocks of `length` nodes from node number `start`; `key` hashes their content."""

    start: int
    length: int
    repeats: int
    key: str

    @property
    def stop(self) -> int:
        """The number of the first node after the last repeat."""
        return self.start + self.length * self.repeats


@dataclass(frozen=True, slots=True)
class Folding:
    """The repeated blocks in order, and how many nodes are left when each block is counted once."""

    blocks: tuple[Block, ...]
    unique_nodes: int


UNFOLDED = Folding((), 0)
