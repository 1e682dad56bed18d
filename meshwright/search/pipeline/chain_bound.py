"""The chain of a step (`space/step.py`) for a number of micro-batches: of each a rank has an example."""

from __future__ import annotations

from meshwright.search.budget import STAGES
from meshwright.search.planner import Planner
from meshwright.search.solve import skipping_unproven, solve
from meshwright.search.space.families import in_pieces, runs
from meshwright.search.space.step_bound import step_problem


def chain_seconds(planner: Planner, micro_batches: int) -> float:
    """The least seconds that all micro-batches compute, and send while nothing can hide it, under shardings into two
    runs that leave an example of each micro-batch to a rank. The update is not in it."""
    family = in_pieces(runs(len(planner.context.mesh.axes), 2), planner.context.factors, micro_batches)
    problem = step_problem(planner.space(family, planner.storage(allowed=False)), update=False)
    launched = (micro_batches - 1) * planner.least.starting
    with skipping_unproven():
        found = solve(problem, limit_work=STAGES.bound_work, ended=planner.request.stop.now)
        return found.bound + launched
    return launched


__all__ = ["chain_seconds"]
