"""The plans that a search came to beside its answer, quickest first by their predicted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.plan.plan import Plan


def runners_up(seen: Sequence[tuple[float, Callable[[], Plan]]], chosen: Plan, count: int) -> list[Plan]:
    """The quickest `count` of those in `Stop.seen` that shard or run the model in another way than `chosen`, and than
    each other. Plans that differ in storage or hubs alone are one."""
    kinds, found = [_kind(chosen)], list[Plan]()
    for _, make in seen:
        if len(found) == count:
            break
        try:
            plan = make()
        except MeshwrightError:  # it has no program after all
            continue
        if (kind := _kind(plan)) not in kinds:
            kinds.append(kind)
            found.append(plan)
    return found


def _kind(plan: Plan) -> tuple[Any, ...]:
    return plan.strategies, plan.techniques.non_defaults(), plan.stages


__all__ = ["runners_up"]
