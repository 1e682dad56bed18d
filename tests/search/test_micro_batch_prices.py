"""What micro-batches cost in a space, against what the programs of its choices take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.compile import captured_of
from meshwright.core.techniques import techniques_from
from meshwright.ops.analysis import factors_of
from meshwright.partition import Partition, partition
from meshwright.plan.plan import Plan, fingerprint
from meshwright.planning.search_request import request_for
from meshwright.predict.price import program_price
from meshwright.search.context import SearchContext
from meshwright.search.data_parallel import by_batch
from meshwright.search.exact_spaces import families_of
from meshwright.search.layer_groups import without_folds
from meshwright.search.planner import Planner
from meshwright.search.solve import solve
from meshwright.search.solve.problem import Problem
from meshwright.search.space.build import Space
from meshwright.search.space.constraints import exactly, rows_of
from meshwright.search.space.memory import gathered_bytes
from meshwright.search.techniques.apply import apply
from tests.search.planned import built, cluster

MODEL, MESH = "wide mlp", "2x2"


def planner(**techniques: Any) -> Planner:
    captured, machine = captured_of(*built(MODEL)), cluster("gpu", MESH)
    request = request_for(machine, 1e12)
    assert request is not None
    context = SearchContext(captured.graph, factors_of(captured.graph), machine.mesh)
    return Planner(context, without_folds(captured.graph), {}, request).under(techniques_from(techniques))


def data_parallel(of: Planner) -> Space:
    rows = rows_of(of.codes, by_batch(of.context, tuple(of.context.mesh.sizes)), of.context.mesh)
    assert rows is not None
    return of.space(exactly(rows))


def stored_cut(space: Space, *, again: bool) -> list[int]:
    """The choice with all of each weight that can be stored cut over all ranks."""
    states = list(solve(space.problem()).states)
    for name, found in space.parameters.items():
        fitting = [s for s in range(len(found.again)) if found.stored[s].all() and found.again[s] == again]
        if fitting:
            states[space.variable["parameter", name]] = fitting[0]
    return states


def program(of: Planner, space: Space, states: list[int]) -> Partition:
    """The program of a choice, under the techniques of a planner."""
    graph, choice = of.context.graph, space.choice(states)
    plan = Plan(
        of.context.mesh,
        "test",
        fingerprint(graph),
        choice.strategies,
        choice.inputs,
        hubs=choice.hubs,
        again=choice.again,
        prices=of.request.cluster.prices,
    )
    return partition(graph, apply(graph, plan, of.techniques))


@pytest.mark.parametrize("again", (False, True))
def test_weights_stored_in_parts_are_gathered_for_each_micro_batch(again: bool) -> None:
    """By as much as the program of the choice takes more with more micro-batches."""
    planners = {n: planner(micro_batches=n) for n in (1, 3)}
    space = data_parallel(planners[1])
    states = stored_cut(space, again=again)
    prices = {n: program_price(program(p, space, states), cluster("gpu", MESH)) for n, p in planners.items()}
    sent = {n: p.forward_communication + p.backward_communication for n, p in prices.items()}
    once, often = (space.price(states, n).communication for n in (1, 3))
    assert often > once
    assert often - once == pytest.approx(sent[3] - sent[1], rel=1e-6)
    assert space.problem(micro_batches=3).price(states) == pytest.approx(
        space.price(states, 3).total, rel=1e-9
    )


def test_weights_that_readers_want_otherwise_are_brought_to_them_in_each_micro_batch() -> None:
    """Stored in parts, used with a gradient that is whole where the reader's is a sum: it is summed every time."""
    planners, machine = {n: planner(micro_batches=n) for n in (1, 3)}, cluster("gpu", MESH)
    space = planners[1].space(families_of(planners[1])[0][1])
    looked = 0
    for name, found in space.parameters.items():
        number = space.variable["parameter", name]
        for state in np.flatnonzero(found.stored.any(axis=1) & ~found.again)[::5]:
            states = with_state(space, number, int(state))
            brought = 2 * sum(float(m[states[u], states[v]]) for (u, v), m in space.brought.items())
            once, often = (space.price(states, n).communication for n in (1, 3))
            if brought < 0.3 * (often - once):
                continue
            prices = [program_price(program(p, space, states), machine) for p in planners.values()]
            one, three = (p.forward_communication + p.backward_communication for p in prices)
            assert often - once == pytest.approx(three - one, rel=0.05)  # latencies of activations beside it
            looked += 1
    assert looked >= 3


def with_state(space: Space, number: int, state: int) -> list[int]:
    """The cheapest choice in which a variable has a state."""
    problem = space.problem()
    unary = list(problem.unary)
    unary[number] = np.where(np.arange(len(unary[number])) == state, unary[number], np.inf)
    return list(solve(Problem(tuple(unary), problem.pairs)).states)


def test_many_micro_batches_keep_weights_whole() -> None:
    """Scattering a gradient and gathering a weight once may cost less than a whole sum; many times it does not."""
    space = data_parallel(planner())
    often = solve(space.problem(micro_batches=64)).states
    cut = [
        bool(p.stored[often[space.variable["parameter", name]]].any()) for name, p in space.parameters.items()
    ]
    assert not any(cut)
    assert space.least_gathers(often) == 0.0


def test_gathers_are_no_more_than_links_are_busy_with_them() -> None:
    space = data_parallel(planner())
    states = stored_cut(space, again=False)
    each = {n: float(s[states[space.variable["parameter", n]]]) for n, s in space.gathers.items()}
    assert 0.0 < space.least_gathers(states) <= sum(each.values())


def test_micro_batches_in_flight_keep_what_backward_needs_of_each() -> None:
    base = planner(micro_batches=4)
    space = data_parallel(base)
    states = solve(space.problem()).states
    one = base.memory(space).totals(states)
    base.request = replace(base.request, in_flight=3.0)
    three = base.memory(space).totals(states)
    kept = [
        float(a[s, 0])
        for v, (a, s) in enumerate(zip(planner().memory(space).amounts, states, strict=True))
        if v not in {space.variable["parameter", name] for name in space.parameters}
    ]
    owned = {name: space.variable["parameter", name] for name in space.parameters}
    gathered = sum(float(gathered_bytes(space, name)[states[v]]) for name, v in owned.items())
    assert gathered > 0
    assert three[0] - one[0] == pytest.approx(2 * (sum(kept) / 4 + gathered))
    assert three[1] == one[1]


def test_micro_batches_in_flight_keep_what_their_readers_gather_each() -> None:
    """A weight that is stored otherwise than its reader wants it is gathered, and kept, in every micro-batch."""
    base = planner(micro_batches=4)
    space = base.space(families_of(base)[0][1])
    one = base.memory(space).pairs
    base.request = replace(base.request, in_flight=3.0)
    three = base.memory(space).pairs
    assert any(block[0].any() for block in one.values())
    for key, block in one.items():
        assert three[key][0] == pytest.approx(3 * block[0])
        assert three[key][1] == pytest.approx(block[1])
