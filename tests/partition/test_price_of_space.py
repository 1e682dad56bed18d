"""The price of an emitted program equals the search's own price of the choice it was made from, for any choice."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from meshwright.compile import captured_of
from meshwright.core.graph import RESHARD
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.ops.factors import analyze
from meshwright.ops.table import rules_of
from meshwright.partition import partition
from meshwright.plan.plan import Plan, fingerprint
from meshwright.predict.price import program_price
from meshwright.search.space.build import Space
from meshwright.search.space.families import named, runs
from meshwright.search.space.parameters import Storage
from tests.breadth import quick
from tests.partition.models import MODELS, UNEVEN, built

SPACES: dict[str, Any] = {  # mesh and family of strategies; a mesh of 3 makes blocks uneven
    "dp=2 tp=2, product": ({"dp": 2, "tp": 2}, lambda n: named([[i] for i in range(n)])),
    "dp=2 tp=3, product": ({"dp": 2, "tp": 3}, lambda n: named([[i] for i in range(n)])),
    "a=12, two runs": ({"a": 12}, lambda n: runs(n, 2)),
}
PLAIN = ("mlp", "gpt", "compared")
CASES = [(model, space) for model in MODELS for space in SPACES if model in PLAIN or "two" not in space]


@pytest.mark.parametrize(("model", "space"), CASES)
@quick(
    lambda model, space: (
        model in ("mlp", "compared") or (model not in ("llama", "resnet") and "dp=2 tp=2" in space)
    )
)
def test_any_choice_costs_what_its_program_costs(model: str, space: str) -> None:
    graph = captured_of(*built(model)).graph
    factors = analyze(graph, rules_of(graph))
    sizes, family = SPACES[space]
    cluster = replace(Cluster.preset("h100", nodes=2), measured=UNEVEN)
    mesh = cluster.place(Mesh.of(sizes))
    axes = len(mesh.axes)
    stored = Storage(tuple((axis,) for axis in range(axes)), smallest_bytes=0)
    draw = random.Random(f"{model} {space}")
    names = [n.name for n in graph.nodes]
    hosts = frozenset(draw.sample(names, len(names) // 3) if draw.random() < 0.5 else ())
    choices = Space(graph, factors, mesh, cluster, family(axes), stored, hosts=hosts)
    for _ in range(4):
        states = [draw.randrange(parts.shape[1]) for parts in choices.unary]
        choice, wanted = choices.choice(states), choices.price(states)
        plan = Plan(
            mesh,
            "drawn",
            fingerprint(graph),
            choice.strategies,
            choice.inputs,
            hubs=choice.hubs,
            again=choice.again,
            hosts=hosts,
            prices=cluster.prices,
        )
        parts = partition(graph, plan)
        found = program_price(parts, cluster)
        sending = found.forward_communication + found.backward_communication
        assert math.isclose(found.compute + found.update, wanted.compute, rel_tol=1e-6)
        assert math.isclose(sending, wanted.communication, rel_tol=1e-6)
        assert math.isclose(found.reduction, wanted.reduction, rel_tol=1e-6, abs_tol=1e-15)
        assert math.isclose(found.total, wanted.total, rel_tol=1e-6)
        for node in parts.resharded.graph.nodes:
            readers = [n for n, _ in parts.resharded.graph.consumers[node.name]] if node.op == RESHARD else []
            if readers and not any(any(n.needs_grad) for n in readers):  # as where a value is only compared
                assert not parts.resharded.pairs[node.name].backward
