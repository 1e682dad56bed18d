"""The optimisation engine below the searches: it knows variables, states and prices, not graphs and layouts."""

from meshwright.search.solve.bounds import Solution, completed, solve
from meshwright.search.solve.eliminate import Eliminated, Estimate, eliminate, estimate
from meshwright.search.solve.lagrange import LimitedSolution, solve_limited
from meshwright.search.solve.problem import Memory, NoStates, Problem, skipping_unproven

__all__ = [
    "solve",
    "Solution",
    "completed",
    "solve_limited",
    "LimitedSolution",
    "Problem",
    "Memory",
    "NoStates",
    "skipping_unproven",
    "eliminate",
    "estimate",
    "Estimate",
    "Eliminated",
]
