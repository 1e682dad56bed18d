"""The schedule of a plan in time: played with the seconds of its stages, as predicted or as the plan claims them."""

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
    """Play a schedule with the seconds of each stage. `messages`: what a stage takes from earlier ones arrives so many
    seconds after it was made, and its gradient there. `updates`: seconds of each rank's update, at its end."""

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
    """The schedule of a plan with stages: by the seconds that it claims, or as if all stages took equally long."""
    schedule, told = schedule_of(plan), plan.claims.get("stages")
    if not told:
        return play(schedule)
    stages = [StageSeconds(**{k: float(one.get(k, 0.0)) for k in StageSeconds.__slots__}) for one in told]
    updates = plan.claims.get("updates") or [0.0] * len(schedule.actions)
    return play_stages(schedule, stages, [float(one.get("message", 0.0)) for one in told], updates)


def claimed_stages(plan: Plan) -> Sequence[Mapping[str, Any]]:
    """What a plan claims of each stage: seconds by name; nothing for a plan that was made without a cluster."""
    return plan.claims.get("stages", ())


def _ended(
    played: Played, times: Sequence[StageSeconds], updates: Sequence[float], ranks: Sequence[int]
) -> Played:
    """The same with reductions and updates at the end of each rank's list."""
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
    """How much later than all that a rank computes the gradients of its stages are reduced. Those of a stage are sent
    when the last micro-batch has come back through it, after those before them and beside what is computed then."""
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
