"""The schedules, each as the order in which every rank takes its stages and micro-batches.

- ``gpipe``: all forward, then all backward (Huang et al., 2019).
- ``1f1b``: as many forwards as there are ranks after this one, then one backward after each forward (Narayanan et
  al., 2019; memory of at most as many micro-batches as there are stages).
- ``interleaved``: several stages a rank, micro-batches in groups of at least as many as there are ranks (Narayanan et
  al., 2021).
- ``zero_bubble``: 1F1B with backward in two halves; what the weights need waits for a gap (Qi et al., 2023, ZB-H1).
- ``zero_bubble_v``: two stages a rank, down the ranks and back up, so that the last stage is on the first rank (Qi et
  al., 2024); here by a race instead of their table.
- ``forward``: for inference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.other_systems import called_here
from meshwright.core.rank_numbers import PipelineRank
from meshwright.core.type_guards import is_whole
from meshwright.errors import PlanError, did_you_mean
from meshwright.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule

END = (Action("reduce"), Action("update"))
Lists = tuple[tuple[Action, ...], ...]


def make(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """A schedule by name. `chunks`: stages of a rank (``interleaved``: two or more, ``zero_bubble_v``: always two).

    Raises PlanError for names and sizes that cannot be.
    """
    if name not in SCHEDULES:
        raise PlanError(
            f"there is no schedule {name!r}",
            why="schedules: " + ", ".join(SCHEDULES),
            hint=called_here(name) or did_you_mean(name, SCHEDULES),
        )
    for what, number in (("pipeline ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if not is_whole(number) or number < 1:
            raise PlanError(f"{what}={number!r}", why="it must be a whole number, at least 1")
    kind = SCHEDULES[name]
    if not kind.least <= chunks <= (kind.most or chunks):
        need = f"exactly {kind.least}" if kind.least == kind.most else f"at least {kind.least}"
        raise PlanError(
            f"{name} with {chunks} stages a rank",
            why=f"it takes {need}",
            hint=f"pipeline={kind.least * ranks} on {ranks} ranks of the pipeline (chunks={kind.least}), or "
            + ("another schedule" if kind.most != 1 else 'schedule="interleaved", for several stages a rank'),
        )
    placed = kind.placed(ranks, chunks)
    return Schedule(
        name,
        tuple(map(PipelineRank, placed)),
        micro_batches,
        kind.lists(ranks, micro_batches, chunks, placed),
    )


@dataclass(frozen=True)
class Kind:
    """A family of schedules: where its stages are, how many a rank may have (`most` 0: any), and its lists."""

    placed: Callable[[int, int], tuple[int, ...]]
    least: int
    most: int
    lists: Callable[[int, int, int, tuple[int, ...]], Lists]


# ---------------------------------------------------------------- where stages are


def in_turn(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: down the ranks, again and again."""
    return tuple(s % ranks for s in range(ranks * chunks))


def back_and_forth(ranks: int, chunks: int) -> tuple[int, ...]:
    """Down the ranks and back up: the first rank has the first and the last stage."""
    down = tuple(range(ranks))
    return tuple(rank for n in range(chunks) for rank in (down if n % 2 == 0 else down[::-1]))


# ---------------------------------------------------------------- lists


def _gpipe(ranks: int, micro_batches: int, chunks: int, placed: tuple[int, ...]) -> Lists:
    every = range(micro_batches)
    return tuple(
        (*(Action(FORWARD, r, m) for m in every), *(Action(BACKWARD, r, m) for m in every), *END)
        for r in range(ranks)
    )


def _one_f_one_b(ranks: int, micro_batches: int, chunks: int, placed: tuple[int, ...]) -> Lists:
    every = range(micro_batches)
    return tuple(
        alternate(
            [Action(FORWARD, r, m) for m in every],
            [Action(BACKWARD, r, m) for m in every],
            min(ranks - 1 - r, micro_batches),
        )
        for r in range(ranks)
    )


