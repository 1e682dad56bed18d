"""Operators that torch has no kernel for on some device, against torch's on values that it has one for."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.graph import Node, TensorType
from meshwright.runtime.operators import (
    NORM,
    QUICK,
    copy_all,
    eager_batch_norm,
    histc,
    quick_operator,
    torch_operator,
)

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


X, Y, W, B = torch.randn(2, 3, 8), torch.randn(3, 8), torch.randn(4, 8), torch.randn(8)
HEADS = torch.randn(1, 2, 5, 4)
QUICK_CALLS = {  # arguments as a graph has them
    "aten.add.Tensor": [((X, Y), {}), ((X, 2), {}), ((X, Y), {"alpha": 3})],
    "aten.sub.Tensor": [((X, Y), {"alpha": 2})],
    "aten.mul.Tensor": [((X, Y), {}), ((X, 0.5), {})],
    "aten.div.Tensor": [((X, Y), {}), ((X, 2), {})],
    "aten.neg.default": [((X,), {})],
    "aten.rsqrt.default": [((X.abs(),), {})],
    "aten.view.default": [((X, (6, 8)), {}), ((X.transpose(0, 1), (6, -1)), {})],
    "aten.reshape.default": [((X, (6, 8)), {})],
    "aten.permute.default": [((X, (2, 0, 1)), {})],
    "aten.transpose.int": [((X, -1, 0), {})],
    "aten.unsqueeze.default": [((X, -1), {})],
    "aten.split_with_sizes.default": [((X, (5, 3), -1), {}), ((X, (1, 1)), {})],
    "aten.embedding.default": [
        ((W, torch.tensor([1, 3])), {}),
        ((W, torch.tensor([1, 3]), 0, False, False), {}),
    ],
    "aten.layer_norm.default": [((X, (8,)), {}), ((X, (8,), B, B, 1e-6), {})],
    "aten.linear.default": [((X, W), {}), ((X, W, B[:4]), {})],
    "aten.gelu.default": [((X,), {}), ((X,), {"approximate": "tanh"})],
    "aten.scaled_dot_product_attention.default": [
        ((HEADS, HEADS, HEADS), {}),
        ((HEADS, HEADS, HEADS, None, 0.0, True), {"scale": 0.3}),
        ((HEADS, HEADS[:, :1], HEADS[:, :1]), {"enable_gqa": True}),
    ],
}


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_quick_function_is_the_operator(name):
    node = Node("x", name, (), {}, (TensorType("f32", (1,)),), (True,))
    for args, kwargs in QUICK_CALLS[name]:
        found, expected = (get(node)(*args, **kwargs) for get in (quick_operator, torch_operator))
        for mine, other in zip(
            found if isinstance(found, tuple | list) else [found],
            expected if isinstance(expected, tuple | list) else [expected],
            strict=True,
        ):
            assert torch.equal(mine, other)
            assert mine.stride() == other.stride()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_the_functional_operator(training, affine):
    """By both functions, of which accelerators call the second one."""
    torch.manual_seed(0)
    node = Node("x", NORM, (), {}, (TensorType("f32", (1,)),), (True,))
    weights = [torch.randn(5, requires_grad=True) for _ in range(2)] if affine else [None, None]
    x, running = torch.randn(4, 5, 3, requires_grad=True), [torch.randn(5), torch.rand(5)]
    before = [value.clone() for value in running]
    found, expected = (
        function(x, *weights, *running, training, 0.2, 1e-3)
        for function in (eager_batch_norm, torch_operator(node))
    )
    assert all(torch.equal(found[k], expected[k]) for k in (0, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))
    wanted = [x, *(w for w in weights if w is not None)]
    grads = [torch.autograd.grad(made[0].square().sum(), wanted) for made in (found, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_tensors_of_several_dtypes_are_copied_together():
    """`copy_all` calls an operator whose name torch keeps to itself: this says when it changes."""
    targets = [torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros(2, 2), torch.zeros(2).double()]
    sources = [torch.arange(3.0), torch.tensor(7), torch.ones(2, 2).t(), torch.full((2,), 2.0).double()]
    places = [x.data_ptr() for x in targets]
    copy_all(targets, sources)
    for target, source, place in zip(targets, sources, places, strict=True):
        assert torch.equal(target, source) and target.data_ptr() == place
    copy_all([], [])
