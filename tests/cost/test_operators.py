"""FLOPs against torch's own counter, bytes against tensors, arrays of sizes against single ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.core.folding import signature
from meshwright.cost.operator_tables import UNFUSED
from meshwright.cost.operators import work
from meshwright.ops.saved import saved
from meshwright.ops.table import rule_of
from tests.ops.prove import Sample, plain, sample, type_of
from tests.ops.sample_calls import T, f, i
from tests.ops.samples import SAMPLES

F32 = torch.float32


def g(*shape: int, grad: bool = True) -> torch.Tensor:
    """f32 values."""
    return torch.randn(shape, dtype=F32).requires_grad_(grad)


def counted(case: Sample) -> tuple[float, float]:
    """FLOPs forward and backward by torch's counter."""
    twins = [t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors]
    node = case.node.with_uses(f"u{n}" for n in range(len(twins)))
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        results = plain(node, {f"u{n}": type_of(t) for n, t in enumerate(twins)}, twins)
    with backward:
        torch.autograd.backward([r.sum() for r in results if r.requires_grad])
    return forward.get_total_flops(), backward.get_total_flops()


def priced(case: Sample, **local: object):
    """Our work of a sample, whole unless sizes are given."""
    rule = rule_of(case.node, case.graph.types)
    return work(
        case.node, rule, {**rule.sizes, **local}, case.graph.types, [t.requires_grad for t in case.tensors]
    )


CONV = ([1, 1], [1, 1], [1, 1])
PRODUCTS = {
    "linear": ("aten.linear.default", T(g, 4, 5, 6), T(g, 8, 6), T(g, 8)),
    "first layer": ("aten.linear.default", lambda: g(4, 5, 6, grad=False), T(g, 8, 6), T(g, 8)),
    "frozen weight": ("aten.linear.default", T(g, 4, 5, 6), lambda: g(8, 6, grad=False)),
    "mm": ("aten.mm.default", T(g, 4, 6), T(g, 6, 5)),
    "matmul of vectors": ("aten.matmul.default", T(g, 4, 5, 6), T(g, 6, 8)),
    "batched": ("aten.matmul.default", T(g, 4, 3, 5, 6), T(g, 4, 3, 6, 8)),
    "broadcast": ("aten.matmul.default", T(g, 4, 1, 5, 6), T(g, 3, 6, 8)),
    "addmm": ("aten.addmm.default", T(g, 8), T(g, 4, 6), T(g, 6, 8)),
    "einsum": ("aten.einsum.default", "bqhd,bkhd->bhqk", [T(g, 4, 5, 3, 6), T(g, 4, 8, 3, 6)]),
    "conv": ("aten.conv2d.default", T(g, 4, 4, 6, 6), T(g, 8, 4, 3, 3), T(g, 8), *CONV, 1),
    "groups": ("aten.conv2d.default", T(g, 4, 4, 6, 6), T(g, 8, 2, 3, 3), None, *CONV, 2),
    "strides": ("aten.conv2d.default", T(g, 4, 4, 8, 8), T(g, 8, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], 1),
    "transposed": ("aten.conv_transpose2d.input", T(g, 4, 4, 5, 5), T(g, 4, 6, 3, 3), None, [2, 2], [1, 1], [1, 1], 1),
}  # fmt: skip


def build(name: str) -> Sample:
    """A product sample with fresh tensors."""
    op, *args = PRODUCTS[name]
    fresh = [
        [x() for x in a] if isinstance(a, list) and callable(a[0]) else a() if callable(a) else a
        for a in args
    ]
    return sample(op, *fresh)


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_torch_counts(name: str) -> None:
    case = build(name)
    found = priced(case)
    forward, backward = counted(case)
    if name == "groups":  # torch 2.13 counts the gradient of the weight as if there were one group
        backward = 2 * forward
    assert (found.flops_forward, found.flops_backward) == (forward, backward)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_does_two_products_forward_and_five_backward(causal: bool) -> None:
    case = sample("aten.scaled_dot_product_attention.default", g(2, 4, 16, 8), g(2, 4, 16, 8), g(2, 4, 16, 8),
                  None, 0.0, causal)  # fmt: skip
    product = 2 * 2 * 4 * 16 * 16 * 8 / (2 if causal else 1)
    found = priced(case)
    assert found.kind == ("causal" if causal else "attention")
    assert (found.flops_forward, found.flops_backward) == (2 * product, 5 * product)
    if causal:  # a rank with some of the queries has an explicit mask, which spares nothing
        assert priced(case, q=8).flops_forward == priced(case).flops_forward


@pytest.mark.parametrize(
    ("queries", "keys", "times"), [(128, 256, 1.0), (64, 256, 2.0), (192, 129, 4 / 3 * 256 / 129)]
)
def test_a_gpu_computes_attention_in_tiles(queries: int, keys: int, times: float) -> None:
    case = sample(
        "aten.scaled_dot_product_attention.default", g(2, 4, queries, 8), g(2, 4, keys, 8), g(2, 4, keys, 8)
    )
    types, rule = case.graph.types, rule_of(case.node, case.graph.types)
    on_cpu, on_gpu = (work(case.node, rule, rule.sizes, types, [True] * 3, device=d) for d in ("cpu", "cuda"))
    assert on_gpu.flops_forward == pytest.approx(times * on_cpu.flops_forward)
    assert on_gpu.flops_backward == pytest.approx(times * on_cpu.flops_backward)
    assert on_gpu.bytes_forward == on_cpu.bytes_forward


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, UNFUSED), (torch.bfloat16, "")])
def test_a_gpu_has_no_kernel_for_grouped_heads_in_float32(dtype: torch.dtype, name: str) -> None:
    """There the scores are written and read several times, and no half of them is skipped."""
    q, k = (torch.randn(2, heads, 16, 8, dtype=dtype, requires_grad=True) for heads in (4, 2))
    case = sample("aten.scaled_dot_product_attention.default", q, k, k, None, 0.0, True, enable_gqa=True)
    types, rule = case.graph.types, rule_of(case.node, case.graph.types)
    on_cpu, on_gpu = (work(case.node, rule, rule.sizes, types, [True] * 3, device=d) for d in ("cpu", "cuda"))
    assert on_cpu.kind == "causal" and on_gpu.name == name
    if name:
        assert on_gpu.flops_forward == 2 * on_cpu.flops_forward
        scores = 2 * 4 * 16 * 16 * 4
        assert (on_gpu.passes_forward, on_gpu.passes_backward) == (6 * scores, 6 * scores)


