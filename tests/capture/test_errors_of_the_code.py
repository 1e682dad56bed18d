"""What the user's own code raises during a capture is reported as an error of that code, with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.capture import capture
from meshwright.errors import CaptureError
from tests.capture.test_traps import Net, mean_loss, net

HERE = "test_errors_of_the_code.py"


def swapped(batch: Any, model: Any) -> torch.Tensor:
    return model(batch["x"]).mean()


def of_one(model: Any) -> torch.Tensor:
    return model.a.weight.mean()


LOSSES: dict[str, tuple[Any, str, str]] = {
    "swapped": (
        swapped,
        "raises TypeError",
        f"{HERE}:{swapped.__code__.co_firstlineno + 1}  return model(batch",
    ),
    "of one argument": (of_one, "raises TypeError", f"{HERE}:{of_one.__code__.co_firstlineno}  of_one"),
    "a function of torch": (F.mse_loss, "raises AttributeError", ""),
    "a module of torch": (nn.MSELoss(), "raises AttributeError", ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_called_with_model_and_batch(name: str) -> None:
    loss, what, where = LOSSES[name]
    with pytest.raises(CaptureError, match=what) as caught:
        capture(*net(lambda model, x: model.a(x)), loss)
    assert caught.value.where.startswith(where)
    assert "loss(model, batch)" in caught.value.hint and "manual_step" not in str(caught.value)


BODIES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "no such attribute": (lambda model, x: model.up(x), "AttributeError", "no attribute 'up'"),
    "no such key": (lambda model, x: {"silu": F.silu}["swiglu"](model.a(x)), "KeyError", "'swiglu'"),
    "shapes that do not fit": (lambda model, x: model.a(x[:, :5]), "RuntimeError", "[6, 5]"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BODIES)
def test_a_mistake_in_the_model_is_told_with_its_line(name: str, device: str) -> None:
    body, kind, why = BODIES[name]
    model, batch = net(body)
    before = dict(model.to(device).named_parameters())
    with pytest.raises(CaptureError, match=f"raises {kind}") as caught:
        capture(model, {"x": batch["x"].to(device)}, mean_loss)
    assert why in caught.value.why and "so does a call without a capture" in caught.value.why
    assert HERE in caught.value.where and "lambda model, x:" in caught.value.where
    assert "manual_step" not in caught.value.hint
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}


@pytest.mark.parametrize("numbers", [lambda x: float(x.numpy().mean()), lambda x: float(np.exp(x).mean())])
def test_what_only_a_capture_cannot_is_no_mistake_of_the_code(numbers: Any) -> None:
    with pytest.raises(CaptureError, match="hands a tensor to numpy") as caught:
        capture(*net(lambda model, x: model.a(x) * numbers(x)), mean_loss)
    assert "torch.exp(x) for np.exp" in caught.value.hint and "manual_step" in caught.value.hint
    assert HERE in caught.value.where


@pytest.mark.parametrize("names", ["y", "x, y"])
def test_numpy_arrays_of_a_batch_are_named(names: str) -> None:
    model, batch = net(lambda model, x: model.a(x))
    batch["y"] = torch.zeros(6, 8)
    arrays = {name: x.numpy() if name in names else x for name, x in batch.items()}
    with pytest.raises(CaptureError, match=f"(?m)numpy arrays: {names}$") as caught:
        capture(model, arrays, lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean())
    assert HERE in caught.value.where and "torch.from_numpy" in caught.value.hint


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(8, 1)), Net(lambda model, x: model.a(x))])
def test_without_a_loss_it_is_said_what_is_called(model: nn.Module) -> None:
    batch = {"x": torch.zeros(6, 8), "y": torch.zeros(6, 1)}
    with pytest.raises(CaptureError, match="raises TypeError") as caught:
        mw.plan(model, batch, mesh=1)
    assert (
        "no loss was given, so it is" in caught.value.why and "loss=lambda model, batch" in caught.value.hint
    )
    assert "loss_value.py" not in str(caught.value)


def test_experts_of_transformers_that_loop_name_the_way_out() -> None:
    transformers = pytest.importorskip("transformers")
    small = dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 8)
    config = transformers.Qwen2MoeConfig(
        vocab_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        **small,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(CaptureError) as caught:
        capture(model, {"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss)
    assert caught.value.where.startswith("modeling_qwen2_moe.py:")
    assert caught.value.hint.startswith('experts_implementation="grouped_mm"')
