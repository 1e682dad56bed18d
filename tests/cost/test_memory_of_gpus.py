"""Peaks of steps on a GPU, against those that its allocator showed: one H200, torch 2.11, 2026-11-26 (docs/gpu.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.compile import captured_of, lower, plan_captured
from meshwright.core.techniques import techniques_from
from meshwright.examples import gpt, llama
from meshwright.predict.memory.step import ADAMW_FUSED, peak
from tests.breadth import quick

TOKENS = 32768
GPT = gpt.GPTConfig(TOKENS, 1024, 6, 16, 1024, tied=False)
LLAMA = llama.LlamaConfig(TOKENS, 1024, 2816, 6, 16, 8, 1024)
WIDE = llama.LlamaConfig(TOKENS, 4096, 11264, 2, 64, 32, 2048)


@pytest.mark.parametrize(
    ("config", "batch", "dtype", "asked", "measured_mb"),
    (
        (GPT, 4, torch.float32, {}, 4981.7),
        (GPT, 4, torch.bfloat16, {}, 2491.9),
        (LLAMA, 4, torch.float32, {}, 6827.2),  # groups of heads in float32: scores are saved
        (LLAMA, 4, torch.bfloat16, {}, 2563.4),
        (WIDE, 2, torch.bfloat16, {}, 5958.8),
        (WIDE, 2, torch.bfloat16, {"recompute": "full"}, 5437.7),
    ),
    ids=("gpt f32", "gpt bf16", "llama f32", "llama bf16", "wide", "recomputed"),
)
@quick(lambda config, dtype, asked, **_: bool(asked) or (config is not WIDE and dtype is torch.float32))
def test_the_peak_is_the_one_that_a_gpu_showed(
    config: Any, batch: int, dtype: torch.dtype, asked: dict[str, Any], measured_mb: float
) -> None:
    with torch.device("meta"):
        model, example, loss = (gpt if config is GPT else llama).build(config, batch=batch)
        captured = captured_of(model.to(dtype), example, loss)
    plan = plan_captured(captured, 1, "stand_alone", None, None, techniques_from(asked))
    found = peak(lower(captured, plan), optimizer=ADAMW_FUSED, device="cuda").bytes / 1e6
    assert found == pytest.approx(measured_mb, rel=3e-3)
