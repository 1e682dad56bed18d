"""`meshwright estimate`: what-ifs give plans that are right, and numbers that the parts of the model confirm."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.cli.estimate import options, parsed
from meshwright.cli.model import cut
from meshwright.cli.what_if import resized, scaled, with_rows
from meshwright.compile import captured_of
from meshwright.cost.cluster import Cluster
from meshwright.errors import ClusterError, PlanError
from meshwright.examples import gpt
from meshwright.ops.factors import analyze
from meshwright.ops.table import rules_of
from meshwright.predict.price import program_price
from meshwright.report.estimate import estimate
from meshwright.report.what_if import changed, stored_as_used, transferred
from tests.breadth import quick

CONFIG = gpt.GPTConfig(vocabulary=96, width=48, layers=3, heads=4, sequence=24)
PINS = {"blocks.*.up": {"n": "tp"}, "*.qkv": {"n": "tp"}}
MESH = {"dp": 2, "tp": 2}
CLUSTER = Cluster.preset("h100", ranks_per_node=4)


def planned(batch: int = 4, **how):
    model, example, loss = gpt.build(CONFIG, batch=batch)
    how = how or {"mode": "sharding_propagation", "pins": PINS}
    plan = mw.plan(model, example, loss=loss, mesh=MESH, **how)
    return model, example, loss, captured_of(model, example, loss), plan


def factors_of(captured):
    return analyze(captured.graph, rules_of(captured.graph))


@pytest.fixture(scope="module")
def made():
    return planned()


@pytest.fixture
def file(made, tmp_path):
    made[-1].save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(
        "from meshwright.examples import gpt\n"
        f"CONFIG = gpt.{CONFIG}\n"
        "def build(batch=4):\n    return gpt.build(CONFIG, batch=batch)\n"
        "def fixed():\n    return gpt.build(CONFIG)\n"
    )
    return path


# ---------------------------------------------------------------- changes


def test_a_plan_moved_to_another_batch_is_the_plan_made_for_it(made):
    *_, plan = made
    *_, captured, wanted = planned(batch=8)
    factors = factors_of(captured)
    found = transferred(plan, captured.graph, factors, "batch=8")
    assert (found.strategies, found.inputs, found.fingerprint) == (
        wanted.strategies,
        wanted.inputs,
        wanted.fingerprint,
    )


def test_a_batch_smaller_than_its_ranks_is_refused(made):
    *_, plan = made
    *_, captured, _ = planned(batch=2)
    factors = factors_of(captured)
    transferred(plan, captured.graph, factors, "batch=2")
    model, example, loss = gpt.build(CONFIG, batch=1)
    captured = captured_of(model, example, loss)
    with pytest.raises(PlanError, match="batch=1"):
        transferred(plan, captured.graph, factors_of(captured), "batch=1")


@pytest.mark.parametrize("level", [2, 3])
@quick(lambda level: level == 3)
def test_storage_by_a_level_computes_what_one_device_computes(made, level):
    model, batch, loss, captured, plan = made
    found = at_level(captured, plan, level)
    assert len(found.hubs if level == 3 else found.states) > 20 and bool(found.again) == (level == 3)
    mw.verify(model, batch, loss=loss, plan=found).raise_if_different()


def at_level(captured, plan, level):
    asked = {"optimizer_parallel": level, "threshold_kb": 0 if level else 64}
    return changed(plan, captured.graph, factors_of(captured), asked)[0]


def test_levels_store_less_and_level_0_undoes_them(made):
    *_, captured, plan = made
    now = estimate(cut(captured, plan, CLUSTER), CLUSTER)
    found = {n: at_level(captured, plan, n) for n in (0, 2, 3)}
    split = {n: estimate(cut(captured, p, CLUSTER), CLUSTER) for n, p in found.items()}
    assert split[0] == now
    # stored cut, without a hub, as a search leaves a parameter with one reader
    cut_alone = replace(found[3], hubs={}, again=frozenset())
    assert stored_as_used(cut_alone, captured.graph, factors_of(captured)).inputs == plan.inputs
    undone = at_level(captured, found[3], 0)
    assert (undone.inputs, undone.hubs, undone.states, undone.again) == (
        plan.inputs,
        plan.hubs,
        {},
        plan.again,
    )
    assert not at_level(captured, found[2], 0).states
    for n in (2, 3):
        assert split[n].memory["optimizer"] < 0.53 * now.memory["optimizer"]
        assert split[n].peak_bytes < now.peak_bytes and split[n].parts["update"] < now.parts["update"]
    assert split[3].memory["optimizer"] == 2 * split[3].memory["parameters"]
    assert split[3].parts["sent backward"] > split[2].parts["sent backward"]


def test_the_estimate_is_the_price_apart(made):
    *_, captured, plan = made
    parts = cut(captured, plan, CLUSTER)
    found = estimate(parts, CLUSTER)
    assert (found.mesh, found.ranks) == (str(plan.mesh), plan.mesh.size)
    assert found.price_seconds == pytest.approx(program_price(parts, CLUSTER).total)
    assert 0 < found.step_seconds <= found.price_seconds * (1 + 1e-9)
    assert sum(found.memory.values()) == pytest.approx(found.peak_bytes)
    assert estimate(parts, CLUSTER, optimizer_states=0).memory.get("optimizer", 0) == 0


@pytest.mark.parametrize(
    "wished",
    (
        {"micro_batches": 2},
        {"recompute": "full"},
        {"recompute": "full", "micro_batches": 2, "optimizer_parallel": 3, "threshold_kb": 0},
        {"fusion": 0},
    ),
    ids=str,
)
@quick(lambda wished: len(wished) > 1 or "fusion" in wished)
def test_a_changed_technique_is_the_plan_made_with_it(made, wished):
    *_, captured, plan = made
    *_, wanted = planned(mode="sharding_propagation", pins=PINS, **wished)
    found, _ = changed(plan, captured.graph, factors_of(captured), wished)
    for name in ("techniques", "strategies", "inputs", "hubs", "states", "again", "keeps"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert estimate(cut(captured, found, CLUSTER), CLUSTER).ranks == plan.mesh.size
    back = {**dict.fromkeys(("micro_batches",), 1), "recompute": "", "fusion": "auto"}
    back |= {"optimizer_parallel": 0, "threshold_kb": 64}
    again, _ = changed(found, captured.graph, factors_of(captured), back)
    for name in ("techniques", "inputs", "hubs", "states", "again", "keeps"):
        assert getattr(again, name) == getattr(plan, name), name


def test_clusters_and_meshes_of_another_size():
    two = Cluster.preset("h100", nodes=2, ranks_per_node=8)
    assert resized(two, 32).ranks == 32 and resized(two, 32).levels[0].size == 4
    assert [v.size for v in resized(two, 8).levels][-1] == 8 and resized(two, 8).ranks == 8
    assert resized(two, 4).ranks == 4
    with pytest.raises(ClusterError, match="100,000,000 ranks"):
        resized(two, 10**8)
    with pytest.raises(ClusterError, match="cannot have 12 ranks"):
        resized(two, 12)
    *_, plan = planned()
    assert scaled(plan, 16, two) == {"dp": 8, "tp": 2}
    with pytest.raises(PlanError, match="no multiple"):
        scaled(plan, 7, two)


def test_changes_are_read_and_wrong_ones_refused():
    assert parsed("batch=16, recompute=full") == {"batch": "16", "recompute": "full"}
    assert options(parsed("fusion=0,offload=none,recompute=2e6")) == {
        "fusion": 0,
        "offload": (),
        "recompute": 2e6,
    }
    assert options(parsed("fusion=all_gather:64MiB+all_reduce:0")) == {
        "fusion": {"all_gather": 64 << 20, "all_reduce": 0}
    }
    for text, said in (
        ("bacth=3", "did you mean 'batch'"),
        ("batch", "batch=…"),
        ("batch=0", "not a number that batch can be"),
        ("recompute=some", "it may be 'full', 'selective'"),
        ("optimizer_parallel=4", "a whole number from 0 to 3"),
        ("micro_batches=many", "a whole number"),
        ("ranks=-1", "not a number"),
    ):
        with pytest.raises(PlanError) as caught:
            parsed(text)
        assert said in str(caught.value)


def test_rows_of_a_batch_are_repeated():
    import torch

    batch = {"x": torch.arange(6.0).view(3, 2), "y": torch.arange(3), "scale": torch.tensor(2.0)}
    found = with_rows(batch, 5)
    assert found["y"].tolist() == [0, 1, 2, 0, 1] and found["x"].shape == (5, 2) and found["scale"].dim() == 0


# ---------------------------------------------------------------- the verb


def test_now_against_what_if(file, model_file, meshwright):
    done = meshwright(
        "estimate", file, "--model", f"{model_file}:build", "--cluster", "preset:h100:4",
        "--what-if", "batch=8", "--what-if", "optimizer_parallel=3,recompute=full,threshold_kb=0", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads(done.out)
    more = data["what_if"]["batch=8"]
    assert more["memory"]["saved"] == pytest.approx(2 * data["now"]["memory"]["saved"], rel=0.1)
    assert more["memory"]["optimizer"] == data["now"]["memory"]["optimizer"]
    assert (
        data["what_if"]["optimizer_parallel=3,recompute=full,threshold_kb=0"]["peak_bytes"]
        < data["now"]["peak_bytes"]
    )


def test_operators_are_measured_here(file, model_file, meshwright):
    words = ("estimate", file, "--model", f"{model_file}:build", "--what-if", "batch=8", "--json")
    plain = meshwright(*words, "--cluster", "preset:cpu:4")
    done = meshwright(*words, "--cluster", "preset:cpu:4", "--measure")
    assert done.code == plain.code == 0, done.err
    for pick in (lambda data: data["now"], lambda data: data["what_if"]["batch=8"]):
        before, after = pick(json.loads(plain.out)), pick(json.loads(done.out))
        assert after["parts"]["compute"] != before["parts"]["compute"]
        assert after["parts"]["gradients"] == before["parts"]["gradients"]
        assert after["peak_bytes"] == before["peak_bytes"]


def test_a_gpu_is_not_measured_without_one(file, model_file, meshwright):
    words = ("estimate", file, "--model", f"{model_file}:build", "--cluster", "preset:h100:4", "--measure")
    done = meshwright(*words)
    assert done.code and "cannot be measured on a device of type cpu" in done.err


def test_the_table_names_what_changed(file, model_file, meshwright):
    done = meshwright(
        "estimate",
        file,
        "--model",
        f"{model_file}:fixed",
        "--cluster",
        "preset:h100:4",
        "--what-if",
        "batch=8",
    )
    assert done.code == 0, done.err
    step = next(line for line in done.out.splitlines() if line.startswith("step"))
    assert len(step.split("   ")) >= 3 and "batch=8" in done.out
    assert "answered in" in done.out and "peak memory" in done.out


def test_many_answers_are_read_on_a_narrow_screen(file, model_file, meshwright):
    asked = ["batch=8", "batch=12", "recompute=full", "fusion=0", "optimizer_parallel=2", "reduce_dtype=bf16"]
    words = [word for what in asked for word in ("--what-if", what)]
    done = meshwright(
        "estimate", file, "--model", f"{model_file}:build", "--cluster", "preset:h100:4", *words
    )
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    heads = [line.split() for line in lines if "now" in line.split()]
    assert len(heads) > 1 and [word for head in heads for word in head if word != "now"] == asked
    assert all(len(line) <= 140 for line in lines)
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == len(heads) and all("s " in step for step in steps)


def test_what_cannot_be_answered_says_why(file, model_file, meshwright):
    words = ("estimate", file, "--model", f"{model_file}:build", "--cluster", "preset:h100:4")
    asked = ("seq=48", "ranks=3", "batch=1", "schedule=gpipe")
    done = meshwright(*words, *(word for what in asked for word in ("--what-if", what)))
    assert done.code == 2
    assert "schedule=gpipe has no answer: schedule='gpipe' without pipeline=" in done.err
    assert "seq=48 has no answer" in done.err and "does not take 'seq'" in done.err
    assert "ranks=3 has no answer" in done.err
    assert "batch=1 has no answer" in done.err
    done = meshwright("estimate", file, "--model", f"{model_file}:build", "--cluster", "preset:h100:8")
    assert done.code == 2 and "the plan is for 4 ranks, the cluster has 8" in done.err
