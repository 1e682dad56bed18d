"""Lower bounds of a schedule for any stages: chains of actions that cannot run at once, whatever the stages take.

A rank runs its list in order, and a value passes through all stages. So a step takes no less than any of these chains,
one of each kind for every rank:

- its full list, after the first micro-batch has reached it and before the last has gone back from it;
- the list from its first backward on, which the first micro-batch must have passed all stages for;
- the list up to its last forward, from which that micro-batch goes on to the end and all the way back.

Each chain is a sum over stages of counts times seconds. A weighted mean of all chains is such a sum too, and for any
assignment of operators to stages, each operator counts no less than in the stage where it counts least. The weights are
the best ones for stages whose forward, backward and weight gradients have the model's own shares.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.core.rank_numbers import PipelineRank
from meshwright.pipeline.actions import BACKWARD, BACKWARD_INPUT, COMPUTE, FORWARD, Action, Schedule
from meshwright.pipeline.schedules import make

ACTIONS = 1 << 14  # of a schedule whose chains are looked at: with more the idle share is small
SHARES = 20  # resolution of shares
BACK = (BACKWARD, BACKWARD_INPUT)


@dataclass(frozen=True, eq=False)
class Counts:
    """How often a stage's seconds count, forward, backward of inputs and of weights: float64[stages, 3]."""

    of: np.ndarray

    def least(self, seconds: np.ndarray) -> np.ndarray:
        """Compute the least count of each operator: `seconds` [operators, 3] of a micro-batch → [operators]."""
        return (seconds @ self.of.T).min(axis=1)

    @property
    def least_of_any(self) -> float:
        """Return the least count of a second of any kind, in any stage."""
        return float(self.of.min())


@functools.lru_cache(maxsize=1024)
def counts(name: str, ranks: int, micro_batches: int, chunks: int, shares: tuple[int, int, int]) -> Counts:
    """The counts of a schedule that are best for stages with some `shares` (of `SHARES`) of their seconds."""
    found = chains(make(name, ranks, micro_batches, chunks))
    weights = _best(found @ (np.array(shares) / SHARES))
    return Counts(np.tensordot(weights, found, axes=1))


def shares_of(seconds: np.ndarray) -> tuple[int, int, int]:
    """The shares of seconds forward, backward of inputs and of weights, in steps."""
    forward, weights = (round(SHARES * part) for part in (seconds[[0, 2]] / seconds.sum()))
    return forward, SHARES - forward - weights, weights


def chains(schedule: Schedule) -> np.ndarray:
    """The chains of a schedule with backward: float64[chains, stages, 3]."""
    return np.stack([chain for place in schedule.every_rank for chain in _of(schedule, place)])


def _of(schedule: Schedule, place: PipelineRank) -> list[np.ndarray]:
    listed = [a for a in schedule.actions[place] if a.kind in COMPUTE]
    halves = schedule.splits_backward(place)
    backs = [n for n, a in enumerate(listed) if a.kind in BACK]
    fronts = [n for n, a in enumerate(listed) if a.kind == FORWARD]
    first, last = listed[0].stage, listed[backs[-1]].stage

    def chain(actions: Iterable[Action], forward: slice | np.ndarray, *back: slice) -> np.ndarray:
        made = np.zeros((schedule.stages, 3))
        for action in actions:
            made[action.stage] += _counted(action)
        made[forward, 0] += 1
        for stages in back:
            made[stages, 1] += 1
            made[stages, 2] += 0 if halves else 1
        return made

    begun, ended = listed[backs[0]].stage, listed[fronts[-1]].stage
    return [
        chain(listed, slice(first)),
        chain(listed[: backs[-1] + 1], slice(first), slice(last)),
        chain(listed[backs[0] :], slice(None), slice(begun + 1, None)),
        chain(listed[backs[0] : backs[-1] + 1], slice(None), slice(begun + 1, None), slice(last)),
        chain(listed[: fronts[-1] + 1], np.r_[:first, ended + 1 : schedule.stages], slice(None)),
    ]


def _counted(action: Action) -> np.ndarray:
    return np.array({
        FORWARD: (1.0, 0.0, 0.0), BACKWARD: (0.0, 1.0, 1.0), BACKWARD_INPUT: (0.0, 1.0, 0.0),
    }.get(action.kind, (0.0, 0.0, 1.0)))  # fmt: skip


def _best(found: np.ndarray) -> np.ndarray:
    """The weights of chains [chains, stages] with which the stage that counts least counts most."""
    kinds, stages = found.shape
    scale = found.max()
    from scipy.optimize import linprog  # 0.4 s, which a rank that only runs its plan need not wait for

    done = linprog(
        np.append(np.zeros(kinds), -1.0),
        A_ub=np.hstack([-found.T / scale, np.ones((stages, 1))]),
        b_ub=np.zeros(stages),
        A_eq=np.append(np.ones(kinds), 0.0)[None, :],
        b_eq=[1.0],
        bounds=(0, None),
    )
    weights = np.clip(done.x[:-1], 0.0, None) if done.success else np.ones(kinds)
    return weights / weights.sum()


__all__ = ["ACTIONS", "Counts", "chains", "counts", "shares_of"]
