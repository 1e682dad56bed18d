"""What the model says of a plan: a step by classes of work (`meshwright.calibrate.step_rows`), and bytes."""

from __future__ import annotations

from meshwright.calibrate.step_rows import Prediction, describe_step, priced
from meshwright.compile import Captured, lower
from meshwright.cost.cluster import Cluster
from meshwright.plan.plan import Plan
from meshwright.predict.memory.step import ADAMW_FUSED, peak


def predict(captured: Captured, plan: Plan, cluster: Cluster) -> tuple[Prediction, int]:
    """What a cluster makes of a plan, of the rank that holds most, and that rank's peak of bytes."""
    parts = lower(captured, plan)
    return priced(describe_step(parts, cluster), cluster), peak(parts, 0, optimizer=ADAMW_FUSED).bytes
