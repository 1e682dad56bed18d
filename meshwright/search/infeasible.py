"""Why a search has no answer: what no choice of it allows, in words of the model."""

from __future__ import annotations

import numpy as np

from meshwright.errors import LayoutError, PlanError
from meshwright.search.exact_spaces import families_of
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import NoStates, Problem, solve
from meshwright.search.space.build import Space
from meshwright.search.space.wiring import Variable

OTHER = 'other pins, or mode="sharding_propagation", which takes shardings as they are'


class NothingFits(Exception):
    """Nothing that a search under given techniques looked at fits; `nearest` came nearest, of what was simulated."""

    def __init__(self, nearest: SearchResult | None) -> None:
        self.nearest = nearest
        super().__init__("nothing fits")


def not_allowed(planner: Planner, error: NoStates) -> PlanError:
    """Build the error for a problem in which no choice of states has a finite price."""
    if not error.proven:
        return PlanError(
            "no plan was found", why=error.why, hint='another space, or mode="recursive_programming"'
        )
    what = "no plan has what is asked for"
    if not planner.seeds:
        what = "no plan is possible on this mesh"
    why, where = error.what, ""
    space = planner.space(families_of(planner)[0][1])
    if ends := _apart(space):
        why = f"no layout of {' goes with one of '.join(_named(space, v) for v in ends)}"
        where = next((_where(space, v) for v in ends if _where(space, v)), "")
    asked = sorted({name for nodes in planner.seeds.values() for name in nodes})
    if asked:
        why += f"; shardings are asked of {', '.join('%' + n for n in asked[:4])}"
        why += f" and {len(asked) - 4} more" * (len(asked) > 4)
    return PlanError(what, why=why, where=where, hint=OTHER if asked else "a mesh of other sizes")


def not_lowered(error: LayoutError) -> PlanError:
    """Build the error for a choice whose program cannot be made."""
    return PlanError(
        "a plan that the search looked at has no program",
        why=f"{error.what}{f' ({error.why})' if error.why else ''}",
        where=error.where,
        hint=error.hint or OTHER,
    )


def _apart(space: Space) -> tuple[Variable, ...]:
    """A variable without any state that is allowed, or two that have no states for each other where as few as can be
    have none."""
    problem, names = space.problem(), list(space.variable)
    dear = 1e3 * (1 + sum(float(m[np.isfinite(m)].max(initial=0.0)) for m in problem.pairs.values()))
    unary = tuple(np.where(np.isfinite(row), row, dear) for row in problem.unary)
    pairs = {key: np.where(np.isfinite(m), m, dear) for key, m in problem.pairs.items()}
    try:
        states = solve(Problem(unary, pairs)).states
    except NoStates:  # too much work: what was asked for is said without the two
        return ()
    for v, row in enumerate(problem.unary):
        if not np.isfinite(row[states[v]]):
            return (names[v],)
    for (u, v), matrix in problem.pairs.items():
        if not np.isfinite(matrix[states[u], states[v]]):
            return names[u], names[v]
    return ()


def _named(space: Space, variable: Variable) -> str:
    kind, name = variable
    op = f" ({space.codes[name].node.op})" if kind == "node" else ""
    return f"{'' if kind == 'node' else f'the {kind} '}%{name}{op}"


def _where(space: Space, variable: Variable) -> str:
    return space.codes[variable[1]].node.where if variable[0] == "node" else ""
