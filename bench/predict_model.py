"""What the model says of a plan: seconds by class of work, and bytes; factors for the classes from measured steps.

A step is played on a timeline of tasks. Multiplying all tasks of one class by a factor and playing again says what
that factor does to the step; since all times are sums and maxima of the tasks' seconds, a step is the sum over classes
of its own derivatives (Euler), and that linear picture is what factors are fitted with. Predictions play anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.calibrate import fit
from meshwright.calibrate.steps import works
from meshwright.compile import Captured, lower
from meshwright.cost.cluster import Cluster
from meshwright.cost.timeline import Task, play
from meshwright.partition.memory import ADAMW_FUSED, peak
from meshwright.partition.tasks import step_tasks
from meshwright.plan import Plan

SENDING = "sending"
STARTING = "starting"  # operators: launches, the interpreter, autograd's own
STEP = 1e-3  # of a factor, for a derivative


@dataclass(frozen=True)
class Prediction:
    """The tasks of a step; of each its class, and its seconds apart from starting operators."""

    tasks: tuple[Task, ...]
    kinds: tuple[str, ...]
    starting: tuple[float, ...]
    slowdown: Mapping[str, float]
    peak_bytes: int

    def seconds(self, factors: Mapping[str, float] | None = None) -> float:
        """The step, with factors for classes."""
        known = factors or {}
        common = known.get(STARTING, 1.0)
        changed = [
            replace(t, seconds=(t.seconds - s) * known.get(kind, 1.0) + s * common)
            for t, kind, s in zip(self.tasks, self.kinds, self.starting, strict=True)
        ]
        return play(changed, self.slowdown).step_seconds

    def shares(self) -> dict[str, float]:
        """Seconds of the step by class: what a class hides behind another does not count."""
        whole = self.seconds()
        classes = dict.fromkeys([*self.kinds, STARTING])
        return {c: (self.seconds({c: 1 + STEP}) - whole) / STEP for c in classes}


def predict(captured: Captured, plan: Plan, cluster: Cluster) -> Prediction:
    """What a cluster makes of a plan, of the rank that holds most."""
    parts = lower(captured, plan)
    rows = works(parts)["works"]
    kinds = {name: row[0] for name, row in zip(parts.factors.sites, rows, strict=True)}
    forward, backward = (
        {name: row[n] for name, row in zip(parts.factors.sites, rows, strict=True)} for n in (6, 7)
    )
    launch = cluster.device.launch_seconds
    tasks = step_tasks(parts, cluster)
    classes: list[str] = []
    starting: list[float] = []
    for task in tasks:
        kind = SENDING if not task.computes else task.kind if task.kind == "update" else kinds[task.name]
        count = {"forward": forward, "backward": backward}.get(task.kind, {}).get(task.name, 0.0)
        factor = cluster.measured.corrections.get(kind, 1.0)
        classes.append(kind)
        starting.append(min(task.seconds, factor * count * launch) if task.computes else 0.0)
    most = peak(parts, 0, optimizer=ADAMW_FUSED)
    return Prediction(tasks, tuple(classes), tuple(starting), cluster.measured.slowdown, most.bytes)


def factors(found: Sequence[tuple[Prediction, float]]) -> dict[str, float]:
    """A factor for each class from (prediction, measured seconds): see `meshwright.calibrate.fit.corrections`."""
    return fit.corrections([p.shares() for p, _ in found], [seconds for _, seconds in found])