def _interleaved(ranks: int, micro_batches: int, chunks: int, placed: tuple[int, ...]) -> Lists:
    groups = _groups(micro_batches, max(1, micro_batches // ranks))
    order = [(c, m) for group in groups for c in range(chunks) for m in group]
    back = [(c, m) for group in groups for c in reversed(range(chunks)) for m in group]
    # Before its first backward a rank runs the first group in all chunks but the last, and then as many more as there
    # are steps to the last rank and back.
    first = len(groups[0])
    return tuple(
        alternate(
            [Action(FORWARD, c * ranks + r, m) for c, m in order],
            [Action(BACKWARD, c * ranks + r, m) for c, m in back],
            min((ranks - 1 - r) * 2 + (chunks - 1) * first, len(order)),
        )
        for r in range(ranks)
    )


def _groups(micro_batches: int, count: int) -> list[range]:
    """Micro-batches in groups that differ by one at most, the larger ones first."""
    least, more = divmod(micro_batches, count)
    edges = [0, *itertools.accumulate(least + (n < more) for n in range(count))]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def alternate(forward: list[Action], backward: list[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards first, then forward and backward in turn, then the backwards that are left."""
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :], *END)


def _halves(ranks: int, micro_batches: int, chunks: int, placed: tuple[int, ...]) -> Lists:
    """1F1B in which the weights' half of backward comes as many micro-batches later as there are ranks before this one:
    so all of them take a forward and both halves in turn, and what is left at the end fills the gaps."""
    return tuple(_late_weights(r, ranks - 1 - r, micro_batches) for r in range(ranks))


def _late_weights(rank: int, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(ahead, micro_batches)
    actions = [Action(FORWARD, rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        actions += [Action(FORWARD, rank, m + ahead)] if m + ahead < micro_batches else []
        actions += [Action(BACKWARD_INPUT, rank, m)]
        actions += [Action(BACKWARD_WEIGHT, rank, m - rank)] if m >= rank else []
    left = range(max(micro_batches - rank, 0), micro_batches)
    return (*actions, *(Action(BACKWARD_WEIGHT, rank, m) for m in left), *END)


def _split(ranks: int, micro_batches: int, chunks: int, placed: tuple[int, ...]) -> Lists:
    """Both halves of backward apart, by a race in which every rank at each moment takes what is ready: the gradient
    that another stage waits for, else a forward if its memory allows, else the weights' half, which nobody waits for.
    """
    last = len(placed) - 1
    room = ranks * chunks  # what 1F1B keeps on its first rank, in stages of a micro-batch
    done: dict[Action, int] = {}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    todo = len(placed) * micro_batches * 3
    next_forward, next_input, next_weight = ([0] * len(placed) for _ in range(3))

    def ready(action: Action, now: int) -> bool:
        return done.get(action, now) < now

    def choose(rank: int, now: int) -> Action | None:
        mine = [s for s in reversed(range(len(placed))) if placed[s] == rank]
        for s in mine:
            m = next_input[s]
            arrived = s == last or ready(Action(BACKWARD_INPUT, s + 1, m), now)
            if m < next_forward[s] and arrived and ready(Action(FORWARD, s, m), now):
                return Action(BACKWARD_INPUT, s, m)
        for s in mine:
            m = next_forward[s]
            # The last places are for later stages: else early ones fill the memory and nothing can go on.
            arrived = s == 0 or ready(Action(FORWARD, s - 1, m), now)
            if m < micro_batches and arrived and held[rank] < room - mine.index(s):
                return Action(FORWARD, s, m)
        for s in mine:
            if next_weight[s] < next_input[s]:
                return Action(BACKWARD_WEIGHT, s, next_weight[s])
        return None

    now = 0
    while todo:
        taken = [(rank, choose(rank, now)) for rank in range(ranks)]
        assert any(action for _, action in taken), "the race has come to a halt"
        for rank, action in taken:
            if action is None:
                continue
            counts = {FORWARD: next_forward, BACKWARD_INPUT: next_input, BACKWARD_WEIGHT: next_weight}
            counts[action.kind][action.stage] += 1
            held[rank] += {FORWARD: 1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}[action.kind]
            done[action] = now
            lists[rank].append(action)
            todo -= 1
        now += 1
    return tuple((*actions, *END) for actions in lists)


def _forward(ranks: int, micro_batches: int, chunks: int, placed: tuple[int, ...]) -> Lists:
    return tuple(
        tuple(Action(FORWARD, c * ranks + r, m) for m in range(micro_batches) for c in range(chunks))
        for r in range(ranks)
    )


SCHEDULES = {
    "gpipe": Kind(in_turn, 1, 1, _gpipe),
    "1f1b": Kind(in_turn, 1, 1, _one_f_one_b),
    "interleaved": Kind(in_turn, 2, 0, _interleaved),
    "zero_bubble": Kind(in_turn, 1, 1, _halves),
    "zero_bubble_v": Kind(back_and_forth, 2, 2, _split),
    "forward": Kind(in_turn, 1, 0, _forward),
}
