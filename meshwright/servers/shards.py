"""What parameter servers store, and where: parameters, their blocks of rows, and the server of each block. Pure data.

A table is split into at most `BLOCKS` blocks of equal numbers of rows (the last may be smaller); any other parameter is
one block. Blocks, not rows, are moved between servers, so a map is small whatever a table's size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import msgspec

from meshwright.errors import ServerError

BLOCKS = 64  # of a table: what 64 servers share evenly
MOST_SERVERS = BLOCKS  # of which each has a block of every large table
Option = bool | int | float | tuple[float, float] | None
Options = dict[str, Option]
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Start(msgspec.Struct, frozen=True):
    """How servers fill a parameter without values from a worker: by seed and row. `low` and `high` bound a uniform
    distribution; for ``kind="normal"`` they are mean and standard deviation. `padding`: a row that is zero."""

    kind: str
    low: float
    high: float
    seed: int
    padding: int | None = None


class Parameter(msgspec.Struct, frozen=True):
    """One parameter. `table`: pulled by rows. `sparse`: a row without a gradient keeps values and moments, as with
    ``nn.Embedding(sparse=True)``. `optimizer`: the name of a class of `torch.optim`. `start` None: a worker fills it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: str
    options: Options
    table: bool = False
    sparse: bool = False
    start: Start | None = None

    @property
    def rows(self) -> int:
        return self.shape[0] if self.table else 1

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return max(1, math.ceil(self.rows / BLOCKS))

    @property
    def blocks(self) -> int:
        return max(1, math.ceil(self.rows / self.block_rows))

    def rows_of(self, block: int) -> range:
        """The rows of a block."""
        first = block * self.block_rows
        return range(first, min(first + self.block_rows, self.rows))

    def size_bytes(self, block: int) -> int:
        """Bytes of a block's values, without moments."""
        each = BYTES[self.dtype] * math.prod(self.shape[1:] if self.table else self.shape)
        return each * len(self.rows_of(block))


class ShardMap(msgspec.Struct, frozen=True):
    """The server of each block of each parameter. A map with a higher version replaces one with a lower."""

    version: int
    servers: tuple[int, ...]
    owners: dict[str, tuple[int, ...]]

    @property
    def first(self) -> int:
        """The server that stays, however many there are. Its word decides whether a push counts."""
        return min(self.servers)

    def blocks_of(self, server: int) -> dict[str, tuple[int, ...]]:
        """The blocks of one server, by parameter; parameters of which it has none are left out."""
        found = {n: tuple(b for b, s in enumerate(o) if s == server) for n, o in self.owners.items()}
        return {name: blocks for name, blocks in found.items() if blocks}


class Move(msgspec.Struct, frozen=True):
    """A block that goes to another server."""

    parameter: str
    block: int
    source: int
    target: int


def fingerprint(job: str, parameters: Sequence[Parameter]) -> str:
    """A name for a model in a job: messages of another one are refused."""
    encoded = msgspec.msgpack.encode((job, tuple(parameters)))
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()


def no_row(wrong: float, name: str, rows: int) -> ServerError:
    """The error for an id beyond a table."""
    return ServerError(
        f"there is no row {wrong} of {name}",
        why=f"rows count from 0 to {rows - 1}",
        hint=f"nn.Embedding({wrong + 1}, …) or more"
        if wrong >= 0
        else "padding is a row as well, such as 0: padding_idx=0",
    )


def spread(
    parameters: Sequence[Parameter], servers: Sequence[int], before: ShardMap | None = None
) -> ShardMap:
    """Spread blocks evenly, by bytes. `before`: a map of which as few blocks as possible are moved."""
    every = [(p, b) for p in parameters for b in range(p.blocks)]
    total = sum(p.size_bytes(b) for p, b in every)
    share, load = total / len(servers), dict.fromkeys(servers, 0)
    owner: dict[tuple[str, int], int] = {}
    largest_first = sorted(every, key=lambda pair: -pair[0].size_bytes(pair[1]))
    for parameter, block in largest_first:
        stays = before.owners[parameter.name][block] if before is not None else -1
        size = parameter.size_bytes(block)
        if stays in load and load[stays] + size <= max(share, size):
            owner[parameter.name, block] = stays
            load[stays] += size
    for parameter, block in largest_first:
        if (parameter.name, block) not in owner:
            least = min(servers, key=lambda s: (load[s], s))
            owner[parameter.name, block] = least
            load[least] += parameter.size_bytes(block)
    owners = {p.name: tuple(owner[p.name, b] for b in range(p.blocks)) for p in parameters}
    return ShardMap(before.version + 1 if before is not None else 1, tuple(servers), owners)


def moves(before: ShardMap, after: ShardMap) -> list[Move]:
    """The blocks that are elsewhere in `after`."""
    owners: Mapping[str, tuple[int, ...]] = after.owners
    return [
        Move(name, block, old, new)
        for name, olds in before.owners.items()
        for block, (old, new) in enumerate(zip(olds, owners[name], strict=True))
        if old != new
    ]


__all__ = [
    "MOST_SERVERS",
    "Move",
    "Option",
    "Options",
    "Parameter",
    "ShardMap",
    "Start",
    "fingerprint",
    "moves",
    "no_row",
    "spread",
]
