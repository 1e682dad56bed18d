"""A plan's cuts on more or fewer ranks: still right, and what a search that cuts alike finds there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.compile import captured_of
from meshwright.core.layout import map_leaves
from meshwright.core.mesh import Mesh
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.examples import gpt
from meshwright.report.reshape_plan import on_other_ranks
from tests.breadth import quick

CONFIG = gpt.GPTConfig(vocabulary=96, width=96, layers=2, heads=8, sequence=24)
PINS = {"blocks.*.up": {"n": "tp"}, "*.qkv": {"n": "tp"}}
BATCH = 16
CLUSTER = Cluster.preset("h100", ranks_per_node=4)


@pytest.fixture(scope="module")
def model():
    return gpt.build(CONFIG, batch=BATCH)


def made(model, mesh, **how):
    net, batch, loss = model
    how = how or {"mode": "sharding_propagation", "pins": PINS}
    return mw.plan(net, batch, loss=loss, mesh=mesh, **how), captured_of(net, batch, loss).graph


@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize("level", [0, 3])
def test_the_same_cuts_are_those_that_propagation_finds_there(model, dp, level):
    how = {"mode": "sharding_propagation", "pins": PINS}
    how |= {"optimizer_parallel": level, "threshold_kb": 0} if level else {}
    plan, graph = made(model, {"dp": 2, "tp": 2}, **how)
    wanted, _ = made(model, {"dp": dp, "tp": 2}, **how)
    found = on_other_ranks(plan, graph, wanted.mesh)
    for name in ("strategies", "inputs", "hubs", "states", "again"):
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("recursive_programming", {}),
        ("dynamic_programming", {"optimizer_parallel": 3, "threshold_kb": 0}),
        ("data_parallel", {"optimizer_parallel": 1, "threshold_kb": 0, "micro_batches": 2}),
        ("data_parallel", {"pipeline": 2, "micro_batches": 2, "optimizer_parallel": 2, "threshold_kb": 0}),
    ],
)
@quick(lambda mode, options: mode == "recursive_programming" or "pipeline" in options)
def test_a_plan_on_half_and_twice_as_many_ranks_is_proved(model, mode, options):
    how = {**options, "mode": mode} | ({"cluster": CLUSTER} if mode.endswith("programming") else {})
    plan, graph = made(model, {"dp": 2, "tp": 2} if "pipeline" not in options else {"dp": 2}, **how)
    for dp in (1, 4):
        mesh = Mesh.of({name: dp if name == "dp" else 2 for name, _ in plan.mesh.names})
        world = Mesh.of({"pp": 2, "dp": dp}) if "pipeline" in options else None
        found = on_other_ranks(plan, graph, mesh, world)
        assert found.ranks.size == dp * plan.ranks.size // 2
        assert mw.verify(*model[:2], loss=model[2], plan=found).raise_if_different().ok


def test_what_cannot_be_carried_over_says_why(model):
    plan, graph = made(model, {"dp": 2, "tp": 2})
    with pytest.raises(PlanError, match="16 elements cannot be split over dp"):
        on_other_ranks(plan, graph, Mesh.of(dp=32, tp=2))
    with pytest.raises(PlanError, match="no axis 'tp'"):
        on_other_ranks(plan, graph, Mesh.of(dp=4))
    one, _ = made(model, {"dp": 1, "tp": 2})
    with pytest.raises(PlanError, match="splits nothing over 'dp'"):
        on_other_ranks(one, graph, Mesh.of(dp=2, tp=2))
    ordered = replace(plan, mesh=Mesh.of({"dp": 2, "tp": 2}, order=(0, 2, 1, 3)))
    with pytest.raises(PlanError, match="an order of their own"):
        on_other_ranks(ordered, graph, Mesh.of(dp=4, tp=2))
    four, _ = made(model, {"dp": 4}, mode="data_parallel")
    turned = {
        name: replace(
            layout, dims=tuple(map_leaves(d, lambda s: s.on(reversed(s.axes))) for d in layout.dims)
        )
        for name, layout in four.inputs.items()
    }
    with pytest.raises(PlanError, match="has some of them apart"):
        on_other_ranks(replace(four, inputs=turned), graph, Mesh.of(dp=9))


def test_ranks_are_answered_with_the_same_cuts_or_planned_again(model, meshwright, tmp_path):
    plan, _ = made(model, None, mode="recursive_programming", cluster=CLUSTER)
    plan.save(tmp_path / "plan.json")
    file = tmp_path / "net.py"
    file.write_text(
        "from meshwright.examples import gpt\n"
        f"def build(batch={BATCH}):\n    return gpt.build(gpt.{CONFIG}, batch=batch)\n"
    )
    words = ("estimate", tmp_path / "plan.json", "--model", f"{file}:build", "--cluster", "preset:h100:4")
    done = meshwright(
        *words, "--what-if", "ranks=2", "--what-if", "ranks=32", "--what-if", "ranks=8,batch=32"
    )
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    assert "ranks=2: the same shardings" in said and "ranks=8,batch=32: the same shardings" in said
    assert "ranks=32: planned again by recursive_programming, since" in said
    data = json.loads(meshwright(*words, "--what-if", "ranks=2", "--json").out)
    assert data["what_if"]["ranks=2"]["ranks"] == 2
