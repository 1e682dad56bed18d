"""The dtypes of a graph as torch has them."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "i64": torch.int64, "i32": torch.int32,
    "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool,
    "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
