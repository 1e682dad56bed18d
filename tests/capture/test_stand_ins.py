"""Calls of torch that read values on the host are captured as the same numbers, or refused with what helps."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.capture import capture
from meshwright.errors import CaptureError
from tests.capture.test_traps import Net, mean_loss, net, run


def weights(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, x.shape[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda y: torch.cov(y.T),
        lambda y: y.T.cov(correction=0),
        lambda y: torch.cov(y[:, 0]),
        lambda y: torch.cov(input=y.T),
        lambda y: torch.cov(y.T, aweights=weights(y)),
        lambda y: torch.cov(y.T, fweights=torch.arange(1, 7), aweights=weights(y)),
        lambda y: torch.cov(y.T, fweights=torch.arange(1, 7)),
        lambda y: torch.corrcoef(y.T),
        lambda y: torch.corrcoef(y[:, 0]) * y.mean(),
    ],
)
def test_covariances_are_captured(call: Any) -> None:
    run(*net(lambda model, x: call(model.a(x))))


class Averaged(Net):
    """With two norms that average the statistics of all batches."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: model.norms(model.b(model.norm(model.a(x)))))
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.norms = nn.Sequential(nn.BatchNorm1d(8, momentum=None, affine=False), nn.ReLU())


def test_a_batch_norm_averages_over_all_batches() -> None:
    model, batch = Averaged().train(), net(lambda *_: None)[1]
    for _ in range(2):
        again, eager = copy.deepcopy(model), copy.deepcopy(model)
        _, results = run(again, batch)
        eager(batch["x"])
        assert again.norm.momentum is None
        for name, buffer in eager.named_buffers():
            assert name == "seen" or torch.allclose(results[name].to(buffer.dtype), buffer), name
        model = eager
    model.eval()
    run(model, batch)


def test_ctc_loss_is_refused_with_what_helps() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((2,), 3), torch.ones(2, dtype=torch.long)
        return F.ctc_loss(
            model.a(x).view(3, 2, 8).log_softmax(-1), torch.ones(2, 1, dtype=torch.long), *lengths
        )

    with pytest.raises(CaptureError, match=r"(?s)ctc_loss\(\) cannot.*lengths.*manual_step.*custom_op"):
        run(*net(body))


def test_a_distribution_that_looks_at_its_arguments_says_what_helps() -> None:
    def body(model: Net, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(model.a(x), model.b(x).exp(), validate_args=checked).rsample()

    checked = True
    with pytest.raises(CaptureError, match="validate_args=False"):
        run(*net(body))
    checked = False
    capture(*net(body), mean_loss)


def test_gated_delta_rules_solve_a_system_as_in_eager() -> None:
    """They substitute row by row in an export: Qwen3-Next 80B was not captured within five minutes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=1, linear_num_value_heads=2,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    ids = torch.arange(160).reshape(2, 80) % 16
    captured, _ = run(model, {"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss)
    assert "aten.linalg_solve_triangular.default" in {node.op for node in captured.graph.nodes}
    module = importlib.import_module(type(model).__module__)
    assert module.is_torchdynamo_exporting.__module__.startswith("transformers.")
