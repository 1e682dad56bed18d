"""The buffer of a bias gradient's sum, as an H100 had it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compile import captured_of, lower, plan_captured
from meshwright.predict.memory.bias_sum import bias_sum_bytes
from meshwright.predict.memory.step import peak


def test_the_buffer_has_the_bytes_that_were_seen() -> None:
    assert bias_sum_bytes(12_608, 768) == 77_463_552  # in float32 and in bfloat16


@pytest.mark.parametrize(("rows", "width"), [(1, 768), (256, 64), (0, 4), (1000, 768), (4096, 0)])
def test_few_rows_need_none(rows: int, width: int) -> None:
    assert bias_sum_bytes(rows, width) == 0


@pytest.mark.parametrize("biased", [True, False])
def test_it_counts_in_the_peak_of_a_cuda_device(biased: bool) -> None:
    model = nn.Sequential(nn.Linear(768, 768, bias=biased), nn.ReLU(), nn.Linear(768, 768, bias=biased))
    captured = captured_of(model, torch.randn(12_608, 768), lambda model, x: model(x)[:, 0].sum())
    parts = lower(captured, plan_captured(captured, mw.Mesh.of(rank=1), "stand_alone", None))
    on_cpu, on_gpu = (peak(parts, device=device).bytes for device in ("cpu", "cuda"))
    more = on_gpu - on_cpu
    assert 0 < more <= 77_463_552 if biased else more == 0, more
