"""Operators that torch has no kernel for on some device, against torch's on values that it has one for."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.graph import Node, TensorType
from meshwright.runtime.operators import histc, torch_operator

CASES = [  # bins, bounds
    (8, 0, 7),
    (128, 0, 127),
    (5, -2, 8),
    (4, 3, 3),
    (6, 0, 0),
]


@pytest.mark.parametrize(("bins", "low", "high"), CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_counted_as_the_same_floats_are(bins, low, high, dtype):
    torch.manual_seed(0)
    x = torch.randint(-3, 130, (7, 50), dtype=dtype)
    found = histc(x, bins, low, high)
    assert found.dtype == dtype
    # Bounds that are equal are those of the values.
    assert torch.equal(found.double(), torch.histc(x.double(), bins, low, high))


def test_values_that_are_all_one_are_in_one_bin():
    x = torch.full((5,), 4, dtype=torch.int32)
    assert torch.equal(histc(x, 3).double(), torch.histc(x.double(), 3))
    assert histc(x[:0], 3).tolist() == [0, 0, 0]


def test_floats_are_left_to_torch():
    x = torch.randn(64)
    assert torch.equal(histc(x, 5, -1, 1), torch.histc(x, 5, -1, 1))


def test_a_program_counts_integers():
    kind = TensorType((8,), "i32")
    node = Node("counts", "aten.histc.default", (), (), (kind,), (False,))
    assert torch_operator(node)(torch.arange(8, dtype=torch.int32), 8, 0, 7).tolist() == [1] * 8
