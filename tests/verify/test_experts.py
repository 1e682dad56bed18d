"""A mixture of experts whose tokens, widths, micro-batches and layers are cut gives what one device gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"mesh": {"dp": 2}, "micro_batches": 2}, marks=pytest.mark.full),
        {"mesh": {"dp": 2}, "optimizer_parallel": 3, "recompute": "full", "pipeline": 2, "micro_batches": 2},
        {"mesh": {"dp": 2, "tp": 2}, "mode": "sharding_propagation",
         "pins": {"*.q_proj": {"n": "tp"}, "*.gate_up_proj": {"1": "tp"}}},
    ],
    ids=("micro-batches", "stages", "widths"),
)  # fmt: skip
def test_experts_are_equal(asked: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=64, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    ids = torch.randint(64, (4, 8))
    report = mw.verify(
        transformers.MixtralForCausalLM(config),
        {"input_ids": ids, "labels": ids},
        loss=lambda model, batch: model(**batch, use_cache=False).loss,
        **asked,
    )
    report.raise_if_different()


def test_gpt_oss_is_equal() -> None:
    """Its experts have biases, and an interleaved, clamped gate."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=64, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
    )  # fmt: skip
    ids = torch.randint(64, (4, 8))
    model = transformers.GptOssForCausalLM(config)
    torch.nn.init.normal_(model.model.layers[0].mlp.experts.gate_up_proj_bias)
    report = mw.verify(
        model,
        {"input_ids": ids, "labels": ids},
        loss=lambda model, batch: model(**batch, use_cache=False).loss,
        mesh={"dp": 2},
        optimizer_parallel=3,
    )
    report.raise_if_different()
