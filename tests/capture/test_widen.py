"""Everything that says a narrow float says float64, and nothing else changes."""

from __future__ import annotations

import torch

from meshwright.capture import widen, widened_eager
from meshwright.core.graph_text import parse

NARROW = """
graph "casts" {
  %w: bf16[4] = parameter("w", grad=True)
  %i: i64[4] = batch("i")
  %c: f32[4] = aten._to_copy.default(%w, dtype=f32)  {"grad": [true]}
  %h: f16[] = aten.full.default((), 0.5, dtype=f16, device=device)
  %r: i64[4] = aten.arange.start_step(0, 4, 1, dtype=i64, device=device)
  %m: f32[4] = aten.mul.Tensor(%c, %h)  {"grad": [true]}
  return loss=%m
}
"""


def test_widen() -> None:
    wide = str(widen(parse(NARROW)))
    assert not any(f"{d}[" in wide or f"dtype={d}" in wide for d in ("f32", "f16", "bf16"))
    assert wide == str(parse(NARROW)).replace("bf16", "f64").replace("f32", "f64").replace("f16", "f64")
    assert widen(parse(wide)) == parse(wide)


def test_widened_eager() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with widened_eager():
        for narrow in (
            x.float(),
            x.to(torch.bfloat16),
            x.half(),
            x.to(dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
        ):
            assert narrow.dtype == torch.float64
        assert x.long().dtype == torch.int64
        assert torch.nn.functional.softmax(x, dim=0, dtype=torch.float32).dtype == torch.float64
    assert x.float().dtype == torch.float32
