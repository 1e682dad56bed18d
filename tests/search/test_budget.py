"""``recompute`` as a number of bytes: the cheapest policies of layers that keep no more, exactly."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

import meshwright as mw
from meshwright.compile import captured_of, lower
from meshwright.core.graph import Node
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.predict.memory.per_operator import kept_bytes
from meshwright.predict.per_operator import Weight
from meshwright.search.techniques.budget import POLICIES, solve
from meshwright.search.techniques.layers import Layer
from tests.breadth import first


@functools.cache
def built() -> Any:
    return gpt.build(gpt.GPTConfig(48, 24, 6, 4, 8, dropout=0.1), batch=6)


def planned(mesh: Any = 1, **options: Any) -> mw.Plan:
    model, batch, loss = built()
    return mw.plan(model, batch, loss=loss, mesh=mesh, **options)


def kept(plan: mw.Plan) -> int:
    model, batch, loss = built()
    return sum(kept_bytes(lower(captured_of(model, batch, loss), plan)).values())


def layers(count: int) -> list[Layer]:
    nodes = [Node(f"n{k}", "aten.relu.default", (), (), (), ()) for k in range(count)]
    return [Layer(n.name, (n,), frozenset()) for n in nodes]


def weights(tables: Sequence[dict[str, tuple[int, float]]], rest: int, chosen: Sequence[str]) -> Weight:
    rows = [table[policy] for table, policy in zip(tables, chosen, strict=True)]
    names = [f"n{k}" for k in range(len(rows))]
    sizes = dict(zip(names, (size for size, _ in rows), strict=True))
    return Weight({**sizes, "": rest}, dict(zip(names, (cost for _, cost in rows), strict=True)), "s")


@pytest.mark.parametrize("seed", range(12))
def test_the_solver_finds_what_trying_all_finds(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [
        {"": (100, 0.0), "full": (draw.randrange(20), draw.random()), "selective": (draw.randrange(90), draw.random())}
        for _ in range(3)
    ]  # fmt: skip
    tables = [draw.choice(kinds) for _ in range(7)]
    weigh = functools.partial(weights, tables, 10)
    every = [weigh(chosen) for chosen in itertools.product(POLICIES, repeat=7)]
    for budget in (150, 300, 500, 640):
        best = min(w.total_cost for w in every if w.total_bytes <= budget)
        found = solve(budget, layers(7), weigh)
        assert found.weight.total_bytes <= budget
        assert found.weight.total_cost == pytest.approx(best, rel=1e-6)


def test_early_layers_are_those_computed_again() -> None:
    table = {"": (100, 0.0), "selective": (60, 1.0), "full": (0, 2.5)}
    found = solve(260, layers(4), functools.partial(weights, [table] * 4, 0))
    assert found.chosen == ("full", "selective", "", "")


def test_what_neighbours_share_is_weighed_with_them() -> None:
    """Two neighbours under different policies keep something more between them."""
    table = {"": (100, 0.0), "selective": (50, 1.0), "full": (10, 2.0)}

    def weigh(chosen: Sequence[str]) -> Weight:
        alone = weights([table] * 4, 0, chosen)
        border = 15 * sum(a != b for a, b in itertools.pairwise(chosen))
        return Weight({**alone.kept_bytes, "": border}, alone.cost, "s")

    best = min(
        w.total_cost for w in map(weigh, itertools.product(POLICIES, repeat=4)) if w.total_bytes <= 310
    )
    found = solve(310, layers(4), weigh)
    assert found.weight.total_bytes <= 310
    assert found.weight.total_cost == best > 2  # which would fit, were it not for the border


@pytest.mark.parametrize("where", first(1, ("h100", "")))
def test_a_plan_keeps_no_more_than_its_budget(where: str) -> None:
    cluster = mw.Cluster.preset(where, nodes=1, ranks_per_node=2) if where else None
    whole = kept(planned({"dp": 2}, mode="data_parallel"))
    costs: list[int] = []
    for budget in (0.2 * whole, 0.5 * whole, 0.9 * whole):
        plan = planned({"dp": 2}, mode="data_parallel", recompute=budget, cluster=cluster)
        assert kept(plan) <= budget
        assert any(note.startswith("recompute within") and "6 layers" in note for note in plan.notes)
        costs.append(len(plan.keeps))
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1] > 0
    assert not planned({"dp": 2}, mode="data_parallel", recompute=float(whole), cluster=cluster).keeps


def test_a_budget_trains_as_one_device() -> None:
    model, batch, loss = built()
    plan = planned({"dp": 2}, recompute=0.5 * kept(planned({"dp": 2})))
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


def test_a_budget_that_cannot_be_kept_names_the_least() -> None:
    with pytest.raises(PlanError, match=r"keeps at least (\d+) bytes") as caught:
        planned(recompute=1)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    assert kept(planned(recompute=least)) == least


def test_explain_says_what_is_computed_again_and_saved() -> None:
    plain, plan = planned(), planned(recompute=0.4 * kept(planned()))
    assert "recomputed" not in plain.explain()
    lines = [line for line in plan.explain().splitlines() if line.startswith("recomputed in backward")]
    assert any("blocks.0" in line for line in lines)
    whole = planned(recompute="full").explain()
    (line,) = (line for line in whole.splitlines() if line.startswith("recomputed in backward"))
    assert "each of 6 blocks.* (blocks.0 to blocks.5)" in line
