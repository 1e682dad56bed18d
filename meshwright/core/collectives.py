"""The collectives, one record each: what prices, the oracle, memory, overlap, calibration, metrics and traces read.

Two facts say what becomes of a tensor. A collective *splits* what a member brings, a chunk for each member, or hands
all of it to everybody; and it *adds* what arrives, or puts it side by side:

=================  ==============  ==================
what arrives is    all to all      a chunk to each
=================  ==============  ==================
added up           all_reduce      reduce_scatter
side by side       all_gather      all_to_all
=================  ==============  ==================

`docs/how-to/add-a-collective.md` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal

Sent = Callable[[Any, Any, Any], Any]
Meaning = Callable[Concatenate[Sequence[Any], int, ...], Any]  # may have options
Matrix = Literal["partial", "replicated", "rows", "columns"]


@dataclass(frozen=True)
class CollectiveKind:
    """One collective.

    `name`: of the method of a communicator that runs it and waits, and with ``_start`` behind it of the one that only
    starts it. `sent(ranks, before, after)`: elements that one rank sends, where ranks hold so many elements before and
    after. `rounds`: how often a message goes round the ring of ranks. `meaning(brought, m)`: what member m gets of the
    arrays that all members bring, or of their sequences of chunks if it `splits`: one array, or a list of chunks in
    the order of the members, to be put side by side. `dual`: the collective that takes the gradient back, where each
    member's result counts by itself, with `dual_options` if it has options.

    `chunks`: whether each message is ``"all"`` of a tensor, a chunk ``"padded"`` to the size of the largest, or a chunk
    of its ``"own"`` size. `reshards`: whether it is a step of a redistribution. `measured`: how a matrix is laid out
    before and after it while calibration measures it.
    """

    name: str
    sent: Sent
    meaning: Meaning
    dual: str
    splits: bool
    adds: bool
    rounds: int = 1
    chunks: Literal["all", "padded", "own"] = "all"
    reshards: bool = False
    measured: tuple[Matrix, Matrix] | None = None
    dual_options: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def start(self) -> str:
        """The method of a communicator that starts it."""
        return f"{self.name}_start"

    @property
    def fuses(self) -> bool:
        """True if several of them can be fused into one on a longer buffer."""
        return self.chunks != "own"


# Bytes of ring algorithms, which are optimal (Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms for
# clusters of workstations"). An all-to-all sends one k-th of what a rank holds to each other rank; that a rank keeps
# more or less where only the order of axes changes, or blocks are uneven, is not counted.
ALL_REDUCE = CollectiveKind(
    "all_reduce",
    sent=lambda ranks, before, after: 2 * (ranks - 1) / ranks * before,
    meaning=lambda brought, m: sum(brought),
    dual="all_reduce",
    splits=False,
    adds=True,
    rounds=2,
    reshards=True,
    measured=("partial", "replicated"),
)
REDUCE_SCATTER = CollectiveKind(
    "reduce_scatter",
    sent=lambda ranks, before, after: (ranks - 1) * after,
    meaning=lambda brought, m: sum(chunks[m] for chunks in brought),
    dual="all_gather",
    splits=True,
    adds=True,
    chunks="padded",
    reshards=True,
    measured=("partial", "columns"),
)
ALL_GATHER = CollectiveKind(
    "all_gather",
    sent=lambda ranks, before, after: (ranks - 1) * before,
    meaning=lambda brought, m: list(brought),
    dual="reduce_scatter",
    splits=False,
    adds=False,
    chunks="padded",
    reshards=True,
    measured=("columns", "replicated"),
)
ALL_TO_ALL = CollectiveKind(
    "all_to_all",
    sent=lambda ranks, before, after: (ranks - 1) / ranks * before,
    meaning=lambda brought, m: [chunks[m] for chunks in brought],
    dual="all_to_all",
    splits=True,
    adds=False,
    chunks="own",
    reshards=True,
    measured=("rows", "columns"),
)


def _from_neighbour(brought: Sequence[Any], m: int, by: int = 1) -> Any:
    return brought[(m - by) % len(brought)]


SHIFT = CollectiveKind(
    "shift",
    sent=lambda ranks, before, after: before,
    meaning=_from_neighbour,
    dual="shift",
    dual_options={"by": -1},
    splits=False,
    adds=False,
)
# of a step that needs nobody else
NOTHING = CollectiveKind(
    "",
    sent=lambda ranks, before, after: 0.0,
    meaning=lambda brought, m: brought[m],
    dual="",
    splits=False,
    adds=True,
)

REGISTERED: Mapping[str, CollectiveKind] = {
    kind.name: kind for kind in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, SHIFT)
}
COLLECTIVES: Mapping[str, CollectiveKind] = {n: kind for n, kind in REGISTERED.items() if kind.reshards}
SEND = "send"  # a message from one rank to another: priced and measured beside the collectives
PRICED = (*COLLECTIVES, SEND)
