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
