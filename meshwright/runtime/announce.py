"""Announcements: before a collective, ranks exchange what they are about to do and the sizes that they need. Ranks that
disagree about a collective would otherwise wait for each other, or add up unrelated tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from meshwright.core.collectives import REGISTERED
from meshwright.errors import RunError
from meshwright.runtime.dtypes import TORCH_DTYPES

KINDS = (
    *REGISTERED, "broadcast", "reduce", "gather", "scatter",
    "barrier", "broadcast_object", "all_gather_object", "gather_object", "send",
)  # fmt: skip
OPS = ("", "sum", "avg", "prod", "max", "min")
_DTYPES = tuple(TORCH_DTYPES.values())
_DIMS = 12  # of a tensor that is announced
HEADER = 6 + _DIMS  # numbers before the sizes of the pieces


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective. `dims`: those that it splits and joins; `peer`: the one member that gives or
    gets; `pieces`: how much of a dim goes to each member, where that is not equal by rule."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: str = ""
    dims: tuple[int, ...] = ()
    peer: int = -1
    pieces: tuple[int, ...] = ()

    def numbers(self, members: int) -> list[int]:
        """As `HEADER + members` numbers. Raises RunError for a tensor that cannot be announced."""
        if self.dtype not in _DTYPES or len(self.shape) > _DIMS:
            raise RunError(
                f"a tensor of {self.dtype} with {len(self.shape)} dims is not sent",
                hint=f"at most {_DIMS} dims, of a dtype that models have",
            )
        split, join = (*self.dims, -1, -1)[:2]
        said = [KINDS.index(self.kind), _DTYPES.index(self.dtype), OPS.index(self.op), split, join, self.peer]
        said += [*self.shape, *[-1] * (_DIMS - len(self.shape))]
        return [*said, *self.pieces, *[-1] * (members - len(self.pieces))]

    @staticmethod
    def of(numbers: list[int]) -> Call:
        """Decode the output of `numbers`."""
        kind, dtype, op, split, join, peer = numbers[:6]
        return Call(
            KINDS[kind],
            _DTYPES[dtype],
            tuple(n for n in numbers[6:HEADER] if n >= 0),
            OPS[op],
            tuple(d for d in (split, join) if d >= 0),
            peer,
            tuple(n for n in numbers[HEADER:] if n >= 0),
        )

    def __str__(self) -> str:
        said = [f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"]
        said += [f"op={self.op}"] if self.op else []
        said += (
            [f"dim{'s' if len(self.dims) > 1 else ''} {', '.join(map(str, self.dims))}"] if self.dims else []
        )
        said += (
            [f"by {self.peer}" if self.kind == "shift" else f"member {self.peer}"] if self.peer >= 0 else []
        )
        return f"{self.kind}({', '.join(said)})"


def check_alike(calls: Mapping[int, Call], free: Collection[int], over: str) -> None:
    """Raise RunError where ranks (rank → its call) are about to do different things over some axes. Sizes of the dims
    `free` may differ."""

    def compared(call: Call) -> Call:
        shape = tuple(0 if d in free else n for d, n in enumerate(call.shape))
        return replace(call, shape=shape, pieces=())

    ranks: dict[Call, list[int]] = {}
    for rank, call in calls.items():
        ranks.setdefault(compared(call), []).append(rank)
    if len(ranks) > 1:
        raise RunError(
            f"ranks disagree about a collective over {over}",
            why="; ".join(f"{calls[r[0]]} on rank {_some(r)}" for r in ranks.values()),
            hint="every rank of a group calls the same collectives in the same order, with matching tensors",
        )


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown} and {len(ranks) - 4} others" if len(ranks) > 4 else shown


__all__ = ["HEADER", "Call", "check_alike"]
