"""A model and a batch of two dtypes: what eager refuses, capture refuses; what eager computes, capture takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.capture import capture
from meshwright.errors import BatchError, CaptureError
from meshwright.examples import mlp

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 8, dtype=dtype))


LOSSES = {
    "linear": (lambda d: nn.Linear(8, 8, dtype=d), (8, 8), lambda m, x: m(x).mean()),
    "matmul": (Weight, (2, 8, 8), lambda m, x: (x @ m.w).mean()),
    "mv": (Weight, (8,), lambda m, x: (m.w @ x).mean()),
    "addmm": (Weight, (8, 8), lambda m, x: torch.addmm(x, m.w, m.w).mean()),
    "conv": (lambda d: nn.Conv2d(2, 4, 3, dtype=d), (2, 2, 5, 5), lambda m, x: m(x).mean()),
    "conv transposed": (
        lambda d: nn.ConvTranspose2d(2, 4, 3, dtype=d), (2, 2, 5, 5), lambda m, x: m(x).mean(),
    ),
    "attention": (lambda d: nn.MultiheadAttention(8, 2, dtype=d), (2, 2, 8), lambda m, x: m(x, x, x)[0].mean()),
    "layer norm": (lambda d: nn.LayerNorm(8, dtype=d), (8, 8), lambda m, x: m(x).mean()),
    "group norm": (lambda d: nn.GroupNorm(2, 8, dtype=d), (2, 8, 4), lambda m, x: m(x).mean()),
    "batch norm": (lambda d: nn.BatchNorm1d(8, dtype=d), (4, 8), lambda m, x: m(x).mean()),
    "sum": (Weight, (8, 8), lambda m, x: (m.w + x).mean()),
    "cat": (Weight, (8, 8), lambda m, x: torch.cat([m.w, x]).mean()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtypes", [(F64, F32), (F32, F64), (F32, BF16), (BF16, F16)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_capture_refuses_what_eager_refuses_and_nothing_else(name, dtypes):
    make, shape, loss = LOSSES[name]
    model, batch = make(dtypes[0]), torch.ones(shape, dtype=dtypes[1])
    try:
        loss(model, batch)
    except RuntimeError:
        with pytest.raises(CaptureError) as caught:
            capture(model, batch, loss)
        assert caught.value.hint
    else:
        capture(model, batch, loss)


def test_it_is_told_which_tensors_and_where():
    model, batch, loss = mlp.build(depth=1)
    with pytest.raises(CaptureError, match=r"aten.linear.default is given f32 and f64") as caught:
        mw.plan(model.double(), batch, loss=loss, mesh=2)
    assert "%batch_x is f32[12, 16], %enter_weight is f64[24, 16]" in caught.value.why
    assert "mlp.py" in caught.value.where and "autocast" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.bool, F32], ids=str)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_targets_are_refused_as_eager_refuses_them(loss, dtype):
    model, batch = nn.Linear(8, 4), {"x": torch.ones(6, 8), "y": torch.ones(6, dtype=dtype)}

    def of_classes(model, batch):
        return loss(model(batch["x"]), batch["y"])

    try:
        of_classes(model, batch)
    except RuntimeError:
        with pytest.raises(CaptureError) as caught:
            capture(model, batch, of_classes)
        assert "test_dtypes.py" in caught.value.where and caught.value.hint
    else:
        capture(model, batch, of_classes)


def test_labels_of_another_dtype_after_the_build_are_refused_before_anything_runs():
    """With the classes sharded they would be taken, and with them replicated not."""
    model, batch = nn.Linear(8, 4), {"x": torch.ones(6, 8), "y": torch.ones(6, dtype=torch.int64)}
    step = mw.train_step(
        model, lambda p: torch.optim.SGD(p, lr=0.1), batch, mesh=1,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    )  # fmt: skip
    with pytest.raises(BatchError, match=r"'y' is i32\[6\], the step was built for i64\[6\]") as caught:
        step({**batch, "y": batch["y"].int()})
    assert "targets of i32" in caught.value.why and "labels.long()" in caught.value.hint
    step(batch)
