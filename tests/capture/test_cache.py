"""The cache returns an equal capture, and misses whenever the program could differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.capture import capture
from meshwright.capture.cache import key_of
from meshwright.examples import mlp
from meshwright.examples.zoo import hugging_face


def entries(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_a_second_capture_is_read_and_equal(tmp_path: Path) -> None:
    table = torch.arange(12.0)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) * table).mean()

    model, batch, _ = mlp.build()
    first = capture(model, batch, loss, cache=tmp_path)
    again = capture(*mlp.build(seed=7)[:2], loss, cache=tmp_path)  # other values, same program
    assert entries(tmp_path) == 1
    assert again.graph == first.graph and again.folding == first.folding and again.notes == first.notes
    assert first.constants.keys() == again.constants.keys() and len(first.constants) == 1
    assert all(torch.equal(first.constants[k], again.constants[k]) for k in first.constants)
    files = sorted(p.name for p in next(tmp_path.iterdir()).iterdir())
    assert files == ["constants.safetensors", "folding.json", "graph.txt"]


def test_a_broken_entry_is_made_again(tmp_path: Path) -> None:
    model, batch, loss = mlp.build()
    first = capture(model, batch, loss, cache=tmp_path)
    next(tmp_path.glob("*/graph.txt")).write_text("graph {")
    assert capture(model, batch, loss, cache=tmp_path).graph == first.graph
    assert "linear" in next(tmp_path.glob("*/graph.txt")).read_text()


SCALE = 1.0


class Config:
    beta = 1.0


def scaled() -> float:
    return SCALE * Config.beta * float(os.environ.get("MESHWRIGHT_TEST_SCALE", "1"))


def test_what_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss = mlp.build(dropout=0.1)
    seen = [key_of(model, batch, loss)]

    def differs() -> None:
        seen.append(key_of(model, batch, loss))
        assert len(set(seen)) == len(seen), "the key did not change"

    model.eval()
    differs()
    model.enter.weight.requires_grad_(False)
    differs()
    model.dropout.p = 0.2
    differs()
    batch = {**batch, "x": torch.randn(6, 16), "y": batch["y"][:6]}
    differs()
    batch = {**batch, "scale": 2.0}
    differs()
    loss = lambda model, batch: model(batch["x"]).mean()  # noqa: E731
    differs()
    factor = 2.0
    loss = lambda model, batch: model(batch["x"]).mean() * factor  # noqa: E731
    differs()
    factor = 3.0
    differs()
    model.up[0].forward = lambda x: x.repeat(1, 4)
    differs()
    model.leave.weight = nn.Parameter(model.leave.weight.detach().double())
    differs()
    with torch.autocast("cpu", torch.bfloat16):
        differs()
    batch["x"].requires_grad_()
    differs()
    batch["x"] = batch["x"].detach().t().contiguous().t()
    differs()

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).mean() * loss.alpha * scaled()  # type: ignore[attr-defined]

    loss.alpha = 1.0  # type: ignore[attr-defined]
    differs()
    loss.alpha = 2.0  # type: ignore[attr-defined]
    differs()
    monkeypatch.setitem(globals(), "SCALE", 2.0)  # as a script sets a global by an option
    differs()
    monkeypatch.setattr(Config, "beta", 2.0)
    differs()
    monkeypatch.setenv("MESHWRIGHT_TEST_SCALE", "2")
    differs()
    model.down[1] = model.down[0]
    differs()


PROGRAM = """
import sys, torch
from meshwright.capture.cache import key_of
import house
torch.manual_seed(0)
print(key_of(house.Net(), {"x": torch.randn(4, 8)}, house.loss))
"""
HOUSE = """
import torch
from helper import twice
class Net(torch.nn.Linear):
    def __init__(self): super().__init__(8, 8)
    def forward(self, x): return twice(super().forward(x))
KINDS = {"sum", "mean", "max"}  # in another order in each process
def loss(model, batch): return model(batch["x"]).mean() * len(KINDS)
"""


def test_key_is_the_same_in_another_process_until_a_helper_changes(tmp_path: Path) -> None:
    (tmp_path / "house.py").write_text(HOUSE)

    def key(helper: str) -> str:
        (tmp_path / "helper.py").write_text(helper)
        root = str(Path(__file__).parents[2])
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(tmp_path), root)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert (
        key("def twice(x): return x * 2")
        == key("def twice(x): return x * 2")
        != key("def twice(x): return x * 3")
    )


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_hugging_face_models_hit(name: str, tmp_path: Path) -> None:
    first = capture(*hugging_face(name), cache=tmp_path)
    assert capture(*hugging_face(name), cache=tmp_path).graph == first.graph
    assert entries(tmp_path) == 1
