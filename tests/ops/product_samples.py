"""Calls of every operator that multiplies or slides over tensors: products, convolutions, experts, pools."""

from __future__ import annotations

import torch

from tests.ops.sample_calls import T, add, f, i, twice


def add_products() -> None:
    """Add the samples of this file."""
    for bias in ((), (T(f, 8),)):
        add("aten.linear.default", T(f, 4, 5, 6), T(f, 8, 6), *bias)
    add("aten.mm.default", T(f, 4, 6), T(f, 6, 5))
    add("aten.bmm.default", T(f, 4, 5, 6), T(f, 4, 6, 8))
    add("aten.mv.default", T(f, 4, 6), T(f, 6))
    add("aten.dot.default", T(f, 6), T(f, 6))
    add("aten.vdot.default", T(f, 6), T(f, 6))
    add("aten.outer.default", T(f, 4), T(f, 6))
    add("aten.bilinear.default", T(f, 4, 5), T(f, 4, 6), T(f, 8, 5, 6), T(f, 8))
    twice("aten.bilinear.default", T(f, 8, 6, 6), T(f, 8))
    for left, right in (((4, 6), (6, 5)), ((6,), (6, 5)), ((4, 6), (6,)), ((6,), (6,)), ((4, 5, 6), (6, 8)),
                        ((4, 1, 5, 6), (3, 6, 8)), ((4, 5, 6), (6,)), ((6,), (4, 6, 5)),
                        ((5, 6), (4, 6, 8))):  # fmt: skip
        add("aten.matmul.default", T(f, *left), T(f, *right))
    twice("aten.mul.Tensor")
    add("aten.addmm.default", T(f, 8), T(f, 4, 6), T(f, 6, 8))
    add("aten.addmm.default", T(f, 4, 1), T(f, 4, 6), T(f, 6, 8), beta=0.5, alpha=2.0)
    add("aten.baddbmm.default", T(f, 4, 5, 8), T(f, 4, 5, 6), T(f, 4, 6, 8))
    add("aten.einsum.default", "bqhd,bkhd->bhqk", [T(f, 4, 5, 3, 6), T(f, 4, 8, 3, 6)])
    add("aten.einsum.default", "...Ij,jk->...Ik", [T(f, 4, 5, 6), T(f, 6, 8)])
    add("aten.einsum.default", "ii->i", [T(f, 5, 5)])
    for groups, wide in ((1, 4), (2, 2), (4, 1)):
        for bias in (None, T(f, 8)):
            add(
                "aten.conv2d.default",
                T(f, 4, 4, 6, 6),
                T(f, 8, wide, 3, 3),
                bias,
                [1, 1],
                [1, 1],
                [1, 1],
                groups,
            )
    for stride, padding, size in (
        ([2, 2], [1, 1], 3),
        ([2, 1], [0, 0], 1),
        ([2, 2], [3, 2], (7, 5)),
        ([1, 1], [2, 0], 5),
    ):
        height, width = (size, size) if isinstance(size, int) else size
        add("aten.conv2d.default", T(f, 2, 3, 10, 8), T(f, 4, 3, height, width), T(f, 4), stride, padding)
    add("aten.conv2d.default", T(f, 2, 3, 9, 8), T(f, 4, 3, 3, 3), None, [1, 1], [2, 2], [2, 2])
    add("aten.conv1d.default", T(f, 4, 4, 9), T(f, 6, 4, 3), T(f, 6), [2], [1], [1], 1)
    add("aten.conv1d.default", T(f, 6, 9), T(f, 6, 1, 3), None, [1], [2], [1], 6)
    add("aten.conv3d.default", T(f, 4, 2, 4, 4, 4), T(f, 6, 2, 2, 2, 2), T(f, 6))
    for dims in (1, 2):  # export leaves default arguments out
        add(f"aten.conv{dims}d.default", T(f, 4, 3, *(8, 6)[:dims]), T(f, 5, 3, *(1, 1)[:dims]), T(f, 5))
    add("aten.conv1d.padding", T(f, 4, 4, 9), T(f, 6, 4, 3), T(f, 6), [1], "same")
    add("aten.conv2d.padding", T(f, 4, 4, 6, 6), T(f, 6, 2, 3, 3), T(f, 6), [1, 1], "same", [1, 1], 2)
    add(
        "aten.convolution.default",
        T(f, 4, 4, 6, 6),
        T(f, 6, 2, 3, 3),
        T(f, 6),
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        2,
    )
    add(
        "aten.convolution.default",
        T(f, 4, 4, 5, 5),
        T(f, 4, 3, 3, 3),
        T(f, 6),
        [2, 2],
        [1, 1],
        [1, 1],
        True,
        [1, 1],
        2,
    )
    add("aten.conv_transpose1d.default", T(f, 4, 4, 5), T(f, 4, 6, 3), T(f, 6), [2], [1], [1], 1)
    add("aten.conv_transpose2d.input", T(f, 4, 4, 5, 5), T(f, 4, 3, 3, 3), T(f, 6), [2, 2], [1, 1], [1, 1], 2)
    add(
        "transformers.grouped_mm_fallback.default",
        T(f, 8, 6),
        T(f, 3, 6, 5),
        lambda: torch.tensor([2, 5, 8], dtype=torch.int32),
    )
    for choices in (1, 2):
        add("meshwright.expert_linear", T(f, 8, 6), T(f, 3, 6, 5), T(i, 3, 8 * choices))
    for gate, wide, up_bias, down_bias, constants in (
        ("silu_gated", 10, None, None, ()),
        ("gelu_gated", 10, T(f, 4, 10), T(f, 4, 6), ()),
        ("interleaved", 10, T(f, 4, 10), None, (1.7, 0.9)),
        ("gelu_tanh", 5, None, None, ()),
    ):
        add("meshwright.experts", T(f, 8, 6), T(f, 4, 6, wide), up_bias, T(f, 4, 5, 6), down_bias, T(i, 3, 16),
            T(f, 16), gate, constants)  # fmt: skip
    for op, *rest in (("max_pool1d", [2]), ("avg_pool1d", [2]), ("adaptive_avg_pool1d", [3])):
        add(f"aten.{op}.default", T(f, 4, 5, 6), *rest)
    for op, *rest in (("max_pool2d", [2, 2]), ("max_pool2d_with_indices", [2, 2]), ("adaptive_max_pool2d", [2, 2]),
                      ("avg_pool2d", [2, 2]),
                      ("adaptive_avg_pool2d", [3, 3]), ("_adaptive_avg_pool2d", [3, 3])):  # fmt: skip
        add(f"aten.{op}.default", T(f, 4, 5, 6, 6), *rest)
    add("aten.max_pool2d.default", T(f, 2, 3, 10, 8), [3, 3], [2, 2], [1, 1])
    add("aten.max_pool2d.default", T(f, 2, 3, 6, 8), [3, 5], [1, 2], [1, 2], [1, 1], True)
    add("aten.max_pool1d.default", T(f, 4, 5, 12), [5], [3], [1])
    add("aten.avg_pool2d.default", T(f, 2, 3, 10, 8), [3, 3], [2, 2], [1, 1])
    add("aten.avg_pool2d.default", T(f, 2, 3, 10, 8), [3, 3], [2, 2], [1, 1], False, False)
    for op in ("adaptive_avg_pool2d", "_adaptive_avg_pool2d"):
        add(f"aten.{op}.default", T(f, 4, 5, 6, 4), [1, 1])
    add("aten.adaptive_avg_pool1d.default", T(f, 4, 5, 6), [1])
    add("aten.adaptive_avg_pool3d.default", T(f, 4, 5, 4, 4, 4), [1, 1, 1])
    for op, *rest in (
        ("max_pool3d", [2, 2, 2]),
        ("avg_pool3d", [2, 2, 2]),
        ("adaptive_avg_pool3d", [2, 2, 2]),
    ):
        add(f"aten.{op}.default", T(f, 4, 5, 4, 4, 4), *rest)
    for op in ("upsample_bilinear2d", "upsample_bicubic2d"):
        add(f"aten.{op}.vec", T(f, 4, 5, 4, 4), [8, 8], False, None)
    add("aten.upsample_nearest2d.vec", T(f, 4, 5, 4, 4), [8, 8], None)
    add("aten.upsample_nearest1d.vec", T(f, 4, 5, 4), [8], None)
