"""Good choices of shardings and storage, from quick to small, and what each takes of a rank under techniques.

Bytes of states (weights, gradients, moments) and bytes of activations have a price each; the optimum for every pair of
prices is a point of the front of (seconds, state bytes, activation bytes). Beside those of all shardings stand the
fronts of known recipes: data parallel outside, one sharding of every operator on the 2, 4, 8 ranks inside, which leave
more examples to a rank, and so more micro-batches. Which choice is best depends on the techniques around, and is found
by adding up: activations are divided by micro-batches, those that are computed again are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from meshwright.ops.batch import batch_rows
from meshwright.search.budget import AUTO, STAGES, TECHNIQUES, Prices
from meshwright.search.data_parallel import by_batch_rows
from meshwright.search.joint.candidates import alike, candidate_of
from meshwright.search.joint.front import Front
from meshwright.search.planner import Planner, SearchResult
from meshwright.search.solve import Memory, NoStates, Problem, Solution, solve
from meshwright.search.space.build import Space
from meshwright.search.space.constraints import exactly
from meshwright.search.space.families import outside
from meshwright.search.space.memory import fixed_bytes
from meshwright.search.stop import never


def least_bytes(planner: Planner, space: Space) -> float:
    """Return a lower bound in bytes of every choice of a space under the planner's techniques."""
    memory, problem = planner.memory(space), space.problem()
    sums = (solve(memory.alone(problem, t)).bound for t in range(memory.instants))
    return fixed_bytes(space) + max(sums)


def quickest_bytes(made: Front, space: Space) -> float:
    """Return the bytes, by sums, of the choice of a space with the least sum of seconds."""
    quick = _nearly(made, space.problem(), made.planner.request.stop.now)
    return fixed_bytes(space) + float(made.planner.memory(space).totals(quick.states).max())


def front(first: Front, space: Space) -> Front:
    """The fronts of a space and of the recipes. `first`: what was found before of the same planner."""
    planner = first.planner
    made = Front(planner, seen=first.seen, solved=first.solved)
    large = sum(pair.size for pair in space.problem().pairs.values()) > TECHNIQUES.front_pairs
    prices = TECHNIQUES.few_prices if large else TECHNIQUES.front_prices
    _add(made, "front", space, prices, TECHNIQUES.many, few=large)
    for name, recipe, examples in _recipes(planner):
        _add(made, name, recipe, TECHNIQUES.recipe_prices, examples)
    # These split the batch as far as it goes, where that is the quickest: others leave micro-batches their examples.
    _add_of_many(made, 1, TECHNIQUES.recipe_prices)
    return made


def stage_front(planner: Planner) -> Front:
    """The fronts of the recipes for a pipeline, which runs many micro-batches, whose gradients it adds up."""
    made = Front(planner)
    for name, space, examples in _recipes(planner, many=True):
        asked = replace(planner.techniques, micro_batches=max(1, min(TECHNIQUES.many, examples)))
        plain, memory = space.problem(micro_batches=asked.micro_batches), made.memory(space, asked)
        _take(made, name, space, _weighed(made, space, plain, memory, STAGES.prices))
    return made


def first_front(planner: Planner) -> Front:
    """One choice: the recipe with most ranks inside, its storage sharded."""
    made = Front(planner)
    for name, recipe, _ in _recipes(planner, AUTO.recipe_axes):
        _add(made, name, recipe, TECHNIQUES.recipe_prices[1:])
    return made


def add_first_of_many(made: Front) -> None:
    """The same recipe, with the choice that leaves micro-batches their examples."""
    _add_of_many(made, AUTO.recipe_axes, TECHNIQUES.recipe_prices[1:])


def _add_of_many(made: Front, least: int, prices: Prices) -> None:
    """The choices of the recipes with at least so many axes inside, that leave micro-batches their examples."""
    planner = made.planner
    for name, recipe, examples in _recipes(planner, least, many=True):
        if examples > planner.techniques.pieces:
            asked = replace(planner.techniques, micro_batches=min(TECHNIQUES.many, examples))
            plain, memory = recipe.problem(micro_batches=asked.micro_batches), made.memory(recipe, asked)
            _take(made, name, recipe, _weighed(made, recipe, plain, memory, prices))


