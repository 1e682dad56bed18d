"""Find the repeated blocks of a graph (the layers of a transformer), so that plans are made once per kind of layer."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.graph import Graph


@dataclass(frozen=True, slots=True)
class Block:
    """`repeats` consecutive equal blocks of `length` nodes from node number `start`; `key` hashes their content."""

    start: int
    length: int
    repeats: int
    key: str


@dataclass(frozen=True, slots=True)
class Folding:
    """The repeated blocks, and how many nodes are left when each is counted once."""

    blocks: tuple[Block, ...]
    unique_nodes: int


def fold(graph: Graph) -> Folding:
    return Folding((), len(graph.nodes))