def test_every_sample_has_a_price_and_arrays_give_the_same_as_single_sizes() -> None:
    for op, builds in SAMPLES.items():
        if op.startswith("transformers."):
            continue
        case = builds[0]()
        rule = rule_of(case.node, case.graph.types)
        wanted = [t.requires_grad for t in case.tensors]
        both = {x: np.array([n, max(n // 2, 1)], dtype=np.float64) for x, n in rule.sizes.items()}
        many = work(case.node, rule, both, case.graph.types, wanted)
        for place in (0, 1):
            single = work(case.node, rule, {x: both[x][place] for x in both}, case.graph.types, wanted)
            for field in ("flops_forward", "flops_backward", "bytes_forward", "bytes_backward"):
                value = np.broadcast_to(getattr(many, field), 2)[place]
                assert value == pytest.approx(getattr(single, field), rel=1e-12), (op, field)
                assert value >= 0 and math.isfinite(value), (op, field)


def test_memory_bound_operators_move_what_they_read_and_write() -> None:
    mib = 4 * 1024
    x, w = (lambda: g(32, 32)), (lambda: g(32))
    cases = [
        # operator, forward, backward in tensors of 4 KiB (vectors of 128 bytes count 1/32)
        (sample("aten.mul.Tensor", x(), x()), 3, 5),  # gradient and both factors, two gradients
        (sample("aten.add.Tensor", x(), x()), 3, 0),  # the gradient passes through
        (sample("aten.add.Tensor", x(), w()), 2 + 1 / 32, 1 + 1 + 1 / 32),  # summed for the vector
        (sample("aten.relu.default", x()), 2, 3),
        (sample("aten.softmax.int", x(), 1), 2, 3),
        (sample("aten.sum.default", x()), 1, 0),
        (sample("aten.view.default", x(), [1024]), 0, 0),
        (sample("aten.permute.default", x(), [1, 0]), 0, 0),
    ]
    for case, forward, backward in cases:
        found = priced(case)
        assert found.bytes_forward / mib == pytest.approx(forward, abs=2e-3), case.node.op
        assert found.bytes_backward / mib == pytest.approx(backward, abs=0.3), case.node.op


def test_a_table_is_read_by_rows_and_its_gradient_is_whole() -> None:
    case = sample("aten.embedding.default", f(1000, 6), i(1000, 4, 5))
    rows, table = 4 * 5 * 6 * 8, 1000 * 6 * 8
    found = priced(case)
    assert found.bytes_forward == 2 * rows + 4 * 5 * 8
    assert found.bytes_backward >= table + 2 * rows


def test_nothing_is_paid_backward_where_no_gradient_is_wanted() -> None:
    cases = (
        ("aten.linear.default", (4, 6), (8, 6)),
        ("aten.mul.Tensor", (4, 6), (6,)),
        ("aten.gelu.default", (4, 6)),
    )
    for op, *args in cases:
        found = priced(sample(op, *(g(*shape, grad=False) for shape in args)))
        assert (found.flops_backward, found.bytes_backward, found.launches_backward) == (0, 0, 0)


def test_cutting_a_letter_cuts_the_work() -> None:
    case = build("linear")
    whole, half = priced(case), priced(case, n=4)
    assert half.flops_forward == whole.flops_forward / 2
    assert half.flops_backward == whole.flops_backward / 2
    assert half.bytes_forward < whole.bytes_forward


def other_floats(value: Any) -> Any:
    """An argument with other finite floats; zeros stay."""
    if isinstance(value, tuple):
        return tuple(map(other_floats, value))
    return value / 2 if isinstance(value, float) and math.isfinite(value) else value


def test_floats_that_fold_change_no_rule_price_or_saved_tensor() -> None:
    """For every operator: `signature` may leave out the value of a float."""
    pytest.importorskip("transformers.integrations.moe")  # registers the grouped product
    compared = 0
    for case in (build() for builds in SAMPLES.values() for build in builds):
        node, types = case.node, case.graph.types
        kwargs = tuple((name, other_floats(value)) for name, value in node.kwargs)
        other = replace(node, args=other_floats(node.args), kwargs=kwargs)
        if other == node or signature(other) != signature(node):
            continue
        compared += 1
        rule, wanted = rule_of(node, types), [t.requires_grad for t in case.tensors]
        assert rule_of(other, types) == rule, node
        for device in ("cpu", "cuda"):
            assert saved(other, types, wanted, device) == saved(node, types, wanted, device), node
            made = [work(n, rule, rule.sizes, types, wanted, device=device) for n in (node, other)]
            assert made[0] == made[1], node
    assert compared > 50
