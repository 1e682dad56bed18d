"""`meshwright plan`: a file that loads, claims that scripts can read, and errors before anything heavy is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import meshwright as mw
from meshwright.cli.arguments import mesh_sizes, open_cluster, optimizer_states, pins_of, size_bytes
from meshwright.compile import captured_of
from meshwright.errors import ClusterError, MeshError, PlanError
from meshwright.examples import mlp
from meshwright.plan.plan import Plan
from tests.search.planned import press_ctrl_c


def test_the_plan_is_that_of_the_function(tmp_path, meshwright):
    done = meshwright(
        "plan", "zoo:mlp", "--mesh", "dp=2,tp=2", "--pin", "up.*:n=tp", "-o", tmp_path / "p.json"
    )
    assert done.code == 0, done.err
    model, batch, loss = mlp.build()
    pins = {"up.*": {"n": "tp"}}
    wanted = mw.plan(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation", pins=pins)
    found = Plan.load(tmp_path / "p.json")
    assert (found.strategies, found.inputs, found.mesh) == (wanted.strategies, wanted.inputs, wanted.mesh)
    assert found.check(captured_of(model, batch, loss).graph) is found
    up = next(line.split() for line in done.out.splitlines() if line.startswith("up.*"))
    assert up[:5] == ["up.*", "×2", "linear", "batch=dp", "n=tp"]
    assert str(tmp_path / "p.json") in done.out and "capture" in done.out
    told = next(line for line in done.out.splitlines() if line.startswith("model "))
    assert told.split(maxsplit=1)[1].strip() == "MLP, x f32[12, 16], y i64[12]"


def test_a_searched_plan_claims_and_traces(tmp_path, meshwright):
    done = meshwright(
        "plan", "zoo:mlp", "--cluster", "preset:h100:2x2", "--mode", "recursive_programming",
        "-o", tmp_path / "p.json", "--trace", tmp_path / "t.json", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["ranks"] == 4 and data["mesh"] == {"node": 2, "gpu": 2}
    assert data["claims"]["price_seconds"] > 0 and data["claims"] == json.loads(
        json.dumps(Plan.load(tmp_path / "p.json").claims)
    )
    assert {"open", "capture", "search"} <= set(data["seconds"])
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_what_cannot_be_planned_says_why(tmp_path, meshwright):
    cases = {
        ("zoo:mlp",): "over how many ranks?",
        ("zoo:mlp", "--mode", "auto"): "--mode auto needs a cluster",
        ("zoo:mlp", "--mesh", "4", "--memory", "70GB"): "--memory needs a cluster",
        ("zoo:mlp", "--mesh", "4", "--memory", "70 lots"): "is not an amount of memory",
        ("zoo:mlp", "--cluster", "preset:h100:8", "--memory", "10"): "'10' has no unit",
        ("zoo:mlp", "--mesh", "dp=x"): "is not name=size",
        ("zoo:mlp", "--mesh", "4", "--with", 'recompute={"up.*": "full"}'): "recompute=blocks.*:full",
        ("zoo:mlp", "--mesh", "4", "--optimizer", "adamv"): "did you mean 'adam",
        ("zoo:mlp", "--cluster", "preset:h10:8"): "did you mean 'h100'",
        ("zoo:mlp", "--cluster", "h100"): "preset:h100:2x8",
        ("zoo:mlp", "--cluster", "none.yaml"): "none.yaml",
        ("zoo:mlp", "--mesh", "4", "--mode", "data_paralel"): "did you mean 'data_parallel'",
        ("zoo:mlp", "--mesh", "64"): "64",
        ("none.py:build", "--mesh", "4"): "there is no file",
        ("zoo:mlp", "--mesh", "4", "-o", str(tmp_path / "no" / "p.json")): "no such folder",
    }
    for words, said in cases.items():
        done = meshwright("plan", *words, *([] if "-o" in words else ["-o", tmp_path / "p.json"]))
        assert done.code == 2 and said in done.err, (words, done.err)
        assert done.out == ""


def test_an_interrupt_before_a_plan_is_found_is_no_traceback(tmp_path, meshwright, monkeypatch):
    def stop(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.compile.plan_captured", stop)
    done = meshwright("plan", "zoo:mlp", "--mesh", "4", "-o", tmp_path / "p.json")
    assert done.code == 130 and "stopped before a plan was found" in done.err
    assert not (tmp_path / "p.json").exists()


def test_help_does_not_load_torch():
    code = "import sys; from meshwright.cli import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# ---------------------------------------------------------------- arguments


def test_clusters_by_name(tmp_path):
    assert open_cluster("preset:h100:2x8").ranks == 16
    assert open_cluster("preset:a100:4").ranks == 4
    path = tmp_path / "mine.yaml"
    open_cluster("preset:h100:2x8").save(path)
    assert open_cluster(str(path)) == open_cluster("preset:h100:2x8")
    for text in ("preset:h100:2y8", "preset:h100:x", "local:four"):
        with pytest.raises(ClusterError, match="does not name a cluster"):
            open_cluster(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("70GB", 70 * 10**9), ("64 GiB", 64 * 2**30), ("1.5e9", 1_500_000_000), ("512mb", 512 * 10**6)],
)
def test_amounts_of_memory(text, size):
    assert size_bytes(text) == size


def test_meshes_pins_and_optimizers():
    assert (
        mesh_sizes("dp=2, tp=4") == {"dp": 2, "tp": 4} and mesh_sizes("8") == 8 and mesh_sizes(None) is None
    )
    assert mesh_sizes("dp=4/dp=2,tp=2") == [{"dp": 4}, {"dp": 2, "tp": 2}]
    with pytest.raises(MeshError, match="twice"):
        mesh_sizes("dp=2,dp=2")
    assert pins_of(["a.*:n=tp,k=dp", "b:m=dp+tp"]) == {
        "a.*": {"n": "tp", "k": "dp"},
        "b": {"m": ("dp", "tp")},
    }
    with pytest.raises(PlanError, match="is not a pin"):
        pins_of(["a.*"])
    assert optimizer_states("sgd") == 0 and optimizer_states("adamw") == 2


def test_an_interrupt_in_the_search_gives_the_best_so_far(tmp_path, meshwright, monkeypatch):
    from meshwright.cli.progress import Watch

    reports = []

    def interrupted(watch, stage, price=None, bound=None):
        reports.append(stage)
        if len(reports) == 1:
            press_ctrl_c()

    monkeypatch.setattr(Watch, "__call__", interrupted)
    done = meshwright("plan", "zoo:mlp", "--cluster", "preset:h100:4", "-o", tmp_path / "p.json")
    said = "the search was interrupted: this is the best plan found by then"
    assert done.code == 0 and said in done.out
    plan = Plan.load(tmp_path / "p.json")
    assert plan.mesh.size == 4 and said in plan.notes