def _recipes(planner: Planner, least: int = 0, *, many: bool = False) -> Iterator[tuple[str, Space, int]]:
    """Data parallel outside, one sharding of every operator on at `least` so many axes inside, if there are as many,
    and how many examples a rank has; none where the user pinned something. `many`: of shardings those alone that leave
    a rank all of these examples, so that there can be as many micro-batches."""
    context = planner.context
    if planner.seeds:
        return
    rows = by_batch_rows(context, planner.codes)
    if rows is None:
        return
    count = len(context.mesh.axes)
    examples = min(batch_rows(context.graph), default=TECHNIQUES.micro_batches * context.mesh.size)
    for inner in range(min(least, count), min(AUTO.recipe_axes, count) + 1):
        ranks = context.mesh.count([a.name for a in context.mesh.axes[count - inner :]])
        each = examples * ranks // context.mesh.size
        if each < planner.techniques.pieces:
            continue  # ranks without an example are no data parallel
        name = f"data parallel × {ranks} ranks of the best cut" if inner else "data parallel"
        family = outside(rows, count - inner) if inner else exactly(rows)
        pieces = max(
            planner.techniques.micro_batches,
            1 << max(0, min(each, TECHNIQUES.micro_batches).bit_length() - 1),
        )
        under = planner.under(replace(planner.techniques, micro_batches=pieces)) if many else planner
        yield name, under.space(family), each


def _add(
    made: Front, name: str, space: Space, prices: Prices, examples: int = 1, *, few: bool = False
) -> None:
    """The choices of a space for some prices, and that for as many micro-batches as there may be `examples`; of these
    the quickest alone where there are to be `few`."""
    most = 1 if few else None
    plain, memory = space.problem(), made.memory(space, made.planner.techniques)
    first, *others = _weighed(made, space, plain, memory, prices)
    several: list[Problem] = []
    if (pieces := min(TECHNIQUES.many, examples)) > 1:
        asked = replace(made.planner.techniques, micro_batches=pieces)
        many = space.problem(micro_batches=pieces)
        several = _weighed(made, space, many, made.memory(space, asked), TECHNIQUES.many_prices[:most])
    if first is plain:
        hidden = space.problem(TECHNIQUES.alpha)
        several = [*_weighed(made, space, hidden, memory, TECHNIQUES.hidden_prices[:most]), *several]
    _take(made, name, space, [first, *several, *others])


def _weighed(
    made: Front,
    space: Space,
    plain: Problem,
    memory: Memory,
    prices: Prices,
) -> list[Problem]:
    """A problem with prices on bytes of states and of activations, in steps that those of its optimum cost: whatever
    the limit of the request is, the choices are the same."""
    quick = _nearly(made, plain, never)
    owned = {space.variable["parameter", name] for name in space.parameters}
    each = quick.price / (fixed_bytes(space) + float(memory.totals(quick.states).max()))
    return [
        _priced(plain, memory, owned, states * each, activations * each) if states or activations else plain
        for states, activations in prices
    ]


def _take(made: Front, name: str, space: Space, problems: Iterable[Problem]) -> None:
    """The optima of some problems, as candidates."""
    floor, seen = space.problem(1.0), set[tuple[int, ...]]()
    stop = made.planner.request.stop
    for asked in problems:
        made.planner.tell("choices from quick to small")
        if stop.now():
            return
        found = tuple(_nearly(made, asked, stop.now).states)
        if found in seen:
            continue
        seen.add(found)
        candidate = candidate_of(made.planner, name, space, found, floor)
        if not any(alike(candidate, other) for other in made.candidates):
            made.candidates.append(candidate)


def _nearly(made: Front, problem: Problem, ended: Callable[[], bool]) -> Solution:
    """The optimum of a problem, or what is near enough to be simulated, sooner. Each is solved once: the plain problem
    says what a price is a share of, too."""
    if (known := made.solved.get(problem)) is not None:
        return known
    try:
        found = solve(problem, limit_work=TECHNIQUES.front_work, ended=ended)
        if not found.stopped and found.price > (1 + TECHNIQUES.front_gap) * found.bound:
            found = solve(problem, limit_work=TECHNIQUES.front_more_work, ended=ended)
    except NoStates as error:
        if error.proven:
            raise
        found = solve(problem, ended=ended)
    if not found.stopped:
        made.solved[problem] = found
    return found


def with_choice(made: Front, found: SearchResult) -> None:
    """Make a choice that another search came to a candidate, too, so that it is looked at under other techniques."""
    states = tuple(found.states)
    if any(one.space is found.space and one.states == states for one in made.candidates):
        return
    made.candidates.append(
        candidate_of(
            made.planner, str(found.claims.get("chosen", "")), found.space, states, found.space.problem(1.0)
        )
    )


def _priced(problem: Problem, memory: Memory, owned: set[int], states: float, activations: float) -> Problem:
    """The problem with a price on the bytes at the first instant."""
    at = np.zeros(memory.instants)
    at[0] = 1.0
    amounts = tuple(a * (states if v in owned else activations) for v, a in enumerate(memory.amounts))
    pairs: Mapping = {key: block * states for key, block in memory.pairs.items()}
    return Memory(amounts, pairs).weighed(problem, at)


__all__ = [
    "add_first_of_many",
    "first_front",
    "front",
    "least_bytes",
    "quickest_bytes",
    "stage_front",
    "with_choice",
]
