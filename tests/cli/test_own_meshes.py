"""Plans whose stages have meshes of their own on the command line: why operators are so, what else it would take, and
what differs."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.model import cut, open_model
from meshwright.compile import captured_of
from meshwright.cost.cluster import Cluster
from meshwright.pipeline.levels import part_of
from meshwright.pipeline.meshes import meshes_of
from meshwright.pipeline.of_plan import place_of
from meshwright.predict.price import program_price
from meshwright.report.diff import difference
from meshwright.report.estimate import estimate
from tests.breadth import first

MODEL = """
from meshwright.examples import gpt
CONFIG = gpt.GPTConfig(vocabulary=96, width=48, layers=4, heads=4, sequence=24)
def build(batch=8):
    return gpt.build(CONFIG, batch=batch)
"""
MESHES = [{"dp": 2}, {"tp": 2}]
PINS = {"*.up": {"n": "tp"}, "*.qkv": {"n": "tp"}}
HOW: dict[str, Any] = {"mode": "sharding_propagation", "pins": PINS, "micro_batches": 4}


@functools.cache
def cluster() -> Cluster:
    return Cluster.preset("h100", ranks_per_node=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own")
    (path / "net.py").write_text(MODEL)
    planned(path).save(path / "plan.json")
    return path


def planned(folder: Path, batch: int = 8, **other: Any) -> mw.Plan:
    opened = open_model(f"{folder}/net.py:build", batch=batch)
    given = {"mesh": MESHES, "cluster": cluster(), **HOW, **other}
    return mw.plan(opened.model, opened.batch, loss=opened.loss, **given)


@pytest.fixture
def verb(meshwright: Any, folder: Path) -> Any:
    """``verb("estimate", …)`` → what it prints about the plan in the folder."""

    def run(name: str, *words: object, code: int = 0) -> str:
        about = ("--model", f"{folder}/net.py:build", "--cluster", "preset:h100:4")
        done = meshwright(name, folder / "plan.json", *about, *words)
        assert done.code == code, done.out + done.err
        return done.out + done.err

    return run


def test_an_operator_has_the_price_of_the_mesh_on_which_it_runs(folder: Path, verb: Any) -> None:
    plan = mw.Plan.load(folder / "plan.json")
    opened = open_model(f"{folder}/net.py:build")
    captured = captured_of(opened.model, opened.batch, opened.loss)
    told = {row["node"]: row for row in json.loads(verb("explain", "blocks.*.up", "--json"))["operators"]}
    assert len({place_of(plan, name) for name in told}) == 2
    for place, mesh in enumerate(MESHES):
        alone = mw.plan(
            opened.model, opened.batch, loss=opened.loss, mesh=mesh, mode=HOW["mode"],
            pins=PINS if "tp" in mesh else None, cluster=part_of(cluster(), meshes_of(plan), place), micro_batches=4,
        )  # fmt: skip
        price = program_price(cut(captured, alone), part_of(cluster(), meshes_of(plan), place))
        for name, row in told.items():
            if place_of(plan, name) == place:
                assert row["seconds"]["forward"] == pytest.approx(price.by_node[name].forward_seconds)
                assert ("tp" in row["cut"]) == ("tp" in mesh) and row["otherwise"]
    page = verb("explain", "blocks.3.up")
    assert "n=tp" in page and "other shardings of it alone" in page and "batch=dp" not in page


@pytest.mark.parametrize(
    ("what", "options"),
    first(
        1,
        [
            ("micro_batches=2,schedule=gpipe", {"micro_batches": 2, "schedule": "gpipe"}),
            ("batch=16", {"batch": 16}),
            ("optimizer_parallel=1,threshold_kb=0", {"optimizer_parallel": 1, "threshold_kb": 0}),
            ("recompute=full", {"recompute": "full"}),
            ("pipeline=4,schedule=interleaved", {"pipeline": 4, "schedule": "interleaved"}),
        ],
    ),
)
def test_a_what_if_is_the_estimate_of_the_plan_made_so(
    folder: Path, verb: Any, what: str, options: dict[str, Any]
) -> None:
    found = json.loads(verb("estimate", "--what-if", what, "--json"))["what_if"][what]
    opened = open_model(f"{folder}/net.py:build", batch=options.get("batch", 8))
    plan = planned(folder, **options)
    if "batch" in options:  # a what-if of a shape leaves operators in their stages
        plan = in_stages_of(mw.Plan.load(folder / "plan.json"), plan)
    captured = captured_of(opened.model, opened.batch, opened.loss)
    wanted = estimate(cut(captured, plan, cluster()), cluster())
    assert found["step_seconds"] == pytest.approx(wanted.step_seconds)
    assert found["peak_bytes"] == wanted.peak_bytes and found["schedule"] == wanted.schedule


def in_stages_of(given: mw.Plan, plan: mw.Plan) -> mw.Plan:
    """A plan whose operators are in the stages of another one."""
    own = tuple(replace(one, stages=given.stages) for one in plan.own)
    return replace(plan, stages=given.stages, own=own)


def test_a_number_of_ranks_does_not_say_which_mesh_has_them(verb: Any) -> None:
    said = verb("estimate", "--what-if", "ranks=8", code=2)
    assert "which of them changes" in said and "dp=2 / tp=2" in said


def test_operators_differ_as_they_run_and_inputs_place_by_place(folder: Path) -> None:
    plan = mw.Plan.load(folder / "plan.json")
    assert difference(plan, plan).equal
    without = in_stages_of(plan, planned(folder, pins={"*.qkv": {"n": "tp"}}))
    found = difference(plan, without)
    last = {m for n, (_, m) in plan.about.items() if m.endswith(".up") and place_of(plan, n) == 1}
    changes = [c for c in found.nodes if c.what.endswith(".up")]
    assert sum(c.count for c in changes) == len(last) and all("n=tp" in c.before for c in changes)
    weights = [c for c in found.inputs if "up_weight" in c.what]
    assert weights and all("rank 1 of the pipeline" in c.what for c in weights)
    one = planned(folder, mesh={"dp": 2}, pins=None, mode="data_parallel", pipeline=2)
    assert ("mesh", "dp=2 / tp=2", "pp=2 × dp=2") in [
        (c.what, c.before, c.after) for c in difference(plan, one).facts
    ]
