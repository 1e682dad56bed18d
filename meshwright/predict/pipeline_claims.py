"""The schedule of a plan in time, simulated with predicted or claimed seconds of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.pipeline.actions import Action, Schedule
from meshwright.pipeline.of_plan import schedule_of
from meshwright.pipeline.play import Played, play
from meshwright.plan.plan import Plan
from meshwright.predict.stage_time import StageSeconds


def play_stages(
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    messages: Sequence[float],
    updates: Sequence[float],
) -> Played:
    """Simulate a schedule with the seconds of each stage.

    `messages`: the seconds from the end of a stage to the arrival of its inputs, and of its gradient. `updates`: the
    seconds of each rank's update, at its end.
    """

    def seconds(action: Action) -> float:
        time = stages[action.stage]
        match action.kind:
            case "forward":
                return time.forward
            case "backward":
                return time.backward
            case "backward_input":
                return time.backward - time.weights
            case "backward_weight":
                return time.weights
        return 0.0

    def message(action: Action) -> float:
        stage = action.stage + (action.kind in ("backward", "backward_input"))
        return messages[stage] if stage < len(messages) else 0.0

    return _ended(play(schedule, seconds, message), stages, updates, schedule.ranks)


def claimed(plan: Plan) -> Played:
    """Return the schedule of a plan with stages, by its claimed seconds, or as if all stages took equally long."""
    schedule, told = schedule_of(plan), plan.claims.get("stages")
    if not told:
        return play(schedule)
    stages = [StageSeconds(**{k: float(one.get(k, 0.0)) for k in StageSeconds.__slots__}) for one in told]
    updates = plan.claims.get("updates") or [0.0] * len(schedule.actions)
    return play_stages(schedule, stages, [float(one.get("message", 0.0)) for one in told], updates)


def claimed_stages(plan: Plan) -> Sequence[Mapping[str, Any]]:
    """Return the claims of a plan about each stage: seconds by name; empty for a plan made without a cluster."""
    return plan.claims.get("stages", ())


def _ended(
    played: Played, times: Sequence[StageSeconds], updates: Sequence[float], ranks: Sequence[int]
) -> Played:
    """Return the schedule with reductions and updates at the end of each rank's list."""
    lists = []
    for rank, actions in enumerate(played.times):
        tail = _tail(actions, {s: times[s] for s, at in enumerate(ranks) if at == rank})
        ends: Mapping[str, float] = {"reduce": tail, "update": updates[rank]}
        found, late = [], 0.0
        for action, begin, end in actions:
            more = ends.get(action.kind, 0.0)
            found.append((action, begin + late, end + late + more))
            late += more
        lists.append(tuple(found))
    return Played(played.schedule, tuple(lists), played.peaks)


def _tail(actions: Sequence[tuple[Action, float, float]], stages: Mapping[int, StageSeconds]) -> float:
    """Return the seconds from the end of a rank's computation to the end of the reduction of its gradients.

    Those of a stage are sent after its last backward, after those before them and beside later computation.
    """
    ends = {a.stage: end for a, _, end in actions if a.kind in ("backward", "backward_weight")}
    computed = max(ends.values(), default=0.0)
    free = late = 0.0
    for stage, end in sorted(ends.items(), key=lambda one: one[1]):
        one = stages[stage]
        begin = max(free, end)
        # Alone, a part has been sent while the stage computed: what is left of it comes after the stage's end.
        free = max(end + one.reduce - one.waited, begin + one.sums if begin > end else 0.0)
        late += one.waited
        if free > begin:
            late += one.slowed * max(0.0, min(free, computed) - begin) / (free - begin)
    return max(0.0, free - computed) + late


__all__ = ["claimed", "claimed_stages", "play_stages"]
