"""Plans with stages on the command line: their trace, what they take now and otherwise, and why they are so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.model import cut, open_model
from meshwright.cli.what_if import scaled
from meshwright.compile import captured_of
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.predict.pipeline_claims import claimed
from meshwright.predict.pipeline_step import predict
from meshwright.report.estimate import estimate
from tests.breadth import first

MODEL = """
from meshwright.examples import gpt
CONFIG = gpt.GPTConfig(vocabulary=96, width=48, layers=4, heads=4, sequence=24)
def build(batch=8):
    return gpt.build(CONFIG, batch=batch)
"""
CLUSTER = "preset:h100:4"


def built(folder: Path) -> Any:
    opened = open_model(f"{folder}/net.py:build")
    return opened.model, opened.batch, opened.loss


def cluster() -> Cluster:
    return Cluster.preset("h100", ranks_per_node=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipelines")
    (path / "net.py").write_text(MODEL)
    model, batch, loss = built(path)
    how = {"mode": "data_parallel", "pipeline": 2, "micro_batches": 4}
    mw.plan(model, batch, loss=loss, cluster=cluster(), **how).save(path / "plan.json")
    return path


@pytest.fixture
def verb(meshwright: Any, folder: Path) -> Any:
    """``verb("estimate", …)`` → what it prints about the plan in the folder."""

    def run(name: str, *words: object, code: int = 0, plan: str = "plan.json", model: bool = True) -> str:
        about = ("--model", f"{folder}/net.py:build", "--cluster", CLUSTER) if model else ()
        done = meshwright(name, folder / plan, *about, *words)
        assert done.code == code, done.out + done.err
        return done.out

    return run


def test_the_trace_of_a_pipeline_is_the_predicted_schedule_of_all_its_ranks(
    folder: Path, tmp_path: Path, meshwright: Any
) -> None:
    done = meshwright(
        "plan", f"{folder}/net.py:build", "--cluster", CLUSTER, "--mode", "data_parallel", "--with",
        "pipeline=2,micro_batches=4", "-o", tmp_path / "p.json", "--trace", tmp_path / "t.json", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    step, data = json.loads(done.out)["claims"]["step_seconds"], json.loads((tmp_path / "t.json").read_text())
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {1, 2}
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(step * 1e6, abs=2e-3)
    assert sum(e["name"].startswith(("F", "B")) for e in slices) == 2 * 2 * 4
    assert data["otherData"]["step_seconds"] == step


def test_an_estimate_is_what_the_plan_claims_and_its_parts_add_up(folder: Path, verb: Any) -> None:
    plan = mw.Plan.load(folder / "plan.json")
    data = json.loads(verb("estimate", "--json"))["now"]
    assert data["step_seconds"] == pytest.approx(plan.claims["step_seconds"])
    assert data["peak_bytes"] == plan.claims["peak_bytes"] and data["bubble"] == plan.claims["bubble"]
    assert sum(data["parts"].values()) == pytest.approx(data["step_seconds"])
    assert data["schedule"] == "2 stages, 1f1b, 4 micro-batches"
    assert "waiting" in verb("estimate") and "1f1b" in verb("estimate", "--what-if", "micro_batches=2")


@pytest.mark.parametrize(
    ("what", "options"),
    first(
        1,
        [
            ("schedule=zero_bubble,recompute=full", {"schedule": "zero_bubble", "recompute": "full"}),
            ("micro_batches=2", {"micro_batches": 2}),
            ("pipeline=4,schedule=interleaved", {"pipeline": 4, "schedule": "interleaved"}),
            ("schedule=gpipe", {"schedule": "gpipe"}),
            ("optimizer_parallel=1,threshold_kb=0", {"optimizer_parallel": 1, "threshold_kb": 0}),
        ],
    ),
)
def test_a_what_if_is_the_estimate_of_the_plan_made_so(
    folder: Path, verb: Any, what: str, options: Any
) -> None:
    found = json.loads(verb("estimate", "--what-if", what, "--json"))["what_if"][what]
    model, batch, loss = built(folder)
    given = {"pipeline": 2, "micro_batches": 4, **options}
    mesh = {"pp": 2, "ranks": 2} if given["pipeline"] == 4 else None
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode="data_parallel", cluster=cluster(), **given)
    wanted = estimate(cut(captured_of(model, batch, loss), plan, cluster()), cluster())
    assert found["step_seconds"] == pytest.approx(wanted.step_seconds)
    assert found["peak_bytes"] == wanted.peak_bytes and found["schedule"] == wanted.schedule


def test_other_shapes_and_what_cannot_be(verb: Any) -> None:
    more = ("--what-if", "batch=16", "--what-if", "ranks=8,batch=16", "--what-if", "pipeline=3", "--json")
    data = json.loads(verb("estimate", *more, code=2))
    now, other = data["now"], data["what_if"]
    assert other["batch=16"]["step_seconds"] > now["step_seconds"]
    assert (
        other["ranks=8,batch=16"]["ranks"] == 8 and other["ranks=8,batch=16"]["schedule"] == now["schedule"]
    )
    assert "pipeline=3 on 2 ranks" in data["refused"]["pipeline=3"]


def test_a_plan_in_one_stage_is_planned_again_for_several(folder: Path, verb: Any) -> None:
    model, batch, loss = built(folder)
    plan = mw.plan(model, batch, loss=loss, mode="data_parallel", cluster=cluster())
    plan.save(folder / "plain.json")
    what = "pipeline=2,micro_batches=4"
    data = json.loads(verb("estimate", "--what-if", what, "--json", plan="plain.json"))
    claimed_seconds = mw.Plan.load(folder / "plan.json").claims["step_seconds"]
    assert data["what_if"][what]["step_seconds"] == pytest.approx(claimed_seconds)
    dp_tp = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2})
    assert scaled(dp_tp, 4, cluster(), 2) == {"dp": 1, "tp": 2}
    with pytest.raises(PlanError, match="in 4 stages"):
        scaled(dp_tp, 4, cluster(), 4)


def test_explain_draws_the_schedule_from_the_file_alone(verb: Any) -> None:
    said = verb("explain", model=False)
    assert "stage 1 on rank 1 of the pipeline:" in said and "1f1b: 2 stages, 4 micro-batches" in said
    assert said.count("at most") == 2
    assert len(json.loads(verb("explain", "--json", model=False))["schedule"]) == 3
    priced = verb("explain")
    assert "forward" in priced and "stage 1 on rank 1" in priced
    page = verb("explain", "blocks.1.up")  # of micro-batches too, whose axis in time is none of the user's
    assert "other shardings of it alone" in page and "time" not in page


def test_the_drawing_of_a_file_is_what_was_predicted(folder: Path) -> None:
    plan = mw.Plan.load(folder / "plan.json")
    model, batch, loss = built(folder)
    found = predict(cut(captured_of(model, batch, loss), plan, cluster()), cluster())
    assert claimed(plan).times == found.played.times
