"""The proof over models × modes × meshes: every plan computes what one device computes, to 1e-12 in float64."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.examples import gpt, mlp, recommender, zoo
from tests.breadth import first, quick

PINS: dict[str, dict[str, str]] = {
    "mlp": {"up.*": "n"},
    "gpt": {"*.qkv": "n", "*.up": "n"},
    "recommender": {"layers.0": "n"},
    "gpt2": {"*.attn.c_attn": "n", "*.mlp.c_fc": "n"},
    "llama": {"*.q_proj": "n", "*.gate_proj": "n"},
    "qwen3": {"*.k_proj": "n", "*.up_proj": "n"},
    "bert": {"*.query": "n", "*.intermediate.dense": "n"},
    "vit": {"*.q_proj": "n", "*.fc1": "n"},
    "t5": {"*.q": "n", "*.wi": "n"},
    "resnet": {"*.layer.0.convolution": "o"},
}
MESHES: tuple[dict[str, int], ...] = (
    {"tp": 2},
    {"tp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "ep": 2, "tp": 2},
    {"tp": 3},
    {"dp": 2, "tp": 3},
)
MODES = ("data_parallel", "semi_auto", "sharding_propagation")
BATCH = 8


@functools.cache
def built(name: str) -> Any:
    """Model, batch and loss, one of each for the whole module, so that the capture is shared."""
    own = {"mlp": mlp.build, "gpt": gpt.build, "recommender": recommender.build}
    build = own[name] if name in own else functools.partial(zoo.hugging_face, name)
    assert "batch" in inspect.signature(build).parameters
    return build(batch=BATCH)


def show(mesh: dict[str, int]) -> str:
    return "x".join(map(str, mesh.values()))


SLICE = ({"dp": 2, "tp": 2}, {"tp": 3})  # what every run proves; `make zoo` proves all


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(m, id=show(m), marks=[] if m in SLICE else [pytest.mark.slow, pytest.mark.zoo])
        for m in MESHES
    ],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", first(3, PINS))
@quick(lambda name, mode, mesh: (name == "gpt") == ("dp" in mesh))  # each model, mode and mesh once
def test_every_model_in_every_mode_on_every_mesh(name: str, mode: str, mesh: dict[str, int]) -> None:
    model, batch, loss = built(name)
    pins = (
        {pattern: {letter: "tp"} for pattern, letter in PINS[name].items()}
        if mode != "data_parallel"
        else None
    )
    mw.verify(model, batch, loss=loss, mesh=mesh, mode=mode, pins=pins).raise_if_different()


@pytest.mark.parametrize("name", first(3, PINS))
def test_every_model_alone_in_its_own_dtype(name: str) -> None:
    """Captured on one rank against plain eager, without widening: rounding differs at most by float32's."""
    model, batch, loss = built(name)
    report = mw.verify(model, batch, loss=loss, mesh=1, mode="stand_alone", dtype=torch.float32)
    report.raise_if_different()


@pytest.mark.parametrize("name", first(1, ("gpt", "llama", "resnet", "gpt2")))
def test_float32_on_a_square_mesh(name: str) -> None:
    model, batch, loss = built(name)
    pins = {pattern: {letter: "tp"} for pattern, letter in PINS[name].items()}
    mesh = {"dp": 2, "tp": 2}
    mw.verify(
        model, batch, loss=loss, mesh=mesh, mode="sharding_propagation", pins=pins, dtype=torch.float32
    ).raise_if_different()


@pytest.mark.parametrize("mode", ("data_parallel", "sharding_propagation"))
@pytest.mark.parametrize("name", ("gpt", "gpt2", "t5"))
@quick(lambda name, mode: name == "gpt" and mode == "sharding_propagation")
def test_dropout_is_proved_with_one_devices_masks(name: str, mode: str) -> None:
    build = gpt.build if name == "gpt" else functools.partial(zoo.hugging_face, name)
    model, batch, loss = build(batch=4, dropout=0.25)
    pins = (
        {pattern: {letter: "tp"} for pattern, letter in PINS[name].items()}
        if mode != "data_parallel"
        else None
    )
    report = mw.verify(model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode=mode, pins=pins)
    report.raise_if_different()


class Made(torch.nn.Module):
    """Makes a tensor without a dtype in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) @ torch.eye(5)).square().mean()


def test_tensors_made_without_a_dtype_are_widened_too(tmp_path) -> None:
    model, batch = Made(), {"x": torch.randn(4, 6)}
    plan = mw.plan(model, batch, loss=lambda m, b: m(b["x"]), mesh=2)
    plan.save(tmp_path / "plan.json")
    mw.verify(model, batch, loss=lambda m, b: m(b["x"]), plan=tmp_path / "plan.json").raise_if_different()
    assert torch.get_default_dtype() == torch.float32
