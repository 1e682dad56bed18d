"""`meshwright verify`: a plan file is proved, and scripts are told by the exit code."""

from __future__ import annotations

import json

import pytest
import torch

import meshwright as mw
from meshwright.cli.verify import _check_room
from meshwright.errors import ModelError
from meshwright.examples import mlp


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    model, batch, loss = mlp.build(batch=8)
    how = {"mode": "sharding_propagation", "pins": {"up.*": {"n": "tp"}}}
    plan = mw.plan(model, batch, loss=loss, mesh={"tp": 2}, micro_batches=2, **how)
    plan.save(file := tmp_path_factory.mktemp("plan") / "plan.json")
    return file


def test_a_plan_is_proved(file, meshwright):
    done = meshwright("verify", file, "--model", "zoo:mlp", "--batch", 8)
    assert done.code == 0, done.err
    assert done.out.startswith("equal to one device (sharding_propagation on tp=2, ")
    assert "micro_batches=2" in done.out and "float64, tolerance 1e-12" in done.out


def test_the_proof_as_json_in_float32(file, meshwright):
    data = json.loads(
        meshwright("verify", file, "--model", "zoo:mlp", "--batch", 8, "--float32", "--json").out
    )
    assert data["equal"] is True and data["dtype"] == "float32"
    assert data["compared"] > 10 and data["worst"]["error"] <= data["tolerance"]


def test_what_differs_is_exit_code_one(file, meshwright, monkeypatch):
    monkeypatch.setitem(mw.verify.__globals__["TOLERANCE"], torch.float64, -1.0)
    done = meshwright("verify", file, "--model", "zoo:mlp", "--batch", 8)
    assert done.code == 1 and done.out.startswith("DIFFERENT from one device")


def test_a_plan_of_another_model_and_models_without_numbers_are_refused(file, meshwright, tmp_path):
    done = meshwright("verify", file, "--model", "zoo:gpt")
    assert done.code == 2 and done.err.startswith("PlanError")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom meshwright.examples import mlp\n"
        "def build():\n    with torch.device('meta'):\n        return mlp.build(batch=8)\n"
    )
    done = meshwright("verify", file, "--model", f"{tmp_path}/net.py:build")
    assert done.code == 2 and "a proof needs numbers" in done.err and "real (random) weights" in done.err


def test_the_model_of_a_configuration_gets_random_weights(meshwright, tmp_path):
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "intermediate_size": 32, "vocab_size": 40}))
    asked = ["--batch", 4, "--seq", 8]
    made = meshwright("plan", f"hf:{file}", "--mesh", "dp=2", *asked, "-o", tmp_path / "plan.json")
    assert made.code == 0, made.err
    done = meshwright("verify", tmp_path / "plan.json", "--model", f"hf:{file}", *asked)
    assert done.code == 0 and done.out.startswith("equal to one device"), done.err


def test_a_proof_that_does_not_fit_into_memory_is_refused():
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 20, 1 << 22)
    with pytest.raises(ModelError, match=r"(?s)takes 281475 GB.*fewer layers"):
        _check_room(model, torch.float64)
